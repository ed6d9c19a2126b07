"""Addresses of targets: `kbtp://HOST[:PORT]` (profile 9)."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from kbtp.errors import ApiMisuse
from kbtp.limits import DEFAULT_PORT

SCHEME = "kbtp"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a target listens; `host` is an IPv4 or IPv6 address (no brackets) or a name."""

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}://{host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises `ApiMisuse` saying what a KBTP URL looks like."""
        expected = f"expected {SCHEME}://HOST[:PORT], such as {SCHEME}://127.0.0.1 or {SCHEME}://[::1]:{DEFAULT_PORT}"
        try:
            url.encode()  # a surrogate is no character, and no name that can be looked up has one
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ApiMisuse(f"{url!r} is not a KBTP URL ({error}): {expected}") from None
        if parts.scheme != SCHEME or not host:
            raise ApiMisuse(f"{url!r} is not a KBTP URL: {expected}")
        if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
            raise ApiMisuse(f"{url!r} carries more than a host and a port: {expected}")
        return cls(host, DEFAULT_PORT if port is None else port)
