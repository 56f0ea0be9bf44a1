"""The demo world: what stands where, the palettes of its styles, and frames of it on a CPU or a GPU.

`scene.h` draws one ray; this file owns the tables it reads and calls it through a C++ compiler or through NVRTC, so
that training and evaluation see the same truth. A frame is uint8 [height, width, 3].
"""

from __future__ import annotations

import argparse
import ctypes
import functools
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from training.demo_world import compiled
from training.demo_world.options import number

HEIGHT, WIDTH = 96, 160
FOCAL_X, FOCAL_Y = 500.0 * WIDTH / 832, 500.0 * HEIGHT / 480
"""500 px at 832x480, the intrinsics of keyboard cameras, scaled to our size."""
CENTRE_X, CENTRE_Y = WIDTH / 2, HEIGHT / 2

PERIOD_M = 12.0
GROUND_Y = 1.5
STYLES = ("day", "night", "snow", "desert", "sunset", "autumn")

Floats = npt.NDArray[np.float32]
Colour = tuple[float, float, float]

_BOX, _SPHERE, _CYLINDER, _CONE = range(4)
_PLAIN, _WINDOWS, _BANDS = range(3)


def _object(
    shape: int,
    at: tuple[float, float],
    top_m: float,
    base_m: float,
    size: tuple[float, float],
    colour: Colour,
    pattern: int = _PLAIN,
    glow: float = 0.0,
) -> list[float]:
    """One row of the table; `top_m` and `base_m` are metres above the ground."""
    return [shape, *at, GROUND_Y - top_m, GROUND_Y - base_m, *size, *colour, pattern, glow]


OBJECTS: Floats = np.array(
    [
        # A lighthouse, south-west.
        _object(_CYLINDER, (2.2, 2.2), 3.98, 0.00, (0.60, 0.60), (0.88, 0.40, 0.38), _BANDS),
        _object(_CYLINDER, (2.2, 2.2), 4.60, 3.98, (0.40, 0.40), (0.98, 0.92, 0.62), glow=1.0),
        _object(_CONE, (2.2, 2.2), 5.38, 4.60, (0.68, 0.68), (0.84, 0.38, 0.38)),
        # A blue house with an orange roof, south-east.
        _object(_BOX, (9.8, 2.4), 2.18, 0.00, (1.08, 0.92), (0.48, 0.64, 0.92), _WINDOWS),
        _object(_CONE, (9.8, 2.4), 3.59, 2.18, (1.60, 1.60), (0.96, 0.64, 0.38)),
        # A great tree, north-west.
        _object(_CYLINDER, (1.8, 10.2), 1.72, 0.00, (0.26, 0.26), (0.60, 0.48, 0.40)),
        _object(_SPHERE, (1.8, 10.2), 3.90, 1.40, (1.28, 1.28), (0.40, 0.70, 0.42)),
        # A purple tower, north-east.
        _object(_BOX, (10.0, 9.8), 4.84, 0.00, (0.84, 0.84), (0.70, 0.54, 0.86), _WINDOWS),
        _object(_CONE, (10.0, 9.8), 6.40, 4.84, (1.20, 1.20), (0.54, 0.44, 0.72)),
        # A golden gate over the northern path.
        _object(_BOX, (4.75, 11.2), 2.65, 0.00, (0.19, 0.19), (0.97, 0.83, 0.40)),
        _object(_BOX, (7.25, 11.2), 2.65, 0.00, (0.19, 0.19), (0.97, 0.83, 0.40)),
        _object(_BOX, (6.0, 11.2), 3.12, 2.57, (1.52, 0.26), (0.97, 0.83, 0.40)),
        # A pink tree beside the eastern path.
        _object(_CYLINDER, (10.6, 6.0), 1.17, 0.00, (0.18, 0.18), (0.56, 0.46, 0.44)),
        _object(_SPHERE, (10.6, 6.0), 2.81, 0.94, (0.92, 0.92), (0.97, 0.68, 0.80)),
        # A teal ball on the lawn.
        _object(_SPHERE, (8.0, 4.0), 1.09, 0.00, (0.56, 0.56), (0.36, 0.78, 0.75)),
    ],
    np.float32,
)

