"""Checkpoint folders: what is read, and the one clear sentence for each way they can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import worldmodel
from worldmodel.checkpoint.diffusers import ComponentReader, open_checkpoint
from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.errors import LoadFailed

DEMO = Path(worldmodel.__file__).parent / "data" / "demo_world"


class Small(nn.Module):
    """Two layers, a persistent counter, a derived buffer and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2, bias=False)
        self.tied = nn.Linear(4, 2, bias=False)
        self.tied.weight = self.second.weight
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scale", torch.full((2,), 0.5), persistent=False)


def stored_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "first.weight": torch.randn(4, 3, generator=generator).bfloat16(),
        "first.bias": torch.randn(4, generator=generator),
        "second.weight": torch.randn(2, 4, generator=generator).half(),
        "steps": torch.tensor([5, 6]),
    }


def write_component(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"width": 3}')
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for shard in range(num_shards):
        names = list(tensors)[shard::num_shards]
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with the single component `net`."""
    write_component(tmp_path / "net", stored_tensors())
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "Pipeline", "net": ["somewhere", "Small"], "unused": [None, None], "ratio": 0.9})
    )
    return tmp_path


def net(folder: Path) -> ComponentReader:
    return open_checkpoint(folder).component("net")


def test_the_demo_checkpoint_opens_with_all_its_components() -> None:
    checkpoint = open_checkpoint(DEMO)
    assert set(checkpoint.components) == {"scheduler", "text_encoder", "tokenizer", "transformer", "vae"}
    vae = checkpoint.component("vae")
    expected = load_file(DEMO / "vae" / "diffusion_pytorch_model.safetensors")
    assert {name: info.shape for name, info in vae.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    assert vae.num_parameters == sum(tensor.numel() for tensor in expected.values())
    assert vae.config["z_dim"] == 16
    assert checkpoint.component("scheduler").config["flow_shift"] == 5.0
    assert torch.equal(vae.read("quant_conv.bias"), expected["quant_conv.bias"])


def test_index_entries_without_a_class_are_no_components(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.components) == ["net"]
    assert (checkpoint.component("net").library, checkpoint.component("net").class_name) == ("somewhere", "Small")
    assert checkpoint.component("net").config == {"width": 3}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_replaces_every_parameter_and_casts_floats_only(folder: Path, num_shards: int, device: str) -> None:
    shutil.rmtree(folder / "net")
    write_component(folder / "net", stored_tensors(), num_shards)
    with torch.device(device):
        module = Small()
    module.scale = torch.full((2,), 0.5)
    fractions: list[float] = []
    net(folder).load_into(module, dtype=torch.float32, progress=lambda fraction, detail: fractions.append(fraction))
    for name, tensor in stored_tensors().items():
        loaded = module.state_dict()[name]
        assert torch.equal(loaded, tensor if name == "steps" else tensor.float())
        assert loaded.dtype == (torch.int64 if name == "steps" else torch.float32)
    assert module.tied.weight is module.second.weight
    assert torch.equal(module.scale, torch.full((2,), 0.5))
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_load_can_choose_the_type_by_name(folder: Path) -> None:
    module = Small()
    net(folder).load_into(module, dtype=lambda name: torch.float64 if name == "first.bias" else torch.bfloat16)
    assert module.first.bias.dtype == torch.float64
    assert module.first.weight.dtype == torch.bfloat16


def test_load_can_be_of_some_tensors_only(folder: Path) -> None:
    with torch.device("meta"):
        module = Small()
    module.scale = torch.full((2,), 0.5)
    before = module.tied.weight
    net(folder).load_into(module, dtype=torch.float32, only=lambda name: name.startswith("first."))
    assert torch.equal(module.first.bias, stored_tensors()["first.bias"])
    assert module.tied.weight is before
    net(folder).load_into(module, dtype=torch.float32, only=lambda name: not name.startswith("first."))
    assert torch.equal(module.steps, stored_tensors()["steps"])
    assert module.tied.weight is module.second.weight


def test_of_some_tensors_only_those_can_be_missing(folder: Path) -> None:
    tensors = stored_tensors()
    del tensors["first.bias"]
    save_file(tensors, folder / "net/model.safetensors")
    net(folder).load_into(Small(), dtype=torch.float32, only=lambda name: not name.startswith("first."))
    with pytest.raises(CheckpointError, match=r"1 missing tensor \(first.bias\)$"):
        net(folder).load_into(Small(), dtype=torch.float32, only=lambda name: name.startswith("first."))


def test_loaded_tensors_do_not_depend_on_the_file(folder: Path) -> None:
    module = Small()
    net(folder).load_into(module, dtype=torch.float32)
    save_file({name: torch.zeros_like(t) for name, t in stored_tensors().items()}, folder / "net/model.safetensors")
    assert torch.equal(module.first.bias, stored_tensors()["first.bias"])


def test_every_misfit_is_named_in_one_error_and_nothing_is_loaded(folder: Path) -> None:
    tensors = stored_tensors()
    del tensors["first.bias"]
    tensors["third.weight"] = torch.zeros(1)
    tensors["second.weight"] = torch.zeros(4, 2)
    tensors["first.weight"] = torch.zeros(4, 3, dtype=torch.int8)
    write_component(folder / "net", tensors)
    module = Small()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        net(folder).load_into(module, dtype=torch.float32)
    text = str(caught.value)
    assert "1 missing tensor (first.bias)" in text
    assert "1 extra tensor (third.weight)" in text
    assert "1 wrong shape (second.weight [4, 2] instead of [2, 4])" in text
    assert "1 wrong type (first.weight I8 for torch.float32)" in text
    assert len(caught.value.problems) == 4
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_checkpoint_error_is_a_load_failure_for_the_server(folder: Path) -> None:
    with pytest.raises(LoadFailed) as caught:
        open_checkpoint(folder / "nowhere")
    assert caught.value.code == "bad_checkpoint"


def test_a_derived_buffer_on_the_meta_device_is_refused(folder: Path) -> None:
    with torch.device("meta"):
        module = Small()
    with pytest.raises(ValueError, match="meta device that no checkpoint stores: scale"):
        net(folder).load_into(module, dtype=torch.float32)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: checkpoint folder does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "a.txt").touch()
    with pytest.raises(CheckpointError, match=r"a\.txt: is no folder"):
        open_checkpoint(tmp_path / "a.txt")


def test_missing_index(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no model_index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("content", "message"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object")])
def test_malformed_index(folder: Path, content: str, message: str) -> None:
    (folder / "model_index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_missing_component_folder(folder: Path) -> None:
    shutil.rmtree(folder / "net")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(
        CheckpointError, match=r"model_index\.json names the component net, but there is no folder net$"
    ):
        checkpoint.component("net")


@pytest.mark.parametrize("name", ["../net", "/etc", ".", "..", "", "net/deeper", "n" * 256, "a\0b"])
def test_components_lie_below_the_checkpoint(folder: Path, name: str) -> None:
    (folder / "model_index.json").write_text(json.dumps({name: ["somewhere", "Small"]}))
    with pytest.raises(CheckpointError, match="names components whose names are no plain ones: '"):
        open_checkpoint(folder)


@pytest.mark.parametrize("shard", ["", "..", "../a", "s" * 300, "a\0b"])
def test_shards_have_plain_names(folder: Path, shard: str) -> None:
    index = sharded(folder)
    index.write_text(json.dumps({"weight_map": {"first.weight": shard}}))
    with pytest.raises(CheckpointError, match="to file names in the same folder"):
        _ = net(folder).tensors


def test_what_the_system_refuses_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = net(folder)

    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    for read in (lambda: opened.tensors, lambda: opened.config):
        with pytest.raises(CheckpointError, match=r"net: cannot be read \(Permission denied\)"):
            read()


def test_unknown_component(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="has no component vae, only net"):
        open_checkpoint(folder).component("vae")


def test_component_without_config_or_weights(folder: Path) -> None:
    (folder / "net/config.json").unlink()
    (folder / "net/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no config, expected one of config\.json"):
        _ = net(folder).config
    with pytest.raises(CheckpointError, match="has no weights, expected one of diffusion_pytorch_model"):
        _ = net(folder).tensors


def test_two_sets_of_weights_are_ambiguous(folder: Path) -> None:
    shutil.copy(folder / "net/model.safetensors", folder / "net/diffusion_pytorch_model.safetensors")
    with pytest.raises(CheckpointError, match="has several sets of weights"):
        _ = net(folder).tensors


def test_unknown_tensor(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tensor third\.weight"):
        net(folder).read("third.weight")


def sharded(folder: Path) -> Path:
    shutil.rmtree(folder / "net")
    write_component(folder / "net", stored_tensors(), num_shards=2)
    return folder / "net/model.safetensors.index.json"


def test_index_that_names_a_missing_shard(folder: Path) -> None:
    sharded(folder)
    (folder / "net/model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shards that do not exist: model-00002-of-00002\.safetensors"):
        _ = net(folder).tensors


def test_every_disagreement_of_index_and_shards_is_named_at_once(folder: Path) -> None:
    index = sharded(folder)
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    save_file(
        {name: stored_tensors()[name] for name in ("first.weight", "first.bias", "second.weight")},
        folder / "net" / shards[0],
    )
    content["weight_map"] = {
        "first.weight": shards[0],
        "first.bias": shards[0],
        "second.weight": shards[1],
        "ghost": shards[1],
    }
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        _ = net(folder).tensors
    first, second = shards
    assert tuple(map(str, caught.value.problems)) == (
        "1 tensor that no shard holds (ghost)",
        f"1 tensor that the index lacks (steps in {second})",
        f"1 tensor in another shard than the index says (second.weight in {first} instead of {second})",
        f"1 tensor in several shards (first.bias in {first} and {second})",
    )


def test_a_tensor_that_its_shard_does_not_hold_is_named_once(folder: Path) -> None:
    sharded(folder)
    shard = sorted((folder / "net").glob("*.safetensors"))[0]
    held = load_file(shard)
    lost = sorted(held)[0]
    del held[lost]
    save_file(held, shard)
    [problem] = net(folder).misfits(Small())
    assert str(problem).endswith(f": 1 tensor that no shard holds ({lost})")


def test_everything_that_is_wrong_with_several_shards_is_named_at_once(folder: Path) -> None:
    shutil.rmtree(folder / "net")
    write_component(folder / "net", {**stored_tensors(), "fifth": torch.zeros(1)}, num_shards=5)
    first, second, third, fourth, fifth = sorted((folder / "net").glob("*.safetensors"))
    first.write_bytes(b"rubbish")
    second.unlink()
    third.write_bytes(third.read_bytes()[:-1])
    save_file({"steps": torch.zeros(3, dtype=torch.int64)}, fourth)
    with pytest.raises(CheckpointError) as caught:
        _ = net(folder).tensors
    unreadable = (
        f"{folder / 'net/model.safetensors.index.json'}: names shards that do not exist: {second.name}",
        f"{first}: is not a safetensors file",
        f"{third}: is truncated: {third.stat().st_size + 1} bytes expected, {third.stat().st_size} found",
    )
    assert tuple(map(str, caught.value.problems)) == unreadable
    # What is in the other shards is compared; what may be in these is not said to be missing.
    assert tuple(map(str, net(folder).misfits(Small()))) == (
        *unreadable,
        "1 extra tensor (fifth)",
        "1 wrong shape (steps [3] instead of [2])",
    )
    assert fifth.exists()


def test_a_damaged_checkpoint_has_a_digest(folder: Path) -> None:
    save_file({**stored_tensors(), "large": torch.zeros(200_000)}, folder / "net/model.safetensors")
    whole = open_checkpoint(folder).digest
    content = (folder / "net/model.safetensors").read_bytes()
    (folder / "net/model.safetensors").write_bytes(b"\xff" * 8 + content[8:])
    assert open_checkpoint(folder).digest != whole


@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_a_digest_sees_one_byte_of_each_sample_of_a_large_file(folder: Path, place: str) -> None:
    save_file({"large": torch.zeros(200_000)}, folder / "net/model.safetensors")
    whole = open_checkpoint(folder).digest
    content = bytearray((folder / "net/model.safetensors").read_bytes())
    content[{"start": -800_000, "middle": len(content) // 2, "end": -1}[place]] = 1
    (folder / "net/model.safetensors").write_bytes(content)
    assert open_checkpoint(folder).digest != whole


def test_a_list_of_names_too_long_for_a_sentence_is_whole_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"extra{number:02}.weight" for number in range(30)]
    write_component(folder / "net", {**stored_tensors(), **{name: torch.zeros(1) for name in names}})
    with pytest.raises(CheckpointError, match=r"30 extra tensors \(extra00\.weight, .* and 10 more\)"):
        net(folder).load_into(Small(), dtype=torch.float32)
    assert all(name in caplog.text for name in names)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, r"is not valid JSON \(nested too deeply\)"),
        ('{"width": 1, "width": 2}', r"is not valid JSON \(key 'width' stands there twice\)"),
        ('{"width": "' + "x" * (64 * 1024 * 1024) + '"}', "is longer than the 67108864 bytes"),
    ],
    ids=["deep", "repeated", "long"],
)
def test_json_that_would_cost_too_much_or_mean_two_things(folder: Path, content: str, message: str) -> None:
    (folder / "net/config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        _ = net(folder).config


@pytest.mark.parametrize("weight_map", [None, {"steps": 3}, {"steps": "../net/model.safetensors"}])
def test_index_with_a_bad_weight_map(folder: Path, weight_map: object) -> None:
    sharded(folder).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="weight_map must map tensor names to file names in the same folder"):
        _ = net(folder).tensors


def test_digest_is_stable_and_sees_a_changed_weight_config_and_name(folder: Path) -> None:
    digests = [open_checkpoint(folder).digest, open_checkpoint(folder).digest]
    changed = stored_tensors()
    changed["first.bias"] += 1
    write_component(folder / "net", changed)
    digests.append(open_checkpoint(folder).digest)
    (folder / "net/config.json").write_text('{"width": 4}')
    digests.append(open_checkpoint(folder).digest)
    (folder / "net/config.json").rename(folder / "net/other.json")
    digests.append(open_checkpoint(folder).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_digest_samples_large_files_and_ignores_files_of_no_component(folder: Path) -> None:
    large = {"weight": torch.zeros(400_000)}
    save_file(large, folder / "net/model.safetensors")
    before = open_checkpoint(folder).digest
    (folder / "notes.txt").write_text("not part of the model")
    assert open_checkpoint(folder).digest == before
    large["weight"][-1] = 1
    save_file(large, folder / "net/model.safetensors")
    assert open_checkpoint(folder).digest != before
