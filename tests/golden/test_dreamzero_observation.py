"""DreamZero observations, golden cases 6 and 7: normalisation, crop and resize, tiling, which frames a call uses."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.dreamzero_golden import manifest, tensors
from worldmodel.dreamzero.embodiments import NEGATIVE_PROMPT, Tiling
from worldmodel.dreamzero.frames import CALL_FRAMES, FIRST_CALL_FRAMES, CameraFrames, add_frames
from worldmodel.dreamzero.normalize import NormalizationMode, Normalizer, read_normalizer
from worldmodel.dreamzero.pictures import tile_views, transform_view

DIMS = 7


def arrays() -> dict[str, npt.NDArray[np.floating]]:
    return {name: tensor.numpy() for name, tensor in tensors("normalize").items()}


def normalizer(low: npt.NDArray[np.floating], high: npt.NDArray[np.floating]) -> Normalizer:
    return Normalizer(mode=NormalizationMode.Q99, low=low, high=high)


def close(got: npt.NDArray[np.floating], want: npt.NDArray[np.floating]) -> None:
    np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-6)


def test_dreamzero_q99_both_ways() -> None:
    golden = arrays()
    close(normalizer(golden["state_q01"], golden["state_q99"]).forward(golden["state_raw"]), golden["state_norm"])
    action = normalizer(golden["action_q01"], golden["action_q99"])
    close(action.inverse(golden["action_norm"]), golden["action_denorm"])
    close(action.forward(golden["action_denorm"]), golden["action_renorm"])
    assert (golden["action_q01"] == golden["action_q99"]).any(), "a dimension that never varied belongs to the case"


def test_dreamzero_q99_with_statistics_by_row() -> None:
    golden = arrays()
    action = normalizer(golden["per_horizon/q01"], golden["per_horizon/q99"])
    close(action.inverse(golden["action_norm"]), golden["per_horizon/denorm"])
    close(action.forward(golden["per_horizon/denorm"]), golden["per_horizon/renorm"])


@pytest.mark.parametrize("mode", ["min_max", "mean_std", "scale", "binary"])
def test_dreamzero_other_modes(mode: str) -> None:
    golden, problems = arrays(), []
    statistics = manifest()["metadata_json_example"]["statistics"]["state"]["joint_position"]
    normalize = read_normalizer(statistics, NormalizationMode(mode), DIMS, where="state", problems=problems)
    assert not problems
    close(normalize.forward(golden["state_raw"]), golden[f"other/{mode}/norm"])


def views_of(frame: int, height: int, width: int) -> list[npt.NDArray[np.uint8]]:
    """Draw the views of the manifest's `view_formula`."""
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    return [
        ((7 * y + 5 * x + 61 * c + 43 * view + 17 * frame + (x * y * (view + 1)) // 3) % 256).astype(np.uint8)[None]
        for view in range(3)
    ]


def test_dreamzero_tiny_views_tiled() -> None:
    golden = tensors("views")
    views, want = golden["tiny/views"].numpy(), golden["tiny/tiled"][0].numpy()
    height, width = want.shape[1] // 2, want.shape[2] // 2
    got = tile_views([transform_view(view[None], height, width) for view in views], Tiling.WRIST_TOP)
    np.testing.assert_array_equal(got, want)


def test_dreamzero_real_views_tiled() -> None:
    golden, case = tensors("views"), manifest()["cases"]["views"]
    views = [transform_view(view, 176, 320) for view in views_of(3, 180, 320)]
    got = tile_views(views, Tiling.WRIST_TOP)
    np.testing.assert_array_equal(got[0, ::8, ::8], golden["real/tiled_every8"].numpy())
    assert list(got[None].shape) == case["real_shape"]
    assert hashlib.sha256(got.tobytes()).hexdigest() == case["real_sha256"]


def test_dreamzero_frames_of_a_call() -> None:
    case = manifest()["cases"]["views"]["frame_accumulation"]
    held: CameraFrames | None = None
    for sent, used in zip(case["sent"], case["used"], strict=True):
        count = FIRST_CALL_FRAMES if held is None else CALL_FRAMES
        held = add_frames(held, np.array(sent, np.uint8).reshape(-1, 1, 1, 1).repeat(3, axis=3))
        assert held.last(count)[:, 0, 0, 0].tolist() == used
        assert len(held.frames_THW3) <= CALL_FRAMES


def test_dreamzero_negative_prompt() -> None:
    assert manifest()["cases"]["rollout_default"]["negative_prompt"] == NEGATIVE_PROMPT


def test_dreamzero_relative_actions_become_absolute() -> None:
    golden = arrays()
    statistics = manifest()["metadata_json_example"]["statistics"]["action"]
    normalized, problems = golden["unapply/normalized"][0], []
    start = 0
    dims = {"joint_position": 7, "gripper_position": 1}
    for key, count in dims.items():
        normalize = read_normalizer(statistics[key], NormalizationMode.Q99, count, where=key, problems=problems)
        values = normalize.inverse(normalized[:, start : start + count])
        if key == "joint_position":
            close(values + golden["unapply/state_joint"][0], golden["unapply/joint_absolute"][0])
        else:
            close(values, golden["unapply/gripper"][0])
        start += count
    assert not problems
