"""Closed loops against the renderer: PSNR by chunk, drift of the camera, full turns, long walks, contact sheets.

    python -m training.demo_world.judge --checkpoint FOLDER [--out FOLDER]

This is the quick measure of training runs; what ships is measured through the server.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from training.demo_world import scene, trajectories
from training.demo_world.closed_loop import Script, roll_out
from training.demo_world.dataset import FRAMES_PER_CHUNK, LatentSpace, draw, relative_motion
from training.demo_world.drift import drift
from training.demo_world.model import DemoModel, PromptTable
from training.demo_world.network import TrainingNetwork
from training.demo_world.options import make_out
from training.demo_world.trajectories import Float64
from training.demo_world.vae_model import read_vae, trainable

REPORTED_CHUNKS = (1, 2, 3, 6, 10, 12, 15, 20, 26)
DRIFT_CHUNKS = (1, 3, 6, 10, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """PSNR in dB by chunk: the loop, the VAE alone, a frozen first frame; and the latents' spread over the truth's.

    `drift` says for some chunks, counted from 1, how far the camera seems to be from the true one [E, 2], in metres and
    degrees.
    """

    psnr_db: list[float]
    ceiling_db: list[float]
    frozen_db: list[float]
    sharpness: list[float]
    drift: dict[int, Float64]
    sheet: Image.Image

    def report(self) -> dict[str, Sequence[float]]:
        """Return the numbers of some chunks, counted from 1, and median and mean of the metres and of the degrees."""
        series = {"psnr_db": self.psnr_db, "ceiling_db": self.ceiling_db, "frozen_db": self.frozen_db}
        series["sharpness"] = self.sharpness
        chunks = [chunk for chunk in REPORTED_CHUNKS if chunk <= len(self.psnr_db)]
        report: dict[str, Sequence[float]] = {"chunks": chunks}
        report |= {name: [round(values[chunk - 1], 2) for chunk in chunks] for name, values in series.items()}
        for chunk, off_E2 in self.drift.items():
            numbers = [float(f(off_E2[:, i])) for i in (0, 1) for f in (np.median, np.mean)]
            report[f"drift_m_deg_at_{chunk}"] = [round(number, 3) for number in numbers]
        return report


class Judge:
    """Plays scripts in closed loop and compares them with the renderer."""

    def __init__(
        self, network: TrainingNetwork, prompts: PromptTable, space: LatentSpace, fixed_condition: Tensor
    ) -> None:
        self._network, self._prompts, self._space, self._fixed_condition = network, prompts, space, fixed_condition

    def report(self, sheet: Path, *, is_short: bool = False) -> dict[str, object]:
        """Measure everything, or a little of it to try the program, and save the contact sheet."""
        evaluation = self.scripts(sessions=2, chunks=3) if is_short else self.scripts()
        evaluation.sheet.save(sheet)
        turn_db = self.turns_db(sessions=2, steps=3) if is_short else self.turns_db()
        long_db = self.long_db(sessions=1, chunks=3) if is_short else self.long_db()
        return {**evaluation.report(), "turn_psnr_db": round(turn_db, 2), "long_psnr_db": round(long_db, 2)}

    @torch.no_grad()
    def scripts(self, *, sessions: int = 24, chunks: int = 26, seed: int = 999) -> Evaluation:
        """Play held-out random key scripts, half of them with style changes."""
        rng = np.random.default_rng(seed)
        cameras, styles_EN = _random_scripts(rng, sessions, chunks)
        truth, latents = self._play(cameras, styles_EN)
        true_latents = torch.cat([self._space.encode(part) for part in truth.split(8)])
        generated = torch.cat([self._space.decode(part) for part in latents.split(8)])
        rebuilt = torch.cat([self._space.decode(part) for part in true_latents.split(8)])
        spread = [x.unflatten(2, (chunks, -1)).std(dim=(3, 4, 5)).mean(dim=(0, 1)) for x in (latents, true_latents)]
        return Evaluation(
            psnr_db=_psnr_by_chunk(generated, truth, chunks),
            ceiling_db=_psnr_by_chunk(rebuilt, truth, chunks),
            frozen_db=_psnr_by_chunk(truth[:, :1].expand_as(truth), truth, chunks),
            sharpness=(spread[0] / spread[1]).tolist(),
            drift={
                chunk: drift(
                    generated[:, 12 * chunk - 4], cameras, FRAMES_PER_CHUNK * chunk - 1, styles_EN[:, chunk - 1]
                )
                for chunk in DRIFT_CHUNKS
                if chunk <= chunks
            },
            sheet=sheet([(truth[index], generated[index]) for index in on_sheet(sessions)]),
        )

    @torch.no_grad()
    def turns_db(self, *, sessions: int = 12, steps: int = 60, seed: int = 998) -> float:
        """Return the mean PSNR of the last frame of turns in place; sixty steps are a full circle."""
        rng = np.random.default_rng(seed)
        chunks = 1 + steps // FRAMES_PER_CHUNK
        keys = np.zeros((sessions, chunks * FRAMES_PER_CHUNK, len(trajectories.KEYS)), bool)
        for session, keys_TK in enumerate(keys):
            keys_TK[1 : steps + 1, trajectories.KEYS.index("jl"[session % 2])] = True
        starts = trajectories.sample_starts(rng, sessions)
        cameras = trajectories.walk(keys, starts, trajectories.sample_headings(rng, sessions))
        styles_EN = np.repeat(rng.integers(0, len(scene.STYLES), sessions)[:, None], chunks, axis=1)
        return self._last_db(cameras, styles_EN, 1)

    @torch.no_grad()
    def long_db(self, *, sessions: int = 4, chunks: int = 90, seed: int = 997) -> float:
        """Return the mean PSNR of the last chunk of long random scripts."""
        return self._last_db(*_random_scripts(np.random.default_rng(seed), sessions, chunks), 12)

    def _last_db(self, cameras: trajectories.Cameras, styles_EN: np.ndarray, num_frames: int) -> float:
        truth, latents = self._play(cameras, styles_EN)
        values = []
        for true, part in zip(truth, latents.split(1), strict=True):
            shown = self._space.decode(part)[0, -num_frames:]
            squared = (shown.float() - true[-num_frames:].float()).square().mean()
            values.append((10 * torch.log10(255**2 / squared)).item())
        return float(np.mean(values))

    def _play(self, cameras: trajectories.Cameras, styles_EN: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the true frames and the latents of the loop."""
        device = self._fixed_condition.device
        truth = draw(cameras, np.repeat(styles_EN, FRAMES_PER_CHUNK, axis=1), device)
        rotations, translations = relative_motion(cameras)
        script = Script(
            styles_EN=torch.from_numpy(styles_EN).to(device),
            rotations_ET33=torch.from_numpy(rotations).to(device),
            translations_ET3=torch.from_numpy(translations).to(device),
            conditions_ECTYX=self._space.opening_condition(truth[:, 0]),
        )
        return truth, roll_out(self._network, self._prompts, script, self._fixed_condition)


