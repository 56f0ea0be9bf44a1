"""DreamZero policy calls, golden cases 2, 2b and 2d: from what a request holds to the actions, through the runtime.

The worker's own loading is part of it: the folder is written from the golden weights. Noise is drawn, not fed: the
drawing itself is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.transaction import ChunkTransaction
from tests.support.dreamzero_checkpoint import call_arrays, start_worker, write_checkpoint
from tests.support.dreamzero_golden import assert_close, head_options, manifest, rollouts, tensors
from tests.support.dreamzero_sessions import Answer, call, open_robot, reset_robot, runtime_of
from worldmodel.dreamzero.adapter import DreamZeroAdapter, create_adapter
from worldmodel.dreamzero.image_encoder import preprocess
from worldmodel.dreamzero.noise import NoiseSource
from worldmodel.dreamzero.observation_vae import ObservationVAE
from worldmodel.dreamzero.pictures import observation_clip, signed_pictures
from worldmodel.dreamzero.prompts import frame_prompt
from worldmodel.dreamzero.step_skip import NUM_STEPS, STATIC_STEPS
from worldmodel.dreamzero.transformer import NEGATIVE, POSITIVE, DreamZeroTransformer, Velocity

BRANCHES = {"positive": POSITIVE, "negative": NEGATIVE}

Load = Callable[..., DreamZeroAdapter]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    def load(options: dict[str, Any] | None = None, **head: Any) -> DreamZeroAdapter:
        folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), **head)
        return create_adapter(start_worker(folder, **(options or {})), lambda stage, fraction, detail: None)

    return load


@dataclass
class Call:
    """One call: its answer, the network's forwards in order with timesteps and first frame, and K/V by branch."""

    answer: Answer
    inputs: list[dict[str, Tensor]] = field(default_factory=list)
    velocities: list[Velocity] = field(default_factory=list)
    kv: dict[str, list[Tensor]] = field(default_factory=dict)
    times: list[tuple[int, int | None, int]] = field(default_factory=list)


def run_case(adapter: DreamZeroAdapter, case: str) -> list[Call]:
    """Run the calls of a case, and watch the network and the commits."""
    described = manifest()["cases"][case]["calls"]
    runtime = runtime_of(adapter, start_worker(Path("golden")))
    open_robot(runtime, "a")
    calls: list[Call] = []
    for index, entry in enumerate(described):
        if index and entry["session_id"] != described[index - 1]["session_id"]:
            reset_robot(runtime, "a")
        with watched() as seen:
            answer = call(runtime, "a", _place(described, index), call_arrays(index), entry["prompt"])
        calls.append(Call(answer, seen.inputs, seen.velocities, seen.kv, seen.times))
    return calls


def _place(described: list[dict[str, Any]], index: int) -> int:
    """Return the number of a call within its session."""
    session = described[index]["session_id"]
    return sum(entry["session_id"] == session for entry in described[:index])


