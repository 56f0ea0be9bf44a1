// The demo world's picture of one ray. Plain C, the one source for CPU (C++ compiler) and GPU (NVRTC).
//
// Axes: x right, y down, z forward, metres; the eye is at y = 0 and the ground at y = GROUND_Y. The world repeats every
// PERIOD metres in x and z. Fog is full before a third copy could be seen, so that copies never pop in.
//
// The including file defines FN (function qualifiers) and LOWEST_BIT (the place of the lowest bit that is set), and passes
// the tables of scene.py as flat float arrays.

#define PERIOD 12.0f
#define GROUND_Y 1.5f
#define FOG_START 1.5f
#define FOG_END 12.0f
#define NEAR_CLIP 0.25f
#define NO_HIT 1e9f
#define PI_F 3.14159265f

// Columns of an object row.
#define OBJECT_COLUMNS 12
enum { O_SHAPE, O_X, O_Z, O_TOP, O_BASE, O_RX, O_RZ, O_RED, O_GREEN, O_BLUE, O_PATTERN, O_GLOW };
enum { SHAPE_BOX, SHAPE_SPHERE, SHAPE_CYLINDER, SHAPE_CONE };
enum { PATTERN_PLAIN, PATTERN_WINDOWS, PATTERN_BANDS };

// Columns of a palette row: twelve colours, then scalars.
#define PALETTE_COLUMNS 44
enum {
  P_ZENITH = 0, P_HORIZON = 3, P_NORTH = 6, P_EAST = 9, P_SOUTH = 12, P_WEST = 15,
  P_GROUND = 18, P_PATH = 21, P_SUN = 24, P_TINT = 27, P_WATER = 30, P_CLOUD = 33,
  P_AMBIENT = 36, P_DIFFUSE = 37, P_SNOW = 38, P_LIT = 39, P_GROUND_HUES = 40, P_VEIL = 41,
  P_POPLARS = 42, P_CUTAWAY = 43
};

typedef struct { float x, y, z; } Vec;
typedef struct { float distance; Vec normal; Vec colour; float glow; } Hit;

FN float clamp01(float v) { return v < 0.0f ? 0.0f : (v > 1.0f ? 1.0f : v); }
FN float smooth01(float v) { v = clamp01(v); return v * v * (3.0f - 2.0f * v); }
FN Vec vec(float x, float y, float z) { Vec v; v.x = x; v.y = y; v.z = z; return v; }
FN Vec at(const float* row, int column) { return vec(row[column], row[column + 1], row[column + 2]); }
FN Vec mix(Vec a, Vec b, float w) { return vec(a.x + (b.x - a.x) * w, a.y + (b.y - a.y) * w, a.z + (b.z - a.z) * w); }
FN Vec times(Vec a, Vec b) { return vec(a.x * b.x, a.y * b.y, a.z * b.z); }
FN Vec scaled(Vec a, float s) { return vec(a.x * s, a.y * s, a.z * s); }
FN float dot(Vec a, Vec b) { return a.x * b.x + a.y * b.y + a.z * b.z; }
FN float wrap(float v) { return v - PERIOD * floorf(v / PERIOD); }
FN float wrap_centred(float v) { return v - PERIOD * floorf(v / PERIOD + 0.5f); }
FN float fraction(float v) { return v - floorf(v); }
FN float inverse(float v) { return 1.0f / (fabsf(v) < 1e-6f ? (v < 0.0f ? -1e-6f : 1e-6f) : v); }
FN float angle_between(float a, float b) { float d = a - b; return fabsf(d - 2.0f * PI_F * floorf(d / (2.0f * PI_F) + 0.5f)); }

// Direction to the sun: low in the north-east, so that its glow tells the heading.
FN Vec sun_direction(void) { return vec(0.5145f, -0.4472f, 0.7317f); }

// ---------------------------------------------------------------- shapes; `p` is the centre relative to the eye

