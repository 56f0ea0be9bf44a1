"""A transformer whose layers are streamed computes the bits of one whose weights are resident, whatever the plan."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload.cache_folder import CacheFolder
from offload.cache_manifest import CacheRequest
from offload.cached_layers import cache_request
from offload.errors import CacheError, OffloadError
from offload.file_lock import OnWait
from offload.host_registration import RegistrationLimits
from offload.mapped_memory import MappedMemory
from offload.residency import plan_residency
from offload.streamed_model import Transfer, TransferWish
from tests.support.lingbot_streaming import NUM_LAYERS, config, resident, rollout, streamed, write_checkpoint
from tests.support.weight_cache import is_locked_for_others, open_folder
from worldmodel.checkpoint.stored_component import StoredComponent
from worldmodel.errors import LoadFailed
from worldmodel.kernels.fused_layer import FusedFormat
from worldmodel.kernels.layer_ops import PlainOps
from worldmodel.lingbot import streaming, streaming_cache
from worldmodel.lingbot.streamed_layers import LayerSource, StreamedLayers, stored_tensors
from worldmodel.lingbot.streaming_plan import WORKING_BYTES, DeviceNumbers
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.offload_settings import OffloadSettings
from worldmodel.wan.precision import precision_plan

FORMS = [("fp32", False), ("fp32", True), ("bf16", True), ("official", False), ("fp8_kv", True)]
"""Precision plans, and whether their layers are fused."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoredComponent]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return {
        "float32": write_checkpoint(folder, torch.float32),
        "bfloat16": write_checkpoint(folder, torch.bfloat16),
    }


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, StoredComponent]) -> dict[tuple[str, str, bool], list[torch.Tensor]]:
    """The flows of resident weights, by stored type, precision and form."""
    made = {("float32", *form): rollout(*resident(checkpoints["float32"], form[0], is_fused=form[1])) for form in FORMS}
    made["bfloat16", "bf16", True] = rollout(*resident(checkpoints["bfloat16"], "bf16", is_fused=True))
    return made


def settings(**values: object) -> OffloadSettings:
    return OffloadSettings(weights="streamed", transfer="staged", **values)  # type: ignore[arg-type]


def assert_equal_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.isfinite(flow).all() for flow in got)


BUDGETS = {"buffers only": 0.0, "a third": 0.33, "most": 0.8, "everything": 2.0}


@pytest.mark.parametrize(
    ("form", "budget"), [(FORMS[0], budget) for budget in BUDGETS] + [(form, "a third") for form in FORMS[1:]]
)
def test_any_budget_gives_the_bits_of_resident_weights(
    checkpoints: dict[str, StoredComponent],
    expected: dict[tuple[str, str, bool], list[torch.Tensor]],
    form: tuple[str, bool],
    budget: str,
) -> None:
    precision, is_fused = form
    component = checkpoints["float32"]
    _, _, whole, _ = streamed(component, precision, settings(), is_fused=is_fused)
    all_bytes = whole.residency.device_bytes
    # Two buffers of six layers are a third of all.
    resident_bytes = int(all_bytes / 3 + BUDGETS[budget] * all_bytes * 2 / 3) + 1

    model, forward, weights, _ = streamed(
        component, precision, settings(resident_bytes=resident_bytes), is_fused=is_fused
    )

    assert weights.residency.device_bytes <= resident_bytes
    assert (weights.residency.host_bytes == 0) == (budget == "everything")
    num_streamed = len(weights.residency.parts["forward"].streamed)
    assert (num_streamed == NUM_LAYERS) == (budget == "buffers only")
    assert_equal_bits(rollout(model, forward), expected["float32", precision, is_fused])


