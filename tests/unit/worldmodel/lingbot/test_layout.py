"""Both layouts of the checkpoint: the full plan equals the published facts, a tiny one loads the same from either."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.lingbot_golden import DEFAULT_ROOT
from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.plan import CheckpointPlan
from worldmodel.checkpoint.writer import write_checkpoint
from worldmodel.lingbot.config import LingBotOptions, parse_options
from worldmodel.lingbot.empty_model import build_empty, open_any
from worldmodel.lingbot.layout import Layout, plan_checkpoint
from worldmodel.lingbot.original_layout import (
    TEXT_ENCODER_FILE,
    VAE_FILE,
    OriginalCheckpoint,
    is_original_layout,
    transformer_config,
)
from worldmodel.lingbot.published import FULL, TINY
from worldmodel.lingbot.weights import LoadedModel, load_model
from worldmodel.wan.precision import precision_plan
from worldmodel.wan.text_names import TextPlacement

WIDTH, FFN = 5120, 13824


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    """A tiny checkpoint in both layouts."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for layout in Layout:
        write_checkpoint(plan_checkpoint(TINY, layout=layout), folder / layout, seed=3)
    return {layout: folder / layout for layout in Layout}


@pytest.fixture(scope="module", params=list(Layout))
def full_plan(request: pytest.FixtureRequest) -> CheckpointPlan:
    return plan_checkpoint(FULL, layout=request.param)


def load(folder: Path, precision: str = "fp32") -> LoadedModel:
    cpu = torch.device("cpu")
    return load_model(folder, LingBotOptions(), precision_plan(precision, device=cpu), cpu, lambda *_: None)


def test_the_full_transformer_has_the_published_shards(full_plan: CheckpointPlan) -> None:
    shards = [file for file in full_plan.tensor_files if "transformer" in file.path]
    assert [len(shard.tensors) for shard in shards] == [180] * 7 + [161]
    assert [Path(shard.path).name for shard in shards] == [
        f"diffusion_pytorch_model-{number:05}-of-00008.safetensors" for number in range(1, 9)
    ]
    assert sum(shard.num_bytes for shard in shards) == 4 * 18_544_332_864
    assert max(shard.num_bytes for shard in shards) < 10e9
    assert {tensor.dtype for shard in shards for tensor in shard.tensors} == {"F32"}


def test_the_full_transformer_has_the_published_names_and_shapes(full_plan: CheckpointPlan) -> None:
    found = {
        tensor.name: tensor.shape
        for file in full_plan.tensor_files
        if "transformer" in file.path
        for tensor in file.tensors
    }
    linears = {
        "patch_embedding_wancamctrl": (WIDTH, 1536),
        "c2ws_hidden_states_layer1": (WIDTH, WIDTH),
        "c2ws_hidden_states_layer2": (WIDTH, WIDTH),
        "text_embedding.0": (WIDTH, 4096),
        "text_embedding.2": (WIDTH, WIDTH),
        "time_embedding.0": (WIDTH, 256),
        "time_embedding.2": (WIDTH, WIDTH),
        "time_projection.1": (6 * WIDTH, WIDTH),
        "head.head": (64, WIDTH),
        "patch_embedding": (WIDTH, 36, 1, 2, 2),
    }
    other: dict[str, tuple[int, ...]] = {"head.modulation": (1, 2, WIDTH)}
    for number in range(40):
        layer = f"blocks.{number}"
        for attention in ("self_attn", "cross_attn"):
            linears |= {f"{layer}.{attention}.{part}": (WIDTH, WIDTH) for part in "qkvo"}
            other |= {f"{layer}.{attention}.norm_{part}.weight": (WIDTH,) for part in "qk"}
        linears |= {f"{layer}.ffn.0": (FFN, WIDTH), f"{layer}.ffn.2": (WIDTH, FFN)}
        for camera in ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer"):
            linears[f"{layer}.{camera}"] = (WIDTH, WIDTH)
        other |= {f"{layer}.modulation": (1, 6, WIDTH)}
        other |= {f"{layer}.norm3.{part}": (WIDTH,) for part in ("weight", "bias")}
    expected = other
    for name, shape in linears.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    assert found == expected


