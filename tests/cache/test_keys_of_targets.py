"""Targets that have keys: a cache with one is served, one without is told of misses."""

from __future__ import annotations

from collections.abc import Callable

from kbtp.cache import Cache, Outcome
from kbtp.keys import Key, Keys

from .conftest import WatchedServer

OpenCache = Callable[..., Cache]


def test_a_cache_with_a_key(open_cache: OpenCache, serve: Callable[..., WatchedServer]) -> None:
    key = Key(1, bytes(range(32)))
    target = serve(keys=Keys([key]))
    cache, stranger = open_cache(targets=[target.url], key=key), open_cache(targets=[target.url])
    assert cache.put(b"key", b"value") is Outcome.STORED
    assert cache.get_into(b"key", bytearray(5)) == 5
    assert stranger.get_into(b"key", bytearray(5)) is None
    assert stranger.put(b"other", b"value") is Outcome.UNAVAILABLE