FN void hit_box(const float* o, float px, float pz, Vec r, float near, Hit* best) {
  float ix = inverse(r.x), iy = inverse(r.y), iz = inverse(r.z);
  float x0 = (px - o[O_RX]) * ix, x1 = (px + o[O_RX]) * ix;
  float y0 = o[O_TOP] * iy, y1 = o[O_BASE] * iy;
  float z0 = (pz - o[O_RZ]) * iz, z1 = (pz + o[O_RZ]) * iz;
  float xn = fminf(x0, x1), yn = fminf(y0, y1), zn = fminf(z0, z1);
  float enter = fmaxf(xn, fmaxf(yn, zn)), leave = fminf(fmaxf(x0, x1), fminf(fmaxf(y0, y1), fmaxf(z0, z1)));
  if (enter >= leave || enter < near || enter >= best->distance) return;
  best->distance = enter;
  best->colour = at(o, O_RED);
  best->glow = o[O_GLOW];
  if (enter == xn) best->normal = vec(r.x > 0 ? -1.0f : 1.0f, 0, 0);
  else if (enter == yn) best->normal = vec(0, r.y > 0 ? -1.0f : 1.0f, 0);
  else best->normal = vec(0, 0, r.z > 0 ? -1.0f : 1.0f);
  if (o[O_PATTERN] == PATTERN_WINDOWS && best->normal.y == 0) {
    float up = o[O_BASE] - r.y * enter;
    float along = best->normal.x != 0 ? r.z * enter - pz : r.x * enter - px;
    float row = fraction(up / 1.4f), column = fraction(along / 1.0f + 0.25f);
    if (row > 0.38f && row < 0.82f && column < 0.5f) {
      best->colour = times(best->colour, vec(0.30f, 0.30f, 0.42f));
      best->glow = 1.0f;
    }
  }
}

FN void hit_sphere(const float* o, float px, float pz, Vec r, float near, Hit* best) {
  float py = 0.5f * (o[O_TOP] + o[O_BASE]), radius = o[O_RX];
  float b = px * r.x + py * r.y + pz * r.z;
  float c = px * px + py * py + pz * pz - radius * radius;
  float d = b * b - c;
  if (d <= 0 || c <= 0) return;
  float t = b - sqrtf(d);
  if (t < near || t >= best->distance) return;
  best->distance = t;
  best->normal = scaled(vec(r.x * t - px, r.y * t - py, r.z * t - pz), 1.0f / radius);
  best->colour = at(o, O_RED);
  best->glow = o[O_GLOW];
}

FN void hit_cylinder(const float* o, float px, float pz, Vec r, float near, Hit* best) {
  float radius = o[O_RX];
  float a = r.x * r.x + r.z * r.z + 1e-9f, b = px * r.x + pz * r.z;
  float c = px * px + pz * pz - radius * radius, d = b * b - a * c;
  if (d <= 0 || c <= 0) return;
  float t = (b - sqrtf(d)) / a, y = r.y * t;
  if (t < near || t >= best->distance || y < o[O_TOP] || y > o[O_BASE]) return;
  best->distance = t;
  best->normal = scaled(vec(r.x * t - px, 0, r.z * t - pz), 1.0f / radius);
  best->colour = at(o, O_RED);
  best->glow = o[O_GLOW];
  if (o[O_PATTERN] == PATTERN_BANDS && fraction((o[O_BASE] - y) / 1.7f) < 0.5f) best->colour = vec(0.94f, 0.93f, 0.90f);
}

FN void hit_cone(const float* o, float px, float pz, Vec r, float near, Hit* best) {
  float height = o[O_BASE] - o[O_TOP], radius = o[O_RX], slope = radius / height, s2 = slope * slope;
  // Along the ray, the distance to the axis equals slope times the depth below the apex.
  float apex = o[O_TOP];
  float a = r.x * r.x + r.z * r.z - s2 * r.y * r.y;
  float b = px * r.x + pz * r.z - s2 * apex * r.y;
  float c = px * px + pz * pz - s2 * apex * apex, d = b * b - a * c;
  if (fabsf(a) > 1e-9f && d > 0) {
    float root = sqrtf(d), t0 = (b - root) / a, t1 = (b + root) / a;
    for (int k = 0; k < 2; k++) {
      float t = k ? fmaxf(t0, t1) : fminf(t0, t1), y = r.y * t;
      if (t < near || t >= best->distance || y < apex || y > o[O_BASE]) continue;
      float nx = r.x * t - px, nz = r.z * t - pz, n = 1.0f / sqrtf(nx * nx + nz * nz + 1e-9f), up = 1.0f / sqrtf(1.0f + s2);
      best->distance = t;
      best->normal = vec(nx * n * up, -slope * up, nz * n * up);
      best->colour = at(o, O_RED);
      best->glow = o[O_GLOW];
      break;
    }
  }
  float t = o[O_BASE] * inverse(r.y), ux = r.x * t - px, uz = r.z * t - pz;
  if (t > near && t < best->distance && ux * ux + uz * uz < radius * radius && r.y < 0) {
    best->distance = t;
    best->normal = vec(0, 1.0f, 0);
    best->colour = scaled(at(o, O_RED), 0.75f);
    best->glow = 0;
  }
}