def test_the_full_plan_has_the_published_other_parts() -> None:
    plan = plan_checkpoint(FULL, layout=Layout.DIFFUSERS)
    vae = [file for file in plan.tensor_files if file.path.startswith("vae/")]
    text = [file for file in plan.tensor_files if file.path.startswith("text_encoder/")]
    assert sum(len(file.tensors) for file in vae) == 194
    assert sum(len(file.tensors) for file in text) == 242
    assert sum(file.num_bytes for file in text) == pytest.approx(11.4e9, rel=0.01)
    index = plan.json_files["model_index.json"]
    assert isinstance(index, dict)
    assert index["_class_name"] == "LingBotWorldCausalDMDPipeline"
    assert [index[name] for name in ("image_encoder", "image_processor", "transformer_2")] == [[None, None]] * 3
    config = plan.json_files["transformer/config.json"]
    assert isinstance(config, dict)
    window = [config[key] for key in ("sink_size", "num_frames_per_block", "sliding_window_num_frames")]
    assert window == [9, 3, 18]
    weight_map = plan.json_files["transformer/diffusion_pytorch_model.safetensors.index.json"]
    assert isinstance(weight_map, dict)
    assert len(weight_map["weight_map"]) == 1421
    assert weight_map["metadata"]["total_size"] == 4 * 18_544_332_864


def test_a_reduced_transformer_takes_half() -> None:
    plan = plan_checkpoint(FULL, layout=Layout.DIFFUSERS, transformer_dtype="BF16")
    assert sum(file.num_bytes for file in plan.tensor_files if file.path.startswith("transformer/")) == 37_088_665_728


def test_a_folder_that_holds_both_layouts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    assert is_original_layout(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"holds both layouts, the original \(transformers/\) and that of diffusers"
    ):
        open_any(tmp_path)


@pytest.mark.parametrize(
    ("entries", "texts"),
    [
        (
            {"transformer_2": ["diffusers", "Second"]},
            ["transformer_2 must be null, as the model has one transformer, got ['diffusers', 'Second']"],
        ),
        (
            {"_class_name": "WanPipeline", "transformer_2": 3},
            [
                "_class_name must be 'LingBotWorldCausalDMDPipeline', got 'WanPipeline'",
                "transformer_2 must be null, as the model has one transformer, got 3",
            ],
        ),
    ],
)
def test_an_index_of_another_kind_of_model_is_refused(
    checkpoints: dict[Layout, Path], tmp_path: Path, entries: dict[str, object], texts: list[str]
) -> None:
    folder = _linked_copy(checkpoints[Layout.DIFFUSERS], tmp_path / "copy", without=("model_index.json",))
    (folder / "model_index.json").write_text(json.dumps(TINY.model_index | entries))
    with pytest.raises(CheckpointError) as caught:
        build_empty(open_any(folder), LingBotOptions())
    assert [str(problem) for problem in caught.value.problems] == [f"model_index.json: {text}" for text in texts]