def _random_scripts(rng: np.random.Generator, sessions: int, chunks: int) -> tuple[trajectories.Cameras, np.ndarray]:
    """Return cameras and styles [E, N] of random key scripts, the latter half of them with style changes."""
    keys = trajectories.sample_keys(rng, sessions, chunks * FRAMES_PER_CHUNK)
    # The first latent frame is the start image, and does not move.
    keys[:, 0] = False
    starts = trajectories.sample_starts(rng, sessions)
    cameras = trajectories.walk(keys, starts, trajectories.sample_headings(rng, sessions))
    styles = np.repeat(rng.integers(0, len(scene.STYLES), sessions)[:, None], chunks, axis=1)
    for session in range(sessions // 2, sessions):
        for chunk in range(1, chunks):
            changes = rng.random() < 0.08
            styles[session, chunk] = rng.integers(0, len(scene.STYLES)) if changes else styles[session, chunk - 1]
    return cameras, styles


def _psnr_by_chunk(frames: Tensor, truth: Tensor, chunks: int) -> list[float]:
    """Return the mean PSNR of each chunk's media frames; the first chunk has 9, every other one 12."""
    squared = (frames.float() - truth.float()).square().mean(dim=(2, 3, 4))
    ends = [9 + 12 * chunk for chunk in range(chunks)]
    starts = [0, *ends[:-1]]
    means = [squared[:, start:end].mean(1).clamp(min=1e-3) for start, end in zip(starts, ends, strict=True)]
    return [(10 * torch.log10(255**2 / mean)).mean().item() for mean in means]


def on_sheet(sessions: int) -> list[int]:
    """Return which sessions a contact sheet shows, each once: two of the first half and two of the second."""
    return sorted({0, min(1, sessions - 1), sessions // 2, sessions - 1})


def sheet(pairs: list[tuple[Tensor, Tensor]], columns: int = 12) -> Image.Image:
    """Put the truth above what was generated, evenly spaced frames of [M, H, W, 3]."""
    rows = []
    for pair in pairs:
        for frames in pair:
            index = np.linspace(0, len(frames) - 1, columns).astype(int)
            rows.append(np.concatenate(list(frames[index].cpu().numpy()), axis=1))
    return Image.fromarray(np.concatenate(rows, axis=0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge a checkpoint in closed loop, before H.264.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder with transformer, text encoder and VAE")
    parser.add_argument("--out", type=Path, default=Path("judged"), help="folder for report and sheet")
    scene.add_changes(parser)
    parser.add_argument("--smoke", action="store_true", help="a few chunks, to try the program on a CPU")
    arguments = parser.parse_args()
    make_out(parser, arguments.out)
    scene.change(poplars=arguments.poplars, cutaway_m=arguments.cutaway)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vae = read_vae(arguments.checkpoint / "vae").to(device)
    space, model = LatentSpace(trainable(vae)), DemoModel().to(device)
    model.load(arguments.checkpoint)
    condition = space.fixed_condition(scene.HEIGHT, scene.WIDTH, device)
    torch.manual_seed(0)
    with torch.autocast(device.type, torch.bfloat16):
        judge = Judge(model.network(), PromptTable(model, device), space, condition)
        report = judge.report(arguments.out / "closed_loop.png", is_short=arguments.smoke)
    (arguments.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
