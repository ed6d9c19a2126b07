"""The ways people paste a message, and what is said when it is not one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.testing.hexdump import HexDumpError, parse_hex_dump

FREE = bytes.fromhex("01060000 0000000000000007 00000000000001ff 0002 0000")


def octets_of(text: str) -> list[bytes]:
    return [message.octets for message in parse_hex_dump(text)]


@pytest.mark.parametrize(
    "text",
    [
        FREE.hex(),
        FREE.hex(" "),
        FREE.hex(":").upper(),
        "0x" + FREE.hex(),
        ", ".join(f"0x{octet:02x}" for octet in FREE),
        f"# a FREE\n\n  {FREE.hex(' ', 4)}  \n",
    ],
)
def test_one_message_a_line(text: str) -> None:
    assert octets_of(text) == [FREE]


def test_several_lines_are_several_messages() -> None:
    messages = parse_hex_dump(f"# two\n{FREE.hex()}\n\n{FREE.hex(' ')}\n")
    assert [(message.line, message.octets) for message in messages] == [(2, FREE), (4, FREE)]


XXD = """\
00000000: 0106 0000 0000 0000 0000 0007 0000 0000  ................
00000010: 0000 01ff 0002 0000                      ........
"""
HEXDUMP = """\
00000000  01 06 00 00 00 00 00 00  00 00 00 07 00 00 00 00  |..|.............|
00000010  00 00 01 ff 00 02 00 00                           |........|
00000018
"""
TCPDUMP = """\
\t0x0000:  0106 0000 0000 0000 0000 0007 0000 0000
\t0x0010:  0000 01ff 0002 0000
"""


@pytest.mark.parametrize("text", [XXD, HEXDUMP, TCPDUMP])
def test_dumps_with_offsets(text: str) -> None:
    assert octets_of(text) == [FREE]
    assert octets_of(text + text) == [FREE, FREE]
    assert octets_of(f"{text}\n# next\n{FREE.hex()}\n{text}") == [FREE, FREE, FREE]


def test_lines_that_hexdump_leaves_out() -> None:
    """`hexdump -C` prints `*` for rows like the one before; a HELLO_ACK that refuses is mostly zeros."""
    text = "00000000  01 02 00 00 00 00 00 00  00 00 00 00 00 00 00 00  |................|\n"
    text += "00000010  00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00  |................|\n*\n00000098\n"
    assert octets_of(text) == [b"\x01\x02" + bytes(150)]


@given(st.binary(min_size=1, max_size=200))
def test_what_hexdump_style_prints_reads_back(octets: bytes) -> None:
    rows = [
        f"{at:08x}: {octets[at : at + 16].hex(' ', 2)}  {'.' * len(octets[at : at + 16])}"
        for at in range(0, len(octets), 16)
    ]
    assert octets_of("\n".join(rows)) == [octets]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("01 02 0", "line 1: an odd number of digits"),
        ("\nhello, world", "line 2: not hexadecimal digits"),
        ("00000000: 0102\n00000010: 0102", "line 2: the offset is 0x10, but 0x2 octets came before"),
        ("00000010: 0102", "line 1: the offset is 0x10, but 0x0 octets came before"),
        ("00000000: 0102\n*\nffffffff: 00", "line 3: the offset is 0xffffffff, no message has over"),
        ("00000000: 0102\n*\n00000001: 00", "line 3: the offset is 0x1, but 0x2 octets"),
        ("*", "line 1: not hexadecimal digits"),
    ],
)
def test_text_that_is_no_dump(text: str, reason: str) -> None:
    with pytest.raises(HexDumpError) as caught:
        parse_hex_dump(text)
    assert str(caught.value).startswith(reason)


@given(st.text(alphabet="0123456789abcdefx:*| #\n\t.", max_size=200))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        parse_hex_dump(text)
    except HexDumpError as error:
        assert str(error)