class watched:
    """Record what goes into and comes out of the network, and the K/V of every commit."""

    def __init__(self) -> None:
        self.inputs: list[dict[str, Tensor]] = []
        self.velocities: list[Velocity] = []
        self.kv: dict[str, list[Tensor]] = {}
        self.times: list[tuple[int, int | None, int]] = []

    def __enter__(self) -> watched:
        self.patch = pytest.MonkeyPatch()
        velocity, commit = DreamZeroTransformer.velocity, DreamZeroTransformer.commit
        commit_chunk = ChunkTransaction.commit

        def watch_velocity(network, x, action, step, inputs, draft):
            self.inputs.append({"x": x.clone(), "action": action.clone()})
            self.times.append((step.video.timestep, step.action.timestep, draft.first_latent_frame))
            self.velocities.append(velocity(network, x, action, step, inputs, draft))
            return self.velocities[-1]

        def watch_commit(network, x, time, inputs, chunk):
            self.inputs.append({"x": x.clone()})
            self.times.append((time.timestep, None, chunk.first_latent_frame))
            commit(network, x, time, inputs, chunk)

        def watch_chunk(chunk: ChunkTransaction) -> None:
            for name, branch in BRANCHES.items():
                layers = range(chunk._spec.num_layers)
                self.kv[name] = [torch.stack(chunk.visible(layer, branch=branch)) for layer in layers]
            commit_chunk(chunk)

        self.patch.setattr(DreamZeroTransformer, "velocity", watch_velocity)
        self.patch.setattr(DreamZeroTransformer, "commit", watch_commit)
        self.patch.setattr(ChunkTransaction, "commit", watch_chunk)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def compare(calls: list[Call], case: str) -> int:
    """Compare everything the file of a case has with its calls; return how many tensors that were."""
    golden, count = tensors(case), 0
    for index, (got, entry) in enumerate(zip(calls, manifest()["cases"][case]["calls"], strict=True)):
        forwards = [(each["t_video"], each["t_action"], each["start_frame"]) for each in entry["dit_forwards"]]
        assert got.times == forwards, f"{case} call {index}: timesteps and first frames"
        prefix = f"call{index}/"
        found = {
            "actions": torch.from_numpy(got.answer.actions.copy()),
            "video_latents": got.answer.latents[None],
        }
        for number, inputs in enumerate(got.inputs):
            for name, tensor in inputs.items():
                found[f"dit{number}/{name}"] = tensor[None]
        for number, velocity in enumerate(got.velocities, start=1):
            found[f"dit{number}/action_pred_positive"] = velocity.action_NA[None]
            for name, branch in BRANCHES.items():
                found[f"dit{number}/video_pred_{name}"] = velocity.video_BCFYX[branch][None]
        for name, layers in got.kv.items():
            for layer, kv in enumerate(layers):
                found[f"kv_after/{name}/layer{layer}"] = kv[:, None]
        for name, tensor in found.items():
            if prefix + name in golden:
                assert_close(tensor, golden[prefix + name], f"{case} {prefix}{name}")
                count += 1
        last = max(int(key.split("/")[1].removeprefix("dit")) for key in golden if key.startswith(prefix + "dit"))
        assert len(got.velocities) == last, f"{case} call {index}: number of forwards"
    return count


def test_dreamzero_eight_calls(load: Load) -> None:
    calls = run_case(load(), "rollout_default")
    assert compare(calls, "rollout_default") > 12 * len(calls)


def test_dreamzero_the_default_skips_as_the_files_say() -> None:
    mask = manifest()["tiny_config"]["head"]["dit_step_mask"]
    assert [step for step, runs in enumerate(mask) if runs] == list(STATIC_STEPS[sum(mask)])


