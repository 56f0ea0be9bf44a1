"""LingBot on a CUDA device: the runtime's whole path against the CPU, and sessions that do not touch each other.

Run with `pytest -m gpu`; without a device these tests fail.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcache.cache import KVCache
from tests.support.demo_server import demo_start_worker
from tests.support.lingbot_golden import tensors
from tests.support.lingbot_network import transformer, transformer_config
from worldmodel.lingbot import adapter as lingbot_adapter
from worldmodel.lingbot.controls import parse_control
from worldmodel.lingbot.noise import NoiseState, PerChunkNoise
from worldmodel.lingbot.transformer import kv_geometry
from worldmodel.messages import (
    Control,
    ControlEvent,
    ImageSize,
    MediaFormat,
    OpenSession,
    RequestId,
    SessionId,
    StartWorker,
    Tick,
)
from worldmodel.runtime import Runtime

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NUM_CHUNKS = 10
"""The window has slid after six."""

NUM_INTERLEAVED_CHUNKS = 20
OUTPUTS = (MediaFormat.LATENT, MediaFormat.RGB24)
KEYS = ["w", "wl", "", "d", "j", "w", "i", "s"]


class CpuNoise(PerChunkNoise):
    """The CPU generator's numbers on any device, so that devices can be compared."""

    def start(self, seed: int) -> NoiseState:
        return NoiseState(generator_state=torch.Generator().manual_seed(seed).get_state())

    def draw(self, state: NoiseState, shape_CFYX: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], NoiseState]:
        source = PerChunkNoise(device=torch.device("cpu"), num_draws=self.num_draws)
        draws, after = source.draw(state, shape_CFYX)
        return tuple(draw.to(self.device) for draw in draws), after


def start(device: str, precision: str = "fp32", **options: object) -> StartWorker:
    return demo_start_worker(device, precision, 3, **options)


def load(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, *, cpu_noise: bool) -> Runtime:
    if cpu_noise:
        monkeypatch.setattr(lingbot_adapter, "PerChunkNoise", CpuNoise)
    return Runtime.load(start_worker, lambda stage, fraction, detail: None)


def open_session(runtime: Runtime, session_id: str, seed: int) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (96, 160, 3), dtype=np.uint8)
    message = OpenSession(
        request_id=RequestId("open"),
        session_id=SessionId(session_id),
        prompt="a small town, day",
        seed=seed,
        image=ImageSize(width=160, height=96),
        outputs=OUTPUTS,
    )
    runtime.open(message, image)


def run_chunk(runtime: Runtime, session_id: str, index: int) -> tuple[np.ndarray, np.ndarray]:
    keys = KEYS[index % len(KEYS)]
    data = parse_control("camera", "lingbot.camera_actions.v1", {"mode": "state", "held": list(keys)})
    control = Control(track="camera", schema="lingbot.camera_actions.v1", data=data)
    tick = Tick(
        request_id=RequestId(f"{session_id}-{index}"),
        session_id=SessionId(session_id),
        chunk_index=index,
        prompt="the town in night" if index == 4 else None,
        events=(ControlEvent(event_id=index, controls=(control,)),),
    )
    _, parts = runtime.tick(tick).to_host()
    latent, rgb = parts
    return np.asarray(latent).view(np.float32).reshape(-1), np.asarray(rgb).view(np.uint8).reshape(-1).astype(np.int16)


def rollout(
    runtime: Runtime, session_id: str, seed: int, num_chunks: int = NUM_CHUNKS
) -> list[tuple[np.ndarray, np.ndarray]]:
    open_session(runtime, session_id, seed)
    return [run_chunk(runtime, session_id, index) for index in range(num_chunks)]


def test_cuda_in_fp32_follows_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the slid window, with the same noise: float32 rounding only."""
    expected = rollout(load(start("cpu"), monkeypatch, cpu_noise=True), "a", seed=5)
    got = rollout(load(start("cuda"), monkeypatch, cpu_noise=True), "a", seed=5)
    for index, ((latent, rgb), (cuda_latent, cuda_rgb)) in enumerate(zip(expected, got, strict=True)):
        assert np.abs(latent - cuda_latent).max() < 5e-3, f"chunk {index}"
        assert np.abs(rgb - cuda_rgb).max() <= 3, f"chunk {index}"


@pytest.mark.parametrize("attention", ["triton", "triton_paged"])
def test_attention_of_our_own_follows_that_of_torch(monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    """Over a filling and a slid window, history in rows or in pages."""
    expected = rollout(load(start("cuda", attention="torch_sdpa"), monkeypatch, cpu_noise=True), "a", seed=5)
    runtime = load(start("cuda", attention=attention), monkeypatch, cpu_noise=True)
    assert runtime.info("demo").attention_backend.startswith(f"{attention};")
    for index, ((latent, _), (got, _)) in enumerate(zip(expected, rollout(runtime, "a", seed=5), strict=True)):
        assert np.abs(latent - got).max() < 5e-3, f"chunk {index}"


@pytest.mark.parametrize("precision", ["bf16", "official"])
def test_cuda_in_low_precision_stays_near_fp32(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """The first chunk, before differences feed back through the history."""
    ((expected, _), *_) = rollout(load(start("cuda"), monkeypatch, cpu_noise=True), "a", seed=5)
    ((got, _), *_) = rollout(load(start("cuda", precision), monkeypatch, cpu_noise=True), "a", seed=5)
    distance = float(np.sqrt(np.mean((got - expected) ** 2)) / np.sqrt(np.mean(expected**2)))
    assert 0 < distance < 0.05


def test_interleaved_sessions_on_cuda_equal_their_solo_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load(start("cuda"), monkeypatch, cpu_noise=False)
    solo = [
        rollout(load(start("cuda"), monkeypatch, cpu_noise=False), "solo", seed, NUM_INTERLEAVED_CHUNKS)
        for seed in (1, 2, 3)
    ]
    for seed in (1, 2, 3):
        open_session(runtime, f"s{seed}", seed)
    for index in range(NUM_INTERLEAVED_CHUNKS):
        for seed in (1, 2, 3):
            latent, rgb = run_chunk(runtime, f"s{seed}", index)
            assert np.array_equal(latent, solo[seed - 1][index][0])
            assert np.array_equal(rgb, solo[seed - 1][index][1])


def test_lingbot_golden_weights_give_the_golden_flow_on_cuda() -> None:
    golden = {name: tensor.cuda() for name, tensor in tensors("case1_forward").items()}
    frames = golden["x_t"].shape[1]
    model = transformer(transformer_config(visible_latent_frames=frames, latent_frames_per_chunk=frames)).cuda()
    spec = kv_geometry(
        model.config, model.plan, latent_height=golden["x_t"].shape[2], latent_width=golden["x_t"].shape[3]
    )
    cache = KVCache(spec, capacity=1, device="cuda", dtype=model.plan.linear)
    cache.open("golden")
    with torch.inference_mode(), cache.lease("golden") as lease:
        chunk = lease.begin_chunk()
        model.publish_text(golden["context"], chunk, merge_padding=True)
        inputs = model.chunk_inputs(golden["condition"], model.project_rays(golden["camera"][0]), 0)
        flow = model.flow(golden["x_t"], model.time_constants(float(golden["timestep"][0])), inputs, chunk)
        assert (flow - golden["flow"]).abs().max().item() < 2e-5
