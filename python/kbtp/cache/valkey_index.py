"""An index in Valkey or Redis, single, behind Sentinel or clustered, by way of the package `valkey`.

| URL | what |
|---|---|
| `valkey://[[USER]:PASSWORD@]HOST[:PORT]` | one server; `valkeys://` with TLS, `unix://PATH`; `redis` is `valkey` |
| `valkey+sentinel://HOST:PORT[,HOST:PORT]/SERVICE` | the primary that these Sentinels name |
| `valkey+cluster://HOST:PORT` | the cluster that this node belongs to |
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import valkey
import valkey.asyncio
import valkey.asyncio.cluster
import valkey.asyncio.sentinel
import valkey.cluster
import valkey.exceptions
import valkey.sentinel
from valkey.connection import parse_url

from kbtp import limits
from kbtp.cache.backoff import Backoff
from kbtp.cache.commands import Command, exchange
from kbtp.cache.index import Answered, Asked
from kbtp.cache.steps import IndexStep, IndexUnavailable
from kbtp.cache.valkey_connections import BY_SCHEME, Connection, Pool, SentinelConnection, begin, left_s
from kbtp.cache.valkey_wire import Dialogue, Wires
from kbtp.errors import ApiMisuse

_SENTINEL_PORT = 26379
_SCHEMES = ("valkey", "valkeys", "redis", "rediss", "unix")
# What a pipeline of the cluster client refuses, or sends to one node only: these go by themselves.
_ALONE_IN_CLUSTER = frozenset(("MGET", "SCAN"))
# The last is what Python says of a host that can be no name.
_FAILURES = (valkey.ValkeyError, valkey.exceptions.ValkeyClusterException, OSError, UnicodeError)
_T = TypeVar("_T")


class _Opened:
    """Which client a URL means. Raises `ApiMisuse`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": min(timeout_s, limits.CACHE_CONNECT_TIMEOUT_S),
        }
        self.timeout_s = timeout_s
        scheme, _, kind = url.partition("://")[0].lower().partition("+")
        if scheme not in _SCHEMES or kind not in ("", "sentinel", "cluster"):
            raise ApiMisuse(
                f"{url!r} names no index: expected valkey://HOST[:PORT], or kbtp://HOST of `kbtp serve --index`"
            )
        rest = url.partition("://")[2]
        self.url = f"{scheme.replace('redis', 'valkey')}://{rest}"
        self.options = options
        self.kind = kind
        self.sentinels: list[tuple[str, int]] = []
        self.service = ""
        try:
            if kind == "sentinel":
                self._read_sentinels(scheme, rest)
            else:
                parse_url(self.url)
        except ApiMisuse:
            raise
        except ValueError as error:
            raise ApiMisuse(f"the URL of the index cannot be used: {error}") from None

    def _read_sentinels(self, scheme: str, rest: str) -> None:
        if scheme not in ("valkey", "redis") or "@" in rest:
            raise ApiMisuse(
                "an index behind Sentinel cannot be reached with TLS or a password here: expected"
                " valkey+sentinel://HOST:PORT[,HOST:PORT]/SERVICE"
            )
        hosts, _, self.service = rest.partition("/")
        for host in hosts.split(","):
            parts = urlsplit(f"//{host}")
            self.sentinels.append((parts.hostname or "", parts.port or _SENTINEL_PORT))
        if not self.service or not all(host for host, _ in self.sentinels):
            raise ApiMisuse(f"{rest!r}: expected valkey+sentinel://HOST:PORT[,HOST:PORT]/SERVICE")


class _Guard:
    """Whether to ask an index that has failed."""

    def __init__(self) -> None:
        self._backoff = Backoff()
        self._lock = threading.Lock()
        self._why = ""

    @property
    def is_content(self) -> bool:
        return not self._why

    def check(self) -> None:
        if not self._why:
            return
        with self._lock:
            if not self._backoff.may_try(time.monotonic()):
                raise IndexUnavailable(f"it is not asked again yet ({self._why})")

    def failed(self, error: Exception) -> IndexUnavailable:
        with self._lock:
            self._why = str(error) or type(error).__name__
            self._backoff.failed(time.monotonic())
        return IndexUnavailable(self._why)

    def worked(self) -> None:
        if self._why:
            with self._lock:
                self._why = ""
                self._backoff.worked()


