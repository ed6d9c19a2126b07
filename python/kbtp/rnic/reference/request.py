"""A connect request: an MPA Request that waits for the ULP's answer (RFC 5044 7.1.2 rule 2)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kbtp.errors import ApiMisuse
from kbtp.iwarp.mpa import PassiveStartup, PeerRequest
from kbtp.rnic.reference.goodbye import Goodbye
from kbtp.rnic.reference.loop import Loop
from kbtp.rnic.reference.posting import check_depths, domain_of, receive_buffer
from kbtp.rnic.reference.stream import ReferenceStream
from kbtp.rnic.reference.tcp import TcpLink
from kbtp.verbs.api import ProtectionDomain, Recv

_log = logging.getLogger("kbtp.rnic")


class ReferenceConnectRequest:
    """`kbtp.verbs.api.ConnectRequest`."""

    def __init__(
        self,
        loop: Loop,
        link: TcpLink,
        startup: PassiveStartup,
        request: PeerRequest,
        on_done: Callable[[ReferenceConnectRequest], None],
    ) -> None:
        self._loop = loop
        self._link = link
        self._startup = startup
        self._request = request
        self._on_done = on_done
        self._open = True

    @property
    def private_data(self) -> bytes:
        return self._request.private_data

    @property
    def remote_address(self) -> str:
        return self._link.peer

    @property
    def peer_ird(self) -> int:
        return self._request.peer_ird

    @property
    def peer_ord(self) -> int:
        return self._request.peer_ord

    def accept(
        self, *, pd: ProtectionDomain, private_data: bytes, ird: int, ord_: int, receives: Sequence[Recv] = ()
    ) -> ReferenceStream:
        """See `kbtp.verbs.api.ConnectRequest.accept`. After an ApiMisuse the request can still be answered."""
        self._check_open()
        check_depths(ird, ord_)
        stream = ReferenceStream(self._loop, domain_of(pd, self._loop.table), self._link.peer, ird, ord_)
        try:
            for receive in receives:
                receive_buffer(receive, stream.memory)
            reply, negotiated = self._startup.accept(private_data, ird, ord_)
        except ApiMisuse:
            stream.discard()
            raise
        self._done()
        stream.post_recv(receives)
        self._link.queue([reply])
        stream.open(self._link, negotiated, active=False)
        return stream

    def reject(self, private_data: bytes) -> None:
        """Reply with R=1, then close. Raises ApiMisuse for too long private data."""
        self._check_open()
        reply = self._startup.reject(private_data)
        self._done()
        self._link.queue([reply])
        Goodbye(self._loop, self._link)

    def reject_unanswered(self) -> None:
        """The owner polls again: the answer is no."""
        if self._open:
            _log.warning("the connect request of %s was neither accepted nor rejected: rejected", self._link.peer)
            self.reject(b"")

    def close_now(self) -> None:
        """The listener closes: the connection goes, and no answer is possible any more."""
        self._done()
        self._link.close()

    def _check_open(self) -> None:
        if not self._open:
            raise ApiMisuse(
                f"the connect request of {self._link.peer} is answered or gone: answer once, before the next poll"
            )

    def _done(self) -> None:
        self._open = False
        self._on_done(self)
