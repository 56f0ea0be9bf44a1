"""Checkpoint folders: everything that does not fit is named at once, adapters are merged, shards are found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.dreamzero_checkpoint import start_worker, tiny_config, training_config, write_checkpoint
from tests.support.dreamzero_golden import manifest, tensors
from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.dreamzero.adapter import create_adapter
from worldmodel.dreamzero.config import DreamZeroOptions
from worldmodel.dreamzero.weights import load_model, read_checkpoint
from worldmodel.errors import LoadFailed
from worldmodel.messages import LoadStage
from worldmodel.wan.precision import precision_plan

OPTIONS = DreamZeroOptions()


def load(folder: Path, options: DreamZeroOptions = OPTIONS):
    plan = precision_plan("fp32")
    return load_model(str(folder), options, plan, torch.device("cpu"), lambda stage, fraction, detail: None)


@contextmanager
def refused_with(*problems: str) -> Iterator[None]:
    """Check that a checkpoint is refused with all of these."""
    with pytest.raises(CheckpointError) as caught:
        yield
    for problem in problems:
        assert problem in str(caught.value), problem


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    weights = dict(tensors("weights"))
    del weights["action_head.model.head.modulation"]
    weights["action_head.model.stranger"] = torch.zeros(1)
    weights["action_head.vae.model.conv1.bias"] = torch.zeros(3)
    del weights["action_head.text_encoder.norm.weight"]
    weights["backbone.weight"] = torch.zeros(1)
    metadata = json.loads(json.dumps({"oxe_droid": manifest()["metadata_json_example"]}))
    del metadata["oxe_droid"]["statistics"]["state"]["joint_position"]["q01"]
    metadata["oxe_droid"]["modalities"]["video"]["wrist_image_left"]["resolution"] = [32]
    training = training_config() | {"relative_action_keys": ["elbow"]}
    folder = write_checkpoint(tmp_path, weights=weights, metadata=metadata, training=training)
    with refused_with(
        "transformer: 1 missing tensor (head.modulation)",
        "transformer: 1 extra tensor (action_head.model.stranger (here stranger))",
        "vae: 1 wrong shape (action_head.vae.model.conv1.bias (here quant_conv.bias) [3] instead of [32])",
        "text_encoder: 1 missing tensor (encoder.final_layer_norm.weight)",
        "1 tensor of no known part, such as backbone.weight",
        "statistics.state.joint_position: q01 is missing, which normalization by q99 needs",
        "modalities.video.wrist_image_left.resolution",
        "relative_action_keys names no action: elbow",
    ):
        load(folder)


def test_all_problems_of_the_sizes_are_named_at_once(tmp_path: Path) -> None:
    network = tiny_config()["action_head_cfg"]["config"]["diffusion_model_cfg"]
    network = {key: value for key, value in network.items() if key != "dim"} | {"model_type": "t2v", "num_heads": "4"}
    folder = write_checkpoint(tmp_path, diffusion_model_cfg=network, num_frames=32, decouple_inference_noise=True)
    with refused_with(
        "dim is missing",
        "model_type: expected one of i2v, ti2v",
        "num_heads: expected an integer",
        "num_frames: expected one more than a multiple of 4",
        "video_inference_final_noise",
    ):
        read_checkpoint(str(folder), OPTIONS)


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_frame_per_block is 2 in diffusion_model_cfg, but"):
        load(write_checkpoint(tmp_path / "a", num_frame_per_block=3))
    with pytest.raises(CheckpointError, match="action_horizon is 12, but the transformer has 24"):
        load(write_checkpoint(tmp_path / "b", action_horizon=12))
    with pytest.raises(CheckpointError, match="num_frames: expected at least 5 for chunks of 2 latent frames, got 1"):
        load(write_checkpoint(tmp_path / "c", num_frames=1))


def test_a_folder_that_is_none_and_a_tokenizer_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint folder does not exist"):
        load(tmp_path / "nothing")
    folder = write_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="tokenizer folder does not exist"):
        load(folder, DreamZeroOptions(tokenizer=str(tmp_path / "elsewhere")))


def test_all_files_that_cannot_be_read_are_named_at_once(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "config.json").write_text("{")
    (folder / "experiment_cfg/metadata.json").unlink()
    (folder / "experiment_cfg/conf.yaml").unlink()
    (folder / "model.safetensors").write_bytes(bytes(4))
    with refused_with(
        "config.json: is not valid JSON",
        "metadata.json: cannot be read",
        "experiment_cfg/conf.yaml is missing",
        "model.safetensors: ",
    ):
        read_checkpoint(str(folder), OPTIONS)


def test_without_its_training_configuration_a_checkpoint_is_not_served(tmp_path: Path) -> None:
    metadata = {"oxe_droid": json.loads(json.dumps(manifest()["metadata_json_example"]))}
    metadata["oxe_droid"]["modalities"]["video"]["wrist_image_left"]["resolution"] = [32]
    folder = write_checkpoint(tmp_path, metadata=metadata)
    (folder / "experiment_cfg/conf.yaml").unlink()
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(str(folder), OPTIONS)
    assert "experiment_cfg/conf.yaml is missing" in str(caught.value)
    assert "wrist_image_left.resolution" in str(caught.value)
    assert "normalization" not in str(caught.value)
    training = training_config()
    del training["relative_action"], training["transforms"]["oxe_droid"]["transforms"][1]
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(str(write_checkpoint(tmp_path, training=training)), OPTIONS)
    assert "relative_action is missing" in str(caught.value)
    assert "normalization_modes does not name action.gripper_position" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        *(("frame_seqlen", value, "1 to 1000000") for value in (8.0, "8", 0, True)),
        ("dim", 10**12, "1 to 1000000"),
        ("num_layers", 10**6, "1 to 1000"),
    ],
)
def test_a_size_that_is_none_is_refused(tmp_path: Path, key: str, value: object, expected: str) -> None:
    network = tiny_config()["action_head_cfg"]["config"]["diffusion_model_cfg"] | {key: value}
    with pytest.raises(CheckpointError, match=f"{key}: expected an integer from {expected}, got "):
        read_checkpoint(str(write_checkpoint(tmp_path, diffusion_model_cfg=network)), OPTIONS)


def test_another_robot_needs_its_statistics(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no statistics of agibot, only of oxe_droid"):
        load(folder, DreamZeroOptions(embodiment="agibot"))


def test_a_picture_of_another_size_is_refused(tmp_path: Path) -> None:
    start = start_worker(write_checkpoint(tmp_path))
    for changes, problem in (
        ({"width": 63}, "width: expected a multiple of 2 pixels, got 63"),
        ({"width": 32, "height": 64}, "trained with views of 32 x 16: set width to 64 and height to 32"),
    ):
        with pytest.raises(LoadFailed, match=problem):
            create_adapter(type(start)(**{**_fields(start), **changes}), no_weights)


def test_a_picture_of_another_size_is_refused_where_the_training_run_is_silent(tmp_path: Path) -> None:
    training = training_config()
    del training["transforms"]["oxe_droid"]["transforms"][0]
    start = start_worker(write_checkpoint(tmp_path, training=training))
    for changes, problem in (
        ({"width": 128}, "has 16 tokens, the checkpoint is for 8"),
        ({"height": 24}, "multiple of 16, got 24"),
    ):
        with pytest.raises(LoadFailed, match=problem):
            create_adapter(type(start)(**{**_fields(start), **changes}), no_weights)


def no_weights(stage: LoadStage, fraction: float, detail: str) -> None:
    """Take progress of a start that must end before weights are read."""
    assert stage is LoadStage.CHECKPOINT


@pytest.mark.parametrize("option", [{"attention": "flash3"}, {"layer_operations": "triton"}])
def test_a_kernel_that_cannot_be_had_stops_the_start_before_any_weights(
    tmp_path: Path, option: dict[str, object]
) -> None:
    with pytest.raises(LoadFailed, match="CUDA device"):
        create_adapter(start_worker(write_checkpoint(tmp_path), **option), no_weights)


def _fields(start) -> dict[str, object]:
    return {name: getattr(start, name) for name in start.__dataclass_fields__}


TARGETS = ("blocks.0.self_attn.q", "blocks.1.cross_attn.o", "blocks.2.ffn.0")


def test_adapters_are_merged_into_the_weights(tmp_path: Path) -> None:
    """A fine-tuned folder loads like one whose weights have been added up beforehand."""
    rng = torch.Generator().manual_seed(0)
    plain, wrapped, merged = dict(tensors("weights")), {}, {}
    rank, alpha = 4, 8.0
    for name, tensor in plain.items():
        merged[name] = tensor
        prefix = "action_head.model."
        target = next((each for each in TARGETS if name.startswith(f"{prefix}{each}.")), None)
        if not name.startswith(prefix):
            wrapped[name] = tensor
            continue
        inner = f"{prefix}base_model.model." + name.removeprefix(prefix)
        if target is None:
            wrapped[inner] = tensor
            continue
        stem, _, leaf = inner.rpartition(".")
        wrapped[f"{stem}.base_layer.{leaf}"] = tensor
        if leaf == "weight":
            down = torch.randn(rank, tensor.shape[1], generator=rng)
            up = torch.randn(tensor.shape[0], rank, generator=rng)
            wrapped |= {f"{stem}.lora_A.default.weight": down, f"{stem}.lora_B.default.weight": up}
            merged[name] = tensor + alpha / rank * up @ down
    got = load(write_checkpoint(tmp_path / "lora", weights=wrapped, lora_alpha=alpha, lora_rank=rank))
    want = load(write_checkpoint(tmp_path / "merged", weights=merged))
    expected = want.transformer.state_dict()
    assert got.transformer.state_dict().keys() == expected.keys()
    for name, tensor in got.transformer.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-5)
    changed = load(write_checkpoint(tmp_path / "plain"))
    assert not torch.equal(changed.transformer.layers[0].self_attn.q.weight, expected["blocks.0.self_attn.q.weight"])


def test_adapters_that_do_not_fit_are_named(tmp_path: Path) -> None:
    stem = "action_head.model.blocks.0.self_attn"
    weights = dict(tensors("weights")) | {
        f"{stem}.q.lora_A.weight": torch.zeros(4, 64),
        f"{stem}.k.lora_A.weight": torch.zeros(4, 63),
        f"{stem}.k.lora_B.weight": torch.zeros(64, 4),
    }
    with refused_with(
        "lora_alpha: the checkpoint holds adapters",
        "blocks.0.self_attn.q: expected a base weight, lora_A and",
        "blocks.0.self_attn.k: lora_A [4, 63] and lora_B [64, 4] do not fit [64, 64]",
    ):
        load(write_checkpoint(tmp_path, weights=weights))


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    name, other = (
        f"action_head.model.{inner}.weight" for inner in ("head.head", "base_model.model.head.head.base_layer")
    )
    weights = dict(tensors("weights"))
    weights[other] = torch.zeros_like(weights[name])
    with pytest.raises(
        CheckpointError, match=r"1 of the tensors are there under another name too, such as action_head"
    ):
        load(write_checkpoint(tmp_path, weights=weights))


def test_shards_and_unused_parts_make_no_difference(tmp_path: Path) -> None:
    whole = load(write_checkpoint(tmp_path / "whole"))
    folder = write_checkpoint(tmp_path / "sharded")
    weights = dict(tensors("weights")) | {
        "action_head.vae.model.decoder.conv1.bias": torch.zeros(2),
        "action_head.vae.model.conv2.bias": torch.zeros(2),
        "action_head.image_encoder.model.visual.post_norm.bias": torch.zeros(2),
        "action_head.image_encoder.model.visual.transformer.2.norm1.bias": torch.zeros(2),
        "action_head.image_encoder.model.textual.x": torch.zeros(2),
        "action_head.image_encoder.model.log_scale": torch.zeros(()),
    }
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    sharded = load(folder)
    assert sharded.num_parameters == whole.num_parameters
    for (name, got), want in zip(sharded.transformer.named_parameters(), whole.transformer.parameters(), strict=True):
        assert torch.equal(got, want), name
