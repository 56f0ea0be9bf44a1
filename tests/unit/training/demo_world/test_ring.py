"""How often walks are seen before new ones take their place."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from training.demo_world.closed_loop import continuous_walks
from training.demo_world.dataset import Walks
from training.demo_world.ring import WalkRing


def _walks(numbers: torch.Tensor) -> Walks:
    """Walks that hold nothing but a number, their gap."""
    others = {field.name: torch.zeros(len(numbers), 1) for field in fields(Walks)}
    return Walks(**{**others, "gap_W": numbers})


class _Builder:
    def __init__(self) -> None:
        self.num_built = 0

    def __call__(self, num_walks: int) -> Walks:
        first = self.num_built
        self.num_built += num_walks
        return _walks(100 + torch.arange(first, first + num_walks))


def _ring(num_walks: int, *, portion: int, clips_per_step: int, seen: float) -> WalkRing:
    walks = _walks(torch.arange(num_walks))
    return WalkRing(walks, _Builder(), portion=portion, clips_per_step=clips_per_step, seen=seen)


def test_the_oldest_walks_give_way_portion_by_portion_and_round_the_end() -> None:
    ring = _ring(8, portion=3, clips_per_step=24, seen=16)
    ring.step()
    assert ring.walks.gap_W.tolist() == list(range(8))
    ring.step()
    assert ring.walks.gap_W.tolist() == [100, 101, 102, 3, 4, 5, 6, 7]
    for _ in range(4):
        ring.step()
    assert ring.walks.gap_W.tolist() == [108, 101, 102, 103, 104, 105, 106, 107]
    assert ring.num_renewed == 9
    assert ring.take_seconds() > 0
    assert ring.take_seconds() == 0


def test_a_walk_is_in_as_many_clips_as_it_may_be_seen() -> None:
    torch.manual_seed(0)
    ring = _ring(64, portion=8, clips_per_step=24, seen=6)
    seen = torch.zeros(5000)
    for _ in range(400):
        drawn = ring.walks.gap_W[torch.randint(0, 64, (24,))]
        seen += torch.bincount(drawn, minlength=5000)
        ring.step()
    # Walks that came and went: the first are those of the beginning, the last are still there.
    done = seen[100 : 100 + ring.num_renewed - 64]
    assert len(done) > 1000
    assert done.mean().item() == pytest.approx(6, abs=0.2)


@pytest.mark.parametrize("before", range(7))
def test_lasting_walks_are_those_that_so_many_steps_leave(before: int) -> None:
    ring = _ring(10, portion=3, clips_per_step=4, seen=5)
    for _ in range(before):
        ring.step()
    numbers = ring.walks.gap_W.clone()
    lasting = ring.lasting(7)
    for _ in range(7):
        ring.step()
    stayed = torch.nonzero(ring.walks.gap_W == numbers)[:, 0]
    assert sorted(lasting.tolist()) == stayed.tolist()


def test_a_ring_that_is_renewed_as_a_whole_keeps_nothing() -> None:
    ring = _ring(6, portion=3, clips_per_step=4, seen=2)
    with pytest.raises(ValueError, match="more than the 6 walks that 3 steps renew; got 6"):
        ring.lasting(3)


def test_continuous_walks_have_no_gap() -> None:
    walks = _walks(torch.tensor([0, 3, 0, 1, 0]))
    assert continuous_walks(walks).tolist() == [0, 2, 4]
    assert continuous_walks(walks, torch.tensor([4, 3, 2])).tolist() == [4, 2]
