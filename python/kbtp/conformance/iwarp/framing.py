"""MPA framing in full operation (RFC 5044 3 to 6)."""

from __future__ import annotations

from kbtp.conformance.case import Group
from kbtp.conformance.probe import Probe
from kbtp.types import TerminateCause

GROUP = Group("mpa-framing")


@GROUP.either("F6")
def wrong_crc(probe: Probe) -> None:
    """An FPDU with a wrong CRC ends the stream with 2/0/02."""
    stream = probe.session().stream
    fpdu = bytearray(stream.fpdu(stream.ulpdus_of_send(bytes(40))[0]))
    fpdu[-1] ^= 1
    stream.send_octets(bytes(fpdu))
    stream.expect_terminate(TerminateCause.MPA_CRC)