// ---------------------------------------------------------------- which copies of objects a tile of the picture may show

// A tile's set has one bit for each of the nine copies of each object, in the order in which rays try them.
#define TILE_WIDTH 16
#define TILE_HEIGHT 8
#define COPIES 9
#define MAX_WORDS 16

// All rays of a tile are within an angle of its middle one; in plan too, unless the tile looks almost straight up or down.
typedef struct { Vec eye, axis; float cosine, sine, plan_x, plan_z, plan_cosine, plan_sine; } Cone;

FN Vec direction(const float* pose, float dx, float dy) {
  float n = 1.0f / sqrtf(dx * dx + dy * dy + 1.0f);
  dx *= n; dy *= n;
  return vec(pose[3] * dx + pose[4] * dy + pose[5] * n, pose[6] * dx + pose[7] * dy + pose[8] * n, pose[9] * dx + pose[10] * dy + pose[11] * n);
}

FN float sine_of(float cosine) { return sqrtf(fmaxf(0.0f, 1.0f - cosine * cosine)); }

FN Cone tile_cone(const float* pose, float left, float top, float right, float bottom) {
  Cone c;
  c.eye = vec(pose[0], pose[1], pose[2]);
  c.axis = direction(pose, 0.5f * (left + right), 0.5f * (top + bottom));
  float flat = 1.0f / sqrtf(c.axis.x * c.axis.x + c.axis.z * c.axis.z + 1e-9f);
  c.plan_x = c.axis.x * flat; c.plan_z = c.axis.z * flat;
  c.cosine = c.plan_cosine = 1.0f;
  for (int corner = 0; corner < 4; corner++) {
    Vec r = direction(pose, corner & 1 ? right : left, corner & 2 ? bottom : top);
    c.cosine = fminf(c.cosine, dot(c.axis, r));
    c.plan_cosine = fminf(c.plan_cosine, (r.x * c.plan_x + r.z * c.plan_z) / sqrtf(r.x * r.x + r.z * r.z + 1e-9f));
  }
  // A little wider, for the rounding.
  c.cosine -= 1e-4f; c.plan_cosine -= 1e-4f;
  c.sine = sine_of(c.cosine); c.plan_sine = sine_of(c.plan_cosine);
  return c;
}

// Whether something round of that radius, its centre at that distance and `ahead` of it along the axis, reaches into the cone.
FN int reaches(float ahead, float distance, float radius, float cosine, float sine) {
  if (distance <= radius) return 1;
  float s = radius / distance;
  return ahead >= distance * (cosine * sine_of(s) - sine * s) - 1e-3f;
}

FN int shows(const Cone* c, const float* objects, int copy) {
  const float* o = objects + copy / COPIES * OBJECT_COLUMNS;
  float px = wrap_centred(o[O_X] - c->eye.x) + PERIOD * (copy % COPIES / 3 - 1);
  float pz = wrap_centred(o[O_Z] - c->eye.z) + PERIOD * (copy % 3 - 1);
  float py = 0.5f * (o[O_TOP] + o[O_BASE]) - c->eye.y, half = 0.5f * (o[O_BASE] - o[O_TOP]);
  float wide = o[O_SHAPE] == SHAPE_BOX ? o[O_RX] * o[O_RX] + o[O_RZ] * o[O_RZ] : fmaxf(o[O_RX] * o[O_RX], o[O_RZ] * o[O_RZ]);
  float plan = sqrtf(px * px + pz * pz), radius = sqrtf(wide);
  if (plan - radius > FOG_END) return 0;
  if (c->plan_cosine > 0.0f && !reaches(px * c->plan_x + pz * c->plan_z, plan, radius, c->plan_cosine, c->plan_sine)) return 0;
  float distance = sqrtf(plan * plan + py * py);
  return reaches(px * c->axis.x + py * c->axis.y + pz * c->axis.z, distance, sqrtf(wide + half * half), c->cosine, c->sine);
}

