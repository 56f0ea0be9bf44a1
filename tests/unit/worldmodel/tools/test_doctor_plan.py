"""`doctor` tells the plan that a worker of the same configuration makes, whatever the configuration."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.cache_folder import CacheFolder
from offload.errors import PlanRefused
from tests.support.empty_models import lay_out_once
from tests.support.weight_cache import MOUNTS
from worldmodel.errors import LoadFailed
from worldmodel.lingbot import empty_model, streaming, streaming_plan
from worldmodel.lingbot.adapter import create_adapter
from worldmodel.lingbot.published import published_model
from worldmodel.lingbot.streaming_plan import WORKING_BYTES, DeviceNumbers, StreamPlan
from worldmodel.messages import StartWorker
from worldmodel.offload_settings import OffloadSettings
from worldmodel.tools import doctor, doctor_offload
from worldmodel.tools.doctor import Check, Status, run_checks
from worldmodel.tools.doctor_offload import open_preview

TINY_NAME, NUM_LAYERS = "random:lingbot-world-v2-tiny", 5
BOUND = 3_120_000_000
"""Of device memory: what the context and working memory leave of it holds some of the tiny model's layers."""


def start(options: dict[str, object] | None = None, precision: str = "fp32", sessions: int = 1, **offload: Any) -> Any:
    settings = {"transfer": "staged", "device_bytes": BOUND, **offload}
    return StartWorker(
        model="lingbot_world_v2",
        checkpoint=TINY_NAME,
        width=48,
        height=32,
        fps=12,
        precision=precision,
        requested_sessions=sessions,
        model_options=json.dumps(options or {}).encode(),
        offload=OffloadSettings(weights="streamed", **settings),
    )


@pytest.fixture
def deeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give the tiny random model more layers than there are buffers, and caches a disk."""

    def published(name: str) -> Any:
        model = published_model(name)
        return replace(model, transformer={**model.transformer, "num_layers": NUM_LAYERS})

    monkeypatch.setattr(empty_model, "published_model", published)
    (tmp_path / "memory").mkdir()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"{MOUNTS}1 0 8:1 / {tmp_path}/memory rw - tmpfs tmpfs rw\n", encoding="utf-8")
    monkeypatch.setattr(streaming_plan, "CacheFolder", partial(CacheFolder, mounts=mounts))


class Planned(Exception):
    """End a start as soon as its plan is made."""


def workers_plan(message: StartWorker, monkeypatch: pytest.MonkeyPatch) -> StreamPlan | str:
    """Start a worker, let it load what it has on its device, and return its plan or why there is none."""
    plans: list[StreamPlan] = []

    def plan_stream(*arguments: Any) -> StreamPlan:
        plans.append(real(*arguments))
        raise Planned

    real = streaming.plan_stream
    with monkeypatch.context() as patch:
        patch.setattr(streaming, "plan_stream", plan_stream)
        try:
            create_adapter(message, lambda *_: None)
        except Planned:
            return plans[0]
        except LoadFailed as error:
            return error.message.removeprefix("offload: ")
    raise AssertionError("nothing was planned")


def doctors_plan(message: StartWorker) -> StreamPlan | str:
    try:
        return open_preview(message).plan()
    except LoadFailed as error:
        return error.message
    except PlanRefused as error:
        return str(error)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fused float8": {"precision": "fp8_kv"},
    "plain operations": {"options": {"layer_operations": "plain"}, "precision": "bf16"},
    "several sessions": {"sessions": 3, "device_bytes": BOUND + 5_000_000},
    "prompts encode history anew": {"options": {"recache_on_prompt": True}},
    "noise of a whole clip": {"options": {"noise_layout": "official_whole_clip", "noise_clip_latent_frames": 90}},
    "three settings": {"vae": "parked", "camera_modulation": "per_layer", "decode": "per_latent_frame"},
    "a bound of weights": {"resident_bytes": 700_000},
    "too little": {"device_bytes": BOUND - 10_000_000},
    "cache in memory": {"host": "runtime_cache", "cache_folder": "TMP/memory/cache"},
    "cache in memory, replaced": {
        "host": "runtime_cache",
        "cache_folder": "TMP/memory/c",
        "on_unavailable": "ordinary",
    },
    "cache on a disk": {"host": "runtime_cache", "cache_folder": "TMP/disk/cache"},
    "mapped, in no file": {"host": "checkpoint_mmap"},
    "mapped, in no file, replaced": {"host": "checkpoint_mmap", "on_unavailable": "ordinary"},
    "mapped float8": {"host": "checkpoint_mmap", "precision": "fp8"},
    "locked": {"transfer": "registered"},
    "locked, replaced": {"transfer": "registered", "on_unavailable": "ordinary"},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.usefixtures("deeper")
def test_the_plan_is_the_workers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = dict(CONFIGURATIONS[name])
    if "cache_folder" in wish:
        wish["cache_folder"] = wish["cache_folder"].replace("TMP", str(tmp_path))
    message = start(**wish)

    told = doctors_plan(message)

    assert told == workers_plan(message, monkeypatch)
    assert sorted(str(entry.relative_to(tmp_path)) for entry in tmp_path.rglob("*")) == ["memory", "mountinfo"]
    is_refused = name in ("too little", "cache in memory", "mapped, in no file", "mapped float8", "locked")
    assert isinstance(told, str) == is_refused


# ------------------------------------------------------------ a card that is not here

FORWARD_BYTES, CAMERA_BYTES, TEXT_BYTES = 598_067_200, 209_756_160, 104_878_080
"""Of one layer in bfloat16."""


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A host with one CUDA card, whose links run at 50 GB/s and 20 GB/s staged."""
    lay_out_once(monkeypatch)
    facts = SimpleNamespace(name="Card", major=9, minor=0, free_bytes=48 * 10**9, host_bytes=64 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (facts.free_bytes, 141 * 10**9))
    monkeypatch.setattr(doctor, "_available_bytes", lambda: facts.host_bytes)
    monkeypatch.setattr(doctor_offload, "measure_link", lambda device: 50e9)
    monkeypatch.setattr(doctor_offload, "measure_staged", lambda device: 20e9)
    monkeypatch.setattr(doctor_offload, "_product_rate", lambda device, dtype: 700e12)
    return facts


