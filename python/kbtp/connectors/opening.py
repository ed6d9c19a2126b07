"""A cache as the configuration of an engine describes it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from os import PathLike
from typing import Any

from kbtp.cache import Cache
from kbtp.errors import ApiMisuse
from kbtp.key_file import read_key

# Of `CacheSettings`; docs/connectors/ says what each is.
OPTIONS = frozenset(
    "namespace writer read_only quota copies ttl_s eviction targets timeout_s connect_timeout_s".split()
)


def open_cache(options: Mapping[str, Any]) -> Cache:
    """`url` is the index, or a target with one; `key_file` where to read the key for targets that have keys.

    Raises `ApiMisuse` for what cannot work: an operator should learn of it before the engine starts. A target or an
    index that is not there is no such thing.
    """
    settings = dict(options)
    url, key_file = settings.pop("url", None), settings.pop("key_file", None)
    if not isinstance(url, str):
        raise ApiMisuse(f"url of {url!r}: expected kbtp://HOST[:PORT] of `kbtp serve --index`, or that of an index")
    unknown = settings.keys() - OPTIONS
    if unknown:
        known = ", ".join(sorted((*OPTIONS, "url", "key_file")))
        raise ApiMisuse(f"there is no option {', '.join(sorted(unknown))}; there are {known}")
    if not isinstance(key_file, str | PathLike | None):
        raise ApiMisuse(f"key_file of {key_file!r}: expected a path")
    return Cache(url, key=None if key_file is None else read_key(key_file), **settings)


def take_flag(options: MutableMapping[str, Any], name: str, otherwise: bool) -> bool:
    """An option of a connector's own, which `open_cache` has not. Raises `ApiMisuse`."""
    value = options.pop(name, otherwise)
    if not isinstance(value, bool):
        raise ApiMisuse(f"{name} of {value!r}: expected true or false")
    return value
