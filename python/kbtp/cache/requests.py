"""From keys and buffers of a caller to the items of a plan; what cannot work has its `INVALID` at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kbtp import limits
from kbtp.cache.keys import Names
from kbtp.cache.lookups import Named
from kbtp.cache.outcomes import Item, Outcome
from kbtp.cache.values import Values
from kbtp.errors import ApiMisuse
from kbtp.verbs.buffers import buffer_of

_EMPTY = memoryview(b"")


def buffers_of(names: Names, keys: Sequence[object], into: Sequence[object]) -> Values:
    """Raises `ApiMisuse` if they are not equally many."""
    return _paired(names, keys, into, _writable)


def values_of(names: Names, keys: Sequence[object], values: Sequence[object]) -> Values:
    """Raises `ApiMisuse` if they are not equally many."""
    return _paired(names, keys, values, octets_of)


def named_of(names: Names, keys: Sequence[object]) -> list[Named]:
    try:
        return [Named(names.of(key)) for key in keys]
    except ApiMisuse:
        pass  # one of them alone is in vain
    made = []
    for key in keys:
        try:
            made.append(Named(names.of(key)))
        except ApiMisuse as error:
            made.append(Named(b"", Item(Outcome.INVALID, error=error)))
    return made


def checked_s(what: str, seconds: float) -> float:
    """How long `what` is to last. Raises `ApiMisuse`."""
    if not 0 < seconds <= limits.CACHE_TTL_MAX_S:
        raise ApiMisuse(f"{what} {seconds} s: must be more than 0 and at most {limits.CACHE_TTL_MAX_S:g}")
    return seconds


def octets_of(buffer: object) -> memoryview:
    """The octets of a buffer, in place; also of one that has none. Raises `ApiMisuse`."""
    try:
        if type(buffer) is memoryview and buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous:
            return buffer  # what many have at hand, and nothing to find out about
        if memoryview(buffer).nbytes == 0:  # type: ignore[arg-type]
            return _EMPTY
    except (TypeError, ValueError, BufferError):
        pass  # DLPack, released, or what else `buffer_of` has something to say about
    return buffer_of(buffer).view


def _writable(buffer: object) -> memoryview:
    view = octets_of(buffer)
    if view.readonly and view.nbytes:
        raise ApiMisuse(f"this {type(buffer).__name__} is read-only: a value cannot be loaded into it")
    return view


def _paired(
    names: Names, keys: Sequence[object], buffers: Sequence[object], view_of: Callable[[object], memoryview]
) -> Values:
    if len(keys) != len(buffers):
        raise ApiMisuse(f"{len(keys)} keys, {len(buffers)} buffers: a batch needs equally many of each")
    made: list[bytes] = []
    views: list[memoryview] = []
    invalid: dict[int, Item] = {}
    for key, buffer in zip(keys, buffers, strict=True):
        try:  # once each: some buffers can be asked for their octets only once
            name, view = names.of(key), view_of(buffer)
        except ApiMisuse as error:
            invalid[len(made)] = Item(Outcome.INVALID, error=error)
            name, view = b"", _EMPTY
        made.append(name)
        views.append(view)
    return Values(made, views, invalid)