CELLS: Floats = np.array(
    [
        # Multipliers on the ground's colour, cells in order of x, then z.
        *((1.25, 1.05, 0.70), (0.70, 1.05, 1.30), (0.80, 1.15, 0.75)),
        *((1.05, 0.95, 0.85), (1.00, 1.00, 1.00), (0.78, 0.92, 1.10)),
        *((1.35, 0.95, 0.95), (1.10, 1.20, 0.65), (1.10, 0.85, 1.30)),
    ],
    np.float32,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Colours and light of one style, RGB from 0 to 1. The compass fields tint the far scenery of their quarter.

    The last columns are how much mist lies on what is near, how much of the far poplars shows, and within how many
    metres things fade.
    """

    zenith: Colour
    horizon: Colour
    north: Colour
    east: Colour
    south: Colour
    west: Colour
    ground: Colour
    path: Colour
    sun: Colour
    tint: Colour
    water: Colour
    cloud: Colour
    ambient: float
    diffuse: float
    snow: float
    lit: float
    ground_hues: float
    veil: float
    poplars: float = 0.65
    cutaway_m: float = 2.0

    def row(self) -> list[float]:
        """Return the columns that `scene.h` reads, in its order."""
        columns: list[float] = []
        for column in fields(self):
            value = getattr(self, column.name)
            columns.extend(value if isinstance(value, tuple) else (value,))
        return columns


PALETTES: Floats = np.array(
    [
        Palette(  # day
            zenith=(0.20, 0.46, 0.90), horizon=(0.80, 0.90, 0.98),
            north=(0.44, 0.46, 0.72), east=(0.92, 0.62, 0.40), south=(0.34, 0.66, 0.66), west=(0.86, 0.52, 0.66),
            ground=(0.40, 0.64, 0.30), path=(0.66, 0.70, 0.49), sun=(1.00, 0.96, 0.75), tint=(1.0, 1.0, 1.0),
            water=(0.28, 0.61, 0.72), cloud=(1.0, 1.0, 1.0),
            ambient=0.62, diffuse=0.48, snow=0.0, lit=0.0, ground_hues=0.56, veil=0.4,
        ).row(),
        Palette(  # night
            zenith=(0.03, 0.04, 0.16), horizon=(0.14, 0.17, 0.36),
            north=(0.16, 0.18, 0.46), east=(0.42, 0.24, 0.36), south=(0.10, 0.32, 0.40), west=(0.36, 0.18, 0.44),
            ground=(0.13, 0.24, 0.24), path=(0.27, 0.31, 0.36), sun=(0.92, 0.93, 0.98), tint=(0.62, 0.68, 1.0),
            water=(0.12, 0.27, 0.47), cloud=(0.24, 0.28, 0.50),
            ambient=0.50, diffuse=0.34, snow=0.0, lit=1.0, ground_hues=0.56, veil=0.24,
        ).row(),
        Palette(  # snow
            zenith=(0.58, 0.70, 0.86), horizon=(0.92, 0.94, 0.97),
            north=(0.60, 0.64, 0.84), east=(0.93, 0.78, 0.66), south=(0.56, 0.76, 0.80), west=(0.90, 0.72, 0.80),
            ground=(0.88, 0.91, 0.96), path=(0.76, 0.77, 0.83), sun=(1.0, 0.98, 0.90), tint=(0.88, 0.92, 0.98),
            water=(0.71, 0.86, 0.94), cloud=(0.98, 0.98, 1.0),
            ambient=0.66, diffuse=0.36, snow=0.9, lit=0.15, ground_hues=0.21, veil=0.52,
        ).row(),
        Palette(  # desert
            zenith=(0.28, 0.56, 0.84), horizon=(0.98, 0.88, 0.68),
            north=(0.66, 0.44, 0.46), east=(0.94, 0.58, 0.28), south=(0.56, 0.62, 0.46), west=(0.86, 0.44, 0.42),
            ground=(0.90, 0.74, 0.46), path=(0.80, 0.64, 0.43), sun=(1.0, 0.97, 0.80), tint=(1.08, 0.94, 0.76),
            water=(0.38, 0.68, 0.64), cloud=(1.0, 0.96, 0.86),
            ambient=0.60, diffuse=0.50, snow=0.0, lit=0.0, ground_hues=0.32, veil=0.38,
        ).row(),
        Palette(  # sunset
            zenith=(0.26, 0.18, 0.48), horizon=(0.99, 0.60, 0.36),
            north=(0.36, 0.20, 0.46), east=(0.98, 0.46, 0.22), south=(0.42, 0.28, 0.52), west=(0.70, 0.22, 0.44),
            ground=(0.44, 0.36, 0.24), path=(0.58, 0.44, 0.36), sun=(1.0, 0.88, 0.50), tint=(1.12, 0.80, 0.66),
            water=(0.63, 0.41, 0.45), cloud=(1.0, 0.66, 0.60),
            ambient=0.48, diffuse=0.56, snow=0.0, lit=0.75, ground_hues=0.56, veil=0.28,
        ).row(),
        Palette(  # autumn
            zenith=(0.46, 0.58, 0.74), horizon=(0.93, 0.89, 0.80),
            north=(0.50, 0.44, 0.60), east=(0.90, 0.56, 0.24), south=(0.52, 0.56, 0.34), west=(0.76, 0.34, 0.30),
            ground=(0.72, 0.50, 0.20), path=(0.68, 0.55, 0.40), sun=(1.0, 0.92, 0.70), tint=(1.08, 0.88, 0.62),
            water=(0.45, 0.50, 0.50), cloud=(0.97, 0.94, 0.90),
            ambient=0.60, diffuse=0.42, snow=0.0, lit=0.1, ground_hues=0.63, veil=0.4,
        ).row(),
    ],
    np.float32,
)  # fmt: skip


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add the options whose values `change` takes to those of a program."""
    parser.add_argument(
        "--poplars", type=number(least=0, most=1), help="how much of the far poplars shows, 0 to 1, if not as shipped"
    )
    parser.add_argument("--cutaway", type=number(least=0), help="metres within which things fade, if not as shipped")


def change(*, poplars: float | None = None, cutaway_m: float | None = None) -> None:
    """Change all styles, in place of what `PALETTES` says, for a run to try.

    Args:
        poplars: How much of the far ring of poplars shows, 0 to 1.
        cutaway_m: Within how many metres things fade, so that no wall fills the picture.
    """
    for column, value in ((-2, poplars), (-1, cutaway_m)):
        if value is not None:
            PALETTES[:, column] = value
    _cuda_kernel.cache_clear()


def render(poses: Floats | torch.Tensor, styles: npt.NDArray[np.int32] | torch.Tensor, rays: int = 3) -> torch.Tensor:
    """Draw frames, each pixel the mean of `rays` x `rays` rays.

    Args:
        poses: float32 [frames, 12]: eye in metres, then the camera-to-world rotation, row-major.
        styles: int32 [frames], indices into `STYLES`.

    Returns:
        uint8 [frames, height, width, 3] on the device of `poses` (NumPy counts as the CPU).
    """
    poses, styles = torch.as_tensor(poses), torch.as_tensor(styles)
    if poses.dim() != 2 or poses.shape[1] != 12 or styles.shape != poses.shape[:1]:
        raise ValueError(
            f"expected poses [frames, 12] and styles [frames], got {list(poses.shape)} and {list(styles.shape)}"
        )
    if len(OBJECTS) > _MAX_OBJECTS:
        raise ValueError(f"expected at most {_MAX_OBJECTS} objects, got {len(OBJECTS)}")
    poses, styles = poses.float().contiguous(), styles.int().contiguous()
    return _render_cuda(poses, styles, rays) if poses.is_cuda else render_cpu(poses, styles, rays)


def render_cpu(poses: torch.Tensor, styles: torch.Tensor, rays: int, *, culls: bool = True) -> torch.Tensor:
    """Draw frames on the CPU; unless `culls`, every ray tries every object, and the picture is the same."""
    frames = torch.empty(len(poses), HEIGHT, WIDTH, 3, dtype=torch.uint8)
    arrays = [poses.numpy(), styles.numpy(), PALETTES, CELLS, OBJECTS]
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
    numbers = [ctypes.c_float(value) for value in (FOCAL_X, FOCAL_Y, CENTRE_X, CENTRE_Y)]
    out = frames.numpy().ctypes.data_as(ctypes.c_void_p)
    _cpu_library().render(*pointers, len(OBJECTS), out, len(poses), HEIGHT, WIDTH, *numbers, rays, culls)
    return frames


_COMPILE = ("g++", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", "-c")
_LINK = ("g++", "-fopenmp", "-shared")
"""Linked with `-ffast-math` too, a library that is loaded makes the whole process take denormal numbers for zero."""


@functools.cache
def _cpu_library() -> ctypes.CDLL:
    """Compile `scene_cpu.cpp`, once per content of the sources and way to compile them."""
    sources = [Path(__file__).parent / name for name in ("scene.h", "scene_cpu.cpp")]
    return compiled.library("scene", sources, _COMPILE, _LINK, compiled.private_folder())


_CUDA_KERNEL = """
#define FN __device__ __forceinline__
#define LOWEST_BIT(bits) (__ffs(bits) - 1)
#include_scene
// One tile of one frame a group of threads, which first find out together what the tile may show.
extern "C" __global__ void render(const float* poses, const int* styles, const float* palettes, const float* cells,
    const float* objects, int num_objects, unsigned char* out, int height, int width, float fx, float fy, float cx,
    float cy, int rays) {
  __shared__ unsigned set[MAX_WORDS];
  int frame = blockIdx.y, across = (width + TILE_WIDTH - 1) / TILE_WIDTH;
  int left = blockIdx.x % across * TILE_WIDTH, top = blockIdx.x / across * TILE_HEIGHT;
  View view = {poses + 12 * frame, palettes + styles[frame] * PALETTE_COLUMNS, cells, objects, num_objects, height,
               width, rays, fx, fy, cx, cy};
  Cone cone = cone_of(&view, left, top);
  for (int first = 0; first < COPIES * num_objects; first += TILE_WIDTH * TILE_HEIGHT) {
    int copy = first + threadIdx.x;
    unsigned bits = __ballot_sync(0xffffffffu, copy < COPIES * num_objects && shows(&cone, objects, copy));
    if (threadIdx.x % 32 == 0) set[copy / 32] = bits;
  }
  __syncthreads();
  int y = top + threadIdx.x / TILE_WIDTH, x = left + threadIdx.x % TILE_WIDTH;
  if (x < width && y < height) draw(&view, set, x, y, out + (size_t)frame * height * width * 3);
}
"""

_TILE_WIDTH, _TILE_HEIGHT = 16, 8
_MAX_OBJECTS = 56
"""As `scene.h` has them; nine copies of each object are bits of 16 words."""
_MAX_GRID_ROWS = 32768


@functools.cache
def _cuda_kernel():
    """Compile the GPU build; returns the kernel and its tables on the device."""
    import cupy

    scene = (Path(__file__).parent / "scene.h").read_text()
    source = _CUDA_KERNEL.replace("#include_scene", scene)
    kernel = cupy.RawKernel(source, "render", options=("--use_fast_math",))
    return kernel, tuple(cupy.asarray(table) for table in (PALETTES, CELLS, OBJECTS))


def _render_cuda(poses: torch.Tensor, styles: torch.Tensor, rays: int) -> torch.Tensor:
    import cupy

    kernel, (palettes, cells, objects) = _cuda_kernel()
    frames = torch.empty(len(poses), HEIGHT, WIDTH, 3, dtype=torch.uint8, device=poses.device)
    numbers = [np.float32(value) for value in (FOCAL_X, FOCAL_Y, CENTRE_X, CENTRE_Y)]
    tiles = -(-HEIGHT // _TILE_HEIGHT) * -(-WIDTH // _TILE_WIDTH)
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        for first in range(0, len(poses), _MAX_GRID_ROWS):
            part = slice(first, first + _MAX_GRID_ROWS)
            grid = (tiles, len(poses[part]))
            arguments = (cupy.asarray(poses[part]), cupy.asarray(styles[part]), palettes, cells, objects)
            out = cupy.asarray(frames[part])
            sizes = (np.int32(HEIGHT), np.int32(WIDTH), *numbers, np.int32(rays))
            kernel(grid, (_TILE_WIDTH * _TILE_HEIGHT,), (*arguments, np.int32(len(OBJECTS)), out, *sizes))
    return frames
