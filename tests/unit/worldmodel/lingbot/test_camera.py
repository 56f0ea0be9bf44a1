"""Camera tokens: the linear shortcut against the exact route, the layout of packed rays, bases in use."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from worldmodel.lingbot import camera
from worldmodel.lingbot.camera import CameraBasis, CameraEmbedding, camera_features, pack, patch_features, rays
from worldmodel.lingbot.poses import Float64, rotations_from_quaternions

HEIGHT, WIDTH, WIDTH_MODEL = 32, 48, 24
TOKENS = HEIGHT // 16 * (WIDTH // 16)
ROW = (37.0, 41.0, 23.5, 15.5)


def poses(count: int, seed: int = 0) -> Float64:
    rng = np.random.default_rng(seed)
    out = np.tile(np.eye(4), (count, 1, 1))
    out[:, :3, :3] = rotations_from_quaternions(rng.normal(size=(count, 4)))
    out[:, :3, 3] = rng.normal(size=(count, 3))
    return out


def linear(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(WIDTH_MODEL, camera.PATCH_FEATURES, generator=generator) / camera.PATCH_FEATURES**0.5
    return weight, torch.randn(WIDTH_MODEL, generator=generator)


def exact(relative_n44: Float64, rows: Float64) -> torch.Tensor:
    weight, bias = linear()
    features = camera_features(torch.from_numpy(relative_n44), torch.from_numpy(rows), HEIGHT, WIDTH)
    return functional.linear(features, weight.double(), bias.double())


def test_rays_of_a_camera_at_rest() -> None:
    out = rays(torch.eye(4)[None], torch.tensor([ROW]), HEIGHT, WIDTH)
    assert out.shape == (1, 6, HEIGHT, WIDTH)
    assert torch.equal(out[:, :3], torch.zeros(1, 3, HEIGHT, WIDTH))
    want = functional.normalize(torch.tensor([(5.5 - 23.5) / 37, (9.5 - 15.5) / 41, 1.0]), dim=0)
    torch.testing.assert_close(out[0, 3:, 9, 5], want)


def test_packing_puts_each_pixel_where_the_model_expects_it() -> None:
    rays_16HW = torch.arange(6 * HEIGHT * WIDTH, dtype=torch.float32).view(1, 6, HEIGHT, WIDTH)
    packed = pack(rays_16HW)
    features = patch_features(packed)
    assert packed.shape == (384, 1, HEIGHT // 8, WIDTH // 8)
    assert features.shape == (TOKENS, 1536)
    for component, y, x in [(0, 0, 0), (2, 7, 8), (3, 17, 30), (5, 31, 47)]:
        channel = component * 64 + (y % 8) * 8 + x % 8
        assert packed[channel, 0, y // 8, x // 8] == rays_16HW[0, component, y, x]
        token, feature = y // 16 * (WIDTH // 16) + x // 16, channel * 4 + y // 8 % 2 * 2 + x // 8 % 2
        assert features[token, feature] == rays_16HW[0, component, y, x]


def test_basis_equals_the_exact_route() -> None:
    relative_n44 = poses(5)
    basis = CameraBasis(*linear(), ROW, HEIGHT, WIDTH)
    want = exact(relative_n44, np.tile(np.array(ROW), (5, 1)))
    torch.testing.assert_close(basis.tokens(torch.from_numpy(relative_n44)).double(), want, rtol=0, atol=2e-6)


def test_intrinsics_may_differ_between_the_frames_of_a_chunk() -> None:
    relative_n44, rows = poses(3), np.array([ROW, [20.0, 21.0, 24.0, 16.0], ROW])
    want = exact(relative_n44, rows)
    for max_bases in (0, 1, 2):
        embedding = CameraEmbedding(*linear(), HEIGHT, WIDTH, max_bases=max_bases)
        torch.testing.assert_close(embedding.tokens(relative_n44, rows).double(), want, rtol=0, atol=2e-6)


def test_a_basis_is_built_once_per_row_and_the_oldest_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[float] = []
    token_directions = camera._token_directions

    def counted(row_14: torch.Tensor, height: int, width: int) -> torch.Tensor:
        built.append(float(row_14[0, 0]))
        return token_directions(row_14, height, width)

    monkeypatch.setattr(camera, "_token_directions", counted)
    embedding = CameraEmbedding(*linear(), HEIGHT, WIDTH, max_bases=2)
    for focal in (10.0, 20.0, 10.0, 30.0, 10.0, 20.0):
        embedding.tokens(poses(1), np.array([[focal, 41.0, 24.0, 16.0]]))
    assert built == [10.0, 20.0, 30.0, 20.0]


def test_tokens_have_the_asked_type() -> None:
    weight, bias = linear()
    embedding = CameraEmbedding(weight.bfloat16(), bias.bfloat16(), HEIGHT, WIDTH, dtype=torch.bfloat16, max_bases=1)
    rows = np.array([ROW, [20.0, 21.0, 24.0, 16.0]])
    for chosen in (rows[:1], rows):
        tokens = embedding.tokens(poses(len(chosen)), chosen)
        assert tokens.dtype is torch.bfloat16
        error = (tokens.double() - exact(poses(len(chosen)), chosen)).norm() / tokens.double().norm()
        assert float(error) < 1e-2


def test_sizes_and_weights_that_do_not_fit_are_refused() -> None:
    weight, bias = linear()
    with pytest.raises(ValueError, match="multiples of 16, got 48x40"):
        CameraEmbedding(weight, bias, 40, 48)
    with pytest.raises(ValueError, match="expected 1536 columns, got 10"):
        CameraEmbedding(weight[:, :10], bias, HEIGHT, WIDTH)
