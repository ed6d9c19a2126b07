"""Each step as commands of Valkey or Redis. No I/O: commands out, replies in.

| key | type | what |
|---|---|---|
| `kbtp:life` | string | random, made by whoever finds none: another one means that the index began anew |
| `kbtp:r:NAME` | string | a record |
| `kbtp:p:NAME` | sorted set | holders of pins, by the time, in ms of the server's clock, when theirs ends |
| `kbtp:m:OWNER` | list | names that others have read or whose record they have removed |
| `kbtp:{targets}:beats` | hash | by incarnation: the time of the last beat, a blank, the announcement |
| `kbtp:{targets}:draining` | set | incarnations |

All keys of a name share its hash tag, so that a script on them works in a cluster too.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from itertools import chain
from typing import Any, TypeAlias

from kbtp import limits
from kbtp.cache.announcement import Announcement, warn_once
from kbtp.cache.steps import (
    Announce,
    Claim,
    Claimed,
    Discard,
    Drain,
    Entry,
    IndexStep,
    IndexUnavailable,
    ListTargets,
    Looked,
    Lookup,
    Pin,
    Publish,
    Removal,
    Remove,
    Scan,
    Tell,
    Unpin,
    Withdraw,
)
from kbtp.errors import ApiMisuse

Command: TypeAlias = tuple[Any, ...]
Exchange: TypeAlias = Generator[Sequence[Command], Sequence[Any], Any]
"""Yields the commands of one round trip, is sent their replies, returns that of the step."""

LIFE = b"kbtp:life"
BEATS = b"kbtp:{targets}:beats"
DRAINING = b"kbtp:{targets}:draining"

_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000) "
# KEYS: record, pins, record, pins, ...; ARGV: whether pins are heeded, then the records expected.
_REMOVE = (
    _NOW
    + """
local out = {}
for i = 1, #KEYS, 2 do
    local place = (i + 1) / 2
    if redis.call('GET', KEYS[i]) ~= ARGV[place + 1] then out[place] = 0
    elseif ARGV[1] == '1' and redis.call('ZCOUNT', KEYS[i + 1], '(' .. now, '+inf') > 0 then out[place] = 1
    else redis.call('DEL', KEYS[i], KEYS[i + 1]) out[place] = 2 end
end
return out
"""
)
_STRINGS = frozenset((bytes, type(None)))
# What a client makes of "OK", and "OK" itself.
_FIRSTS = {True: True, b"OK": True, None: False}
_ALL = {1: True, 0: False}
_REMOVALS = (Removal.GONE, Removal.PINNED, Removal.REMOVED)
# KEYS: record, pins; ARGV: holder, ms.
_PIN = (
    _NOW
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('ZADD', KEYS[2], 'GT', now + ARGV[2], ARGV[1])
redis.call('PEXPIREAT', KEYS[2], redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2])
return 1
"""
)
# KEYS: beats; ARGV: incarnation, announcement, how old a beat may be to be kept.
_ANNOUNCE = (
    _NOW
    + """
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
    local beat = tonumber(string.match(all[i + 1], '^%d+')) or 0
    if now - beat > tonumber(ARGV[3]) then redis.call('HDEL', KEYS[1], all[i]) end
end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d ', now) .. ARGV[2])
"""
)
# KEYS: beats, draining.
_LIST = _NOW + "return {string.format('%d', now), redis.call('HVALS', KEYS[1]), redis.call('SMEMBERS', KEYS[2])}"
_KEEP_BEATS_MS = round(limits.CACHE_BEAT_TTL_S * 1000 * 30)


def exchange(step: IndexStep) -> Exchange:
    """Raises `IndexUnavailable` at a reply that cannot be one."""
    try:
        return (yield from _exchange(step))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise IndexUnavailable(f"the index answers a {type(step).__name__} with something else ({error})") from error


def _exchange(step: IndexStep) -> Exchange:
    match step:
        case Lookup():
            return _lookup(step)
        case Publish():
            return _publish(step.entries, step.ttl_ms)
        case Claim():
            return _claim(step)
        case Remove():
            return _remove(step)
        case Discard():
            return _discard(step.names)
        case Pin():
            return _pin(step)
        case Unpin():
            return _each([("ZREM", _pins(name), step.holder) for name in step.names])
        case Scan():
            return _scan(step)
        case Tell():
            return _each(_mail(step.owner, step.names))
        case Announce():
            about = step.target
            return _each([("EVAL", _ANNOUNCE, 1, BEATS, _hex(about.incarnation), about.pack(), _KEEP_BEATS_MS)])
        case Withdraw():
            return _each([("HDEL", BEATS, _hex(step.incarnation)), ("SREM", DRAINING, _hex(step.incarnation))])
        case Drain():
            return _each([("SREM" if step.undo else "SADD", DRAINING, _hex(step.incarnation))])
        case ListTargets():
            return _list_targets()


def record_key(name: bytes) -> bytes:
    return b"kbtp:r:" + name


def _pins(name: bytes) -> bytes:
    return b"kbtp:p:" + name


def _hex(incarnation: int) -> bytes:
    return b"%016x" % incarnation


def _each(commands: Sequence[Command]) -> Exchange:
    if commands:
        yield commands


def _mail(owner: bytes, letters: Sequence[bytes]) -> list[Command]:
    box = b"kbtp:m:" + owner.hex().encode()
    return [
        ("RPUSH", box, *letters),
        ("LTRIM", box, -limits.CACHE_MAIL_MAX, -1),
        ("EXPIRE", box, limits.CACHE_MAIL_TTL_S),
    ]


