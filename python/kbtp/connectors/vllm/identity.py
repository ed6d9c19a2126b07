"""What engines must agree on before one takes for its own what another has stored."""

from __future__ import annotations

import hashlib

from kbtp.connectors.names import key_of

_FINGERPRINT_BYTES = 16


def fingerprint_of(*fields: bytes | str | int) -> bytes:
    """Of fixed length, and different for what differs in one field."""
    return hashlib.blake2b(key_of(*fields), digest_size=_FINGERPRINT_BYTES).digest()