class ValkeyIndex:
    """Threads may share it."""

    def __init__(self, url: str, timeout_s: float = limits.CACHE_TIMEOUT_S) -> None:
        self._opened = _Opened(url, timeout_s)
        self._guard = _Guard()
        self._client: Any = None
        self._wires: Wires | None = None
        self._sentinels: list[Any] = []

    def perform(self, step: IndexStep) -> Any:
        return self.ask(step).answer()

    def ask(self, step: IndexStep) -> Asked:
        """As `perform`, but for the wait. A client for a cluster waits all the same."""
        self._guard.check()
        if self._opened.kind != "cluster":
            return _Asked(self, step)
        reply = self.in_time(self._opened.timeout_s, partial(self._perform_in_cluster, step))
        self._guard.worked()
        return Answered(reply)

    def is_at_once(self) -> bool:
        return self._wires is not None and self._wires.has_idle and self._guard.is_content

    def close(self) -> None:
        if self._wires is not None:
            self._wires.drop_all()
        if self._client is not None:
            self._client.close()
            if self._sentinels:  # a client that they chose the server for leaves its connections to them
                self._client.connection_pool.disconnect()
        for one in self._sentinels:
            one.close()

    def in_time(self, timeout_s: float, do: Callable[[], _T], again: Callable[[], _T] | None = None) -> _T:
        """`do`, and `again` after it has found a connection that the server has closed meanwhile: every step may be
        done twice. Raises `IndexUnavailable`."""
        begin(timeout_s)
        try:
            try:
                return do()
            except valkey.ConnectionError:
                if self._wires is not None:
                    self._wires.drop_all()
                return (again or do)()
        except _FAILURES as error:
            raise self._guard.failed(error) from error

    def worked(self) -> None:
        self._guard.worked()

    @property
    def timeout_s(self) -> float:
        return self._opened.timeout_s

    def begun(self, step: IndexStep) -> Dialogue:
        if self._wires is None:
            self._client = self._connect()
            self._wires = Wires(self._client.connection_pool)
        return Dialogue(self._wires, step)

    def _connect(self) -> Any:
        opened = self._opened
        if opened.kind == "cluster":
            return valkey.cluster.ValkeyCluster.from_url(  # type: ignore[no-untyped-call]
                opened.url, connection_pool_class=Pool, **opened.options
            )
        if opened.kind == "sentinel":
            sentinel: Any = valkey.sentinel.Sentinel(opened.sentinels, **opened.options)  # type: ignore[no-untyped-call]
            self._sentinels = list(sentinel.sentinels)
            for one in self._sentinels:
                one.connection_pool.connection_class = Connection
            return sentinel.master_for(opened.service, connection_class=SentinelConnection, **opened.options)
        chosen = BY_SCHEME[urlsplit(opened.url).scheme]
        return valkey.Valkey.from_url(opened.url, connection_class=chosen, **opened.options)

    def _perform_in_cluster(self, step: IndexStep) -> Any:
        if self._client is None:
            self._client = self._connect()
        plan = exchange(step)
        try:
            commands = next(plan)
            while True:
                commands = plan.send(_in_cluster(self._client, commands))
        except StopIteration as done:
            return done.value


class _Asked:
    """A step that a server has been asked for, which is no cluster."""

    def __init__(self, index: ValkeyIndex, step: IndexStep) -> None:
        self._index = index
        self._step = step
        self._dialogue = index.in_time(index.timeout_s, self._begin)

    def answer(self) -> Any:
        reply = self._index.in_time(self._left_s, self._dialogue.finish, self._anew)
        self._index.worked()
        return reply

    def _begin(self) -> Dialogue:
        dialogue = self._index.begun(self._step)
        self._left_s = left_s()
        return dialogue

    def _anew(self) -> Any:
        return self._index.begun(self._step).finish()

    def forget(self) -> None:
        self._dialogue.forget()


def _in_cluster(client: Any, commands: Sequence[Command]) -> list[Any]:
    replies: list[Any] = [None] * len(commands)
    single = _Single(commands)
    if single.commands:
        pipeline = client.pipeline()
        for command in single.commands:
            pipeline.execute_command(*command)
        single.answer(pipeline.execute(), replies)
    for place, command in enumerate(commands):
        if command[0] == "MGET":
            replies[place] = client.mget_nonatomic(command[1:])
        elif command[0] == "SCAN":
            node, there = _node_of(client, command)
            replies[place] = _scanned(client, command, client.execute_command(*there, target_nodes=node))
    return replies


