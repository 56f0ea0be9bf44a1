// The CPU build of scene.h: frames in parallel, each pixel the mean of a square of rays.
#include <math.h>
#define FN static inline
#include "scene.h"

extern "C" void render(const float* poses, const int* styles, const float* palettes, const float* cells,
                       const float* objects, int num_objects, unsigned char* out, int num_frames, int height, int width,
                       float fx, float fy, float cx, float cy, int rays) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int frame = 0; frame < num_frames; frame++) {
    const float* palette = palettes + styles[frame] * PALETTE_COLUMNS;
    for (int y = 0; y < height; y++)
      for (int x = 0; x < width; x++) {
        Vec sum = vec(0, 0, 0);
        for (int s = 0; s < rays * rays; s++) {
          float u = x + (s % rays + 0.5f) / rays, v = y + (s / rays + 0.5f) / rays;
          Vec c = trace(poses + 12 * frame, palette, cells, objects, num_objects, (u - cx) / fx, (v - cy) / fy);
          sum = vec(sum.x + clamp01(c.x), sum.y + clamp01(c.y), sum.z + clamp01(c.z));
        }
        unsigned char* pixel = out + (((size_t)frame * height + y) * width + x) * 3;
        float scale = 255.0f / (rays * rays);
        pixel[0] = (unsigned char)(sum.x * scale + 0.5f);
        pixel[1] = (unsigned char)(sum.y * scale + 0.5f);
        pixel[2] = (unsigned char)(sum.z * scale + 0.5f);
      }
  }
}
