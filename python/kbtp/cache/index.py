"""The index behind the cache: what it has to offer, and which one a URL means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kbtp.address import SCHEME, Address
from kbtp.cache.steps import IndexStep, IndexUnavailable
from kbtp.errors import ApiMisuse

EMBEDDED_PORT_OFFSET = 1
"""`kbtp serve --index` has its index on the port behind its own, so that `kbtp://HOST` names both."""


class Index(Protocol):
    """Each step is one round trip, or as many as its parts need; all of them have a deadline."""

    def perform(self, step: IndexStep) -> Any:
        """The reply that the step's class tells of. Raises `IndexUnavailable`."""

    def close(self) -> None: ...


class Asked(Protocol):
    """A step that is on its way."""

    def answer(self) -> Any:
        """The reply that the step's class tells of. Raises `IndexUnavailable`."""

    def forget(self) -> None:
        """Instead of `answer`: nobody waits for it."""


class Answered:
    """One that was waited for."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply

    def answer(self) -> Any:
        return self._reply

    def forget(self) -> None:
        """It has left nothing behind."""


def ask(index: Index, step: IndexStep) -> Asked:
    """As `Index.perform`, but for the wait where `index` can do without. Raises `IndexUnavailable`."""
    asking: Callable[[IndexStep], Asked] | None = getattr(index, "ask", None)
    return Answered(index.perform(step)) if asking is None else asking(step)


def is_at_once(index: Index) -> bool:
    """Whether to ask is not to wait: there is a connection, and it worked last time."""
    at_once: Callable[[], bool] | None = getattr(index, "is_at_once", None)
    return at_once is not None and at_once()


class Asking:
    """A step that is asked for once, at the latest when there is nothing else to do."""

    def __init__(self, index: Index, step: IndexStep) -> None:
        self._index = index
        self._step = step
        self._asked: Asked | None = None
        self._why: IndexUnavailable | None = None

    def begin(self) -> None:
        """Raises `IndexUnavailable`."""
        self._asked = ask(self._index, self._step)

    def begin_meanwhile(self) -> None:
        """As `begin`, if it has not begun; `answer` raises instead."""
        if self._asked is None and self._why is None:
            try:
                self.begin()
            except IndexUnavailable as unavailable:
                self._why = unavailable

    def answer(self) -> Any:
        """As `Asked.answer`."""
        if self._asked is None:
            raise self._why or IndexUnavailable("it was not asked")
        return self._asked.answer()

    def forget(self) -> None:
        if self._asked is not None:
            self._asked.forget()


class AsyncIndex(Protocol):
    async def perform(self, step: IndexStep) -> Any:
        """See `Index.perform`."""

    async def close(self) -> None: ...


def index_url(url: str) -> str:
    """The URL of the index itself: `kbtp://HOST[:PORT]` means the one that `kbtp serve --index` has there."""
    if url.partition("://")[0].lower() != SCHEME:
        return url
    address = Address.parse(url)
    return valkey_url(address.host, address.port + EMBEDDED_PORT_OFFSET)


def valkey_url(host: str, port: int) -> str:
    bracketed = f"[{host}]" if ":" in host else host
    return f"valkey://{bracketed}:{port}"


def open_index(url: str, timeout_s: float) -> Index:
    """Opens none yet: an index that is not there is one that does not answer. Raises `ApiMisuse`."""
    from kbtp.cache.valkey_index import ValkeyIndex

    return ValkeyIndex(index_url(_checked(url)), timeout_s)


def open_async_index(url: str, timeout_s: float) -> AsyncIndex:
    from kbtp.cache.valkey_index import AsyncValkeyIndex

    return AsyncValkeyIndex(index_url(_checked(url)), timeout_s)


def _checked(url: str) -> str:
    try:
        import valkey  # noqa: F401
    except ImportError:
        raise ApiMisuse(f"{url}: the cache needs a client of the index: pip install 'kbtp[cache]'") from None
    return url