// What a ray meets first, at least `near` away.
FN Hit nearest_object(Vec eye, Vec r, const float* objects, int num_objects, const unsigned* set, float near) {
  Hit best;
  best.distance = NO_HIT; best.normal = vec(0, 0, 0); best.colour = vec(0, 0, 0); best.glow = 0;
  for (int word = 0; 32 * word < COPIES * num_objects; word++) {
    for (unsigned bits = set[word]; bits; bits &= bits - 1) {
      int copy = 32 * word + LOWEST_BIT(bits);
      const float* o = objects + copy / COPIES * OBJECT_COLUMNS;
      float px = wrap_centred(o[O_X] - eye.x) + PERIOD * (copy % COPIES / 3 - 1);
      float pz = wrap_centred(o[O_Z] - eye.z) + PERIOD * (copy % 3 - 1);
      int shape = (int)o[O_SHAPE];
      if (shape == SHAPE_BOX) hit_box(o, px, pz, r, near, &best);
      else if (shape == SHAPE_SPHERE) hit_sphere(o, px, pz, r, near, &best);
      else if (shape == SHAPE_CYLINDER) hit_cylinder(o, px, pz, r, near, &best);
      else hit_cone(o, px, pz, r, near, &best);
    }
  }
  return best;
}

// ---------------------------------------------------------------- sky: a function of direction alone

// Colour where everything fades out, by heading: each quarter has its own hue.
FN Vec horizon_colour(float heading, const float* p) {
  Vec c = at(p, P_HORIZON);
  const float width = 1.15f;
  for (int quarter = 0; quarter < 4; quarter++) {
    float w = 1.0f - angle_between(heading, 0.5f * PI_F * quarter) / width;
    c = mix(c, at(p, P_NORTH + 3 * quarter), 0.30f * smooth01(w));
  }
  return c;
}

// Angular height of the far skyline: a volcano in the north, two domes in the east, a table mountain in the south, three
// peaks in the west.
FN float skyline(float heading) {
  float h = 0.045f + 0.012f * sinf(3.0f * heading + 0.5f);
  float north = 0.30f - 0.72f * fmaxf(angle_between(heading, 0.0f) - 0.05f, 0.0f);
  float east_a = 0.17f * smooth01(1.0f - angle_between(heading, 1.35f) / 0.34f);
  float east_b = 0.12f * smooth01(1.0f - angle_between(heading, 1.90f) / 0.26f);
  float south = 0.19f * smooth01((0.50f - angle_between(heading, PI_F)) / 0.16f);
  float west = 0.0f;
  for (int k = -1; k <= 1; k++) west = fmaxf(west, (k == 0 ? 0.27f : 0.19f) - 1.15f * angle_between(heading, 1.5f * PI_F + 0.30f * k));
  return fmaxf(h, fmaxf(fmaxf(north, west), fmaxf(south, fmaxf(east_a, east_b))));
}

// A far ring of poplars, one at every second step of a turning key, in turn dark green, light green and blue-green: seen
// from a whole step, they stand in one of two rows of columns, and any other heading shows.
#define NUM_POPLARS 30
FN Vec with_poplars(Vec colour, Vec r, const float* p) {
  float heading = atan2f(r.x, r.z), elevation = asinf(fmaxf(-1.0f, fminf(1.0f, -r.y)));
  float place = heading * (NUM_POPLARS / (2.0f * PI_F)), nearest = floorf(place + 0.5f);
  int kind = ((int)nearest % 3 + 3) % 3;
  float top = kind == 0 ? 0.25f : (kind == 1 ? 0.19f : 0.22f), height = clamp01(elevation / top);
  // Widest at a third of the height.
  float wide = 0.23f * sqrtf(fmaxf(0.0f, height < 0.33f ? 1.0f - 2.2f * (0.33f - height) : 1.0f - (height - 0.33f) / 0.67f));
  float inside = smooth01(0.5f + (wide - fabsf(place - nearest)) / 0.08f) * smooth01((top - elevation) / 0.02f) * smooth01(0.5f + elevation / 0.02f);
  Vec leaves = kind == 0 ? vec(0.16f, 0.40f, 0.24f) : (kind == 1 ? vec(0.50f, 0.62f, 0.26f) : vec(0.20f, 0.46f, 0.50f));
  leaves = scaled(times(leaves, at(p, P_TINT)), p[P_AMBIENT] + 0.5f * p[P_DIFFUSE]);
  return mix(colour, leaves, p[P_POPLARS] * inside);
}

