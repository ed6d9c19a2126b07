"""The keyed cache: values under keys, in blocks of one or many targets. docs/cache.md is its design."""

from kbtp.cache.aio import AsyncCache
from kbtp.cache.cache import Cache, Registration
from kbtp.cache.memory_index import MemoryIndex
from kbtp.cache.outcomes import Counters, Item, Outcome
from kbtp.cache.settings import CacheSettings
from kbtp.cache.steps import IndexUnavailable

__all__ = [
    "AsyncCache",
    "Cache",
    "CacheSettings",
    "Counters",
    "IndexUnavailable",
    "Item",
    "MemoryIndex",
    "Outcome",
    "Registration",
]
