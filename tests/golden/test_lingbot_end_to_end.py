"""Case 9: from a start image and a camera path to pixels, as the official generation routine does it.

Every part is ours and streams chunk by chunk: condition, camera, four steps, clean history, decoder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import torch

import worldmodel.lingbot.noise
from kvcache.cache import KVCache
from kvcache.transaction import ChunkTransaction
from tests.support.lingbot_camera import relative_path
from tests.support.lingbot_golden import assert_close, load_json, manifest, tensors
from tests.support.lingbot_golden_noise import GivenNoise, stored_chunks
from tests.support.lingbot_network import SESSION, open_cache, transformer, transformer_config
from worldmodel.adapter import SessionOpening
from worldmodel.lingbot.adapter import LingBotAdapter
from worldmodel.lingbot.camera import CameraEmbedding, pack, rays
from worldmodel.lingbot.condition import next_condition, start_condition
from worldmodel.lingbot.config import OFFICIAL_HEIGHT, OFFICIAL_WIDTH, LingBotOptions, Sampler
from worldmodel.lingbot.controls import parse_control
from worldmodel.lingbot.noise import WholeClipNoise
from worldmodel.lingbot.pipeline import ChunkSampler
from worldmodel.lingbot.trajectory import CameraClip, resample, trajectory_control
from worldmodel.lingbot.transformer import ChunkInputs, LingBotTransformer
from worldmodel.lingbot.weights import LoadedModel
from worldmodel.messages import Control, ControlEvent, MediaFormat, RequestId, SessionId, StartWorker, Tick
from worldmodel.wan.flow_scheduler import COMMIT_TIMESTEP, add_noise, official_table
from worldmodel.wan.image import prepare_image
from worldmodel.wan.text_encoder import TextEncoder
from worldmodel.wan.vae import VAECache, WanVAE

CONDITION_TOLERANCE = 1e-5
CAMERA_TOLERANCE = 1e-5
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one run of the whole routine made. Flows: [chunk][forward], the commit forward last."""

    condition: torch.Tensor
    packed_camera: torch.Tensor
    flows: list[list[torch.Tensor]]
    latents: torch.Tensor
    frames: torch.Tensor
    timesteps: list[float]


RayProjection = Callable[[LingBotTransformer, np.ndarray, np.ndarray], torch.Tensor]


def official_clip() -> CameraClip:
    """Return the path with a pose per latent frame; intrinsics refer to the official size."""
    setup = manifest()["end_to_end"]
    file_name, _, tensor = setup["pose_tensor"].partition(": ")
    poses = tensors(file_name)[tensor.partition("[")[0]][: setup["frames"]].double().numpy()
    row = tensors("case9_end_to_end_official")["intrinsics_row0"].double().numpy()
    return resample(
        CameraClip(poses_n44=poses, intrinsics_n4=np.tile(row, (len(poses), 1))), len(poses), setup["chunk"]
    )


def camera_path() -> tuple[np.ndarray, np.ndarray]:
    """Return relative poses and intrinsics at the target size, one per latent frame, float64."""
    clip, setup = official_clip(), manifest()["end_to_end"]
    scale_x, scale_y = setup["width"] / OFFICIAL_WIDTH, setup["height"] / OFFICIAL_HEIGHT
    return relative_path(clip), clip.intrinsics_n4 * np.array([scale_x, scale_y, scale_x, scale_y])


def packed_rays(relative: np.ndarray, intrinsics: np.ndarray) -> torch.Tensor:
    setup = manifest()["end_to_end"]
    poses, rows = torch.from_numpy(relative).float(), torch.from_numpy(intrinsics).float()
    return pack(rays(poses, rows, setup["height"], setup["width"]))


def project_exactly(model: LingBotTransformer, relative: np.ndarray, intrinsics: np.ndarray) -> torch.Tensor:
    return model.project_rays(packed_rays(relative, intrinsics))


def project_by_basis(model: LingBotTransformer, relative: np.ndarray, intrinsics: np.ndarray) -> torch.Tensor:
    setup = manifest()["end_to_end"]
    linear = model.patch_embedding_wancamctrl
    return CameraEmbedding(linear.weight, linear.bias, setup["height"], setup["width"]).tokens(relative, intrinsics)


def build_vae() -> WanVAE:
    names = load_json("vae_names.json")
    vae = WanVAE.from_config(names["diffusers_config"])
    vae.load_state_dict(tensors("vae_weights_diffusers"), strict=True)
    vae.fold_weights()
    return vae