FN Vec bare_sky(Vec r, const float* p) {
  float heading = atan2f(r.x, r.z), elevation = asinf(fmaxf(-1.0f, fminf(1.0f, -r.y)));
  Vec horizon = horizon_colour(heading, p);
  Vec colour = mix(horizon, at(p, P_ZENITH), sqrtf(clamp01(elevation / 1.1f)));
  // Broad clouds whose pattern never repeats around the circle.
  float cloud = sinf(2.0f * heading + 0.6f) + 0.8f * sinf(3.0f * heading + 7.0f * elevation + 2.1f) + 0.5f * sinf(5.0f * heading - 9.0f * elevation);
  colour = mix(colour, at(p, P_CLOUD), 0.55f * smooth01((cloud - 0.5f) / 1.4f) * smooth01((elevation - 0.12f) / 0.2f));
  float towards_sun = dot(r, sun_direction());
  colour = mix(colour, at(p, P_SUN), 0.45f * smooth01((towards_sun - 0.75f) / 0.24f));
  colour = mix(colour, at(p, P_SUN), smooth01((towards_sun - 0.9925f) / 0.0025f));
  float ridge = skyline(heading);
  if (elevation < ridge) {
    int quarter = (int)floorf(heading / (0.5f * PI_F) + 0.5f);
    Vec rock = at(p, P_NORTH + 3 * ((quarter % 4 + 4) % 4));
    float high = clamp01(elevation / 0.30f);
    rock = mix(scaled(rock, 0.80f), rock, high);
    if (quarter == 0) rock = mix(rock, vec(0.96f, 0.97f, 1.0f), 0.8f * smooth01((elevation - 0.20f) / 0.04f) * p[P_AMBIENT]);
    colour = mix(horizon, rock, smooth01(elevation / 0.09f));
  }
  return colour;
}

FN Vec sky(Vec r, const float* p) { return with_poplars(bare_sky(r, p), r, p); }

// ---------------------------------------------------------------- ground: paths, a plaza, a pond, one hue per cell

FN float edge(float inside, float softness) { return smooth01(0.5f + inside / softness); }

FN Vec ground(float x, float z, const float* p, const float* cells, const float* objects, int num_objects) {
  // Each of the 3 x 3 cells of 4 m has its own hue; neighbours blend over a metre.
  Vec hue = vec(0, 0, 0);
  for (int i = 0; i < 3; i++) {
    float wx = edge(2.0f - fabsf(wrap_centred(x - (2.0f + 4.0f * i))), 1.0f);
    for (int j = 0; j < 3; j++) {
      float w = wx * edge(2.0f - fabsf(wrap_centred(z - (2.0f + 4.0f * j))), 1.0f);
      const float* cell = cells + 3 * (3 * i + j);
      hue = vec(hue.x + w * cell[0], hue.y + w * cell[1], hue.z + w * cell[2]);
    }
  }
  Vec colour = times(at(p, P_GROUND), mix(vec(1, 1, 1), hue, p[P_GROUND_HUES]));
  float cx = wrap_centred(x - 6.0f), cz = wrap_centred(z - 6.0f), plaza = sqrtf(cx * cx + cz * cz);
  float path = fmaxf(0.85f - fabsf(cx), fmaxf(0.85f - fabsf(cz), 2.1f - plaza));
  colour = mix(colour, at(p, P_PATH), edge(path, 0.16f));
  // The plaza's mosaic: one colour for each quarter of the compass, in a ring.
  float ring = edge(1.7f - plaza, 0.15f) * edge(plaza - 0.8f, 0.15f);
  int quarter = (int)floorf(atan2f(cx, cz) / (0.5f * PI_F) + 0.5f);
  colour = mix(colour, mix(at(p, P_PATH), at(p, P_NORTH + 3 * ((quarter % 4 + 4) % 4)), 0.75f), 0.85f * ring);
  float qx = wrap_centred(x - 3.2f), qz = wrap_centred(z - 8.4f), pond = 1.05f - sqrtf(qx * qx + qz * qz);
  colour = mix(colour, vec(0.93f, 0.88f, 0.74f), 0.5f * edge(pond + 0.25f, 0.2f) * p[P_AMBIENT]);
  colour = mix(colour, at(p, P_WATER), edge(pond, 0.14f));
  // A soft shadow under everything, drawn out away from the sun.
  float shade = 0.0f;
  for (int k = 0; k < num_objects; k++) {
    const float* o = objects + k * OBJECT_COLUMNS;
    float size = fmaxf(o[O_RX], o[O_RZ]);
    float dx = wrap_centred(x - o[O_X] + 0.45f * size), dz = wrap_centred(z - o[O_Z] + 0.65f * size);
    float d = sqrtf(dx * dx + dz * dz) / (1.55f * size);
    shade = fmaxf(shade, smooth01(1.35f - d) * (o[O_BASE] > GROUND_Y - 2.6f ? 1.0f : 0.55f));
  }
  return scaled(colour, 1.0f - 0.42f * shade);
}

