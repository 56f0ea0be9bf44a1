"""Every golden case of LingBot-World v2 on any device in any precision plan, as distances to the stored numbers.

Needs torch and safetensors only, so that it runs where the server's other parts are not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvcache.cache import KVCache
from kvcache.transaction import ChunkTransaction
from tests.support.lingbot_camera import relative_path
from tests.support.lingbot_golden import load_json, manifest, tensors
from tests.support.lingbot_network import SESSION, main_geometry, transformer, transformer_config
from worldmodel.lingbot.camera import CameraEmbedding
from worldmodel.lingbot.condition import encode_clip_condition, next_condition, start_condition
from worldmodel.lingbot.config import OFFICIAL_HEIGHT, OFFICIAL_WIDTH
from worldmodel.lingbot.memory import num_camera_bases
from worldmodel.lingbot.pipeline import ChunkSampler
from worldmodel.lingbot.trajectory import CameraClip, resample
from worldmodel.lingbot.transformer import ChunkInputs, LingBotTransformer, kv_geometry
from worldmodel.wan.flow_scheduler import SamplerTable, nominal_table, official_table
from worldmodel.wan.image import prepare_image
from worldmodel.wan.precision import precision_plan
from worldmodel.wan.vae import VAECache, WanVAE


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Largest absolute difference, and root mean square of the differences over that of the stored values."""

    largest: float
    relative_rms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A chunk that is ready: what every forward takes, and the noise of its steps."""

    forward: tuple[ChunkInputs, ChunkTransaction]
    noise: tuple[Tensor, ...]


def distance(got: Tensor, want: Tensor) -> Distance:
    """Compare in float64 on the CPU."""
    a, b = got.detach().double().cpu(), want.double().cpu()
    assert a.shape == b.shape, f"expected shape {tuple(b.shape)}, got {tuple(a.shape)}"
    relative = ((a - b).square().mean() / b.square().mean()).sqrt()
    return Distance(largest=float((a - b).abs().max()), relative_rms=float(relative))


def _worst(distances: Iterator[Distance]) -> Distance:
    found = list(distances)
    return Distance(largest=max(item.largest for item in found), relative_rms=max(item.relative_rms for item in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRuns:
    """The cases for one device and one precision plan."""

    device: torch.device
    precision: str

    def all_distances(self) -> dict[str, Distance]:
        """Run everything. Names are those of the table in docs/models/lingbot_world.md."""
        with torch.inference_mode():
            return {
                **self.forward(),
                **self.vae(),
                **self.forced_rollout(),
                **self.free_rollouts(),
                **self.end_to_end(),
            }

    # ------------------------------------------------------------ parts on the device

    def _given(self, name: str) -> dict[str, Tensor]:
        return {key: value.to(self.device) for key, value in tensors(name).items()}

    def _network(
        self, grid: tuple[int, int], *, sink: int, visible: int | None, frames: int
    ) -> tuple[LingBotTransformer, KVCache]:
        config = transformer_config(
            sink_latent_frames=sink, visible_latent_frames=visible, latent_frames_per_chunk=frames
        )
        model = transformer(config, self.precision).to(self.device)
        spec = kv_geometry(config, model.plan, latent_height=grid[0], latent_width=grid[1])
        cache = KVCache(spec, capacity=1, device=self.device, dtype=model.plan.linear)
        cache.open(SESSION)
        return model, cache

    def _vae(self) -> WanVAE:
        vae = WanVAE.from_config(load_json("vae_names.json")["diffusers_config"])
        vae.load_state_dict(tensors("vae_weights_diffusers"), strict=True)
        vae.to(device=self.device, dtype=precision_plan(self.precision, device=torch.device(self.device)).vae)
        vae.fold_weights()
        return vae

    # ------------------------------------------------------------ cases

    def forward(self) -> dict[str, Distance]:
        """Case 1: one forward without history."""
        case = self._given("case1_forward")
        frames, *grid = case["x_t"].shape[1:]
        model, cache = self._network((grid[0], grid[1]), sink=0, visible=frames, frames=frames)
        with cache.lease(SESSION) as lease:
            chunk = lease.begin_chunk()
            model.publish_text(case["context"], chunk)
            inputs = model.chunk_inputs(case["condition"], model.project_rays(case["camera"][0]), 0)
            flow = model.flow(case["x_t"], model.time_constants(float(case["timestep"][0])), inputs, chunk)
        return {
            "case 1 flow": distance(flow, case["flow"]),
            "case 1 flow, official rounding emulated": distance(flow, case["flow_bf16_autocast_emulated"]),
        }

    def vae(self) -> dict[str, Distance]:
        """Cases 7 and 8: encode, decode, image condition; the decode as a stream of chunks."""
        case, vae = self._given("case7_8_vae"), self._vae()
        latent, _ = vae.encode(case["video"][None])
        cache: VAECache | None = None
        frames = []
        for part in case["latent_normalised"].split(case["compose.noise_block0"].shape[1], dim=1):
            pixels, cache = vae.decode(part[None], cache)
            frames.append(pixels[0])
        stored = case["condition.latent_normalised"]
        condition = encode_clip_condition(vae, case["condition.image"], stored.shape[1])
        return {
            "case 7 encode": distance(latent[0], case["encode.normalised_mu"]),
            "case 7 decode": distance(torch.cat(frames, dim=1), case["decode.whole_clip_unclamped"]),
            "case 8 condition": distance(condition[4:], stored),
        }

    def forced_rollout(self) -> dict[str, Distance]:
        """Case 2: each forward of seven chunks, fed the stored latents."""
        golden, found = self._given("case2_rollout_nominal"), []
        for sampler, index, now in self._rollout_chunks(self._nominal(), *self._main_window()):
            for step in range(sampler.num_steps):
                name = f"b{index}.s{step}"
                flow, _ = sampler.step(step, golden[f"{name}.x_t"], *now.forward)
                found.append(distance(flow, golden[f"{name}.flow"]))
            sampler.store_clean(golden[f"b{index}.latent"], *now.forward)
        return {"case 2 flow of each forward": _worst(iter(found))}

    def free_rollouts(self) -> dict[str, Distance]:
        """Case 2: seven chunks running free, both samplers, all windows."""
        nominal = tensors("case2_rollout_nominal")
        official = tensors("case2_rollout_official_sampler")
        variants = tensors("case2_window_variants")
        found = {
            "case 2 latents, nominal sampler": self._free(self._nominal(), *self._main_window(), nominal, ""),
            "case 2 latents, official sampler": self._free(self._official(), *self._main_window(), official, ""),
        }
        described = manifest()["transformer_runtime"]["variants"]
        windows: dict[str, tuple[int, int | None]] = {
            name: (0, None) if isinstance(value, str) else (value[1], value[0]) for name, value in described.items()
        }
        for name, (sink, visible) in sorted(windows.items()):
            label = f"case 2 latents, window {visible}, sink {sink}"
            found[label] = self._free(self._nominal(), sink, visible, variants, f"{name}.")
        return found

    def end_to_end(self) -> dict[str, Distance]:
        """Case 9: image and camera path to latents and pixels, every part a stream."""
        case, setup, vae = self._given("case9_end_to_end_official"), manifest()["end_to_end"], self._vae()
        frames, grid = setup["chunk"], tuple(case["latents"].shape[2:])
        model, cache = self._network(grid, sink=setup["sink"], visible=setup["window"], frames=frames)
        sampler = ChunkSampler(model, self._official())
        relative, intrinsics = self._camera_path()
        linear = model.patch_embedding_wancamctrl
        camera = CameraEmbedding(
            linear.weight,
            linear.bias,
            setup["height"],
            setup["width"],
            max_bases=num_camera_bases(model.plan),
            dtype=model.plan.linear,
        )
        picture = prepare_image(case["image_u8"].cpu().numpy(), setup["height"], setup["width"])
        state = start_condition(picture.to(self.device))
        decoder_cache: VAECache | None = None
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for index in range(case["latents"].shape[1] // frames):
            now = slice(index * frames, (index + 1) * frames)
            condition, state = next_condition(vae, state, frames)
            with cache.lease(SESSION) as lease:
                chunk = lease.begin_chunk()
                if index == 0:
                    model.publish_text(case["context"], chunk)
                rays = camera.tokens(relative[now], intrinsics[now])
                inputs = model.chunk_inputs(condition, rays, chunk.first_latent_frame)
                renoise = case["renoise"].split(sampler.num_steps - 1)[index]
                latents = sampler.denoise((case["noise_all"][:, now], *renoise), inputs, chunk)
                sampler.store_clean(latents, inputs, chunk)
                chunk.commit()
            pixels, decoder_cache = vae.decode(latents[None], decoder_cache)
            parts.append((condition, latents, pixels[0].clamp(-1, 1)))
        conditions, latents, video = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        stored = [name for name in case if name.startswith("video_frames_")]
        ranges = {name: [int(number) for number in name.removeprefix("video_frames_").split("_")] for name in stored}
        return {
            "case 9 condition": distance(conditions, case["condition"]),
            "case 9 latents": distance(latents, case["latents"]),
            "case 9 video": _worst(
                distance(video[:, first : last + 1], case[name]) for name, (first, last) in ranges.items()
            ),
        }

    # ------------------------------------------------------------ helpers

    def _nominal(self) -> SamplerTable:
        return nominal_table(manifest()["end_to_end"]["flow_shift"])

    def _official(self) -> SamplerTable:
        return official_table(manifest()["end_to_end"]["flow_shift"])

    def _main_window(self) -> tuple[int, int]:
        return main_geometry()["sink_frames"], main_geometry()["window_frames"]

    def _rollout_chunks(
        self, table: SamplerTable, sink: int, visible: int | None
    ) -> Iterator[tuple[ChunkSampler, int, _Chunk]]:
        """Go through the chunks of case 2, committing each after the caller has worked on it."""
        given, geometry = self._given("case2_inputs"), main_geometry()
        grid = tuple(geometry["latent_hw"])
        model, cache = self._network(grid, sink=sink, visible=visible, frames=geometry["frames_per_block"])
        sampler = ChunkSampler(model, table)
        for index in range(geometry["blocks"]):
            with cache.lease(SESSION) as lease:
                chunk = lease.begin_chunk()
                if index == 0:
                    model.publish_text(given["context"], chunk)
                rays = model.project_rays(given[f"b{index}.camera"][0])
                inputs = model.chunk_inputs(given[f"b{index}.condition"], rays, chunk.first_latent_frame)
                renoise = (given[f"b{index}.renoise{step}"] for step in range(sampler.num_steps - 1))
                yield sampler, index, _Chunk(forward=(inputs, chunk), noise=(given[f"b{index}.noise0"], *renoise))
                chunk.commit()

    def _free(
        self, table: SamplerTable, sink: int, visible: int | None, golden: dict[str, Tensor], prefix: str
    ) -> Distance:
        found = []
        for sampler, index, now in self._rollout_chunks(table, sink, visible):
            latents = sampler.denoise(now.noise, *now.forward)
            sampler.store_clean(latents, *now.forward)
            found.append(distance(latents, golden[f"{prefix}b{index}.latent"]))
        return _worst(iter(found))

    def _camera_path(self) -> tuple[np.ndarray, np.ndarray]:
        """Return relative poses and intrinsics at the target size of case 9, one a latent frame."""
        setup = manifest()["end_to_end"]
        file_name, _, tensor = setup["pose_tensor"].partition(": ")
        poses = tensors(file_name)[tensor.partition("[")[0]][: setup["frames"]].double().numpy()
        row = tensors("case9_end_to_end_official")["intrinsics_row0"].double().numpy()
        clip = CameraClip(poses_n44=poses, intrinsics_n4=np.tile(row, (len(poses), 1)))
        latent = resample(clip, len(poses), setup["chunk"])
        scale_x, scale_y = setup["width"] / OFFICIAL_WIDTH, setup["height"] / OFFICIAL_HEIGHT
        return relative_path(latent), latent.intrinsics_n4 * np.array([scale_x, scale_y, scale_x, scale_y])


# ---------------------------------------------------------------- what is allowed

EXACT: dict[str, float] = {
    "case 1 flow": 1e-5,
    "case 2 flow of each forward": 2e-5,
    "case 2 latents": 5e-5,
    "case 7": 1e-5,
    "case 8": 1e-5,
    "case 9 condition": 1e-5,
    "case 9 latents": 1e-4,
    "case 9 video": 1e-4,
}
"""Largest absolute differences in float32, by the beginning of a name; those of the golden set's manifest."""

