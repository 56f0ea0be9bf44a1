// The CPU build of scene.h: frames in parallel, tile by tile. Unless `culls`, every ray tries every copy of every object.
#include <math.h>
#define FN static inline
#define LOWEST_BIT(bits) __builtin_ctz(bits)
#include "scene.h"

static void draw_tile(const View* view, int left, int top, int culls, unsigned char* frame) {
  unsigned set[MAX_WORDS] = {0};
  Cone cone = cone_of(view, left, top);
  for (int copy = 0; copy < COPIES * view->num_objects; copy++)
    if (!culls || shows(&cone, view->objects, copy)) set[copy / 32] |= 1u << copy % 32;
  for (int y = top; y < top + TILE_HEIGHT && y < view->height; y++)
    for (int x = left; x < left + TILE_WIDTH && x < view->width; x++) draw(view, set, x, y, frame);
}

extern "C" void render(const float* poses, const int* styles, const float* palettes, const float* cells,
                       const float* objects, int num_objects, unsigned char* out, int num_frames, int height, int width,
                       float fx, float fy, float cx, float cy, int rays, int culls) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int frame = 0; frame < num_frames; frame++) {
    View view = {poses + 12 * frame, palettes + styles[frame] * PALETTE_COLUMNS, cells, objects, num_objects, height,
                 width, rays, fx, fy, cx, cy};
    for (int top = 0; top < height; top += TILE_HEIGHT)
      for (int left = 0; left < width; left += TILE_WIDTH)
        draw_tile(&view, left, top, culls, out + (size_t)frame * height * width * 3);
  }
}
