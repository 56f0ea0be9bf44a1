"""Weights that are no numbers are found by the warm-up, of either real model; a later chunk of theirs is never sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from kvcache.cache import KVCache
from tests.support.dreamzero_checkpoint import start_worker, write_checkpoint
from tests.support.dreamzero_sessions import runtime_of
from tests.support.fake_model import ignore_progress, image, keys, open_session, pixels, tick
from tests.support.lingbot_tiny import OUTPUTS, cache_of, snapshot, tiny_adapter
from worldmodel.dreamzero.adapter import create_adapter
from worldmodel.errors import LoadFailed, TickRolledBack
from worldmodel.lingbot.adapter import LingBotAdapter
from worldmodel.runtime import Runtime


@contextmanager
def spoilt(weight: torch.Tensor, value: float) -> Iterator[None]:
    """Put a number that is none into a weight for a while."""
    first = (0,) * weight.dim()
    kept = weight.data[first].clone()
    weight.data[first] = value
    try:
        yield
    finally:
        weight.data[first] = kept


def weight_of(module: nn.Module, name: str) -> torch.Tensor:
    return dict(module.named_parameters())[name]


def lingbot() -> tuple[LingBotAdapter, KVCache, Runtime]:
    adapter = tiny_adapter()
    cache = cache_of(adapter)
    return adapter, cache, Runtime(adapter, cache)


def in_transformer(adapter: LingBotAdapter) -> torch.Tensor:
    return weight_of(adapter._transformer, "blocks.1.self_attn.q.weight")


def in_decoder(adapter: LingBotAdapter) -> torch.Tensor:
    return weight_of(adapter._vae, "decoder.conv_out.bias")


@pytest.mark.parametrize(
    ("choose", "value", "names"),
    [(in_transformer, float("nan"), "latents and pictures"), (in_decoder, float("inf"), "pictures")],
)
def test_a_world_model_with_such_a_weight_is_not_served(
    choose: Callable[[LingBotAdapter], torch.Tensor], value: float, names: str
) -> None:
    adapter, _, runtime = lingbot()
    with spoilt(choose(adapter), value), pytest.raises(LoadFailed) as caught:
        runtime.warm_up(ignore_progress)
    assert caught.value.code == "warm_up_failed"
    assert f"the model gave {names} that are not finite numbers" in caught.value.message


def test_a_chunk_of_a_session_that_is_not_finite_leaves_it_as_it_was() -> None:
    adapter, cache, runtime = lingbot()
    for name in ("a", "b"):
        runtime.open(open_session(name, outputs=OUTPUTS), image())
        pixels(runtime, tick(name, 0, keys(0, "w")))
    before = snapshot(runtime, cache, "a")
    with spoilt(in_transformer(adapter), float("nan")), pytest.raises(TickRolledBack, match="chunk 1 failed") as caught:
        runtime.tick(tick("a", 1, keys(1, "d"), prompt="another world"))
    assert (caught.value.code, caught.value.transient) == ("not_finite", False)
    assert snapshot(runtime, cache, "a") == before
    assert pixels(runtime, tick("a", 1, keys(1, "s"))) == pixels(runtime, tick("b", 1, keys(1, "s")))


def test_a_robot_model_with_such_a_weight_is_not_served(tmp_path_factory: pytest.TempPathFactory) -> None:
    start = start_worker(write_checkpoint(tmp_path_factory.mktemp("checkpoint")), computed_steps=5)
    adapter = create_adapter(start, ignore_progress)
    runtime = runtime_of(adapter, start)
    with (
        spoilt(weight_of(adapter._transformer, "blocks.1.self_attn.q.weight"), float("nan")),
        pytest.raises(LoadFailed, match="the model gave actions and latents that are not finite numbers") as caught,
    ):
        runtime.warm_up(ignore_progress)
    assert caught.value.code == "warm_up_failed"
