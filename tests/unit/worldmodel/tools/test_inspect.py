"""`inspect`: numbers of the full model against hand arithmetic, damaged checkpoints, and its two outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from tests.support.checkpoint_headers import write_headers
from tests.support.empty_models import lay_out_once
from worldmodel.checkpoint.inspection import CONTEXT_BYTES
from worldmodel.checkpoint.writer import write_checkpoint
from worldmodel.kernels.names import AttentionChoice, GraphChoice
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.inspection import inspect_checkpoint
from worldmodel.lingbot.layout import Layout, plan_checkpoint
from worldmodel.lingbot.published import FULL as PUBLISHED
from worldmodel.lingbot.published import TINY
from worldmodel.offload_settings import OffloadSettings
from worldmodel.tools.inspect import main, show

FULL = "random:lingbot-world-v2"
WEIGHTS = ("transformer_weights", "vae_weights", "text_encoder_on_device")


@pytest.fixture(autouse=True)
def one_empty_model(monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out_once(monkeypatch)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_checkpoint(plan_checkpoint(TINY, layout=Layout.DIFFUSERS), tmp_path / "tiny", seed=0)
    return tmp_path / "tiny"


def test_memory_and_capacity_of_the_full_model() -> None:
    found = inspect_checkpoint(FULL, width=832, height=480, precision="bf16")
    memory = found.memory
    assert memory["transformer_weights_bytes"] == 2 * 18_544_332_864
    assert memory["kv_per_session_bytes"] == 2 * 40 * 5120 * 2 * 18 * 1560
    assert memory["text_kv_per_session_bytes"] == 2 * 512 * 5120 * 40 * 2
    per_layer = 4 * 4096 * 4096 + 3 * 4096 * 10240 + 32 * 64 + 2 * 4096
    assert memory["text_encoder_on_device_bytes"] == 2 * 2 * per_layer
    assert memory["text_encoder_on_host_bytes"] == 2 * 5_680_910_336
    sessions = {card.card_gb: card.sessions for card in found.capacity}
    assert sessions == {24.0: 0, 48.0: 0, 80.0: 1, 141.0: 3}
    assert memory["cuda_context_bytes"] == CONTEXT_BYTES
    weights_bytes = sum(memory[f"{name}_bytes"] for name in WEIGHTS)
    assert found.capacity[2].spare_bytes == 80 * 10**9 - CONTEXT_BYTES - weights_bytes - memory["first_session_bytes"]
    assert found.problems == ()


def test_settings_that_count_whatever_is_streamed_count_here(capsys: pytest.CaptureFixture[str]) -> None:
    def first_session(*settings: str) -> tuple[int, int]:
        flags = [word for setting in settings for word in ("--offload", setting)]
        assert main([FULL, "--json", "--cards", "80", *flags]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        return memory["first_session_bytes"], memory["vae_weights_bytes"]

    frame_bytes, stream_bytes, hidden_bytes = 96 * 480 * 832 * 2, 3 * 1560 * 5120 * 2, 2 * 3 * 1560 * 13824 * 2
    vae_bytes = 2 * 126_892_531
    bytes_now, weights_bytes = first_session()
    rest_bytes = bytes_now - (5 * 12 + 2) * frame_bytes
    assert weights_bytes == vae_bytes
    # Then denoising is the larger: scale and shift of 40 layers, 12 streams, the feed-forward.
    assert first_session("decode=per_latent_frame")[0] - rest_bytes == (2 * 40 + 12) * stream_bytes + hidden_bytes
    assert first_session("vae=parked") == (bytes_now + vae_bytes, 0)
    three = first_session("decode=per_latent_frame", "vae=parked", "camera_modulation=per_layer")
    assert three == (rest_bytes + (5 * 4 + 2) * frame_bytes + vae_bytes, 0)


def test_graphs_are_counted_where_a_worker_may_capture_them_and_refused_where_it_can_not() -> None:
    def look(graphs: str, attention: str = "auto", weights: str = "resident") -> tuple[int, str]:
        found = inspect_checkpoint(
            f"{FULL}-tiny",
            width=64,
            height=32,
            precision="bf16",
            options=LingBotOptions(graphs=GraphChoice(graphs), attention=AttentionChoice(attention)),
            offload=OffloadSettings(weights=weights),
            device=torch.device("cuda"),
        )
        return found.memory["first_session_bytes"], " ".join(problem.whole for problem in found.problems)

    without, nothing = look("off")
    counted, _ = look("auto")
    assert counted > without
    assert look("on") == (counted, nothing)
    assert look("auto", weights="streamed") == (without, nothing)
    assert "graphs 'on' can't be had: weights that are streamed" in look("on", weights="streamed")[1]
    assert "graphs 'on' can't be had: they need the attention 'flash3'" in look("on", attention="torch_sdpa")[1]


def test_other_settings_of_offloading_are_refused_by_name(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, message in {
        "weights=streamed": "--offload: expected one of vae, camera_modulation, decode, got 'weights'",
        "vae=away": "offload.vae: expected one of resident, parked, got 'away'",
    }.items():
        assert main([str(tiny), "--offload", flag]) == 2
        assert message in capsys.readouterr().err


def test_options_of_a_configuration_can_be_given(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def vae_bytes(*options: str) -> int:
        assert main([str(tiny), "--json", "--width", "64", "--height", "64", *options]) == 0
        return int(json.loads(capsys.readouterr().out)["memory"]["vae_weights_bytes"])

    assert vae_bytes("--option", "vae_precision=float32") == 2 * vae_bytes()
    assert main([str(tiny), "--option", "vae=float32"]) == 2
    assert "inspect: --option: " in capsys.readouterr().err


@pytest.mark.parametrize("layout", list(Layout))
def test_the_full_checkpoint_is_inspected_from_its_headers(
    tmp_path: Path, layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, tiny = (plan_checkpoint(model, layout=layout) for model in (PUBLISHED, TINY))
    # A vocabulary of 256384 tokens takes seconds to write and to read; a smaller one is as good.
    names = [name for name in plan.json_files if name.endswith("tokenizer.json")]
    assert len(names) == 1
    small = {**plan.json_files, names[0]: tiny.json_files[names[0]]}
    write_headers(replace(plan, json_files=small), tmp_path / "full")
    stored_bytes = sum(file.stat().st_size for file in (tmp_path / "full").rglob("*") if file.is_file())
    assert stored_bytes > 86e9
    assert main([str(tmp_path / "full"), "--json", "--cards", "80,141"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = {part["name"]: (part["dtypes"], part["num_tensors"], part["num_bytes"]) for part in found["components"]}
    assert parts == {
        "transformer": (["F32"], 1421, 4 * 18_544_332_864),
        "vae": (["F32"], 194, 4 * 126_892_531),
        "text_encoder": (["BF16"], 242, 2 * 5_680_910_336),
    }
    assert found["geometry"]["layers"] == 40
    assert [card["sessions"] for card in found["capacity"]] == [1, 3]
    assert found["problems"] == []


def test_float8_weights_are_counted_as_float8() -> None:
    found = inspect_checkpoint(FULL, width=832, height=480, precision="fp8_kv", text_encoder="streamed")
    large, outputs = 40 * (6 * 5120 * 5120 + 2 * 5120 * 13824), 40 * (7 * 5120 + 13824)
    assert found.memory["transformer_weights_bytes"] == 2 * 18_544_332_864 - large + 4 * outputs
    assert {card.card_gb: card.sessions for card in found.capacity}[141.0] == 6


def test_where_the_text_encoder_is_changes_what_the_device_holds() -> None:
    def on_device(text_encoder: str | None, options: dict[str, object]) -> int:
        found = inspect_checkpoint(
            FULL,
            width=832,
            height=480,
            precision="bf16",
            text_encoder=text_encoder,
            options=LingBotOptions.from_json(json.dumps(options).encode()),
            cards_gb=(80.0,),
        )
        return found.memory["text_encoder_on_device_bytes"]

    assert on_device("resident", {}) == 2 * 5_680_910_336
    assert on_device("cpu", {}) == 0
    assert on_device(None, {"text_encoder": "cpu"}) == 0
    assert on_device("resident", {"text_encoder": "cpu"}) == 2 * 5_680_910_336


@pytest.mark.parametrize("layout", list(Layout))
def test_a_tokenizer_without_files_is_found(tmp_path: Path, layout: Layout) -> None:
    write_checkpoint(plan_checkpoint(TINY, layout=layout), tmp_path / "tiny", seed=0)
    folder = tmp_path / "tiny" / ("tokenizer" if layout is Layout.DIFFUSERS else "google/umt5-xxl")
    for file in folder.iterdir():
        file.unlink()
    [problem] = inspect_checkpoint(str(tmp_path / "tiny"), width=64, height=64, precision="fp32").problems
    assert str(problem).startswith(f"tokenizer: {folder} has none of tokenizer.json")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("tokenizer.json", "{}", "is no tokenizer"),
        ("tokenizer.json", '{"model": {"type": "Unigram", "vocab": 3}}', "is no tokenizer"),
        ("tokenizer.json", "rubbish", "is not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
    ],
)
def test_a_damaged_tokenizer_is_found_before_any_weights(tiny: Path, name: str, content: str, text: str) -> None:
    (tiny / "tokenizer" / name).write_text(content)
    [problem] = inspect_checkpoint(str(tiny), width=64, height=64, precision="fp32").problems
    assert str(problem).startswith(f"tokenizer: {tiny / 'tokenizer' / name}: ")
    assert text in str(problem)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_tokenizer_of_more_tokens_than_the_encoder_knows_is_found(tmp_path: Path, layout: Layout) -> None:
    """Tokens that only its config adds count too."""
    write_checkpoint(plan_checkpoint(TINY, layout=layout), tmp_path / "tiny", seed=0)
    folder = tmp_path / "tiny" / ("tokenizer" if layout is Layout.DIFFUSERS else "google/umt5-xxl")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"extra_ids": 100}))
    [problem] = inspect_checkpoint(str(tmp_path / "tiny"), width=64, height=64, precision="fp32").problems
    assert str(problem) == "tokenizer: tokenizer has 548 tokens, text_encoder only 512"


@pytest.mark.parametrize("others", [(), ("spiece.model",)])
def test_a_tokenizer_without_its_vocabulary_is_found(tiny: Path, others: tuple[str, ...]) -> None:
    """transformers loads one of four tokens from the config alone, to which all prompts are much the same."""
    (tiny / "tokenizer" / "tokenizer.json").unlink()
    for name in others:
        (tiny / "tokenizer" / name).write_bytes(b"read by nobody")
    [problem] = inspect_checkpoint(str(tiny), width=64, height=64, precision="fp32").problems
    text = f"tokenizer: {tiny / 'tokenizer'} has no tokenizer.json, which only a ByT5Tokenizer does without"
    assert str(problem) == text


def test_the_second_vocabulary_of_a_published_tokenizer_is_left_alone(tiny: Path) -> None:
    (tiny / "tokenizer" / "spiece.model").write_bytes(b"read by nobody")
    assert inspect_checkpoint(str(tiny), width=64, height=64, precision="fp32").problems == ()


def test_no_tensor_data_is_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("tensor data was read")

    monkeypatch.setattr("worldmodel.checkpoint.loading.stream_tensors", refuse)
    found = inspect_checkpoint(str(tiny), width=96, height=64, precision="fp32")
    assert [(part.name, part.num_tensors) for part in found.components] == [
        ("transformer", 91),
        ("vae", 194),
        ("text_encoder", 22),
    ]
    assert [part.dtypes for part in found.components] == [("F32",), ("F32",), ("BF16",)]
    assert found.geometry["tokens_per_latent_frame"] == 24


def test_json_has_everything(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny), "--json", "--width", "96", "--height", "64", "--cards", "8,16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"] == str(tiny)
    assert [card["card_gb"] for card in found["capacity"]] == [8.0, 16.0]
    assert sum(part["num_parameters"] for part in found["components"]) == 576_159
    assert len(found["digest"]) == 64


def test_the_tables_name_every_part(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny)]) == 0
    text = capsys.readouterr().out
    for word in ("transformer", "vae", "text_encoder", "latent frames per chunk", "kv per session", "card GB"):
        assert word in text


def test_eighty_columns_cut_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=80, file=StringIO())
    show(inspect_checkpoint(FULL, width=832, height=480, precision="bf16"), console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for number in ("18,544,332,864", "5,680,910,336", "37.09 GB", "11.36 GB"):
        assert number in text


def test_sessions_are_counted_up_to_a_limit_that_is_said(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny), "--width", "96", "--height", "64", "--cards", "141"]) == 0
    assert "64 or more" in capsys.readouterr().out


@pytest.mark.parametrize("cards", ["", "24,", "many", "nan", "0", "-1", "1e9"])
def test_cards_that_are_none_are_refused(cards: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([FULL, f"--cards={cards}"])
    assert caught.value.code == 2
    assert (
        f"inspect: --cards: expected numbers of GB above 0 with commas between them, such as 24,80, got '{cards}'"
        in (capsys.readouterr().err)
    )


def test_what_does_not_fit_is_shown_and_the_exit_code_is_1(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny / "vae/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["strange"] = tensors.pop("quant_conv.bias")
    save_file(tensors, file)
    assert main([str(tiny)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "cannot be served: vae: 1 missing tensor (quant_conv.bias)" in text
    assert "cannot be served: vae: 1 extra tensor (strange)" in text


def test_json_lists_what_the_tables_count(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny / "vae/diffusion_pytorch_model.safetensors"
    names = [f"strange{number:02}" for number in range(25)]
    save_file({**load_file(file), **{name: torch.zeros(1) for name in names}}, file)
    assert main([str(tiny)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"vae: 25 extra tensors ({', '.join(names[:20])} and 5 more)" in text
    assert main([str(tiny), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == [f"vae: 25 extra tensors ({', '.join(names)})"]


def test_a_broken_shard_leaves_numbers_and_other_problems_to_be_shown(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = tiny / "transformer/diffusion_pytorch_model-00002-of-00008.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (tiny / "tokenizer/tokenizer.json").write_text("rubbish")
    assert main([str(tiny), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    first, second = found["problems"]
    assert first.startswith(f"transformer: {shard}: is truncated")
    assert second.startswith("tokenizer: ")
    assert found["memory"]["transformer_weights_bytes"] > 0


def test_json_has_all_problems_of_a_checkpoint_that_cannot_be_laid_out(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny / "vae/config.json").write_text("rubbish")
    (tiny / "text_encoder/model.safetensors").write_bytes(b"rubbish")
    assert main([str(tiny), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    first, second = found["problems"]
    assert first.startswith(f"{tiny / 'vae/config.json'}: is not valid JSON")
    assert second == f"text_encoder: {tiny / 'text_encoder/model.safetensors'}: is not a safetensors file"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 1, "checkpoint folder does not exist"),
        (["n" * 300], 1, "cannot be read (File name too long)"),
        (["random:lingbot-world-v2-tiny:99999999999999999999"], 1, "with a seed from 0 to 9007199254740991"),
        ([FULL, "--width", "100"], 2, "width must be a multiple of 16 pixels, got 100"),
        ([FULL, "--precision", "int4"], 2, "unknown precision 'int4'"),
    ],
)
def test_a_wrong_call_is_one_sentence(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    assert message in capsys.readouterr().err