class _Single:
    """What a pipeline of a cluster can carry of some commands, those on many names as one for each name."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self.commands: list[Command] = []
        self._asked_for_all = [command[0] == "MSETNX" for command in commands]
        self._places: list[tuple[int, bool]] = []
        for place, command in enumerate(commands):
            if command[0] in _ALONE_IN_CLUSTER:
                continue
            parts = _by_slot(command)
            self.commands += parts or [command]
            self._places += [(place, bool(parts))] * len(parts or [command])

    def answer(self, answers: Sequence[Any], replies: list[Any]) -> None:
        for (place, is_part), answer in zip(self._places, answers, strict=True):
            if not is_part:
                replies[place] = answer
            elif isinstance(answer, list):
                replies[place] = [*(replies[place] or []), *answer]
            elif self._asked_for_all[place]:
                replies[place] = bool(answer) if replies[place] is None else replies[place] and bool(answer)
            else:
                replies[place] = (replies[place] or 0) + answer


def _by_slot(command: Command) -> list[Command]:
    """What is on the keys of many names, once for each: no two of them need be on one node. Empty if it is on one."""
    if command[0] == "MSETNX":
        return [("SET", *command[at : at + 2], "NX") for at in range(1, len(command), 2)]
    if command[0] == "DEL" and len(command) > 2:
        return [("DEL", key) for key in command[1:]]
    if command[0] != "EVAL" or command[2] <= 2:
        return []
    eval_, script, key_count, *rest = command
    keys, first, records = rest[:key_count], rest[key_count], rest[key_count + 1 :]
    return [
        (eval_, script, 2, keys[2 * place], keys[2 * place + 1], first, record) for place, record in enumerate(records)
    ]


# A cursor over a whole cluster: that of one node, and which of the primaries, by name, that is.
_NODE_BITS = 16


def _primaries(client: Any) -> list[Any]:
    return sorted(client.get_primaries(), key=lambda node: str(node.name))


def _node_of(client: Any, command: Command) -> tuple[Any, Command]:
    """The node to ask next, and the command with its own cursor."""
    nodes, number = _primaries(client), command[1] & ((1 << _NODE_BITS) - 1)
    # Where nodes have gone meanwhile the last one is asked again: a scan is no promise in a cluster that changes.
    return nodes[min(number, len(nodes) - 1)], ("SCAN", command[1] >> _NODE_BITS, *command[2:])


def _scanned(client: Any, command: Command, reply: Any) -> tuple[int, Sequence[bytes]]:
    cursors, keys = reply
    cursor, number = next(iter(cursors.values())), command[1] & ((1 << _NODE_BITS) - 1)
    if not cursor:
        number = number + 1 if number + 1 < len(_primaries(client)) else 0
    return cursor << _NODE_BITS | number, keys


async def _in_time(answer: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """Raises `asyncio.TimeoutError`."""
    if sys.version_info >= (3, 11):
        async with asyncio.timeout(timeout_s):  # a fifth of a look-up faster than `wait_for`
            return await answer
    else:
        return await asyncio.wait_for(answer, timeout_s)


class AsyncValkeyIndex:
    """For one event loop."""

    def __init__(self, url: str, timeout_s: float = limits.CACHE_TIMEOUT_S) -> None:
        self._opened = _Opened(url, timeout_s)
        self._guard = _Guard()
        self._client: Any = None
        self._sentinels: list[Any] = []

    async def perform(self, step: IndexStep) -> Any:
        self._guard.check()
        try:
            reply = await _in_time(self._twice(step), self._opened.timeout_s)
        except asyncio.TimeoutError:
            raise self._guard.failed(valkey.TimeoutError("the deadline has passed")) from None
        except _FAILURES as error:
            raise self._guard.failed(error) from error
        self._guard.worked()
        return reply

    async def _twice(self, step: IndexStep) -> Any:
        try:
            return await self._perform(step)
        except valkey.ConnectionError:  # see `ValkeyIndex.perform`
            return await self._perform(step)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            if self._sentinels:  # see `ValkeyIndex.close`
                await self._client.connection_pool.disconnect()
        for one in self._sentinels:
            await one.aclose()

    async def _perform(self, step: IndexStep) -> Any:
        if self._client is None:
            self._client = self._connect()
        plan = exchange(step)
        try:
            commands = next(plan)
            while True:
                commands = plan.send(await self._send(commands))
        except StopIteration as done:
            return done.value

    def _connect(self) -> Any:
        opened = self._opened
        if opened.kind == "cluster":
            return valkey.asyncio.cluster.ValkeyCluster.from_url(opened.url, **opened.options)
        if opened.kind == "sentinel":
            sentinel: Any = valkey.asyncio.sentinel.Sentinel(opened.sentinels, **opened.options)  # type: ignore[no-untyped-call]
            self._sentinels = list(sentinel.sentinels)
            return sentinel.master_for(opened.service, **opened.options)
        return valkey.asyncio.Valkey.from_url(opened.url, **opened.options)

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        client = self._client
        if self._opened.kind == "cluster":
            return await self._in_cluster(commands)
        if len(commands) == 1:
            return [await client.execute_command(*commands[0])]
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = await pipeline.execute()
        return replies

    async def _in_cluster(self, commands: Sequence[Command]) -> list[Any]:
        client = self._client
        await client.initialize()
        replies: list[Any] = [None] * len(commands)
        single = _Single(commands)
        if single.commands:
            pipeline = client.pipeline()
            for command in single.commands:
                pipeline.execute_command(*command)
            single.answer(await pipeline.execute(), replies)
        for place, command in enumerate(commands):
            if command[0] == "MGET":
                replies[place] = await client.mget_nonatomic(command[1:])
            elif command[0] == "SCAN":
                node, there = _node_of(client, command)
                replies[place] = _scanned(client, command, await client.execute_command(*there, target_nodes=node))
        return replies
