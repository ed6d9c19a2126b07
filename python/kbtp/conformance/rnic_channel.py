"""One channel of an RNIC: whoever waits serves all of its streams, each of which is handed its own events."""

from __future__ import annotations

from collections.abc import Callable

from kbtp.verbs.api import ConnectRequest, Event, Rnic, Stream


class RnicChannel:
    """`verbs` is what connects and listens."""

    def __init__(self, rnic: Rnic, on_request: Callable[[ConnectRequest], None] | None = None) -> None:
        """`on_request` answers whoever connects to a listener, before it returns."""
        self.rnic = rnic
        self.verbs = rnic.open_channel()
        self._on_request = on_request
        self._takers: dict[Stream, Callable[[Event], None]] = {}

    def hand_events_of(self, stream: Stream, take: Callable[[Event], None]) -> None:
        self._takers[stream] = take

    def pump(self, timeout_s: float) -> None:
        """Wait so long for something to happen."""
        for event in self.verbs.poll(timeout_s):
            if isinstance(event, ConnectRequest):
                if self._on_request is not None:
                    self._on_request(event)
            elif event.stream in self._takers:
                self._takers[event.stream](event)

    def close(self) -> None:
        self.verbs.close()
