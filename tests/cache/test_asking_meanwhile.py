"""What is done while the index is asked: a get loads what is remembered, a put makes what it will keep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from kbtp.cache import Cache, MemoryIndex, Outcome
from kbtp.cache.index import Answered
from kbtp.cache.small import Small
from kbtp.cache.steps import IndexUnavailable
from kbtp.initiator.batches import Results
from kbtp.initiator.client import Client

from .conftest import Clock, WatchedServer

OpenCache = Callable[..., Cache]


class AtOnce(MemoryIndex):
    """Takes a question without a wait."""

    def __init__(self, clock: Clock, order: list[str]) -> None:
        super().__init__(clock)
        self.order = order
        self.why: BaseException | None = None

    def is_at_once(self) -> bool:
        return True

    def ask(self, step):  # type: ignore[no-untyped-def]
        self.order.append("asked")
        if self.why is not None:
            raise self.why
        return Answered(self.perform(step))


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """When a batch of LOADs begins and ends, and what a test adds."""
    order: list[str] = []
    load_many = Client.load_many

    def ordered(self: Client, *arguments: Any, **options: Any) -> Results:
        order.append("load")
        results = load_many(self, *arguments, **options)
        order.append("loaded")
        return results

    monkeypatch.setattr(Client, "load_many", ordered)
    return order


def test_the_index_is_asked_while_what_is_remembered_is_on_its_way(
    open_cache: OpenCache, clock: Clock, order: list[str]
) -> None:
    cache, into = open_cache(index=AtOnce(clock, order)), bytearray(5)
    cache.put(b"key", b"value")
    order.clear()
    assert cache.get_into(b"key", into) == 5
    assert (order, into) == (["load", "asked", "loaded"], b"value")


@pytest.mark.parametrize("why", [IndexUnavailable("away"), KeyboardInterrupt()], ids=repr)
def test_an_index_that_is_not_asked_meanwhile_leaves_a_cache_that_works(
    open_cache: OpenCache, clock: Clock, order: list[str], why: BaseException
) -> None:
    index = AtOnce(clock, order)
    cache, into = open_cache(index=index), bytearray(5)
    cache.put(b"key", b"value")
    index.why = why
    with nullcontext() if isinstance(why, Exception) else pytest.raises(KeyboardInterrupt):
        assert cache.get_into(b"key", into) is None
    index.why, clock.now_s = None, clock.now_s + 60
    assert cache.get_into(b"key", into) == 5
    assert into == b"value"


def test_the_index_is_asked_if_there_is_no_target_to_ask(
    open_cache: OpenCache, clock: Clock, order: list[str], target: WatchedServer
) -> None:
    cache = open_cache(index=AtOnce(clock, order))
    cache.put(b"key", b"value")
    target.stop()
    order.clear()
    assert cache.get_into(b"key", bytearray(5)) is None
    assert order.count("asked") == 1


class Pending(Answered):
    def __init__(self, reply: object, order: list[str]) -> None:
        super().__init__(reply)
        self._order = order

    def answer(self) -> object:
        self._order.append("answered")
        return super().answer()

    def forget(self) -> None:
        self._order.append("forgotten")


class Asked(AtOnce):
    def ask(self, step):  # type: ignore[no-untyped-def]
        return Pending(super().ask(step).answer(), self.order)


def test_what_a_put_keeps_is_made_while_the_index_is_asked(
    open_cache: OpenCache, clock: Clock, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = Small.prepare

    def prepared(small: Small) -> None:
        order.append("prepared")
        prepare(small)

    monkeypatch.setattr(Small, "prepare", prepared)
    cache, into = open_cache(index=Asked(clock, order)), bytearray(5)
    cache.put(b"first", b"value")
    order.clear()
    assert cache.put(b"key", b"value") is Outcome.STORED
    assert order[:3] == ["asked", "prepared", "answered"]
    assert cache.get_into(b"key", into) == 5


def test_a_put_that_is_interrupted_meanwhile_frees_its_block(
    open_cache: OpenCache, clock: Clock, order: list[str], monkeypatch: pytest.MonkeyPatch, target: WatchedServer
) -> None:
    cache = open_cache(index=Asked(clock, order))
    cache.put(b"first", b"value")
    order.clear()
    with monkeypatch.context() as interrupting, pytest.raises(KeyboardInterrupt):
        interrupting.setattr(Small, "prepare", lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
        cache.put(b"key", b"value")
    assert order == ["asked", "forgotten"]
    assert cache.put(b"next", b"value") is Outcome.STORED
    assert cache.get_into(b"key", bytearray(5)) is None
    assert target.used_blocks == 2
