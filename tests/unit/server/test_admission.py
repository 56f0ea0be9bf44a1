"""Places and the queue for them."""

from __future__ import annotations

import asyncio

import pytest

from server.admission import Admission, Place
from server.errors import ErrorCode, Unavailable


class Desk:
    """An admission with a capacity that the test sets, and clients that wait."""

    def __init__(self, capacity: int, max_queued: int = 8) -> None:
        self.capacity = capacity
        self.admission = Admission(capacity=lambda: self.capacity, max_queued=max_queued)
        self.positions: dict[str, list[tuple[int, int]]] = {}

    def join(self, name: str) -> asyncio.Task[Place]:
        seen = self.positions.setdefault(name, [])
        return asyncio.create_task(self.admission.wait(lambda position, queued: seen.append((position, queued))))


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def take(desk: Desk) -> Place:
    place = desk.admission.try_take()
    assert place is not None
    return place


async def test_no_more_places_than_the_capacity() -> None:
    desk = Desk(2)
    first = take(desk)
    take(desk)
    assert desk.admission.try_take() is None
    first.release()
    first.release()
    assert desk.admission.num_taken == 1
    take(desk)
    assert desk.admission.try_take() is None


async def test_places_go_to_those_who_wait_in_order() -> None:
    desk = Desk(1)
    place = take(desk)
    a, b = desk.join("a"), desk.join("b")
    await settle()
    assert desk.positions == {"a": [(1, 1), (1, 2)], "b": [(2, 2)]}
    place.release()
    await settle()
    assert a.done()
    assert desk.positions["b"] == [(2, 2), (1, 1)]
    assert desk.admission.try_take() is None
    (await a).release()
    assert await b
    assert desk.admission.num_waiting == 0


async def test_newcomers_do_not_overtake() -> None:
    desk = Desk(1)
    take(desk)
    waiting = desk.join("a")
    await settle()
    desk.capacity = 2
    assert desk.admission.try_take() is None
    desk.admission.grant()
    assert await waiting


async def test_leaving_the_queue_moves_the_others_up() -> None:
    desk = Desk(0)
    a, b = desk.join("a"), desk.join("b")
    await settle()
    a.cancel()
    await settle()
    assert desk.positions["b"][-1] == (1, 1)
    b.cancel()
    await settle()
    assert desk.admission.num_waiting == 0


async def test_leaving_at_the_moment_of_the_grant_loses_no_place() -> None:
    desk = Desk(1)
    place = take(desk)
    waiting = desk.join("a")
    await settle()
    place.release()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert desk.admission.num_taken == 0


async def test_a_grant_after_a_cancel_that_was_not_yet_noticed_goes_to_the_next() -> None:
    desk = Desk(1)
    place = take(desk)
    a, b = desk.join("a"), desk.join("b")
    await settle()
    a.cancel()
    place.release()
    await settle()
    assert a.cancelled()
    assert await b
    assert desk.admission.num_taken == 1


async def test_a_full_queue_refuses_unless_a_place_is_on_its_way() -> None:
    desk = Desk(1, max_queued=0)
    place = take(desk)
    with pytest.raises(Unavailable) as caught:
        await desk.admission.wait(lambda position, queued: None)
    assert caught.value.code is ErrorCode.CAPACITY
    waiting = asyncio.create_task(desk.admission.wait(lambda position, queued: None, limited=False))
    await settle()
    place.release()
    assert await waiting


async def test_everybody_can_be_sent_away() -> None:
    desk = Desk(0)
    waiting = [desk.join(name) for name in "ab"]
    await settle()
    desk.admission.refuse_all(Unavailable(ErrorCode.SHUTTING_DOWN, "bye"))
    for task in waiting:
        with pytest.raises(Unavailable, match="bye"):
            await task
    assert desk.admission.num_waiting == 0


async def test_who_has_no_position_waits_only_for_a_place_that_comes() -> None:
    desk = Desk(2)
    places = [take(desk), take(desk)]
    a = desk.join("a")
    unqueued = [asyncio.create_task(desk.admission.wait(None, limited=False)) for _ in range(2)]
    b = desk.join("b")
    await settle()
    for place in places:
        place.promise()
        place.promise()
    assert desk.admission.num_unclaimed == -2
    desk.admission.refuse_unpromised()
    await settle()
    with pytest.raises(Unavailable, match="all 2 places"):
        await unqueued[1]
    assert desk.positions["b"] == [(4, 4), (3, 3)]
    for place in places:
        place.release()
    (await a).release()
    (await unqueued[0]).release()
    (await b).release()
    assert desk.admission.num_taken == 0


async def test_a_promise_that_is_broken_is_not_waited_for() -> None:
    desk = Desk(1)
    place = take(desk)
    place.promise()
    waiting = asyncio.create_task(desk.admission.wait(None, limited=False))
    await settle()
    assert desk.admission.num_unclaimed == 0
    place.keep()
    place.keep()
    desk.admission.refuse_unpromised()
    with pytest.raises(Unavailable, match="all 1 places"):
        await waiting
    place.promise()
    place.release()
    assert (desk.admission.num_unclaimed, desk.admission.num_taken) == (0, 0)


async def test_without_any_capacity_nobody_is_sent_away() -> None:
    desk = Desk(0)
    waiting = asyncio.create_task(desk.admission.wait(None, limited=False))
    await settle()
    desk.admission.refuse_unpromised()
    desk.capacity = 1
    desk.admission.grant()
    assert await waiting