class Routine:
    """The official routine out of our parts, one chunk at a time."""

    def __init__(self, project: RayProjection) -> None:
        self.golden, self.setup = tensors("case9_end_to_end_official"), manifest()["end_to_end"]
        self.num_frames: int = self.setup["chunk"]
        self.model = transformer(
            transformer_config(
                sink_latent_frames=self.setup["sink"],
                visible_latent_frames=self.setup["window"],
                latent_frames_per_chunk=self.num_frames,
            )
        )
        self.sampler = ChunkSampler(self.model, official_table(self.setup["flow_shift"]))
        self.commit_time = self.model.time_constants(COMMIT_TIMESTEP)
        self.vae = build_vae()
        self.project = project

    def generate(self) -> Generated:
        latent_shape = self.golden["latents"].shape
        cache = open_cache(self.model, *latent_shape[2:])
        relative, intrinsics = camera_path()
        assert len(relative) == latent_shape[1]
        image = prepare_image(self.golden["image_u8"].numpy(), self.setup["height"], self.setup["width"])
        condition_state = start_condition(image)
        decoder_cache: VAECache | None = None
        parts: list[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor]] = []
        for index in range(latent_shape[1] // self.num_frames):
            now = slice(index * self.num_frames, (index + 1) * self.num_frames)
            condition, condition_state = next_condition(self.vae, condition_state, self.num_frames)
            with cache.lease(SESSION) as lease:
                chunk = lease.begin_chunk()
                if index == 0:
                    self.model.publish_text(self.golden["context"], chunk)
                projected = self.project(self.model, relative[now], intrinsics[now])
                inputs = self.model.chunk_inputs(condition, projected, chunk.first_latent_frame)
                flows, latent = self.denoise(index, inputs, chunk)
                chunk.commit()
            pixels, decoder_cache = self.vae.decode(latent[None], decoder_cache)
            parts.append((condition, flows, latent, pixels[0].clamp(-1, 1)))
        conditions, flows_by_chunk, latents, frames = zip(*parts, strict=True)
        return Generated(
            condition=torch.cat(conditions, dim=1),
            packed_camera=packed_rays(relative, intrinsics),
            flows=list(flows_by_chunk),
            latents=torch.cat(latents, dim=1),
            frames=torch.cat(frames, dim=1),
            timesteps=[*(step.timestep for step in self.sampler.table), COMMIT_TIMESTEP] * len(parts),
        )

    def denoise(
        self, index: int, inputs: ChunkInputs, chunk: ChunkTransaction
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run the steps by hand to keep each flow, then the commit forward, once in full to keep its flow, too."""
        num_renoise = self.sampler.num_steps - 1
        renoise = self.golden["renoise"][index * num_renoise : (index + 1) * num_renoise]
        first = index * self.num_frames
        flow, x0 = self.sampler.step(0, self.golden["noise_all"][:, first : first + self.num_frames], inputs, chunk)
        flows = [flow]
        for step, noise in enumerate(renoise, start=1):
            x_t = add_noise(x0, noise, self.sampler.table[step].renoise_sigma)
            flow, x0 = self.sampler.step(step, x_t, inputs, chunk)
            flows.append(flow)
        flows.append(self.model.flow(x0, self.commit_time, inputs, chunk))
        self.sampler.store_clean(x0, inputs, chunk)
        return flows, x0


@pytest.fixture(scope="module", params=[project_exactly, project_by_basis], ids=["exact_rays", "ray_basis"])
def generated(request: pytest.FixtureRequest) -> Generated:
    with torch.inference_mode():
        return Routine(request.param).generate()


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return tensors("case9_end_to_end_official")


def numbered(golden: dict[str, torch.Tensor], prefix: str) -> dict[int, torch.Tensor]:
    found = {int(name.removeprefix(prefix)): value for name, value in golden.items() if name.startswith(prefix)}
    assert found, f"no tensor {prefix}N"
    return found


def test_lingbot_end_to_end_timesteps(generated: Generated, golden: dict[str, torch.Tensor]) -> None:
    assert generated.timesteps == golden["forward_timesteps"].tolist()


def test_lingbot_end_to_end_condition(generated: Generated, golden: dict[str, torch.Tensor]) -> None:
    assert_close(generated.condition, golden["condition"], CONDITION_TOLERANCE, "condition")


def test_lingbot_end_to_end_camera(generated: Generated, golden: dict[str, torch.Tensor]) -> None:
    for index, expected in numbered(golden, "camera_block").items():
        got = generated.packed_camera.split(expected.shape[2], dim=1)[index]
        assert_close(got, expected[0], CAMERA_TOLERANCE, f"camera of chunk {index}")


def test_lingbot_end_to_end_flows(generated: Generated, golden: dict[str, torch.Tensor]) -> None:
    for index, expected in numbered(golden, "flow_block").items():
        assert_close(torch.stack(generated.flows[index]), expected, TOLERANCE, f"flows of chunk {index}")


def test_lingbot_end_to_end_latents(generated: Generated, golden: dict[str, torch.Tensor]) -> None:
    assert_close(generated.latents, golden["latents"], TOLERANCE, "latents")


def test_lingbot_end_to_end_frames(generated: Generated, golden: dict[str, torch.Tensor]) -> None:
    assert generated.frames.shape[1] == 4 * golden["latents"].shape[1] - 3
    ranges = [name for name in golden if name.startswith("video_frames_")]
    assert ranges, "no stored frames"
    for name in ranges:
        first, last = (int(number) for number in name.removeprefix("video_frames_").split("_"))
        assert_close(generated.frames[:, first : last + 1], golden[name], TOLERANCE, name)


def test_lingbot_official_noise_layout_gives_each_chunk_the_stored_noise(
    golden: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hand out the stored numbers as the official routine draws them: the clip at once, then chunk by chunk."""
    num_steps = len(official_table(manifest()["end_to_end"]["flow_shift"]))
    channels, num_latent_frames, *grid = golden["noise_all"].shape
    drawn = iter([golden["noise_all"], *golden["renoise"]])

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        numbers = next(drawn)
        assert tuple(numbers.shape) == tuple(shape)
        return numbers

    monkeypatch.setattr(worldmodel.lingbot.noise, "_normal", draw)
    source = WholeClipNoise(device=torch.device("cpu"), num_draws=num_steps, clip_latent_frames=num_latent_frames)
    state = source.start(0)
    for stored in stored_chunks(num_steps):
        draws, state = source.draw(state, (channels, stored[0].shape[1], *grid))
        assert all(torch.equal(got, want) for got, want in zip(draws, stored, strict=True))
    assert next(drawn, None) is None


# ---------------------------------------------------------------- through the adapter


class GivenText:
    """The stored text rows in place of an encoder: the official run had random ones, too."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def clean(self, prompt: str) -> str:
        return prompt

    def encode(self, prompt: str) -> torch.Tensor:
        return self.rows


def build_adapter(golden: dict[str, torch.Tensor]) -> LingBotAdapter:
    setup = manifest()["end_to_end"]
    routine = Routine(project_by_basis)
    table = official_table(setup["flow_shift"])
    model = LoadedModel(
        transformer=routine.model,
        vae=routine.vae,
        text_encoder=cast(TextEncoder, GivenText(golden["context"])),
        flow_shift=setup["flow_shift"],
        digest="golden",
        num_parameters=0,
    )
    config = StartWorker(model="lingbot_world_v2", checkpoint="", width=setup["width"], height=setup["height"], fps=16)
    noise = GivenNoise(num_steps=len(table))
    return LingBotAdapter(model, table, noise, LingBotOptions(sampler=Sampler.OFFICIAL), config)


def trajectory_event() -> ControlEvent:
    clip = official_clip()
    schema = "lingbot.camera_trajectory.v1"
    data = parse_control("camera", schema, json.loads(json.dumps(trajectory_control(clip))))
    return ControlEvent(event_id=1, controls=(Control(track="camera", schema=schema, data=data),))


def test_lingbot_end_to_end_through_the_adapter(golden: dict[str, torch.Tensor]) -> None:
    """The path as one trajectory control in the first tick, pixels and latents as a client gets them."""
    adapter = build_adapter(golden)
    cache = KVCache(adapter.kv_spec(), capacity=1, device="cpu", dtype=torch.float32)
    cache.open(SESSION)
    outputs = (MediaFormat.LATENT, MediaFormat.RGB24)
    state = adapter.open_state(
        SessionOpening(prompt="golden", seed=0, image=golden["image_u8"].numpy(), outputs=outputs)
    )
    arrays = []
    for index in range(golden["latents"].shape[1] // adapter.spec.latent_frames_per_chunk):
        events = (trajectory_event(),) if index == 0 else ()
        tick = Tick(request_id=RequestId("r"), session_id=SessionId(SESSION), chunk_index=index, events=events)
        with cache.lease(SESSION) as lease:
            chunk = lease.begin_chunk()
            result = adapter.generate(tick, state, chunk)
            chunk.commit()
        state = result.state
        arrays.append([torch.from_numpy(part.array.copy()) for part in result.media.to_host()])
    latents, pixels = zip(*arrays, strict=True)
    assert_close(torch.cat(latents, dim=1), golden["latents"], TOLERANCE, "latents")
    frames = torch.cat(pixels).permute(3, 0, 1, 2)
    for name in (name for name in golden if name.startswith("video_frames_")):
        first, last = (int(number) for number in name.removeprefix("video_frames_").split("_"))
        levels = (golden[name] / 2 + 0.5).mul(255).round()
        # A difference below the tolerance can still cross a rounding border.
        assert_close(frames[:, first : last + 1].float(), levels, 1.0, name)
