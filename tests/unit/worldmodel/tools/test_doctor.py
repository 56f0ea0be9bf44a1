"""The worker's half of `doctor`: every check with a good and a bad host, none of which exists here."""

from __future__ import annotations

import io
import json
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcache.attention_backends import FLASH3_MODULE
from tests.support.dreamzero_checkpoint import start_worker, write_checkpoint
from tests.support.dreamzero_golden import tensors
from tests.support.empty_models import lay_out_once
from worldmodel.checkpoint.writer import write_checkpoint as write_lingbot
from worldmodel.lingbot.layout import Layout, plan_checkpoint
from worldmodel.lingbot.published import TINY
from worldmodel.messages import StartWorker
from worldmodel.offload_settings import OffloadSettings
from worldmodel.tools import doctor, doctor_offload
from worldmodel.tools.doctor import Check, Status, run_checks
from worldmodel.wan.precision import precision_plan


def start(**changes: object) -> StartWorker:
    fields = {"checkpoint": "random:lingbot-world-v2-tiny", "width": 96, "height": 64, **changes}
    return StartWorker(model="lingbot_world_v2", fps=16, **fields)  # type: ignore[arg-type]


def checks(message: StartWorker) -> dict[str, Check]:
    return {check.name: check for check in run_checks(message)}


