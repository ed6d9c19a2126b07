"""What the index knows of a target: where it is, and that it lives."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from kbtp.atomics import MASK64
from kbtp.errors import ApiMisuse
from kbtp.initiator.view import SessionTerms
from kbtp.limits import BLOCK_SIZE_MAX_BYTES, BLOCK_SIZE_MIN_BYTES

log = logging.getLogger("kbtp.cache")


@dataclass(frozen=True, slots=True)
class Announcement:
    """One life of a target; it says so again every few seconds."""

    incarnation: int
    url: str
    block_bytes: int
    pool_blocks: int
    draining: bool = False
    """No value is put there any more, and those that are there are given up."""

    def __post_init__(self) -> None:
        """Raises `ApiMisuse` for what no target can be: placement and records count on it."""
        for what, number, least, most in (
            ("incarnation", self.incarnation, 1, MASK64),
            ("block size", self.block_bytes, BLOCK_SIZE_MIN_BYTES, BLOCK_SIZE_MAX_BYTES),
            ("number of blocks", self.pool_blocks, 1, MASK64),
        ):
            if not isinstance(number, int) or not least <= number <= most:
                raise ApiMisuse(f"{what} {number!r}")
        if not isinstance(self.url, str):
            raise ApiMisuse(f"URL {self.url!r}")

    @property
    def pool_bytes(self) -> int:
        return self.block_bytes * self.pool_blocks

    def marked(self, *, draining: bool) -> Announcement:
        return replace(self, draining=draining)

    def pack(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def parse(cls, octets: bytes) -> Announcement:
        """Raises `ApiMisuse`: it is for whoever announced it to mend. Fields of a later version are passed over."""
        try:
            said = json.loads(octets)
            return cls(*(said[name] for name in ("incarnation", "url", "block_bytes", "pool_blocks")))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ApiMisuse(f"an announcement in the index cannot be read ({error!r})") from None

    @classmethod
    def of(cls, url: str, terms: SessionTerms) -> list[Announcement]:
        """What a target would announce that has granted `terms` at `url`; none if it cannot be used."""
        try:
            return [cls(terms.incarnation, url, terms.block_size_bytes, terms.pool_blocks)]
        except ApiMisuse as error:
            warn_once(f"{url} is not used: its HELLO_ACK says {error}")
            return []


@lru_cache(maxsize=256)
def warn_once(said: str) -> None:
    """For what is found each time that the targets are listed."""
    log.warning("%s", said)