def _lookup(step: Lookup) -> Exchange:
    names = step.names
    most = limits.CACHE_LOOKUP_MAX_NAMES
    commands: list[Command] = [
        ("MGET", LIFE, *map(record_key, names[at : at + most])) for at in range(0, max(1, len(names)), most)
    ]
    looks = len(commands)
    for owner, letters in step.touched.items():
        commands += _mail(owner, letters)
    if step.collect is not None:
        commands.append(_open_mail(step.collect))
    replies = yield commands
    records = [record for reply in replies[:looks] for record in reply[1:]]
    life = yield from _life(replies[0][0])
    return Looked(_octets(records, len(names)), _letters(replies[-1]) if step.collect is not None else [], life)


def _life(said: bytes | None) -> Exchange:
    """The life of the index, which begins if it has not yet."""
    if said is None:
        yield [("SET", LIFE, secrets.token_bytes(8), "NX")]
        [said] = yield [("GET", LIFE)]
    if not isinstance(said, bytes):
        raise TypeError("its life is no string")
    return said


def _open_mail(owner: bytes) -> Command:
    return ("LPOP", b"kbtp:m:" + owner.hex().encode(), limits.CACHE_MAIL_MAX)


def _letters(reply: Any) -> list[Any]:
    return _octets(reply, len(reply)) if reply else []


def _octets(replies: Sequence[Any], count: int) -> list[Any]:
    """So many strings, or None for those that there are none of."""
    if len(replies) != count or not _STRINGS.issuperset(map(type, replies)):
        raise TypeError(f"not {count} strings")
    return list(replies)


def _publish(entries: Sequence[Entry], ttl_ms: int | None) -> Exchange:
    if not entries:
        return []
    return (yield from _firsts(entries, (yield _puts(entries, ttl_ms))))


def _claim(step: Claim) -> Exchange:
    """All or none at first: most often all are new, and one command costs the server far less than one for each."""
    entries = step.entries
    at_once = step.ttl_ms is None and len({name for name, _ in entries}) == len(entries) > 1
    puts = [_put_all(entries)] if at_once else _puts(entries, step.ttl_ms)
    life, mail, *replies = yield [("GET", LIFE), _open_mail(step.owner), *puts]
    if not at_once:
        firsts = yield from _firsts(entries, replies)
    elif _ALL[replies[0]]:
        firsts = [True] * len(entries)
    else:
        firsts = yield from _publish(entries, step.ttl_ms)
    return Claimed(firsts, _letters(mail), (yield from _life(life)))


def _put_all(entries: Sequence[Entry]) -> Command:
    """Of different names: of two records under one name the later one would be there, and both the first."""
    return ("MSETNX", *chain.from_iterable([(record_key(name), record) for name, record in entries]))


def _puts(entries: Sequence[Entry], ttl_ms: int | None) -> list[Command]:
    ttl = () if ttl_ms is None else ("PX", ttl_ms)
    return [("SET", record_key(name), record, "NX", *ttl) for name, record in entries]


def _firsts(entries: Sequence[Entry], replies: Sequence[Any]) -> Exchange:
    """Whether each was the first under its name, or is what is there: where that was done already, unanswered."""
    firsts = [_FIRSTS[reply] for reply in replies]
    later = [place for place, first in enumerate(firsts) if not first]
    if later:
        [records] = yield [("MGET", *(record_key(entries[place][0]) for place in later))]
        for place, record in zip(later, _octets(records, len(later)), strict=True):
            firsts[place] = record == entries[place][1]
    return firsts


def _remove(step: Remove) -> Exchange:
    """By a script that takes the keys of any of them, and may be run for each by itself."""
    removals: list[Removal] = []
    for at in range(0, len(step.entries), limits.CACHE_LOOKUP_MAX_NAMES):
        some = step.entries[at : at + limits.CACHE_LOOKUP_MAX_NAMES]
        keys = [key for name, _ in some for key in (record_key(name), _pins(name))]
        records = (record for _, record in some)
        [reply] = yield [("EVAL", _REMOVE, len(keys), *keys, int(step.spare_pinned), *records)]
        if len(reply) != len(some):
            raise ValueError(f"{len(reply)} answers to {len(some)} entries")
        removals += [_REMOVALS[number] for number in reply]
    return removals


def _discard(names: Sequence[bytes]) -> Exchange:
    if not names:
        return []
    replies = yield [("GETDEL", record_key(name)) for name in names] + [("DEL", *map(_pins, names))]
    return _octets(replies[: len(names)], len(names))


def _pin(step: Pin) -> Exchange:
    if not step.names:
        return []
    commands = [("EVAL", _PIN, 2, record_key(name), _pins(name), step.holder, step.ms) for name in step.names]
    return [bool(reply) for reply in (yield commands)]


def _scan(step: Scan) -> Exchange:
    prefix = record_key(b"")
    [(cursor, keys)] = yield [
        ("SCAN", step.cursor, "MATCH", prefix + (step.fingerprint or b"*") + b":*", "COUNT", 1000)
    ]
    if not keys:
        return int(cursor), []
    [records] = yield [("MGET", *keys)]
    entries = zip((key.removeprefix(prefix) for key in keys), _octets(records, len(keys)), strict=True)
    return int(cursor), [(name, record) for name, record in entries if record is not None]


def _list_targets() -> Exchange:
    [(now_ms, beats, draining)] = yield [("EVAL", _LIST, 2, BEATS, DRAINING)]
    targets = []
    for beat in beats:
        at_ms, _, octets = beat.partition(b" ")
        if not at_ms.isdigit() or int(now_ms) - int(at_ms) > limits.CACHE_BEAT_TTL_S * 1000:
            continue
        try:
            target = Announcement.parse(octets)
        except ApiMisuse as error:
            warn_once(str(error))  # the other targets are there all the same
            continue
        targets.append(target.marked(draining=_hex(target.incarnation) in draining))
    return targets
