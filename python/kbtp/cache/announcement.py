"""What the index knows of a target: where it is, and that it lives."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from kbtp.errors import ApiMisuse


@dataclass(frozen=True, slots=True)
class Announcement:
    """One life of a target; it says so again every few seconds."""

    incarnation: int
    url: str
    block_bytes: int
    pool_blocks: int
    draining: bool = False
    """No value is put there any more, and those that are there are given up."""

    @property
    def pool_bytes(self) -> int:
        return self.block_bytes * self.pool_blocks

    def marked(self, *, draining: bool) -> Announcement:
        return replace(self, draining=draining)

    def pack(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def parse(cls, octets: bytes) -> Announcement:
        """Raises `ApiMisuse`: it is for whoever announced it to mend."""
        try:
            fields = json.loads(octets)
            one = cls(**fields)
            whole = (one.incarnation, one.block_bytes, one.pool_blocks)
            if not all(isinstance(number, int) and number > 0 for number in whole) or not isinstance(one.url, str):
                raise TypeError("a field is of another type")
        except (ValueError, TypeError) as error:
            raise ApiMisuse(f"an announcement in the index cannot be read ({error})") from None
        return one
