"""Profile 3: the 24 octets that begin the MPA (or CM) private data of both directions."""

from __future__ import annotations

from dataclasses import dataclass

from kbtp.errors import WireFormatError
from kbtp.limits import CONNECTION_DATA_BYTES, CONNECTION_DATA_VERSION, CONNECTION_NONCE_BYTES
from kbtp.types import Status
from kbtp.wire.header import Octets, check_octets
from kbtp.wire.layouts import CONNECTION_DATA

_MAGIC = int.from_bytes(b"KBTP", "big")


@dataclass(frozen=True, slots=True)
class ConnectionData:
    """The nonce (16 octets) is fresh and random for each connection; authentication covers it (profile 4).

    | at | bits | field |
    |---|---|---|
    | 0 | 32 | `KBTP` |
    | 4 | 8 | version, 1 |
    | 5 | 24 | reserved |
    | 8 | 128 | nonce |
    """

    nonce: bytes
    version: int = CONNECTION_DATA_VERSION

    @classmethod
    def parse(cls, data: Octets) -> ConnectionData:
        """The first 24 octets; more are ignored, since a CM pads.

        Raises `WireFormatError` if they are not there (field "connection_data"), for another magic, and with status
        UNSUPPORTED for another version. A target answers all three with R=1.
        """
        if len(data) < CONNECTION_DATA_BYTES:
            raise WireFormatError(
                "connection_data", f"{CONNECTION_DATA_BYTES} octets are needed, only {len(data)} are there"
            )
        magic, version, nonce = CONNECTION_DATA.unpack_from(data)
        if magic != _MAGIC:
            raise WireFormatError("magic", f"0x{magic:08x} is not that of KBTP, 0x{_MAGIC:08x}")
        if version != CONNECTION_DATA_VERSION:
            raise WireFormatError("version", f"{version}, spoken here is {CONNECTION_DATA_VERSION}", Status.UNSUPPORTED)
        return cls(nonce, version)

    def pack(self) -> bytes:
        """The 24 octets. Raises `ApiMisuse` for a nonce of another length or a version that does not fit 8 bits."""
        check_octets("nonce", self.nonce, CONNECTION_NONCE_BYTES)
        return CONNECTION_DATA.pack(_MAGIC, self.version, self.nonce)
