"""`kbtp decode`: a capture or hex dump of KBTP traffic, message by message."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeAlias

import click

from kbtp.testing.describe import TARGET, Record, Value, describe_message
from kbtp.testing.hexdump import HexDumpError, parse_hex_dump
from kbtp.testing.packets import CAPTURE_MAGICS, CaptureError
from kbtp.testing.traffic import CaptureDissector, Located

NOTHING_FOUND = 1
CANNOT_READ = 2

# Numbers that are addresses or names rather than amounts.
_HEXADECIMAL = frozenset(
    {"stag", "to", "handle", "block_offset", "invalidate_stag", "incarnation", "first_handle", "table_base_handle"}
    | {"table_offset", "table_stag", "pool_stag", "partition_stag", "ring_stag", "ring_offset", "head_offset"}
    | {"head_stag", "pool_base", "sink_stag", "sink_to", "source_stag", "source_to", "mask", "compare_mask"}
)
# Zero means "not granted" for most of what a HELLO_ACK carries, and for all of it in a refusal.
_ZERO_SAYS_NOTHING = frozenset({"HELLO_ACK"})
_BARE = re.compile(r"[\w.:/+-]+", re.ASCII)

_Show: TypeAlias = Callable[[Record, "Located | None"], None]


class _CannotRead(click.ClickException):
    exit_code = CANNOT_READ


@click.command(short_help="Print captured KBTP traffic message by message.")
@click.argument("file", type=click.File("rb"))
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line for each message.")
def decode(file: BinaryIO, as_json: bool) -> None:
    """Print a capture or hex dump of KBTP traffic message by message.

    FILE (- for standard input) is a pcap or pcapng capture that has connections from their start, or text: one KBTP
    message in hexadecimal a line, or dumps as xxd and hexdump -C print them, a new message at each offset 0.

    Times are seconds since the first message. A line with !! names what is wrong with a message: octets that do not
    parse, a bad CRC, an answer to nothing. Exits with 1 if there is no KBTP traffic in FILE, with 2 if FILE cannot
    be read to its end.

    \b
    Examples:
      tcpdump -i lo -w session.pcap port 5287
      kbtp decode session.pcap
      xxd message.bin | kbtp decode --json -
    """
    octets = file.read()
    show = _show_json if as_json else _Text().show
    if octets[:4] in CAPTURE_MAGICS:
        _decode_capture(octets, show)
    else:
        _decode_hex_dump(octets, show)


def _decode_capture(octets: bytes, show: _Show) -> None:
    dissector = CaptureDissector()
    problem: CaptureError | None = None

    def everything() -> Iterator[Located]:
        nonlocal problem
        try:
            yield from dissector.read(octets)
        except CaptureError as error:
            problem = error
        yield from dissector.finish()

    for located in everything():
        show(located.record, located)
    if problem is not None:
        raise _CannotRead(str(problem))
    if not dissector.found_kbtp:
        click.echo(f"No KBTP traffic: {dissector.summary()}.", err=True)
        raise SystemExit(NOTHING_FOUND)


def _decode_hex_dump(octets: bytes, show: _Show) -> None:
    try:
        messages = parse_hex_dump(octets.decode("ascii"))
    except UnicodeDecodeError:
        raise _CannotRead("neither a pcap or pcapng capture nor text with a hex dump") from None
    except HexDumpError as error:
        raise _CannotRead(f"neither a pcap or pcapng capture nor a hex dump: {error}") from None
    if not messages:
        click.echo("No KBTP traffic: there is no message in the hex dump.", err=True)
        raise SystemExit(NOTHING_FOUND)
    for message in messages:
        show(describe_message(message.octets), None)


def _show_json(record: Record, located: Located | None) -> None:
    shown: dict[str, Value] = {}
    if located is not None:
        shown |= {
            "time_s": record.time_s,
            "connection": located.connection,
            "from": str(located.source),
            "to": str(located.sink),
        }
    shown |= {"sender": record.sender}
    shown |= {name: value for name, value in (("carrier", record.carrier), ("message", record.message)) if value}
    if record.fields:
        shown["fields"] = record.fields
    if record.problem:
        shown["problem"] = record.problem
    click.echo(json.dumps(shown))


class _Text:
    """Lines for people; knows what was shown before."""

    def __init__(self) -> None:
        self._first_time_s: float | None = None
        self._connections: set[int] = set()

    def show(self, record: Record, located: Located | None) -> None:
        arrow = "<" if record.sender == TARGET else ">"
        words = [arrow]
        if located is not None:
            if located.connection not in self._connections:
                self._connections.add(located.connection)
                ends = (located.source, located.sink) if arrow == ">" else (located.sink, located.source)
                click.echo(f"connection {located.connection}: initiator {ends[0]} > target {ends[1]}")
            time_s = record.time_s or 0.0
            if self._first_time_s is None:
                self._first_time_s = time_s
            words = [f"{time_s - self._first_time_s:11.6f}", str(located.connection), arrow]
        words += [word for word in (record.carrier, record.message) if word]
        words += _fields_as_words(record)
        problem = click.style(f" !! {record.problem}", fg="red") if record.problem else ""
        click.echo(" ".join(words) + problem)


def _fields_as_words(record: Record) -> list[str]:
    terse = record.message in _ZERO_SAYS_NOTHING
    return [
        f"{name}={_as_text(name, value)}"
        for name, value in record.fields.items()
        if value not in (None, "", []) and not (terse and value == 0)
    ]


def _as_text(name: str, value: Value) -> str:
    if isinstance(value, dict):
        return "(" + " ".join(f"{inner}={_as_text(inner, part)}" for inner, part in value.items()) + ")"
    if isinstance(value, list):
        return "|".join(value)
    if isinstance(value, int) and name in _HEXADECIMAL:
        return f"{value:#x}"
    if isinstance(value, float):
        return f"{value:.6f}"
    text = str(value)
    # A name is the peer's text: nothing in it reaches a terminal as it came.
    return text if _BARE.fullmatch(text) else json.dumps(text)
