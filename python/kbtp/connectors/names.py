"""Keys of fields: what differs in one field has a different key, whatever the fields hold."""

from __future__ import annotations

import hashlib

_FINGERPRINT_BYTES = 16


def key_of(*fields: bytes | str | int) -> bytes:
    """Every field behind its kind and length, so that no separator can be forged and 1 is not "1"."""
    parts = []
    for field in fields:
        octets = field if isinstance(field, bytes) else str(field).encode("utf-8", "surrogatepass")
        kind = b"b" if isinstance(field, bytes) else b"s" if isinstance(field, str) else b"i"
        parts += [kind, len(octets).to_bytes(4, "big"), octets]
    return b"".join(parts)


def fingerprint_of(*fields: bytes | str | int) -> bytes:
    """Of fixed length, and different for what differs in one field."""
    return hashlib.blake2b(key_of(*fields), digest_size=_FINGERPRINT_BYTES).digest()