@pytest.mark.parametrize(
    ("stored", "form"), [("float32", ("fp32", True)), ("float32", ("fp32", False)), ("bfloat16", ("bf16", True))]
)
@pytest.mark.parametrize("resident_share", [0.34, 0.7])
def test_the_checkpoints_own_bytes_can_be_streamed(
    checkpoints: dict[str, StoredComponent],
    expected: dict[tuple[str, str, bool], list[torch.Tensor]],
    stored: str,
    form: tuple[str, bool],
    resident_share: float,
) -> None:
    precision, is_fused = form
    _, _, whole, _ = streamed(checkpoints[stored], precision, settings(), is_fused=is_fused)
    budget = int(whole.residency.device_bytes * resident_share)

    model, forward, weights, description = streamed(
        checkpoints[stored], precision, settings(host="checkpoint_mmap", resident_bytes=budget), is_fused=is_fused
    )

    assert description.startswith("weights streamed from checkpoint_mmap")
    assert_equal_bits(rollout(model, forward), expected[stored, precision, is_fused])
    weights.close()


@pytest.mark.parametrize(
    ("precision", "reason"),
    [
        ("bf16", r"host weights .* can't be used: stored as torch\.float32, computed with as torch\.bfloat16"),
        ("fp8_kv", "can't be used: mapped checkpoint with float8 linears"),
    ],
)
def test_a_checkpoint_that_cannot_be_mapped_stops_the_start_or_becomes_ordinary(
    checkpoints: dict[str, StoredComponent],
    expected: dict[tuple[str, str, bool], list[torch.Tensor]],
    precision: str,
    reason: str,
) -> None:
    component = checkpoints["float32"]
    with pytest.raises(LoadFailed, match=f"offload: .*{reason}") as failed:
        streamed(component, precision, settings(host="checkpoint_mmap", resident_bytes=10**9), is_fused=True)
    assert failed.value.field == "offload"

    model, forward, _, description = streamed(
        component,
        precision,
        settings(host="checkpoint_mmap", on_unavailable="ordinary", resident_bytes=10**9),
        is_fused=True,
    )
    assert description.startswith("weights streamed from ordinary")
    assert_equal_bits(rollout(model, forward), expected["float32", precision, True])


def test_a_tensor_with_gaps_in_its_file_is_known_by_its_header(checkpoints: dict[str, StoredComponent]) -> None:
    component = checkpoints["float32"]
    name = "blocks.0.self_attn.q.weight"
    info = component.tensors[name]
    scattered = replace(component, tensors={**component.tensors, name: replace(info, num_bytes=info.num_bytes + 4)})

    assert all(places[0].is_contiguous for places in stored_tensors(component).values())
    assert [key for key, places in stored_tensors(scattered).items() if not places[0].is_contiguous] == [name]


