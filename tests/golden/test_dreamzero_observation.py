"""DreamZero observations, golden cases 6 and 7: normalisation, crop and resize, tiling, which frames a call uses."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.dreamzero_checkpoint import TAG, keys_of, relative_keys
from tests.support.dreamzero_golden import manifest, tensors
from worldmodel.dreamzero.embodiments import NEGATIVE_PROMPT, embodiment
from worldmodel.dreamzero.frames import CALL_FRAMES, FIRST_CALL_FRAMES, CameraFrames, add_frames
from worldmodel.dreamzero.normalize import NormalizationMode, Normalizer, read_normalizer
from worldmodel.dreamzero.pictures import tile_views, transform_view

CAMERA_SIZE = 180, 320
"""Height and width of the cameras whose tiled picture is `real_shape`."""

TILING = embodiment(TAG).tiling


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


def other_modes() -> list[str]:
    return sorted({name.split("/")[1] for name in tensors("normalize") if name.startswith("other/")})


@pytest.mark.parametrize("mode", other_modes())
def test_dreamzero_other_modes(mode: str) -> None:
    golden, problems = arrays(), []
    statistics = next(iter(manifest()["metadata_json_example"]["statistics"]["state"].values()))
    num_dims = golden["state_raw"].shape[-1]
    normalize = read_normalizer(statistics, NormalizationMode(mode), num_dims, where="state", problems=problems)
    assert not problems
    close(normalize.forward(golden["state_raw"]), golden[f"other/{mode}/norm"])
    if (name := f"other/{mode}/inverse") in golden:
        # The other way round the golden numbers are of the first normalised actions.
        close(normalize.inverse(golden["action_norm"][: len(golden[name])]), golden[name])


def views_of(num_views: int, frame: int, height: int, width: int) -> list[npt.NDArray[np.uint8]]:
    """Draw the views of the manifest's `view_formula`."""
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    return [
        ((7 * y + 5 * x + 61 * c + 43 * view + 17 * frame + (x * y * (view + 1)) // 3) % 256).astype(np.uint8)[None]
        for view in range(num_views)
    ]


def test_dreamzero_tiny_views_tiled() -> None:
    golden = tensors("views")
    views, want = golden["tiny/views"].numpy(), golden["tiny/tiled"][0].numpy()
    height, width = want.shape[1] // 2, want.shape[2] // 2
    got = tile_views([transform_view(view[None], height, width) for view in views], TILING)
    np.testing.assert_array_equal(got, want)


def test_dreamzero_real_views_tiled() -> None:
    golden, case = tensors("views"), manifest()["cases"]["views"]
    height, width = (size // 2 for size in case["real_shape"][2:4])
    frame = int(re.search(r"frame=(\d+)", case["view_formula"])[1])
    num_views = len(golden["tiny/views"])
    views = [transform_view(view, height, width) for view in views_of(num_views, frame, *CAMERA_SIZE)]
    got = tile_views(views, TILING)
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
    for key, count in keys_of("action").items():
        normalize = read_normalizer(statistics[key], NormalizationMode.Q99, count, where=key, problems=problems)
        values = normalize.inverse(normalized[:, start : start + count])
        part = key.removesuffix("_position")
        if key in relative_keys():
            close(values + golden[f"unapply/state_{part}"][0], golden[f"unapply/{part}_absolute"][0])
        else:
            close(values, golden[f"unapply/{part}"][0])
        start += count
    assert not problems