@pytest.fixture(autouse=True)
def one_empty_model(monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out_once(monkeypatch)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A host with one CUDA card whose properties a test may change."""
    facts = SimpleNamespace(name="Card", major=9, minor=0, free_bytes=140 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (facts.free_bytes, 141 * 10**9))
    monkeypatch.setattr(doctor, "_available_bytes", lambda: 64 * 10**9)
    return facts


FULL = {"checkpoint": "random:lingbot-world-v2", "width": 832, "height": 480, "device": "cuda:0", "precision": "bf16"}


def test_a_tiny_model_on_the_cpu_is_fine() -> None:
    found = checks(start())
    assert {check.status for check in found.values()} == {Status.OK}
    assert set(found) == {"torch", "device", "checkpoint", "memory for the model", "host memory", "memlock"}


def test_what_sessions_may_take_on_the_cpu_is_compared_with_what_one_takes() -> None:
    found = checks(start(memory_bytes=2**31))["memory for sessions"]
    assert (found.status, found.found) == (Status.OK, "2.1 GB allowed by kvcache.cpu_memory_bytes")
    assert checks(start(memory_bytes=10**6))["memory for sessions"].status is Status.FAIL


def test_the_full_model_on_a_large_card(card: SimpleNamespace) -> None:
    found = checks(start(**FULL))
    assert {found[name].status for name in ("torch", "device", "checkpoint", "device memory", "host memory")} == {
        Status.OK
    }
    # 38.1 GB of weights, 34.3 of a first session, 1.5 of a context, and what kernels may keep.
    assert re.fullmatch(r"7[3-9]\.\d GB for weights, CUDA context and one session", found["device memory"].expected)
    assert found["host memory"].expected == "12.4 GB for loading and the text encoder"
    assert "11.4 GB for the streamed text encoder" in found["memlock"].expected


def test_a_card_that_is_too_small_or_too_old(card: SimpleNamespace) -> None:
    card.free_bytes = 47 * 10**9
    memory = checks(start(**FULL))["device memory"]
    assert (memory.status, memory.found) == (Status.FAIL, "47.0 GB free of 141.0 GB")
    card.major, card.minor = 7, 5
    found = checks(start(**FULL))
    assert found["device"].status is Status.FAIL
    assert "compute capability 7.5" in found["device"].found


def test_a_device_that_is_not_there() -> None:
    assert checks(start(device="cuda:7"))["device"].status is Status.FAIL
    assert checks(start(device="tpu!"))["device"].expected == "cpu, cuda or cuda:N"


def test_a_host_with_too_little_memory(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_available_bytes", lambda: 8 * 10**9)
    found = checks(start(**FULL))["host memory"]
    assert (found.status, found.found) == (Status.FAIL, "8.0 GB available")


@pytest.mark.parametrize(
    ("limit", "status"), [(resource.RLIM_INFINITY, Status.OK), (12 * 10**9, Status.OK), (8 * 2**20, Status.WARN)]
)
def test_the_limit_on_locked_memory(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, limit: int, status: Status
) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (limit, limit))
    assert checks(start(**FULL))["memlock"].status is status
    assert checks(start(**{**FULL, "model_options": b'{"text_encoder": "cpu"}'}))["memlock"].status is Status.OK


def test_kernels_that_are_missing_are_a_warning(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = doctor.importlib.util.find_spec
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name: object() if name == "triton" else find_spec(name)
    )
    found = checks(start(**FULL))
    assert found["fused kernels"].status is Status.OK
    assert found["FlashAttention-3"].status is Status.WARN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": "/nowhere"}, "checkpoint folder does not exist"),
        ({"width": 100}, "width must be a multiple of 16"),
        ({"precision": "int4"}, "unknown precision 'int4'"),
        ({"model_options": b'{"flow_shift": -1}'}, "flow_shift"),
        ({"model_options": b'{"noise_layout": "official_whole_clip"}'}, "noise_clip_latent_frames: missing"),
        ({"model_options": b'{"attention": "flash3"}'}, "attention 'flash3' can't be used: it needs a CUDA device"),
        ({"model_options": b'{"layer_operations": "triton"}'}, "layer operations 'triton' can't be used"),
        ({"precision": "fp8", "model_options": b'{"layer_operations": "unfused"}'}, "'fp8' has no unfused form"),
    ],
)
def test_what_cannot_be_loaded_fails_with_its_reason(changes: dict[str, object], message: str) -> None:
    found = checks(start(**changes))["checkpoint"]
    assert found.status is Status.FAIL
    assert message in found.found


def test_details_have_in_full_what_is_cut_in_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_lingbot(plan_checkpoint(TINY, layout=Layout.DIFFUSERS), folder, seed=0)
    file = folder / "vae/diffusion_pytorch_model.safetensors"
    names = [f"strange{number:02}" for number in range(25)]
    save_file({**load_file(file), **{name: torch.zeros(1) for name in names}}, file)
    found = checks(start(checkpoint=str(folder)))["checkpoint"]
    assert found.found.endswith("strange19 and 5 more)")
    assert found.details == (f"vae: 25 extra tensors ({', '.join(names)})",)


def test_a_named_kernel_whose_package_is_missing_fails(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = doctor.importlib.util.find_spec
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name: None if name == FLASH3_MODULE else find_spec(name)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    named = {**FULL, "model_options": b'{"attention": "flash3"}'}
    found = checks(start(**named))["checkpoint"]
    assert (found.status, "the package 'fa3-fwd' is not installed" in found.found) == (Status.FAIL, True)
    # A card that is not there says so itself; what depends on it is not guessed.
    assert "fa3-fwd" not in checks(start(**{**named, "device": "cuda:7"}))["checkpoint"].found


def test_the_module_looked_for_is_the_one_that_is_used() -> None:
    assert (FLASH3_MODULE, "FlashAttention-3") in doctor.KERNELS


def test_without_torch_nothing_else_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
    found = list(run_checks(start()))
    assert [(check.status, check.name, check.found) for check in found] == [(Status.FAIL, "torch", "not installed")]


def test_an_old_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda _: "2.5.1+cu121")
    assert next(run_checks(start())).status is Status.FAIL


def test_a_robot_model_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path)
    found = checks(start_worker(folder))
    assert found["checkpoint"].status is Status.OK
    assert "for weights and one session" in found["memory for the model"].expected
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "_available_bytes", lambda: 1_000_000)
        assert checks(start_worker(folder))["memory for the model"].status is Status.FAIL
    message = start_worker(folder, tokenizer=str(tmp_path / "elsewhere"))
    assert "tokenizer folder does not exist" in checks(message)["checkpoint"].found
    (folder / "experiment_cfg" / "metadata.json").write_text("{}", encoding="utf-8")
    weights = {name: tensor for name, tensor in tensors("weights").items() if "head.modulation" not in name}
    save_file(weights, folder / "model.safetensors")
    failed = checks(start_worker(folder))["checkpoint"]
    assert failed.status is Status.FAIL
    for problem in ("no statistics of oxe_droid, only of nothing", "transformer: 1 missing tensor (head.modulation)"):
        assert problem in failed.found
    assert "does not exist" in checks(start_worker(tmp_path / "nothing"))["checkpoint"].found


@pytest.mark.parametrize(
    ("options", "precision", "message"),
    [
        ({"attention": "flash3"}, "bf16", "attention 'flash3' can't be used: it needs a CUDA device"),
        ({"layer_operations": "triton"}, "bf16", "layer operations 'triton' can't be used"),
        ({"layer_operations": "unfused"}, "fp8", "'fp8' has no unfused form"),
    ],
)
def test_kernels_that_a_robot_model_names_are_looked_for(
    tmp_path: Path, options: dict[str, object], precision: str, message: str
) -> None:
    folder = write_checkpoint(tmp_path)
    found = checks(replace(start_worker(folder, **options), precision=precision))["checkpoint"]
    assert (found.status, message in found.found) == (Status.FAIL, True)


def test_a_robot_model_on_a_card(tmp_path: Path, card: SimpleNamespace) -> None:
    found = checks(replace(start_worker(write_checkpoint(tmp_path)), device="cuda:0"))
    assert {found[name].status for name in ("checkpoint", "device memory", "host memory", "memlock")} == {Status.OK}
    assert found["fused kernels"].status is Status.WARN
    card.free_bytes = 1_000_000
    failed = checks(replace(start_worker(tmp_path), device="cuda:0"))["device memory"]
    assert failed.status is Status.FAIL


def test_a_damaged_tokenizer_of_a_robot_model_is_found_before_any_weights(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert "is no tokenizer" in checks(start_worker(folder))["checkpoint"].found
    for file in (folder / "tokenizer").iterdir():
        file.unlink()
    assert "has none of tokenizer.json" in checks(start_worker(folder))["checkpoint"].found


def test_a_model_without_a_planner_is_not_looked_into() -> None:
    other = StartWorker(model="fake", checkpoint="", width=96, height=64, fps=16)
    assert "not looked into" in checks(other)["checkpoint"].found


def test_the_answer_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stream = SimpleNamespace(buffer=io.BytesIO(msgspec.json.encode(start())))
    monkeypatch.setattr(sys, "stdin", stream)
    assert doctor.main() == 0
    assert {entry["status"] for entry in json.loads(capsys.readouterr().out)} == {"OK"}


def test_streamed_weights_are_planned_and_timed(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    card.free_bytes = 48 * 10**9
    monkeypatch.setattr(doctor_offload, "measure_link", lambda device: 50e9)
    monkeypatch.setattr(doctor_offload, "_product_rate", lambda device, dtype: 700e12)

    whole = checks(start(**FULL))
    streamed = checks(start(**FULL, offload=OffloadSettings(weights="streamed", resident_bytes=1_830_000_000)))

    assert "offload" not in whole
    assert whole["device memory"].status is Status.FAIL
    assert streamed["device memory"].status is Status.OK
    assert streamed["offload"].status is Status.OK
    # 40 layers: five times 598 MB, once 210 MB; 1149 TFLOP.
    assert re.search(
        r"forward: 0 of 40 layers resident, .* 128\.0 GB copied a chunk, .* at 50\.0 GB/s a chunk takes at least "
        r"2561 ms \(copying 2561 ms, computing 16\d\d ms\)",
        streamed["offload"].found,
    ), streamed["offload"].found
    assert streamed["memlock"].expected.startswith("47.")


def test_settings_that_exclude_each_other_are_told_as_a_worker_tells_them(card: SimpleNamespace) -> None:
    wish = OffloadSettings(weights="streamed", host="checkpoint_mmap")
    found = checks(start(**{**FULL, "precision": "fp8"}, offload=wish))["offload"]
    assert found.status is Status.FAIL
    assert "mapped checkpoint with float8 linears: the bytes are made at load" in found.found


def test_float8_is_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.bfloat16: 700.0, torch.float8_e4m3fn: 1400.0}
    monkeypatch.setattr(doctor_offload, "_product_rate", lambda device, dtype: rates[dtype])
    work = doctor_offload.ChunkWork(linears_flop=7000.0, attention_flop=1400.0, camera_flop=700.0)

    def compute_s(precision: str, device: str) -> float:
        return doctor_offload._compute_s(work, precision_plan(precision), torch.device(device))

    assert compute_s("bf16", "cuda:0") == 10 + 2 + 1
    assert compute_s("fp8", "cuda:0") == 5 + 2 + 1
    assert compute_s("fp8_kv", "cuda:0") == 5 + 1 + 1
    assert compute_s("fp8_kv", "cpu") == 10 + 2 + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rate_of_a_product_is_measured(dtype: torch.dtype) -> None:
    assert doctor_offload._product_rate(torch.device("cpu"), dtype) > 0


def test_streamed_weights_that_do_not_fit_are_told_with_the_numbers(card: SimpleNamespace) -> None:
    card.free_bytes = 30 * 10**9

    found = checks(start(**FULL, offload=OffloadSettings(weights="streamed")))

    assert found["offload"].status is Status.FAIL
    assert re.search(r"streamed weights do not fit: \d+ bytes", found["offload"].found)