def test_an_index_may_leave_out_what_is_not_there(checkpoints: dict[Layout, Path], tmp_path: Path) -> None:
    folder = _linked_copy(checkpoints[Layout.DIFFUSERS], tmp_path / "copy", without=("model_index.json",))
    left_out = ("_class_name", "transformer_2")
    index = {key: entry for key, entry in TINY.model_index.items() if key not in left_out}
    (folder / "model_index.json").write_text(json.dumps(index))
    build_empty(open_any(folder), LingBotOptions())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_layouts_give_bit_identical_models(checkpoints: dict[Layout, Path], precision: str) -> None:
    models = [load(checkpoints[layout], precision) for layout in Layout]
    for part in ("transformer", "vae"):
        first, second = (getattr(model, part).state_dict() for model in models)
        assert first.keys() == second.keys()
        assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []
        assert {tensor.dtype for tensor in first.values()} == {tensor.dtype for tensor in second.values()}
    first, second = models
    assert torch.equal(first.vae.latents_std, second.vae.latents_std)
    assert first.transformer.config == second.transformer.config
    assert first.flow_shift == second.flow_shift == 5.0
    assert torch.equal(first.text_encoder.encode("a small town"), second.text_encoder.encode("a small town"))
    assert first.num_parameters == second.num_parameters