// ---------------------------------------------------------------- one ray

// Where pictures are taken from and what they show; `pose` is the eye, then the camera-to-world rotation, row-major.
typedef struct {
  const float *pose, *palette, *cells, *objects;
  int num_objects, height, width, rays;
  float fx, fy, cx, cy;
} View;

FN Vec shaded(const View* view, Vec eye, Vec r, Hit hit) {
  const float *p = view->palette;
  float to_ground = r.y > 1e-4f ? GROUND_Y / r.y : NO_HIT;
  float distance = fminf(hit.distance, to_ground);
  float fog = p[P_VEIL] + (1.0f - p[P_VEIL]) * smooth01((distance - FOG_START) / (FOG_END - FOG_START));
  if (fog >= 1.0f) return r.y > 0 ? horizon_colour(atan2f(r.x, r.z), p) : sky(r, p);
  Vec colour;
  if (to_ground < hit.distance) {
    float x = wrap(eye.x + r.x * to_ground), z = wrap(eye.z + r.z * to_ground);
    colour = ground(x, z, p, view->cells, view->objects, view->num_objects);
  } else {
    float light = p[P_AMBIENT] + p[P_DIFFUSE] * fmaxf(0.0f, 0.25f + 0.75f * dot(hit.normal, sun_direction()));
    colour = scaled(times(hit.colour, at(p, P_TINT)), light);
    colour = mix(colour, vec(0.95f, 0.97f, 1.0f), p[P_SNOW] * smooth01((-hit.normal.y - 0.25f) / 0.4f));
    colour = mix(colour, vec(1.0f, 0.86f, 0.48f), 0.95f * hit.glow * p[P_LIT]);
  }
  if (r.y > 0) return mix(colour, horizon_colour(atan2f(r.x, r.z), p), fog);
  // What stands in the mist lets sky and skyline through, but hides the poplars until it is almost gone itself.
  Vec bare = bare_sky(r, p);
  return mix(colour, mix(bare, with_poplars(bare, r, p), smooth01((fog - 0.75f) / 0.25f)), fog);
}

// (dx, dy, 1): direction in the camera. What is nearer than the cutaway fades, and shows what is behind it.
FN Vec trace(const View* view, const unsigned* set, float dx, float dy) {
  const float* pose = view->pose;
  Vec r = direction(pose, dx, dy), eye = vec(pose[0], pose[1], pose[2]);
  float cutaway = view->palette[P_CUTAWAY];
  Hit hit = nearest_object(eye, r, view->objects, view->num_objects, set, NEAR_CLIP);
  Vec colour = shaded(view, eye, r, hit);
  if (hit.distance >= cutaway || (r.y > 1e-4f && hit.distance >= GROUND_Y / r.y)) return colour;
  Hit behind = nearest_object(eye, r, view->objects, view->num_objects, set, cutaway);
  return mix(shaded(view, eye, r, behind), colour, smooth01((hit.distance - 0.5f * cutaway) / (0.5f * cutaway)));
}

FN Cone cone_of(const View* view, int left, int top) {
  return tile_cone(view->pose, (left - view->cx) / view->fx, (top - view->cy) / view->fy,
                   (left + TILE_WIDTH - view->cx) / view->fx, (top + TILE_HEIGHT - view->cy) / view->fy);
}

// One pixel is the mean of a square of rays; `frame` is where the picture begins.
FN void draw(const View* view, const unsigned* set, int x, int y, unsigned char* frame) {
  Vec sum = vec(0, 0, 0);
  int rays = view->rays;
  for (int s = 0; s < rays * rays; s++) {
    float u = x + (s % rays + 0.5f) / rays, v = y + (s / rays + 0.5f) / rays;
    Vec c = trace(view, set, (u - view->cx) / view->fx, (v - view->cy) / view->fy);
    sum = vec(sum.x + clamp01(c.x), sum.y + clamp01(c.y), sum.z + clamp01(c.z));
  }
  unsigned char* pixel = frame + (y * view->width + x) * 3;
  float scale = 255.0f / (rays * rays);
  pixel[0] = (unsigned char)(sum.x * scale + 0.5f);
  pixel[1] = (unsigned char)(sum.y * scale + 0.5f);
  pixel[2] = (unsigned char)(sum.z * scale + 0.5f);
}
