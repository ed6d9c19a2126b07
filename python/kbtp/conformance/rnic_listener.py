"""Where an initiator under test connects to over an RNIC: what a listening socket is to the peer by hand."""

from __future__ import annotations

import time

from kbtp.address import Address
from kbtp.conformance.deviation import NotApplicable
from kbtp.conformance.rnic_channel import RnicChannel
from kbtp.conformance.rnic_stream import LOOK_AGAIN_S, RnicStream
from kbtp.conformance.startup import Startup, connection_data
from kbtp.conformance.tcp import Deadline
from kbtp.verbs.api import ConnectRequest, Rnic


class RnicListener:
    """For one case, whose streams it carries. Who connects while nobody awaits that is accepted, and kept."""

    def __init__(self, rnic: Rnic, address: Address) -> None:
        """Raises OSError as the system gives it."""
        self._channel = RnicChannel(rnic, self._answer)
        self._listener = self._channel.verbs.listen(address.host, address.port)
        self._deadline = Deadline(0)
        self._startup: Startup | None = None
        self._rejecting = False
        self._accepted: list[RnicStream] = []

    @property
    def address(self) -> Address:
        return Address(*self._listener.address)

    def accept(self, deadline: Deadline, startup: Startup | None, within_s: float) -> RnicStream | None:
        """The next stream, started like that; None if there is none in time."""
        if self._accepted and startup is not None:
            raise NotApplicable("a choice of how the stream starts, which it has already")
        self._deadline, self._startup = deadline, startup
        end_s = time.monotonic() + within_s
        while not self._accepted and (left_s := end_s - time.monotonic()) > 0:
            self._channel.pump(min(left_s, LOOK_AGAIN_S))
        return self._accepted.pop(0) if self._accepted else None

    def reject(self, within_s: float) -> bool:
        """Turn away who connects next; False if nobody does in time."""
        self._rejecting = True
        end_s = time.monotonic() + within_s
        while self._rejecting and (left_s := end_s - time.monotonic()) > 0:
            self._channel.pump(min(left_s, LOOK_AGAIN_S))
        done, self._rejecting = not self._rejecting, False
        return done

    def close(self) -> None:
        """Nobody can connect any more; streams go on."""
        self._listener.close()

    def end(self) -> None:
        """Streams end too."""
        self._channel.close()

    def _answer(self, request: ConnectRequest) -> None:
        if self._rejecting:
            self._rejecting = False
            request.reject(connection_data())
            return
        startup, self._startup = self._startup or Startup(), None
        self._accepted.append(RnicStream.accept(self._channel, request, self._deadline, startup))
