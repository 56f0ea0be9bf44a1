"""Camera tokens of LingBot-World v2: relative poses and intrinsics -> the input of every layer's camera injector.

Owns the rays, their packing and the first linear layer (`patch_embedding_wancamctrl`); the two-layer residual MLP that
follows belongs to the transformer. Two routes give the same tokens:

    exact:  rays [n, 6, H, W] -> packed [384, n, H/8, W/8] -> features [n*P, 1536] -> linear
    basis:  12 numbers a frame (9 of the rotation, 3 of the translation) times a basis [12, P, D]

They are equal because a ray's direction is linear in the rotation and its origin in the translation, and the linear
layer commutes with both. The basis depends on intrinsics and resolution only.

Shape suffixes: n latent frames, H W pixels, P = H/16 * W/16 tokens a frame, C 384 packed channels, F 1536 features,
D model width, 4 rows or columns of a pose, or (fx, fy, cx, cy), 6 and 3 ray components.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

PACK = 8
PATCH = 2
TOKEN_PIXELS = PACK * PATCH
RAY_COMPONENTS = 6
PACKED_CHANNELS = RAY_COMPONENTS * PACK * PACK
PATCH_FEATURES = PACKED_CHANNELS * PATCH * PATCH
NUM_COEFFICIENTS = 12

Float64Array = npt.NDArray[np.float64]


def pixel_directions(intrinsics_n4: Tensor, height: int, width: int) -> Tensor:
    """Return unit directions [n, 3, H, W] through pixel centres, in camera axes and in the type of the intrinsics.

    Intrinsics are pixels of the same size. Source: official code, wan/utils/cam_utils.py.
    """
    fx, fy, cx, cy = (column[:, None, None] for column in intrinsics_n4.unbind(-1))
    x_W = torch.arange(width, dtype=fx.dtype, device=fx.device) + 0.5
    y_H = torch.arange(height, dtype=fx.dtype, device=fx.device) + 0.5
    x_nHW = ((x_W[None, None, :] - cx) / fx).expand(-1, height, -1)
    y_nHW = ((y_H[None, :, None] - cy) / fy).expand(-1, -1, width)
    return functional.normalize(torch.stack([x_nHW, y_nHW, torch.ones_like(x_nHW)], dim=1), dim=1)


def rays(relative_n44: Tensor, intrinsics_n4: Tensor, height: int, width: int) -> Tensor:
    """Return rays [n, 6, H, W]: the camera's position x, y, z (one for all pixels), then the rotated direction."""
    directions_n3HW = torch.einsum(
        "nij,njhw->nihw", relative_n44[:, :3, :3], pixel_directions(intrinsics_n4, height, width)
    )
    origins_n3HW = relative_n44[:, :3, 3, None, None].expand_as(directions_n3HW)
    return torch.cat([origins_n3HW, directions_n3HW], dim=1)


def pack(rays_n6HW: Tensor) -> Tensor:
    """Fold 8x8 pixels into channels: [384, n, H/8, W/8], channel = component * 64 + (y mod 8) * 8 + x mod 8."""
    folded_nChw = functional.pixel_unshuffle(rays_n6HW, PACK)
    return folded_nChw.movedim(1, 0)


def patch_features(packed_Cnhw: Tensor) -> Tensor:
    """Fold 2x2 packed pixels into features [n*P, 1536], tokens in (frame, row, column) order.

    Feature = channel * 4 + dy * 2 + dx.
    """
    folded_nFhw = functional.pixel_unshuffle(packed_Cnhw.movedim(0, 1), PATCH)
    return folded_nFhw.permute(0, 2, 3, 1).reshape(-1, PATCH_FEATURES)


def camera_features(relative_n44: Tensor, intrinsics_n4: Tensor, height: int, width: int) -> Tensor:
    """Return patch features [n*P, 1536] by the exact route."""
    _check_size(height, width)
    return patch_features(pack(rays(relative_n44, intrinsics_n4, height, width)))


