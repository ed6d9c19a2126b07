"""CRC32c as MPA puts it on the wire (RFC 5044 4.4)."""

from __future__ import annotations

from crc32c import crc32c as _crc32c
from crc32c import hardware_based

CRC_BYTES = 4
PATH = "hardware instructions" if hardware_based else "software"
"""How `wire_crc` is taken on this processor."""


def wire_crc(octets: bytes | bytearray | memoryview) -> bytes:
    """The 4 CRC octets over `octets`: least significant octet first, the one little endian field of iWARP."""
    return _crc32c(octets).to_bytes(CRC_BYTES, "little")