ROUNDED: dict[str, float] = {"case 1": 1e-2, "case 2": 1.5e-2, "case 7": 5e-2, "case 8": 5e-2, "case 9": 5e-2}
"""Relative root mean squares with bfloat16 linears; decoding in bfloat16 is the least exact (2.7e-2 on a CPU)."""

EMULATED = "case 1 flow, official rounding emulated"


def check_distances(found: dict[str, Distance], precision: str, *, margin: float = 1.0) -> None:
    """Fail with every distance that is too large. `margin` widens float32 bounds for other orders of summation."""
    exact = {name for name in found if precision == "fp32" or (precision == "official" and _is_vae_alone(name))}
    exact.discard(EMULATED)
    wrong = []
    for name, item in found.items():
        if name in exact:
            (limit,) = [limit for prefix, limit in EXACT.items() if name.startswith(prefix)]
            if not item.largest <= margin * limit:
                wrong.append(f"{name}: largest difference {item.largest:.2e}, limit {margin * limit:.0e}")
        else:
            limit = ROUNDED[name[:6]]
            if not item.relative_rms <= limit:
                wrong.append(f"{name}: relative {item.relative_rms:.2e}, limit {limit:.0e}")
    assert not wrong, "\n".join([f"precision {precision}", *wrong])


def _is_vae_alone(name: str) -> bool:
    return name.startswith(("case 7", "case 8", "case 9 condition"))
