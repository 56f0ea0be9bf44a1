"""Case 9 through the real command: `worldserve generate` on the golden weights as a checkpoint folder.

The noise of the set in this tree is drawn from its seed. A golden set need not say its seed, so with another one the
worker is given the noise.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from safetensors.torch import load_file

from tests.support.lingbot_checkpoint import golden_prompt, write_case_files, write_golden_checkpoint
from tests.support.lingbot_golden import DEFAULT_ROOT, assert_close, golden_dir, manifest, tensors
from worldmodel.wan.pixels import to_yuv420

GIVEN_NOISE_COMMAND = "tests.support.golden_noise_command"
SEED = 1234
"""What the noise of the set in this tree was drawn from."""

TOLERANCE = 1e-4
MEAN_LEVELS = 1.0
"""Of 255, averaged: what H.264 loses at its finest setting."""


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the command and return the folder with `clip.mp4` and `latents.safetensors`."""
    folder, setup = tmp_path_factory.mktemp("case9"), manifest()["end_to_end"]
    write_golden_checkpoint(folder / "checkpoint")
    write_case_files(folder / "case")
    config = folder / "case9.toml"
    config.write_text(
        f"""
[model]
name = "lingbot_world_v2"
checkpoint = "{folder / "checkpoint"}"
width = {setup["width"]}
height = {setup["height"]}
precision = "fp32"

[model.options]
sampler = "official"
noise_layout = "official_whole_clip"
""",
        encoding="utf-8",
    )
    is_own_set = golden_dir().resolve() == (DEFAULT_ROOT / "lingbot").resolve()
    module = "server" if is_own_set else GIVEN_NOISE_COMMAND
    command = [sys.executable, "-m", module, "generate", "--config", str(config), "--media.crf", "1"]
    command += ["--seed", str(SEED)]
    command += ["--image", str(folder / "case" / "image.png"), "--prompt", golden_prompt()]
    command += ["--camera", str(folder / "case"), "--frames", str(setup["frames"]), "--trim"]
    command += ["--out", str(folder / "clip.mp4"), "--latents", str(folder / "latents.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return folder


def test_lingbot_generate_gives_the_golden_latents(clip: Path) -> None:
    golden = tensors("case9_end_to_end_official")["latents"]
    assert_close(load_file(clip / "latents.safetensors")["latents"], golden, TOLERANCE, "latents")
    modes = {(clip / name).stat().st_mode for name in ("latents.safetensors", "clip.mp4")}
    assert len(modes) == 1, "who may read the video may read the latents"


def test_lingbot_generate_gives_the_golden_video(clip: Path) -> None:
    golden, setup = tensors("case9_end_to_end_official"), manifest()["end_to_end"]
    with av.open(str(clip / "clip.mp4")) as container:
        frames = np.stack([frame.to_ndarray(format="yuv420p") for frame in container.decode(video=0)])
    num_frames = 4 * golden["latents"].shape[1] - 3
    assert frames.shape == (num_frames, setup["height"] * 3 // 2, setup["width"])
    for name in (name for name in golden if name.startswith("video_frames_")):
        first, last = (int(number) for number in name.removeprefix("video_frames_").split("_"))
        expected = to_yuv420(golden[name]).numpy().astype(np.int16)
        difference = np.abs(frames[first : last + 1].astype(np.int16) - expected)
        assert difference.mean() < MEAN_LEVELS, name