class CameraBasis:
    """The first camera linear applied to the rays of a camera at rest, for one row of intrinsics and one size.

    `weight_DF` and `bias_D` are those of `patch_embedding_wancamctrl`. The basis is float32 whatever the weights are: a
    pose rounded to bfloat16 would be wrong by the same amount for every pixel. `dtype` is what `tokens` returns. At
    832x480 and width 5120 the basis takes 288 MB.
    """

    def __init__(
        self,
        weight_DF: Tensor,
        bias_D: Tensor,
        intrinsics: tuple[float, float, float, float],
        height: int,
        width: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _check_size(height, width)
        weight_6FD = _weight_by_component(weight_DF)
        row_14 = torch.tensor([intrinsics], dtype=torch.float64)
        directions_P3F = _token_directions(row_14, height, width).to(weight_6FD)
        # [P, j, F] x [i, F, D]: how token p changes with element (i, j) of the rotation.
        rotation_ijPD = torch.einsum("pjf,ifd->ijpd", directions_P3F, weight_6FD[3:])
        self._num_tokens = directions_P3F.shape[0]
        self._rotation_9PD = rotation_ijPD.flatten(0, 1)
        self._translation_3D = weight_6FD[:3].sum(dim=1)
        self._bias_D = bias_D.float()
        self._dtype = dtype

    def tokens(self, relative_n44: Tensor) -> Tensor:
        """Return camera tokens [n*P, D] for relative poses, on the weights' device."""
        poses_n44 = relative_n44.to(self._rotation_9PD)
        num_frames = poses_n44.shape[0]
        still_nD = torch.addmm(self._bias_D, poses_n44[:, :3, 3], self._translation_3D)
        coefficients_n9 = poses_n44[:, :3, :3].reshape(num_frames, 9)
        turned_nPD = (coefficients_n9 @ self._rotation_9PD.flatten(1)).view(num_frames, self._num_tokens, -1)
        return (turned_nPD + still_nD[:, None]).flatten(0, 1).to(self._dtype)


class CameraEmbedding:
    """Camera tokens for any intrinsics: a basis for each row that is in use, the exact route for rows that keep
    changing.

    `max_bases` bases are kept, least recently used first out. A chunk whose frames have more different rows than that
    (a zoom) takes the exact route; with `max_bases` 0 every chunk does. Weights are shared with the caller,
    never changed.
    """

    def __init__(
        self,
        weight_DF: Tensor,
        bias_D: Tensor,
        height: int,
        width: int,
        *,
        max_bases: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if weight_DF.shape[1] != PATCH_FEATURES:
            raise ValueError(
                f"patch_embedding_wancamctrl.weight: expected {PATCH_FEATURES} columns, got {weight_DF.shape[1]}"
            )
        _check_size(height, width)
        self._weight_DF = weight_DF
        self._bias_D = bias_D
        self._height = height
        self._width = width
        self._max_bases = max_bases
        self._dtype = dtype
        self._bases: OrderedDict[tuple[float, float, float, float], CameraBasis] = OrderedDict()

    def tokens(self, relative_n44: Float64Array, intrinsics_n4: Float64Array) -> Tensor:
        """Return camera tokens [n*P, D] of a chunk, before the residual MLP.

        Takes float64 arrays on the host (`CameraPlan.relative_n44`, `.intrinsics_n4`); the only copies to the device
        are the relative poses and, on the exact route, the intrinsics.
        """
        device = self._weight_DF.device
        poses_n44 = torch.from_numpy(relative_n44.astype(np.float32)).to(device, non_blocking=True)
        rows: list[tuple[float, float, float, float]] = [(fx, fy, cx, cy) for fx, fy, cx, cy in intrinsics_n4.tolist()]
        if len(set(rows)) > self._max_bases:
            return self._exact(poses_n44, intrinsics_n4)
        if len(set(rows)) == 1:
            return self._basis(rows[0]).tokens(poses_n44)
        return torch.cat([self._basis(row).tokens(poses_n44[i : i + 1]) for i, row in enumerate(rows)])

    def _exact(self, poses_n44: Tensor, intrinsics_n4: Float64Array) -> Tensor:
        rows_n4 = torch.from_numpy(intrinsics_n4.astype(np.float32)).to(poses_n44.device, non_blocking=True)
        features = camera_features(poses_n44, rows_n4, self._height, self._width)
        return functional.linear(features.to(self._weight_DF), self._weight_DF, self._bias_D).to(self._dtype)

    def _basis(self, row: tuple[float, float, float, float]) -> CameraBasis:
        basis = self._bases.pop(row, None)
        if basis is None:
            basis = CameraBasis(self._weight_DF, self._bias_D, row, self._height, self._width, self._dtype)
            while len(self._bases) >= self._max_bases:
                self._bases.popitem(last=False)
        self._bases[row] = basis
        return basis


def _check_size(height: int, width: int) -> None:
    if height % TOKEN_PIXELS or width % TOKEN_PIXELS or height < 1 or width < 1:
        raise ValueError(f"expected height and width to be multiples of {TOKEN_PIXELS}, got {width}x{height}")


def _weight_by_component(weight_DF: Tensor) -> Tensor:
    """Split the weight by ray component: float32 [6, 256, D], features in the order of `_token_directions`."""
    return weight_DF.float().view(weight_DF.shape[0], RAY_COMPONENTS, -1).permute(1, 2, 0)


def _token_directions(row_14: Tensor, height: int, width: int) -> Tensor:
    """Return the directions of the pixels of each token: [P, 3, 256] in the order of one component's features."""
    directions_13HW = pixel_directions(row_14, height, width)
    folded_1Fhw = functional.pixel_unshuffle(functional.pixel_unshuffle(directions_13HW, PACK), PATCH)
    return folded_1Fhw[0].permute(1, 2, 0).reshape(-1, 3, TOKEN_PIXELS * TOKEN_PIXELS)
