"""What a case may ask of a KBTP session whichever side is under test."""

from __future__ import annotations

from typing import Protocol

from kbtp.conformance.stream import Stream


class Session(Protocol):
    """A session with the peer under test: HELLO and HELLO_ACK have been exchanged."""

    @property
    def stream(self) -> Stream: ...

    def goes_on(self) -> None:
        """The peer still serves the stream: one exchange of messages shows it. Raises `Deviation`."""

    def finish(self) -> None:
        """End the session as a well-behaved peer does, and see the other side close. Raises `Deviation`."""