def test_the_plan_is_told_before_the_first_layer_is_loaded(
    checkpoints: dict[str, StoredComponent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*_: object) -> None:
        raise InterruptedError(caplog.text)

    monkeypatch.setattr("worldmodel.lingbot.streamed_layers.LayerSource.load", load)
    with (
        caplog.at_level("INFO"),
        pytest.raises(InterruptedError, match=r"weights: forward: \d of 6 layers resident, .* GB copied a chunk"),
    ):
        streamed(checkpoints["float32"], "fp32", settings(resident_bytes=600_000), is_fused=False)


@pytest.mark.parametrize(
    ("wish", "precision"),
    [
        (OffloadSettings(weights="streamed", transfer="registered"), "fp32"),
        (settings(host="checkpoint_mmap"), "fp8"),
        (settings(host="checkpoint_mmap"), "bf16"),
        (settings(resident_bytes=10), "fp32"),
    ],
)
def test_what_cannot_be_had_is_refused_before_a_layer_is_loaded(
    checkpoints: dict[str, StoredComponent], monkeypatch: pytest.MonkeyPatch, wish: OffloadSettings, precision: str
) -> None:
    monkeypatch.setattr("worldmodel.lingbot.streamed_layers.LayerSource.load", refuse)
    with pytest.raises(LoadFailed, match=r"offload: .* can't be used|do not fit"):
        streamed(checkpoints["float32"], precision, wish, is_fused=True)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the cache, on what passes for a disk."""
    open_folder(tmp_path / "cache")
    for user in ("streaming_cache", "streaming_plan"):
        monkeypatch.setattr(f"worldmodel.lingbot.{user}.CacheFolder", open_folder)
    return tmp_path / "cache"


def refuse(*_: object) -> None:
    raise AssertionError("a layer was loaded the ordinary way")


@pytest.mark.parametrize("form", [("bf16", True), ("fp8_kv", True)])
def test_cached_weights_are_the_same_bits_and_skip_the_ordinary_load(
    checkpoints: dict[str, StoredComponent],
    expected: dict[tuple[str, str, bool], list[torch.Tensor]],
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: tuple[str, bool],
) -> None:
    precision, is_fused = form
    component = checkpoints["float32"]
    wish = {"host": "runtime_cache", "cache_folder": str(cache_folder), "cache_validation": "full"}

    model, forward, weights, _ = streamed(component, precision, settings(**wish, resident_bytes=10**9), is_fused=True)
    assert_equal_bits(rollout(model, forward), expected["float32", precision, is_fused])
    [entry] = (cache_folder / "entries").iterdir()
    assert is_locked_for_others(cache_folder / "locks" / f"{entry.name}.lock")
    weights.close()
    assert not is_locked_for_others(cache_folder / "locks" / f"{entry.name}.lock")

    # Another budget finds the same entry.
    monkeypatch.setattr("worldmodel.lingbot.streamed_layers.LayerSource.load", refuse)
    model, forward, weights, description = streamed(
        component, precision, settings(**wish, resident_bytes=600_000), is_fused=True
    )
    assert description.startswith("weights streamed from runtime_cache")
    assert_equal_bits(rollout(model, forward), expected["float32", precision, is_fused])
    weights.close()


def test_plans_and_forms_that_give_other_bytes_are_other_requests(checkpoints: dict[str, StoredComponent]) -> None:
    """Shapes and types are those of float8 in both plans; one balances the values."""

    def key(precision: str, *, is_fused: bool = True) -> str:
        with torch.device("meta"):
            model = LingBotTransformer(config())
        model.plan = precision_plan(precision)
        layer_format = FusedFormat(PlainOps(), model.plan.linear, quantize=model.plan.quantizes_linears)
        source = LayerSource(component=checkpoints["float32"], device=torch.device("cpu"))
        layers = StreamedLayers(model, source, layer_format if is_fused else None)
        return cache_request(layers, "source", layers.metadata).key

    keys = {key("fp8"), key("fp8_kv"), key("bf16"), key("bf16", is_fused=False)}
    assert len(keys) == 4


class HandedOver(Exception):
    """Report what a part was given."""


def test_what_decides_the_bytes_of_an_entry_is_in_its_request(
    checkpoints: dict[str, StoredComponent], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CacheRequest] = []

    def open_none(layers: object, cache: object, request: CacheRequest, *_: object, **__: object) -> None:
        asked.append(request)
        raise HandedOver

    def ask(digest: str = "golden") -> CacheRequest:
        wish = settings(host="runtime_cache", cache_folder=str(cache_folder))
        with pytest.raises(HandedOver):
            streamed(checkpoints["float32"], "fp8", wish, is_fused=True, digest=digest)
        return asked[-1]

    monkeypatch.setattr(streaming_cache, "open_cached", open_none)
    request = ask()
    assert request.metadata == {
        "model": "lingbot_world_v2",
        "loader": streaming_cache.LOADER_VERSION,
        "precision": "fp8",
        "form": "fused",
        "torch": torch.__version__,
        "device": "cpu",
        "tensor_parallel": "0 of 1",
        "sequence_parallel_layout": "whole",
    }
    assert ask().key == request.key
    monkeypatch.setattr(streaming_cache, "LOADER_VERSION", "another")
    assert len({request.key, ask().key, ask(digest="another").key}) == 3


def test_settings_come_to_the_cache_and_to_page_locking(
    checkpoints: dict[str, StoredComponent], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes: list[TransferWish] = []
    told: list[str] = []

    class Cache:
        def __init__(self, folder: CacheFolder, *, lock_timeout_s: float, on_wait: OnWait) -> None:
            assert (folder.root, lock_timeout_s) == (cache_folder, 7.0)
            on_wait("waiting for somebody")
            raise CacheError("no cache here")

    def stream(layers: object, residency: object, host: object, wish: TransferWish, *_: object) -> None:
        wishes.append(wish)
        raise HandedOver

    monkeypatch.setattr(streaming_cache, "WeightCache", Cache)
    monkeypatch.setattr(streaming, "stream_model", stream)
    wish = OffloadSettings(
        weights="streamed",
        on_unavailable="ordinary",
        registered_bytes=10**9,
        registration_timeout_s=5.0,
        host="runtime_cache",
        cache_folder=str(cache_folder),
        cache_lock_timeout_s=7.0,
    )
    with pytest.raises(HandedOver):
        streamed(
            checkpoints["float32"], "fp32", wish, is_fused=False, progress=lambda fraction, detail: told.append(detail)
        )

    assert wishes[0].limits == RegistrationLimits(max_bytes=10**9, timeout_s=5.0)
    assert wishes[0].falls_back
    assert wishes[0].transfer is Transfer.STAGED
    assert wishes[0].reason == "cpu is no CUDA device"
    assert told[0] == "waiting for somebody"


def test_layers_that_are_made_for_the_cache_are_told_as_progress(
    checkpoints: dict[str, StoredComponent], cache_folder: Path
) -> None:
    told: list[tuple[float, str]] = []
    wish = OffloadSettings(weights="streamed", transfer="staged", host="runtime_cache", cache_folder=str(cache_folder))
    streamed(checkpoints["float32"], "fp32", wish, is_fused=False, progress=lambda *step: told.append(step))
    made = [(fraction, detail) for fraction, detail in told if detail.endswith("made for the cache")]
    assert made == [((index + 1) / NUM_LAYERS, f"layer {index + 1} made for the cache") for index in range(NUM_LAYERS)]


@pytest.mark.parametrize("validation", ["fast", "full"])
def test_an_entry_is_checked_as_the_settings_say(
    checkpoints: dict[str, StoredComponent], cache_folder: Path, monkeypatch: pytest.MonkeyPatch, validation: str
) -> None:
    wish = settings(host="runtime_cache", cache_folder=str(cache_folder), cache_validation=validation)
    streamed(checkpoints["float32"], "fp32", wish, is_fused=False)[2].close()
    file = next((cache_folder / "entries").rglob("*.safetensors"))
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")

    def load_again(*_: object) -> None:
        raise RuntimeError("a layer is made")

    monkeypatch.setattr("worldmodel.lingbot.streamed_layers.LayerSource.load", load_again)
    if validation == "full":
        with pytest.raises(RuntimeError, match="a layer is made"):
            streamed(checkpoints["float32"], "fp32", wish, is_fused=False)
    else:
        streamed(checkpoints["float32"], "fp32", wish, is_fused=False)[2].close()


def test_a_checkpoint_that_was_written_again_is_another_entry(
    checkpoints: dict[str, StoredComponent], cache_folder: Path
) -> None:
    component = checkpoints["bfloat16"]
    wish = settings(host="runtime_cache", cache_folder=str(cache_folder))
    streamed(component, "bf16", wish, is_fused=True)[2].close()
    file = next(iter(component.tensors.values())).file
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))

    streamed(component, "bf16", wish, is_fused=True)[2].close()

    # The content is the same, so that there is still one entry.
    assert len(list((cache_folder / "requests").iterdir())) == 2
    assert len(list((cache_folder / "entries").iterdir())) == 1


def test_a_cache_that_cannot_be_had_stops_the_start_or_becomes_ordinary(
    checkpoints: dict[str, StoredComponent], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    wish = {"host": "runtime_cache", "cache_folder": str(tmp_path / "file" / "cache")}

    with pytest.raises(LoadFailed, match=r"host weights 'runtime_cache' can't be used: .* cannot be made"):
        streamed(checkpoints["float32"], "fp32", settings(**wish), is_fused=False)
    _, _, _, description = streamed(
        checkpoints["float32"], "fp32", settings(**wish, on_unavailable="ordinary"), is_fused=False
    )

    assert "ordinary memory" in description
    assert "cannot be made" in description


@pytest.mark.parametrize("form", [("fp32", False), ("fp32", True), ("fp8_kv", True)])
def test_a_build_that_fails_half_way_becomes_ordinary_with_the_same_bits(
    checkpoints: dict[str, StoredComponent],
    expected: dict[tuple[str, str, bool], list[torch.Tensor]],
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: tuple[str, bool],
) -> None:
    """Some layers have been made and given up by then, one is there, others are not."""
    precision, is_fused = form
    real_write, num_written = os.write, 0

    def write(descriptor: int, data: memoryview) -> int:
        nonlocal num_written
        num_written += 1
        if num_written > 60:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data)

    wish = settings(
        host="runtime_cache", cache_folder=str(cache_folder), on_unavailable="ordinary", resident_bytes=10**9
    )
    with monkeypatch.context() as patch:
        patch.setattr("offload.tensor_file.os.write", write)
        model, forward, _, description = streamed(checkpoints["float32"], precision, wish, is_fused=is_fused)

    assert description.startswith("weights streamed from ordinary memory")
    assert "No space left on device" in description
    assert_equal_bits(rollout(model, forward), expected["float32", precision, is_fused])


@pytest.mark.parametrize(("host", "num_mapped"), [("checkpoint_mmap", 0), ("runtime_cache", 2)])
def test_files_that_cannot_be_mapped_stop_the_start_or_become_ordinary(
    checkpoints: dict[str, StoredComponent],
    expected: dict[tuple[str, str, bool], list[torch.Tensor]],
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    num_mapped: int,
) -> None:
    """Also the third of six, with nothing left in use of the cache."""
    real_map, calls = MappedMemory.of_file, 0

    def map_file(file: Path) -> MappedMemory:
        nonlocal calls
        calls += 1
        if calls > num_mapped:
            raise OffloadError(f"{file}: cannot be mapped (Cannot allocate memory)")
        return real_map(file)

    wish = settings(
        host=host, cache_folder=str(cache_folder) if host == "runtime_cache" else "", resident_bytes=600_000
    )
    with monkeypatch.context() as patch:
        patch.setattr(MappedMemory, "of_file", map_file)
        with pytest.raises(LoadFailed, match=rf"host weights '{host}' can't be used: .* cannot be mapped"):
            streamed(checkpoints["float32"], "fp32", wish, is_fused=True)
        calls = 0
        model, forward, _, description = streamed(
            checkpoints["float32"], "fp32", replace(wish, on_unavailable="ordinary"), is_fused=True
        )

    assert "cannot be mapped" in description
    assert not any(is_locked_for_others(lock) for lock in (cache_folder / "locks").glob("*"))
    assert_equal_bits(rollout(model, forward), expected["float32", "fp32", True])


def test_old_entries_make_room_but_never_the_one_in_use(
    checkpoints: dict[str, StoredComponent], cache_folder: Path
) -> None:
    wish = {"host": "runtime_cache", "cache_folder": str(cache_folder)}
    streamed(checkpoints["float32"], "fp32", settings(**wish), is_fused=False)[2].close()

    weights = streamed(checkpoints["float32"], "bf16", settings(**wish, cache_max_bytes=0), is_fused=True)[2]

    assert len(list((cache_folder / "entries").iterdir())) == 1
    weights.close()


def test_upkeep_that_fails_stops_no_start(
    checkpoints: dict[str, StoredComponent],
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def prune(*_: object, **__: object) -> None:
        raise CacheError("the entries cannot be read")

    monkeypatch.setattr("worldmodel.lingbot.streaming_cache.prune", prune)
    wish = settings(host="runtime_cache", cache_folder=str(cache_folder), cache_max_bytes=0)
    streamed(checkpoints["float32"], "fp32", wish, is_fused=False)[2].close()
    assert "weight cache: nothing more is evicted: the entries cannot be read" in caplog.text


def test_an_entry_that_cannot_be_evicted_is_told_and_stops_no_start(
    checkpoints: dict[str, StoredComponent],
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wish = settings(host="runtime_cache", cache_folder=str(cache_folder))
    streamed(checkpoints["float32"], "fp32", wish, is_fused=False)[2].close()
    [old] = (cache_folder / "entries").iterdir()

    def refused(folder: CacheFolder, address: str) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("offload.cache_upkeep._delete", refused)
    wish = replace(wish, cache_max_bytes=0)
    streamed(checkpoints["bfloat16"], "bf16", wish, is_fused=False)[2].close()
    assert f"weight cache: {old.name} stays, it can't be deleted: [Errno 13] Permission denied" in caplog.text


def test_page_locking_needs_a_cuda_device_or_leave_to_stage(checkpoints: dict[str, StoredComponent]) -> None:
    component = checkpoints["float32"]
    wish = OffloadSettings(weights="streamed", transfer="registered")
    with pytest.raises(LoadFailed, match=r"offload: .* can't be used: page-locking without a CUDA device"):
        streamed(component, "fp32", wish, is_fused=False)

    wish = OffloadSettings(weights="streamed", transfer="registered", on_unavailable="ordinary")
    _, _, _, description = streamed(component, "fp32", wish, is_fused=False)
    assert "staged" in description
    assert "cpu is no CUDA device" in description


def test_a_bound_of_device_memory_that_is_too_small_is_refused_with_the_numbers(
    checkpoints: dict[str, StoredComponent],
) -> None:
    with pytest.raises(LoadFailed, match=r"streamed weights do not fit: \d+ bytes .* device_bytes is 2\.00 GiB, less"):
        streamed(checkpoints["float32"], "fp32", settings(device_bytes=2 * 2**30), is_fused=False)


def test_what_sessions_leave_of_the_device_is_used(checkpoints: dict[str, StoredComponent]) -> None:
    numbers = DeviceNumbers(loaded_bytes=0, free_bytes=WORKING_BYTES + 2**20)

    _, _, weights, _ = streamed(checkpoints["float32"], "fp32", settings(), is_fused=False, numbers=numbers)

    assert 0 < weights.residency.device_bytes <= 2**20


def test_after_a_rolled_back_tick_the_next_one_is_right(
    checkpoints: dict[str, StoredComponent], expected: dict[tuple[str, str, bool], list[torch.Tensor]]
) -> None:
    model, forward, weights, _ = streamed(
        checkpoints["float32"], "fp32", settings(resident_bytes=600_000), is_fused=False
    )
    loop = weights.weights("forward")
    for index in range(3):
        with loop.layer(index):
            pass

    assert_equal_bits(rollout(model, forward), expected["float32", "fp32", False])


def test_the_plan_can_change_while_the_host_memory_stays(
    checkpoints: dict[str, StoredComponent], expected: dict[tuple[str, str, bool], list[torch.Tensor]]
) -> None:
    model, forward, weights, _ = streamed(
        checkpoints["float32"], "bf16", settings(resident_bytes=600_000), is_fused=True
    )
    everything = weights.residency
    parts = [plan.part for plan in everything.parts.values()]
    assert model.weights.streamed is not None

    for budget_bytes in (None, everything.device_bytes * 2, everything.device_bytes):
        model.weights.streamed.rearrange(model, plan_residency(parts, NUM_LAYERS, budget_bytes))
        assert_equal_bits(rollout(model, forward), expected["float32", "bf16", True])


def test_closed_weights_are_gone(checkpoints: dict[str, StoredComponent]) -> None:
    model, _, weights, _ = streamed(
        checkpoints["float32"], "fp32", settings(host="checkpoint_mmap", resident_bytes=600_000), is_fused=False
    )
    files = weights._host.files  # type: ignore[union-attr]

    weights.close()
    weights.close()

    for file in files:
        with pytest.raises(OffloadError, match="is closed"):
            _ = file.bytes
    del model


def test_weights_are_closed_with_their_model(checkpoints: dict[str, StoredComponent]) -> None:
    model, forward, weights, _ = streamed(
        checkpoints["float32"], "fp32", settings(resident_bytes=600_000), is_fused=False
    )
    closed: list[str] = []
    weights._streamers["forward"].close = lambda: closed.append("forward")  # type: ignore[method-assign]
    del model, forward
    gc.collect()
    assert closed == ["forward"]
