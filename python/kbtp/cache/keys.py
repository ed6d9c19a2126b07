"""Names in the index: of fixed length, whatever octets a key is made of."""

from __future__ import annotations

import binascii
import hashlib

from kbtp.errors import ApiMisuse
from kbtp.limits import CACHE_KEY_MAX_BYTES, NAMESPACE_MAX_BYTES

_DIGEST_BYTES = 24  # 192 bits; a multiple of 3 has no padding in base 64
_FINGERPRINT_BYTES = 8


class Names:
    """The names of one namespace's keys.

    A name is the fingerprint of the namespace, and in braces (the hash tag of a clustered index, so that all that
    belongs to a key lies together) the hash of namespace and key.
    """

    def __init__(self, namespace: str | bytes = b"") -> None:
        octets = namespace.encode() if isinstance(namespace, str) else namespace
        if len(octets) > NAMESPACE_MAX_BYTES:
            raise ApiMisuse(f"namespace of {len(octets)} octets: at most {NAMESPACE_MAX_BYTES}")
        self.namespace = octets
        self.fingerprint = hashlib.blake2b(octets, digest_size=_FINGERPRINT_BYTES).hexdigest().encode()
        self._head = self.fingerprint + b":{"
        # The length before it: no namespace and key run together as another pair does.
        self._hash = hashlib.blake2b(len(octets).to_bytes(4, "big") + octets, digest_size=_DIGEST_BYTES)

    def of(self, key: object) -> bytes:
        """Raises `ApiMisuse` for what is no key: not octets, none, or too many."""
        if type(key) is bytes and 1 <= len(key) <= CACHE_KEY_MAX_BYTES:
            hashed = self._hash.copy()
            hashed.update(key)
            return self._head + binascii.b2a_base64(hashed.digest(), newline=False) + b"}"
        try:
            octets = memoryview(key).cast("B")  # type: ignore[arg-type]
        except TypeError:
            raise ApiMisuse(f"a key is octets (bytes); got {type(key).__name__}: encode text first") from None
        except (ValueError, BufferError) as error:  # released, or of a type that the buffer protocol has no letter for
            raise ApiMisuse(f"a key is octets (bytes); a {type(key).__name__} cannot be had: {error}") from None
        if not 1 <= octets.nbytes <= CACHE_KEY_MAX_BYTES:
            raise ApiMisuse(f"key of {octets.nbytes} octets: 1 to {CACHE_KEY_MAX_BYTES} are possible")
        return self.of(octets.tobytes())