def test_what_each_part_took_is_in_the_log(checkpoints: dict[Layout, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load(checkpoints[Layout.DIFFUSERS])
    for part in ("transformer", "vae", "text_encoder"):
        assert re.search(rf"{part}: (\d+\.\d) of \1 MB, \d+ MB/s", caplog.text)


def test_a_checkpoint_is_the_same_bytes_for_the_same_seed(checkpoints: dict[Layout, Path], tmp_path: Path) -> None:
    def digests(folder: Path) -> dict[str, str]:
        files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix != ".pth")
        return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    plan = plan_checkpoint(TINY, layout=Layout.DIFFUSERS)
    for seed in (3, 4):
        write_checkpoint(plan, tmp_path / str(seed), seed=seed)
    expected = digests(checkpoints[Layout.DIFFUSERS])
    assert digests(tmp_path / "3") == expected
    other = digests(tmp_path / "4")
    assert {name for name in expected if other[name] != expected[name]} == {
        name for name in expected if name.endswith(".safetensors")
    }


def test_the_made_tokenizer_is_of_the_published_class(checkpoints: dict[Layout, Path]) -> None:
    encoder = load(checkpoints[Layout.ORIGINAL]).text_encoder
    ids = encoder.token_ids("snow")
    assert ids[-1] == 1
    assert len(ids) == len(set(ids)) > 3
    assert max(encoder.token_ids("snow \u00e9 \u96ea")) < 512
    assert encoder.token_ids("snow") != encoder.token_ids("sand")


def test_every_missing_part_of_the_original_layout_is_named(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    parts = ("transformers/config.json", VAE_FILE, TEXT_ENCODER_FILE, "google/umt5-xxl/")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert [str(problem).rpartition(": ")[2] for problem in caught.value.problems] == [
        f"has the original layout, but lacks {part}" for part in parts
    ]


def test_every_missing_part_of_the_diffusers_layout_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps(TINY.model_index))
    names = ("transformer", "vae", "text_encoder", "scheduler", "tokenizer")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert [str(problem).rpartition("no folder ")[2] for problem in caught.value.problems] == list(names)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_missing_tokenizer_does_not_hide_what_else_is_wrong(
    checkpoints: dict[Layout, Path], layout: Layout, tmp_path: Path
) -> None:
    is_original = layout is Layout.ORIGINAL
    text = TEXT_ENCODER_FILE if is_original else "text_encoder/model.safetensors"
    changed = ("tokenizer.json", "tokenizer_config.json", Path(text).name)
    folder = _linked_copy(checkpoints[layout], tmp_path / "copy", without=changed)
    (folder / text).parent.mkdir(parents=True, exist_ok=True)
    stored = (
        torch.load(checkpoints[layout] / text, weights_only=True)
        if is_original
        else load_file(checkpoints[layout] / text)
    )
    stored["strange"] = torch.zeros(1)
    (torch.save if is_original else save_file)(stored, folder / text)
    shutil.rmtree(folder / ("google" if is_original else "tokenizer"), ignore_errors=True)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    extra, missing = map(str, caught.value.problems)
    assert extra.startswith("text_encoder: 1 extra tensor (strange")
    assert missing.startswith("tokenizer: ")
    assert missing.endswith(("but lacks google/umt5-xxl/", "but there is no folder tokenizer"))


def test_a_folder_that_cannot_be_listed_is_one_sentence(
    checkpoints: dict[Layout, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    checkpoint = OriginalCheckpoint(checkpoints[Layout.ORIGINAL])
    monkeypatch.setattr(Path, "rglob", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\)"):
        _ = checkpoint.digest


def test_misfits_of_all_components_are_named_at_once(checkpoints: dict[Layout, Path], tmp_path: Path) -> None:
    source = checkpoints[Layout.ORIGINAL]
    folder = _linked_copy(source, tmp_path / "copy", without=(VAE_FILE, TEXT_ENCODER_FILE))
    vae = torch.load(source / VAE_FILE, weights_only=True)
    vae["decoder.strange.weight"] = vae.pop("decoder.middle.1.proj.bias")
    vae["encoder.middle.1.proj.strange"] = vae["decoder.strange.weight"]
    torch.save(vae, folder / VAE_FILE)
    text = torch.load(source / TEXT_ENCODER_FILE, weights_only=True)
    text["norm.weight"] = text["norm.weight"][:-1]
    text["blocks.1.attn.o.weight"] = text["blocks.1.attn.o.weight"].to(torch.int8)
    torch.save(text, folder / TEXT_ENCODER_FILE)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert tuple(map(str, caught.value.problems)) == (
        "vae: 1 missing tensor (decoder.middle.1.proj.bias (here decoder.mid_block.attentions.0.proj.bias))",
        "vae: 2 extra tensors (decoder.strange.weight, "
        "encoder.middle.1.proj.strange (here encoder.mid_block.attentions.0.proj.strange))",
        "text_encoder: 1 wrong shape (norm.weight (here encoder.final_layer_norm.weight) [31] instead of [32])",
        "text_encoder: 1 wrong type "
        "(blocks.1.attn.o.weight (here encoder.block.1.layer.0.SelfAttention.o.weight) I8 for torch.float32)",
    )


def test_a_file_without_the_tensor_that_tells_its_size_says_so_by_its_key(
    checkpoints: dict[Layout, Path], tmp_path: Path
) -> None:
    folder = _linked_copy(checkpoints[Layout.ORIGINAL], tmp_path / "copy", without=(VAE_FILE,))
    torch.save({"encoder.head.0.gamma": torch.zeros(1)}, folder / VAE_FILE)
    with pytest.raises(CheckpointError, match=rf"{VAE_FILE}: tensor encoder\.conv1\.weight, which tells the size"):
        load(folder)


def test_layers_missing_at_the_end_of_the_published_text_encoder_are_missed(
    checkpoints: dict[Layout, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file states no depth: without the last layers it would look like a shallower encoder."""
    monkeypatch.setattr("worldmodel.lingbot.original_layout.FULL", TINY)
    folder = _linked_copy(checkpoints[Layout.ORIGINAL], tmp_path / "copy", without=(TEXT_ENCODER_FILE,))
    whole = torch.load(checkpoints[Layout.ORIGINAL] / TEXT_ENCODER_FILE, weights_only=True)
    torch.save({key: tensor for key, tensor in whole.items() if "blocks.1." not in key}, folder / TEXT_ENCODER_FILE)
    with pytest.raises(CheckpointError, match=r"text_encoder: \d+ missing tensors \(blocks\.1\."):
        load(folder)


def test_two_keys_for_one_tensor_are_refused(checkpoints: dict[Layout, Path], tmp_path: Path) -> None:
    folder = _linked_copy(checkpoints[Layout.ORIGINAL], tmp_path / "copy", without=(VAE_FILE,))
    vae = torch.load(checkpoints[Layout.ORIGINAL] / VAE_FILE, weights_only=True)
    torch.save({**vae, "quant_conv.bias": torch.zeros(1)}, folder / VAE_FILE)
    with pytest.raises(CheckpointError, match=r"holds one tensor under two keys, conv1\.bias and quant_conv\.bias"):
        load(folder)


@pytest.mark.parametrize("layout", list(Layout))
def test_what_cannot_be_read_does_not_hide_what_else_is_wrong(
    checkpoints: dict[Layout, Path], layout: Layout, tmp_path: Path
) -> None:
    is_original = layout is Layout.ORIGINAL
    shard = "diffusion_pytorch_model-00003-of-00008.safetensors"
    vae = VAE_FILE if is_original else "vae/diffusion_pytorch_model.safetensors"
    tokenizer = "google/umt5-xxl/tokenizer.json" if is_original else "tokenizer/tokenizer.json"
    transformer = "transformers" if is_original else "transformer"
    text = TEXT_ENCODER_FILE if is_original else "text_encoder/model.safetensors"
    changed = (shard, Path(vae).name, "tokenizer.json", Path(text).name)
    source = checkpoints[layout]
    folder = _linked_copy(source, tmp_path / "copy", without=changed)
    (folder / transformer / shard).write_bytes(b"rubbish")
    for broken in {vae, tokenizer}:
        (folder / broken).parent.mkdir(parents=True, exist_ok=True)
        (folder / broken).write_bytes(b"rubbish")
    key = "norm.weight" if is_original else "encoder.final_layer_norm.weight"
    stored = torch.load(source / text, weights_only=True) if is_original else load_file(source / text)
    del stored[key]
    (folder / text).parent.mkdir(parents=True, exist_ok=True)
    (torch.save if is_original else save_file)(stored, folder / text)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    found = [str(problem).removeprefix(f"{name}: ") for problem in caught.value.problems for name in ("vae",)]
    expected = [
        rf"transformer: {folder / transformer / shard}: is not a safetensors file",
        rf"{folder / vae}: is (not a safetensors file|truncated, or not written by torch\.save)",
        rf"text_encoder: 1 missing tensor \({key}",
        rf"tokenizer: {folder / tokenizer}: is not valid JSON",
    ]
    assert len(found) == len(expected)
    assert all(any(re.match(pattern, text) for text in found) for pattern in expected)


@pytest.mark.parametrize("placement", list(TextPlacement))
def test_the_text_encoder_goes_where_the_options_say(checkpoints: dict[Layout, Path], placement: TextPlacement) -> None:
    options = LingBotOptions.from_json(parse_options({"text_encoder": placement.value}))
    folder, plan, device = checkpoints[Layout.DIFFUSERS], precision_plan("fp32"), torch.device("cpu")
    model = load_model(folder, options, plan, device, lambda *_: None)
    assert model.text_encoder.placement == placement


def test_an_original_config_without_a_window_takes_the_published_one(caplog: pytest.LogCaptureFixture) -> None:
    content = {"dim": 64, "num_heads": 2, "num_layers": 2, "in_dim": 36, "out_dim": 16, "sink_size": 4}
    with caplog.at_level(logging.INFO):
        config = transformer_config(content, "here")
    assert (config["sink_size"], config["num_frames_per_block"], config["sliding_window_num_frames"]) == (4, 3, 18)
    assert "config has no num_frames_per_block, sliding_window_num_frames, local_attn_size" in caplog.text
    assert config["attention_head_dim"] == 32
    assert transformer_config(config, "here") == config


def test_an_original_config_that_gives_its_window_in_one_key_has_that_window() -> None:
    """`local_attn_size` is the whole window, the sink counted; -1 says nothing about it."""
    content = {"dim": 64, "num_heads": 2, "sink_size": 4}
    windows = {
        size: transformer_config(content | {"local_attn_size": size}, "here")["sliding_window_num_frames"]
        for size in (12, 18, -1)
    }
    assert windows == {12: 12, 18: 18, -1: 18}
    both = transformer_config(content | {"local_attn_size": 12, "sliding_window_num_frames": 15}, "here")
    assert both["sliding_window_num_frames"] == 15


def test_the_statistics_that_the_original_layout_leaves_unsaid_are_those_of_the_golden_vae() -> None:
    golden = json.loads((DEFAULT_ROOT / "lingbot" / "vae_names.json").read_text())["diffusers_config"]
    for name in ("latents_mean", "latents_std"):
        assert FULL.vae[name] == golden[name]


def test_an_original_config_keeps_how_many_text_rows_are_attended_to() -> None:
    assert transformer_config({"dim": 64, "num_heads": 2, "text_len": 16}, "here")["text_len"] == 16
    assert "text_len" not in transformer_config({"dim": 64, "num_heads": 2}, "here")


@pytest.mark.parametrize("keys", [{"dim": 64, "num_heads": 2}, {"num_attention_heads": 2}])
def test_the_class_that_an_original_config_names_is_the_authors_affair(keys: dict[str, object]) -> None:
    assert "_class_name" not in transformer_config(keys | {"_class_name": "WanModel"}, "here")


def test_an_original_config_with_keys_of_both_layouts_is_an_original_one() -> None:
    content = {"dim": 64, "num_heads": 2, "in_dim": 36, "num_layers": 2}
    both = content | {"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 36}
    assert transformer_config(both, "here") == transformer_config(content, "here")


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"num_attention_heads": 4}, "num_attention_heads is 4, the keys of the original layout make it 2"),
        ({"attention_head_dim": 16}, "attention_head_dim is 16, the keys of the original layout make it 32"),
        ({"in_channels": "36"}, "in_channels is '36', the keys of the original layout make it 36"),
    ],
)
def test_an_original_config_that_contradicts_itself_is_refused(extra: dict[str, object], text: str) -> None:
    with pytest.raises(CheckpointError, match=f"^here: config: {text}$"):
        transformer_config({"dim": 64, "num_heads": 2, "in_dim": 36} | extra, "here")


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ({"dim": 64, "num_heads": 3}, "64 and 3"),
        ({"dim": "64", "num_heads": 2}, "'64' and 2"),
        ({"num_heads": 2}, "null and 2"),
        ({"dim": True, "num_heads": 2}, "true and 2"),
    ],
)
def test_an_original_config_of_impossible_width_is_refused(content: dict[str, object], got: str) -> None:
    with pytest.raises(CheckpointError, match=f"config: dim must be a multiple of num_heads, got {got}$"):
        transformer_config(content, "here")


def test_a_folder_that_is_in_use_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="must be a new or empty folder"):
        write_checkpoint(plan_checkpoint(TINY, layout=Layout.DIFFUSERS), tmp_path, seed=0)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_disk_too_small_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 5_000_000_000})()
    monkeypatch.setattr("worldmodel.checkpoint.writer.shutil.disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"takes 86\.0 GB, the disk has 5\.0 GB free"):
        write_checkpoint(plan_checkpoint(FULL, layout=Layout.DIFFUSERS), tmp_path / "new", seed=0)
    assert not (tmp_path / "new").exists()


def test_progress_of_writing_ends_at_one(tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []
    plan = plan_checkpoint(TINY, layout=Layout.DIFFUSERS)
    write_checkpoint(plan, tmp_path / "new", seed=0, progress=lambda fraction, detail: seen.append((fraction, detail)))
    assert [fraction for fraction, _ in seen] == sorted(fraction for fraction, _ in seen)
    assert seen[-1] == (1.0, "text_encoder/model.safetensors")
    index = json.loads((tmp_path / "new/transformer/diffusion_pytorch_model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 8


def _linked_copy(source: Path, target: Path, *, without: tuple[str, ...]) -> Path:
    for file in source.rglob("*"):
        place = target / file.relative_to(source)
        if file.is_file() and file.name not in without:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file)
    return target
