"""The event channel and completion channel of a reference RNIC: `kbtp.verbs.api.Channel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kbtp.errors import ApiMisuse, ConnectionLost
from kbtp.iwarp.mpa import ActiveStartup
from kbtp.rnic.reference.connector import Connector, resolve
from kbtp.rnic.reference.listener import ReferenceListener
from kbtp.rnic.reference.loop import Loop
from kbtp.rnic.reference.options import ReferenceOptions
from kbtp.rnic.reference.posting import check_depths, domain_of
from kbtp.rnic.reference.stream import ReferenceStream
from kbtp.rnic.reference.tcp import address_text, error_text
from kbtp.verbs.api import Event, ProtectionDomain, Recv
from kbtp.verbs.stag_table import StagTable

_PORT_MAX = 0xFFFF


class ReferenceChannel:
    """One thread polls, posts, connects and listens; any thread may `wake`."""

    def __init__(
        self, table: StagTable, options: ReferenceOptions, on_close: Callable[[ReferenceChannel], None]
    ) -> None:
        self._loop = Loop(table, options)
        self._on_close = on_close

    def listen(self, host: str, port: int) -> ReferenceListener:
        """Listen on the first address of `host` ("": the system's wildcard); port 0 takes a free one.

        Raises OSError as the system gives it, ApiMisuse for a port that is none.
        """
        self._check_open()
        if not 0 <= port <= _PORT_MAX:
            raise ApiMisuse(f"a port to listen on must be 0 to {_PORT_MAX}; got {port}")
        return ReferenceListener(self._loop, host, port)

    def connect(
        self,
        host: str,
        port: int,
        *,
        pd: ProtectionDomain,
        private_data: bytes,
        ird: int,
        ord_: int,
        timeout_s: float,
        receives: Sequence[Recv] = (),
    ) -> ReferenceStream:
        """Start connecting; whatever fails from here on is the `StreamEnded` of the stream.

        A name is looked up by the system's resolver, which blocks this thread and knows no time limit of ours: where
        that matters, give an address. Raises ApiMisuse.
        """
        self._check_open()
        if not 0 < port <= _PORT_MAX:
            raise ApiMisuse(f"a port to connect to must be 1 to {_PORT_MAX}; got {port}")
        check_depths(ird, ord_)
        domain = domain_of(pd, self._loop.table)
        startup = ActiveStartup(self._loop.options.mpa, private_data, ird, ord_)
        stream = ReferenceStream(self._loop, domain, address_text((host, port)), ird, ord_)
        try:
            stream.post_recv(receives)
        except ApiMisuse:
            stream.discard()
            raise
        try:
            addresses = resolve(host, port)
        except (OSError, UnicodeError) as error:  # a name that IDNA cannot encode is a UnicodeError
            why = error_text(error) if isinstance(error, OSError) else str(error)
            stream.fail_connecting(ConnectionLost(f"cannot look up {host}: {why}: check the name"))
            return stream
        Connector(self._loop, stream, startup, addresses, timeout_s).start()
        return stream

    def poll(self, timeout_s: float) -> list[Event]:
        self._check_open()
        return self._loop.poll(timeout_s)

    def fileno(self) -> int:
        self._check_open()
        return self._loop.fileno()

    def next_timeout_s(self) -> float | None:
        self._check_open()
        return self._loop.next_timeout_s()

    def wake(self) -> None:
        self._loop.wake()

    def close(self) -> None:
        if not self._loop.closed:
            self._loop.close()
            self._on_close(self)

    def _check_open(self) -> None:
        if self._loop.closed:
            raise ApiMisuse("the channel is closed: open another one")
