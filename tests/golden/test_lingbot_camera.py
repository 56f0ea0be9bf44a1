"""Golden case 5: camera paths of the official code -> relative poses -> packed rays -> tokens.

Tolerance 1e-5, ray directions 1e-6.

The official code differences poses in float32, which costs up to eps * |translation| / step far from the origin. The
product differences in float64; a float32 twin here shows that the order of operations is understood.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from tests.support.lingbot_camera import relative_path
from tests.support.lingbot_golden import assert_close, manifest, max_abs, tensors
from worldmodel.lingbot.camera import CameraEmbedding, pack, patch_features, rays
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.controls import TRAJECTORY_SCHEMA, parse_control
from worldmodel.lingbot.poses import Float64
from worldmodel.lingbot.reducer import CameraReducer
from worldmodel.lingbot.trajectory import CameraClip, resample, trajectory_control
from worldmodel.messages import Control, ControlEvent

CASE = tensors("case4_5_camera_official")
PATHS = sorted(name.removesuffix(".relative_c2w") for name in CASE if re.match(r"ex\d+\.frames\d+\.chunk\d+\.", name))


def array(name: str) -> Float64:
    return CASE[name].double().numpy()


def longest_poses(example: str) -> Float64:
    """Return the longest stored list of poses of an example."""
    stored = [name for name in CASE if name.startswith(f"{example}.") and name.endswith("poses_c2w")]
    return max((array(name) for name in stored), key=len)


def clip_for(path: str) -> tuple[CameraClip, int, int]:
    """Return the source clip of "exNN.framesF.chunkC", and F and C."""
    example, frames, chunk = path.split(".")
    num_frames, chunk_frames = int(frames.removeprefix("frames")), int(chunk.removeprefix("chunk"))
    poses = longest_poses(example)
    return CameraClip(poses_n44=poses, intrinsics_n4=np.ones((len(poses), 4))), num_frames, chunk_frames


def float32_twin(poses_n44: Float64) -> Float64:
    """Difference in float32 in the official order: to the first pose, then frame to frame, then the largest step."""

    def inverse(poses: torch.Tensor) -> torch.Tensor:
        out = torch.eye(4).repeat(len(poses), 1, 1)
        out[:, :3, :3] = poses[:, :3, :3].transpose(1, 2)
        out[:, :3, 3:] = -torch.bmm(out[:, :3, :3], poses[:, :3, 3:])
        return out

    poses = torch.from_numpy(poses_n44).float()
    to_first = torch.matmul(inverse(poses[:1]), poses)
    to_first[0] = torch.eye(4)
    deltas = torch.cat([torch.eye(4)[None], torch.bmm(inverse(to_first[:-1]), to_first[1:])])
    deltas[:, :3, 3] /= deltas[:, :3, 3].norm(dim=-1).max()
    return deltas.double().numpy()


def with_source(paths: list[str]) -> list[str]:
    """Keep the paths whose source poses are in the file; of the others only the result is stored."""
    return [
        path for path in paths if len(longest_poses(path.split(".")[0])) >= int(path.split(".frames")[1].split(".")[0])
    ]


def test_lingbot_paths_to_check_exist() -> None:
    assert len(with_source(PATHS)) >= 2


@pytest.mark.parametrize("path", with_source(PATHS))
def test_lingbot_relative_poses_of_a_clip(path: str) -> None:
    latent = resample(*clip_for(path))
    want = array(f"{path}.relative_c2w")
    assert latent.poses_n44.shape == want.shape
    assert np.abs(float32_twin(latent.poses_n44) - want).max() <= 1e-5
    steps = np.linalg.norm(np.diff(latent.poses_n44[:, :3, 3], axis=0), axis=-1)
    float32_loss = 2 * np.finfo(np.float32).eps * np.abs(latent.poses_n44[:, :3, 3]).max() / steps.max()
    assert np.abs(relative_path(latent) - want).max() <= max(1e-5, float32_loss)


def first_clip() -> tuple[CameraClip, int, int, int]:
    """Return clip ex00 as stored, its chunk length, and the pixel height and width of its packed tensor."""
    clip = CameraClip(poses_n44=array("ex00.poses_c2w"), intrinsics_n4=array("ex00.intrinsics"))
    _, _, height, width = CASE["ex00.packed"].shape
    chunk = CASE["ex00.tokens_block0"].shape[0] // (height // 2 * (width // 2))
    return clip, chunk, height * 8, width * 8


def test_lingbot_interpolation_and_relative_poses() -> None:
    clip, chunk, _, _ = first_clip()
    latent = resample(clip, len(clip.poses_n44), chunk)
    assert np.abs(latent.poses_n44 - array("ex00.interpolated_c2w")).max() <= 1e-6
    assert np.abs(relative_path(latent) - array("ex00.relative_c2w")).max() <= 1e-5


def test_lingbot_packed_rays_and_tokens() -> None:
    _, chunk, height, width = first_clip()
    relative_n44 = CASE["ex00.relative_c2w"]
    row = CASE["ex00.intrinsics_scaled"].expand(len(relative_n44), 4)
    packed = pack(rays(relative_n44, row, height, width))
    assert_close(packed[192:], CASE["ex00.packed"][192:], 1e-6, "ray directions")
    assert_close(packed, CASE["ex00.packed"], 1e-5, "packed rays")
    assert_close(patch_features(packed[:, :chunk]), CASE["ex00.tokens_block0"], 1e-5, "tokens")


def test_lingbot_trajectory_control_gives_the_official_tokens() -> None:
    """File -> control -> reducer, chunk by chunk -> packed rays. The official code uses the first row of intrinsics."""
    clip, chunk, height, width = first_clip()
    latent = resample(clip, len(clip.poses_n44), chunk)
    data = trajectory_control(CameraClip(poses_n44=latent.poses_n44, intrinsics_n4=clip.intrinsics_n4[:1]))
    control = Control(track="camera", schema=TRAJECTORY_SCHEMA, data=parse_control("camera", TRAJECTORY_SCHEMA, data))
    reducer = CameraReducer(LingBotOptions(), width, height)
    state, events = reducer.initial(), [ControlEvent(event_id=0, controls=(control,))]
    chunks = []
    for _ in range(len(latent.poses_n44) // chunk):
        plan = reducer.prepare(state, events, chunk)
        state, events = plan.state, []
        rows_n4 = torch.tensor(plan.intrinsics_n4, dtype=torch.float32)
        chunks.append(pack(rays(torch.tensor(plan.relative_n44, dtype=torch.float32), rows_n4, height, width)))
    assert_close(torch.cat(chunks, dim=1), CASE["ex00.packed"], 1e-5, "packed rays")


def test_lingbot_end_to_end_camera_of_the_stored_chunks() -> None:
    case, facts = tensors("case9_end_to_end_official"), manifest()["end_to_end"]
    name, _, slice_text = facts["pose_tensor"].rpartition(": ")[2].partition("[")
    poses = array(name)[: int(slice_text.strip("[:]"))]
    row = case["intrinsics_row0"].double().numpy()
    clip = CameraClip(poses_n44=poses, intrinsics_n4=np.tile(row, (len(poses), 1)))
    chunk = facts["chunk"]
    relative_n44 = relative_path(resample(clip, facts["frames"], chunk))
    scale = np.array([facts["width"] / 832, facts["height"] / 480] * 2)
    row_n4 = torch.from_numpy(row * scale).expand(chunk, 4).float()
    stored = {int(key.removeprefix("camera_block")): case[key] for key in case if key.startswith("camera_block")}
    assert stored, "no stored camera"
    for index, want in stored.items():
        now_n44 = torch.from_numpy(relative_n44[chunk * index : chunk * (index + 1)]).float()
        packed = pack(rays(now_n44, row_n4, facts["height"], facts["width"]))
        assert_close(packed, want.reshape(packed.shape), 1e-5, f"camera of chunk {index}")


def test_lingbot_camera_basis_equals_the_packed_route() -> None:
    weights = tensors("transformer_weights")
    weight, bias = weights["patch_embedding_wancamctrl.weight"], weights["patch_embedding_wancamctrl.bias"]
    _, _, height, width = first_clip()
    relative_n44 = CASE["ex00.relative_c2w"]
    row_n4 = CASE["ex00.intrinsics_scaled"].expand(len(relative_n44), 4)
    embedding = CameraEmbedding(weight, bias, height, width)
    got = embedding.tokens(relative_n44.double().numpy(), row_n4.double().numpy())
    want = torch.nn.functional.linear(patch_features(CASE["ex00.packed"]), weight, bias)
    assert max_abs(got, want) <= 2e-6 * max(1.0, float(want.abs().max()))
