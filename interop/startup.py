"""How the newest connection of a recorded guest started, as it went over the wire: was CRC on, which RTR came."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dpkt

from kbtp.iwarp.mpa import REPLY_KEY, REQUEST_KEY, RtrKind
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.limits import DDP_TAGGED_HEADER_BYTES

_FLAGS_AT, _CRC = 16, 0x40
_OPCODE_AT, _OPCODE = 3, 0x0F


@dataclass(frozen=True, slots=True)
class Startup:
    crc: bool
    rtr: RtrKind


def newest_startup(recording: Path) -> Startup | None:
    """None when no connection got as far as a first FPDU."""
    asked_by, crc, replied, found = None, False, False, None
    for flow, octets in _payloads(recording):
        if octets.startswith(REQUEST_KEY):
            asked_by, crc, replied, found = flow, bool(octets[_FLAGS_AT] & _CRC), False, None
        elif octets.startswith(REPLY_KEY):
            crc, replied = crc or bool(octets[_FLAGS_AT] & _CRC), True
        elif replied and flow == asked_by and found is None:
            found = Startup(crc, _rtr_of(octets))
    return found


def _rtr_of(octets: bytes) -> RtrKind:
    """Of the first FPDU: rping's own messages begin with a Send, so a Read Request there is the RTR."""
    length = int.from_bytes(octets[:2], "big")
    match octets[_OPCODE_AT] & _OPCODE:
        case RdmapOpcode.WRITE if length == DDP_TAGGED_HEADER_BYTES:
            return RtrKind.WRITE
        case RdmapOpcode.READ_REQUEST:
            return RtrKind.READ
    return RtrKind.NONE


def _payloads(recording: Path) -> Iterator[tuple[object, bytes]]:
    """Of each TCP segment that has one: its addresses and ports, and as much of it as is recorded."""
    with recording.open("rb") as file:
        for _, packet in dpkt.pcap.Reader(file):
            ip = dpkt.ethernet.Ethernet(packet).data
            if isinstance(ip, dpkt.ip.IP) and isinstance(ip.data, dpkt.tcp.TCP) and ip.data.data:
                yield (ip.src, ip.data.sport, ip.dst, ip.data.dport), bytes(ip.data.data)
