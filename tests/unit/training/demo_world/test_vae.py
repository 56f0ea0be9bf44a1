"""The trainable forwards equal the stock layers, and what a step changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file

from training.demo_world import vae as vae_program
from training.demo_world.vae import Trainer
from training.demo_world.vae_clips import ClipPool
from training.demo_world.vae_model import CONFIG, decode, encode, read_vae, strip, trainable


def test_folded_layers_and_whole_clip_calls_equal_the_stock_model() -> None:
    torch.manual_seed(0)
    vae = trainable(AutoencoderKLWan(**CONFIG)).eval()
    stock = strip(vae).eval()
    clip = torch.rand(1, 3, 9, 16, 24) * 2 - 1
    with torch.no_grad():
        moments = encode(vae, clip)
        torch.testing.assert_close(moments, stock._encode(clip), atol=1e-5, rtol=1e-4)
        latents = moments[:, : vae.config.z_dim]
        torch.testing.assert_close(
            decode(vae, latents).clamp(-1, 1), stock._decode(latents).sample, atol=1e-5, rtol=1e-4
        )


class _Noise(ClipPool):
    def draw(self, num_clips: int) -> torch.Tensor:
        return torch.rand(num_clips, 3, 5, 16, 16) * 2 - 1


def _noise_trainer(*, decoder_only: bool = False) -> Trainer:
    pool = _Noise(poses=torch.zeros(0), styles=torch.zeros(0), clips_per_step=1)
    return Trainer(trainable(AutoencoderKLWan(**CONFIG)), [pool], decoder_only=decoder_only)


def _step(trainer: Trainer) -> None:
    torch.manual_seed(5)
    trainer.step(1e-3)


def test_a_decoder_that_learns_alone_leaves_the_latents_as_they_are() -> None:
    torch.manual_seed(1)
    trainer = _noise_trainer(decoder_only=True)
    vae = trainer.vae
    before = {name: parameter.detach().clone() for name, parameter in vae.named_parameters()}
    trainer.step(1e-3)
    changed = {name for name, parameter in vae.named_parameters() if not torch.equal(parameter, before[name])}
    assert {name.split(".")[0] for name in changed} == {"decoder", "post_quant_conv"}
    assert set(trainer.names) >= changed


def test_a_new_trainer_goes_on_exactly_where_another_was_saved(tmp_path: Path) -> None:
    first, second = _noise_trainer(), _noise_trainer()
    _step(first)
    first.save(tmp_path)
    second.restore(tmp_path)
    _step(first)
    _step(second)
    assert all(map(torch.equal, first.parameters, second.parameters))
    assert all(map(torch.equal, first.average, second.average))


def test_a_trainer_is_refused_what_is_not_its_own_and_stays_as_it_was(tmp_path: Path) -> None:
    decoder, whole = _noise_trainer(decoder_only=True), _noise_trainer()
    decoder.save(tmp_path)
    before = [parameter.detach().clone() for parameter in whole.parameters]
    with pytest.raises(ValueError, match=r"weights\.safetensors: .* tensors missing .* first encoder\.conv_in\.weight"):
        whole.restore(tmp_path)
    whole.save(tmp_path)
    (tmp_path / "step.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"step\.safetensors"):
        decoder.restore(tmp_path)
    assert all(map(torch.equal, before, whole.parameters))


def test_what_is_not_finite_is_not_saved_over_what_was(tmp_path: Path) -> None:
    trainer = _noise_trainer(decoder_only=True)
    trainer.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    trainer.average[0].view(-1)[0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"average of 1 tensors not finite, first post_quant_conv"):
        trainer.save(tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


class _EndsAtThirdStep(Trainer):
    """Ends the program as a signal does."""

    def step(self, learning_rate: float) -> torch.Tensor:
        if self.num_steps == 2:
            raise KeyboardInterrupt
        return super().step(learning_rate)


class _LosesItsWay(Trainer):
    """Has an error of `nan` at all steps, of which it takes eight at once: the program looks at every eighth."""

    def step(self, learning_rate: float) -> torch.Tensor:
        self.num_steps += 8
        return torch.tensor(torch.nan)


def _run(monkeypatch: pytest.MonkeyPatch, *options: str, trainer: type[Trainer] = _EndsAtThirdStep) -> None:
    def small(*_: object, **__: object) -> ClipPool:
        return _Noise(poses=torch.zeros(0), styles=torch.zeros(0), clips_per_step=1)

    monkeypatch.setattr(vae_program, "make_pool", small)
    monkeypatch.setattr(vae_program, "Trainer", trainer)
    monkeypatch.setattr("sys.argv", ["vae", "--seconds", "1000", *options])
    vae_program.main()


def test_a_run_that_is_cut_short_has_saved_what_another_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        _run(monkeypatch, "--out", str(tmp_path / "a"), "--save-s", "0")
    steps = load_file(tmp_path / "a" / "step.safetensors")
    assert {step.item() for step in steps.values()} == {2.0}
    _run(monkeypatch, "--smoke", "--out", str(tmp_path / "b"), "--resume", str(tmp_path / "a"))
    steps = load_file(tmp_path / "b" / "step.safetensors")
    assert {step.item() for step in steps.values()} == {4.0}
    exported = AutoencoderKLWan.from_pretrained(tmp_path / "b" / "vae", torch_dtype=torch.float32)
    average = load_file(tmp_path / "b" / "average.safetensors")
    name = "decoder.conv_out.weight"
    assert torch.equal(exported.state_dict()[name], average[name].bfloat16().float())
    modes = {path.stat().st_mode for path in (tmp_path / "b").rglob("*") if path.is_file()}
    assert len(modes) == 1


def test_a_run_stops_at_an_error_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"squared error nan after .* keeps what was saved before"):
        _run(monkeypatch, "--out", str(tmp_path), trainer=_LosesItsWay)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--seconds", "0"), "argument --seconds: expected a finite number and above 0; got 0"),
        (("--seconds", "nan"), "argument --seconds: expected a finite number"),
        (("--peak", "nan"), "argument --peak: expected a finite number"),
        (("--seed", "-1"), "argument --seed: expected a finite number and at least 0"),
        (("--start", "nowhere"), "argument --start: expected a folder with config.json; nowhere is none"),
        (("--resume", "nowhere"), "argument --resume: expected the --out of an earlier run; nowhere has no weights"),
    ],
)
def test_options_that_no_run_can_do_are_refused_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    error: str,
) -> None:
    with pytest.raises(SystemExit):
        _run(monkeypatch, "--out", str(tmp_path / "run"), *options)
    assert error in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_no_vae_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere: expected the folder of a VAE, has no config\.json"):
        read_vae(tmp_path / "nowhere")