def on_card(options: dict[str, object] | None = None, precision: str = "bf16", **offload: Any) -> StartWorker:
    message = start({"text_encoder": "streamed", **(options or {})}, precision, **{"device_bytes": None, **offload})
    full = {"checkpoint": "random:lingbot-world-v2", "width": 832, "height": 480, "device": "cuda:0", "fps": 16}
    return replace(message, **full)


def rows(message: StartWorker) -> dict[str, Check]:
    return {check.name: check for check in run_checks(message)}


def gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def test_what_is_free_is_what_a_worker_would_find(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights are gone by then; a text encoder on the device is one of them."""
    seen: list[DeviceNumbers] = []

    def plan_stream(*arguments: Any) -> StreamPlan:
        seen.extend(each for each in arguments if isinstance(each, DeviceNumbers))
        raise LoadFailed("seen")

    monkeypatch.setattr(doctor_offload, "plan_stream", plan_stream)
    for text_encoder in ("streamed", "resident"):
        rows(replace(on_card({"text_encoder": text_encoder}), gpu_memory_fraction=0.8))

    streamed, resident = seen
    assert resident.loaded_bytes - streamed.loaded_bytes == 2 * 5_680_910_336
    for numbers in seen:
        assert numbers.free_bytes == card.free_bytes - numbers.loaded_bytes
        assert numbers.gpu_memory_fraction == 0.8


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_least_a_device_needs_is_told_part_by_part(card: SimpleNamespace, precision: str) -> None:
    message = on_card(precision=precision)
    before = open_preview(message)
    buffers = sum(2 * layout.num_bytes for layout in before.form().layouts.values())
    least = before.loaded_bytes + buffers + WORKING_BYTES + before.kv.required_bytes(1)
    assert abs(least - {"bf16": 39.13e9, "fp8": 38.53e9}[precision]) < 0.02e9

    found = rows(message)["device memory"]

    assert found.expected == f"{gb(least)} for other weights, buffers of layers, working memory and one session"
    assert found.status is Status.OK
    # What the plan demands is no more and no less.
    card.free_bytes = least
    assert [rows(message)[name].status for name in ("device memory", "offload")] == [Status.OK, Status.OK]
    card.free_bytes = least - 1
    assert [rows(message)[name].status for name in ("device memory", "offload")] == [Status.FAIL, Status.FAIL]


def test_the_host_holds_and_locks_the_layers_that_are_streamed(card: SimpleNamespace) -> None:
    message = on_card(vae="parked")
    plan = open_preview(message).plan(card.free_bytes)
    streamed_bytes = sum(
        len(plan.residency.parts[part].streamed) * layer_bytes
        for part, layer_bytes in {"forward": FORWARD_BYTES, "camera": CAMERA_BYTES, "text": TEXT_BYTES}.items()
    )
    text_bytes, vae_bytes = 2 * 5_680_910_336, 2 * 126_892_531
    assert 0 < streamed_bytes < 40 * (FORWARD_BYTES + CAMERA_BYTES + TEXT_BYTES)

    found = rows(replace(message, offload=replace(message.offload, transfer="registered")))
    staged = rows(message)

    taken = f"{gb(streamed_bytes + text_bytes + vae_bytes + doctor.STAGING_BYTES)} for loading, the text encoder, the "
    host = f"{taken}parked VAE and streamed layers"
    assert (found["host memory"].expected, staged["host memory"].expected) == (host, host)
    locked = f"{gb(streamed_bytes + text_bytes + vae_bytes)} for the streamed text encoder, the parked VAE and "
    assert found["memlock"].expected == f"{locked}streamed layers"
    assert (
        staged["memlock"].expected == f"{gb(text_bytes + vae_bytes)} for the streamed text encoder and the parked VAE"
    )


def test_files_that_another_worker_has_in_memory_are_no_reason_to_fail(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming_plan, "CacheFolder", lambda root: None)
    cached = on_card(host="runtime_cache", cache_folder="/cache")
    streamed_bytes = open_preview(cached).plan(card.free_bytes).residency.host_bytes
    own_bytes = 2 * 5_680_910_336 + doctor.STAGING_BYTES
    card.host_bytes = own_bytes + streamed_bytes
    assert rows(cached)["host memory"].status is Status.OK
    card.host_bytes -= 1
    assert rows(on_card())["host memory"].status is Status.FAIL
    found = rows(cached)["host memory"]
    assert found.status is Status.WARN
    assert found.found.endswith(f"; {gb(streamed_bytes)} are files, which another worker may have in memory")
    card.host_bytes = own_bytes - 1
    assert rows(cached)["host memory"].status is Status.FAIL


def test_copies_are_timed_the_way_they_go(card: SimpleNamespace) -> None:
    copied = open_preview(on_card()).plan(card.free_bytes).residency.copied_bytes_per_chunk
    for transfer, rate in (("registered", 50e9), ("staged", 20e9)):
        found = rows(on_card(transfer=transfer))["offload"]
        assert f"at {rate / 1e9:.1f} GB/s a chunk takes at least" in found.found
        assert f"(copying {1000 * copied / rate:.0f} ms" in found.found


def test_a_chunk_takes_no_less_than_its_copies_and_than_its_products(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rate, slower in ((1e9, "copying"), (1e15, "computing")):
        monkeypatch.setattr(doctor_offload, "measure_staged", lambda device, rate=rate: rate)
        found = re.search(
            r"at least (\d+) ms \(copying (\d+) ms, computing (\d+) ms\)", rows(on_card())["offload"].found
        )
        assert found is not None
        least_ms, copy_ms, compute_ms = map(int, found.groups())
        assert least_ms == max(copy_ms, compute_ms) == {"copying": copy_ms, "computing": compute_ms}[slower]


def test_what_is_not_as_wished_is_a_warning_and_what_can_not_be_a_failure(card: SimpleNamespace) -> None:
    wish = {"transfer": "registered", "registered_bytes": 10**9}
    replaced = rows(on_card(**wish, on_unavailable="ordinary"))["offload"]
    assert replaced.status is Status.WARN
    assert "staged; registered_bytes is 1000000000" in replaced.found
    assert "at 20.0 GB/s" in replaced.found
    refused = rows(on_card(**wish))["offload"]
    assert refused.status is Status.FAIL
    assert "transfer 'registered' can't be used: registered_bytes is 1000000000" in refused.found


def test_with_everything_resident_nothing_is_copied(card: SimpleNamespace) -> None:
    card.free_bytes = 140 * 10**9
    assert "nothing is copied, a chunk takes at least" in rows(on_card())["offload"].found


@pytest.mark.parametrize(
    ("free_bytes", "has_entries", "status"),
    [(37 * 10**9, False, Status.OK), (36 * 10**9, False, Status.FAIL), (36 * 10**9, True, Status.WARN)],
)
def test_the_disk_is_compared_with_an_entry(
    card: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    has_entries: bool,
    status: Status,
) -> None:
    """All layers are in it, whichever stay on the device."""
    monkeypatch.setattr(streaming_plan, "CacheFolder", lambda root: None)
    monkeypatch.setattr(doctor_offload.shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes))
    cache = tmp_path / "cache"
    if has_entries:
        (cache / "entries").mkdir(parents=True)
    found = rows(on_card(host="runtime_cache", cache_folder=str(cache)))["disk for the cache"]
    assert found.expected == f"36.5 GB in {cache}, if the weights are not there yet"
    assert (found.status, found.found) == (status, f"{gb(free_bytes)} free")
    # A worker that may take ordinary memory instead starts without it.
    replaced = rows(on_card(host="runtime_cache", cache_folder=str(cache), on_unavailable="ordinary"))
    assert replaced["disk for the cache"].status is (Status.OK if status is Status.OK else Status.WARN)
    assert "disk for the cache" not in rows(on_card())
