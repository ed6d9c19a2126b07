"""KBTP messages from text: one message a line, or dumps as `xxd`, `hexdump -C` and `tcpdump -x` print them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kbtp.errors import KbtpError

# An offset is told from octets by its colon, or by standing apart the way hexdump -C sets it.
_OFFSET = re.compile(r"\s*(?:0x)?([0-9a-fA-F]{4,16}):\s*(.*)|([0-9a-fA-F]{7,16})(?:\s\s+(.*))?$")
MESSAGE_BYTES_MAX = 16 << 20
_REPEATED = "*"  # hexdump -C prints it for lines like the one before


class HexDumpError(KbtpError):
    """The text is no hex dump; says in which line and why."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")


@dataclass(frozen=True, slots=True)
class DumpedMessage:
    """The octets of one message and the line its dump begins at."""

    line: int
    octets: bytes


@dataclass(slots=True)
class _Dump:
    """A dump with offsets, while it is being read."""

    line: int
    octets: bytearray
    row: bytes = b""
    repeated: bool = False

    def reach(self, offset: int, line: int) -> None:
        """The next row says it begins at `offset`."""
        if self.repeated and self.row:
            missing_bytes = offset - len(self.octets)
            self.octets += (self.row * (missing_bytes // len(self.row) + 1))[: max(0, missing_bytes)]
        self.repeated = False
        if offset != len(self.octets):
            raise HexDumpError(line, f"the offset is {offset:#x}, but {len(self.octets):#x} octets came before")

    def append(self, row: bytes) -> None:
        self.octets += row
        self.row = row


def parse_hex_dump(text: str) -> list[DumpedMessage]:
    """The messages in `text`, in order. Blank lines and offset 0 begin a new one; lines with `#` in front are skipped.

    Raises `HexDumpError`, also for a message of more than `MESSAGE_BYTES_MAX`.
    """
    messages: list[DumpedMessage] = []
    dump: _Dump | None = None
    for number, line in enumerate([*text.splitlines(), ""], 1):
        match = _OFFSET.match(line)
        offset = int(match[1] or match[3], 16) if match else None
        blank = not line.strip() or line.lstrip().startswith("#")
        if dump is not None and line.strip() == _REPEATED:
            dump.repeated = True
            continue
        if dump is not None and (offset is None or offset == 0):
            messages.append(DumpedMessage(dump.line, bytes(dump.octets)))
            dump = None
        if blank:
            continue
        if match is None or offset is None:
            messages.append(DumpedMessage(number, _octets(line, number)))
            continue
        if dump is None:
            dump = _Dump(number, bytearray())
        if offset > MESSAGE_BYTES_MAX:
            raise HexDumpError(number, f"the offset is {offset:#x}, no message has over {MESSAGE_BYTES_MAX:#x} octets")
        dump.reach(offset, number)
        dump.append(_octets(_without_characters(match), number))
    return messages


def _without_characters(match: re.Match[str]) -> str:
    """The octets of a row with an offset, without the column that shows them as characters."""
    if match[3] is not None:
        return (match[4] or "").partition("|")[0]
    return re.split(r"\s\s", match[2], maxsplit=1)[0]


def _octets(digits: str, line: int) -> bytes:
    digits = re.sub(r"\b0x|[\s:,]", "", digits)
    try:
        return bytes.fromhex(digits)
    except ValueError:
        reason = "an odd number of digits" if re.fullmatch("[0-9a-fA-F]*", digits) else "not hexadecimal digits"
        raise HexDumpError(line, reason) from None