def settings_of(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options and the settings of `config.json` that a rollout changes."""
    options, head = {}, {}
    for key, value in head_options(case).items():
        match key.lower():
            case "num_dit_steps":
                options["computed_steps"] = value if value in STATIC_STEPS else NUM_STEPS
            case "dynamic_cache_schedule":
                options["step_skipping"] = "dynamic" if value else "static"
            case "seed":
                options["noise_seed"] = value
            case "cfg_scale":
                options["guidance"] = value
            case "sigma_shift":
                options["shift"] = value
            case _:
                head[key] = value
    return options, head


@pytest.mark.parametrize("case", [case for case in rollouts() if case != "rollout_default"])
def test_dreamzero_sampler_variants(load: Load, case: str) -> None:
    options, head = settings_of(case)
    assert options or head
    calls = run_case(load(options, **head), case)
    assert compare(calls, case) > 4 * len(calls)


# ---------------------------------------------------------------- the parts before the network


@pytest.fixture(scope="module")
def adapter(load: Load) -> DreamZeroAdapter:
    return load()


def test_dreamzero_noise() -> None:
    golden = tensors("rollout_default")
    seed = manifest()["tiny_config"]["head"]["seed"]
    video, action = golden["call0/noise_video"][0], golden["call0/noise_action"][0]
    noise = NoiseSource(tuple(video.shape), tuple(action.shape), torch.device("cpu")).draw(seed)
    assert torch.equal(noise.video_CFYX, video)
    assert torch.equal(noise.action_NA, action)


def test_dreamzero_normalised_state(adapter: DreamZeroAdapter) -> None:
    golden = tensors("rollout_default")
    for index in range(len(manifest()["cases"]["rollout_default"]["calls"])):
        arrays = call_arrays(index)
        raw = adapter._observations.read(arrays, ()).raw_state_S
        got = adapter._model.robot.normalize_state(raw, golden[f"call{index}/state_norm"].shape[-1])
        assert_close(torch.from_numpy(got), golden[f"call{index}/state_norm"][0, 0], f"call {index}")


def test_dreamzero_text_rows(adapter: DreamZeroAdapter) -> None:
    golden, calls = tensors("rollout_default"), manifest()["cases"]["rollout_default"]["calls"]
    for key in [key for key in golden if key.endswith("context_positive")]:
        call_name = key.split("/")[0]
        prompt = calls[int(call_name.removeprefix("call"))]["prompt"]
        framed = frame_prompt(prompt, adapter._template)
        for branch, encoded in (("positive", adapter._prompts.encode(framed)), ("negative", adapter._negative)):
            want = golden[f"{call_name}/context_{branch}"][0]
            length = encoded.rows_LC.shape[0]
            assert_close(encoded.rows_LC, want[:length], f"{call_name} {branch}")
            assert not want[length:].any()


def test_dreamzero_observation_latents(adapter: DreamZeroAdapter) -> None:
    golden = tensors("rollout_default")
    vae: ObservationVAE = adapter._model.vae
    height, width = adapter._picture_size
    seen = [key for key in golden if key.endswith("/obs_latent")]
    for key in seen:
        pictures = golden[key.replace("obs_latent", "images_u8")][0].numpy()
        clip = observation_clip(signed_pictures(pictures, height, width))
        if (want := key.replace("obs_latent", "obs_vae_input")) in golden:
            assert_close(clip, golden[want][0], want)
        assert_close(vae.encode_clip(clip), golden[key][0], key)
    assert seen


def test_dreamzero_restart_condition(adapter: DreamZeroAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    golden, published = tensors("rollout_default"), []
    monkeypatch.setattr(
        DreamZeroTransformer, "publish_image", lambda network, tokens, kv: published.append(tokens.clone())
    )
    monkeypatch.setattr(DreamZeroTransformer, "commit", lambda *_: None)

    class Chunk:
        first_latent_frame = 0

        def restart(self, num_latent_frames: int) -> None:
            assert num_latent_frames == 1

    restarts = [key.split("/")[0] for key in golden if key.endswith("/ys")]
    for name in restarts:
        pictures = signed_pictures(golden[f"{name}/images_u8"][0].numpy(), *adapter._picture_size)
        with torch.inference_mode():
            first_CFYX, condition_CFYX = adapter._begin_run(pictures, Chunk())
        assert_close(condition_CFYX, golden[f"{name}/ys"][0], f"{name} condition")
        assert_close(first_CFYX, golden[f"{name}/first_latent"][0], f"{name} first latent")
        assert_close(published[-1], golden[f"{name}/clip_feature"][0], f"{name} image tokens")
    assert len(restarts) > 1


def test_dreamzero_image_preprocessing() -> None:
    """The stored picture is the one of the first call."""
    pictures = tensors("rollout_default")["call0/images_u8"][0].numpy()
    signed_CTYX = signed_pictures(pictures, *pictures.shape[1:3])
    got = preprocess(signed_CTYX[:, 0][None], manifest()["tiny_config"]["clip"]["image_size"])
    assert_close(got[..., ::8, ::8], tensors("encoders")["clip/preprocessed_every8"], "preprocessed")


def test_dreamzero_streamed_encoding(adapter: DreamZeroAdapter) -> None:
    """The stored clip is that of the second call, encoded in pieces of 1, 4 and 4 frames."""
    golden, vae = tensors("encoders"), adapter._model.vae
    clip = tensors("rollout_default")["call1/obs_vae_input"][0]
    pieces, memory = [], None
    for start, end in ((0, 1), (1, 5), (5, 9)):
        latent, memory = vae.encode(clip[None, :, start:end], memory)
        pieces.append(latent)
    assert memory is not None
    assert_close(torch.cat(pieces, dim=2), golden["vae/latents"], "pieces")
    assert_close(vae.encode_clip(clip)[None], golden["vae/latents"], "in bounded memory")
    assert len(memory.tensors) == manifest()["cases"]["encoders"]["vae_cache_used"]
    slots = [key for key in golden if key.startswith("vae/cache_slot")]
    for key in slots:
        kept_BTYXC = memory.tensors[int(key.removeprefix("vae/cache_slot"))]
        assert_close(kept_BTYXC.permute(0, 4, 1, 2, 3), golden[key], key)
    assert slots
