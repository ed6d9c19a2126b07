"""`kbtp decode` on captures and dumps: what it prints, and how it ends."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kbtp.cli.decode import decode
from kbtp.iwarp.ddp import pack_tagged, pack_untagged
from kbtp.iwarp.fpdu import FpduEncoder
from kbtp.iwarp.mpa import ActiveStartup, MpaOptions, PassiveStartup
from kbtp.iwarp.rdmap import RdmapOpcode, control_octet
from kbtp.testing.capture import RecordedConnection, TcpRecording
from kbtp.testing.packets import Endpoint
from kbtp.types import Feature, RequestFlag, Status
from kbtp.wire import Completion, ConnectionData, DataDescriptor, Hello, HelloAck, Load

INITIATOR, TARGET = Endpoint("127.0.0.1", 40000), Endpoint("127.0.0.1", 5287)
START_S = 1_800_000_000.0
CONNECTION_DATA = ConnectionData(bytes(16)).pack()
LOAD = Load(7, 0x1FF, 0, RequestFlag.ALLOW_UNSEALED, DataDescriptor(0x1234, 0x5000, 8))
COMPLETION = Completion(7, 0x1FF, 2, Status.SUCCESS, 8, 0x8000)


class Session:
    """A recorded connection whose FPDUs the test makes."""

    def __init__(
        self, connection: RecordedConnection, name: str = "prefill", private_data: bytes = CONNECTION_DATA
    ) -> None:
        self.connection = connection
        self.encoders = {end: FpduEncoder(crc=True, markers=False) for end in (True, False)}
        self.msn = {True: 0, False: 0}
        active, passive = ActiveStartup(MpaOptions(), private_data, 4, 4), PassiveStartup(MpaOptions())
        passive.receive_data(active.request)
        connection.octets(START_S, active.request, from_client=True)
        connection.octets(START_S + 0.001, passive.accept(private_data, 4, 4)[0], from_client=False)
        self.send(0.002, Hello(1, Feature.INVALIDATE, 4, 16, 8, 1024, name=name).pack(), from_client=True)
        ack = HelloAck(1, block_size=4096, request_credits=8, max_message=1024, table_stag=0xABC)
        self.send(0.003, ack.pack(), from_client=False)

    def send(self, after_s: float, octets: bytes, *, from_client: bool) -> None:
        self.msn[from_client] += 1
        header = pack_untagged(control_octet(RdmapOpcode.SEND), 0, 0, self.msn[from_client], 0, last=True)
        self.fpdu(after_s, [header, octets], from_client=from_client)

    def write(self, after_s: float, octets: bytes) -> None:
        header = pack_tagged(control_octet(RdmapOpcode.WRITE), 0x1234, 0x5000, last=True)
        self.fpdu(after_s, [header, octets], from_client=False)

    def fpdu(self, after_s: float, ulpdu: list[bytes], *, from_client: bool) -> None:
        self.connection.octets(START_S + after_s, self.encoders[from_client].encode(ulpdu), from_client=from_client)

    def load(self) -> None:
        self.send(0.004, LOAD.pack(), from_client=True)
        self.write(0.005, b"8 octets")
        self.send(0.0055, COMPLETION.pack(), from_client=False)


def pcap(recording: TcpRecording) -> bytes:
    file = io.BytesIO()
    recording.write(file)
    return file.getvalue()


@pytest.fixture
def capture() -> bytes:
    """One session with a LOAD, from SYN to FIN."""
    recording = TcpRecording()
    session = Session(recording.connection(START_S, INITIATOR, TARGET))
    session.load()
    session.connection.finish(START_S + 0.006, from_client=True)
    return pcap(recording)


def run(octets: bytes | str, *arguments: str) -> Result:
    return CliRunner().invoke(decode, [*arguments, "-"], input=octets)


def lines(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_session_line_by_line(capture: bytes) -> None:
    result = run(capture)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "connection 1: initiator 127.0.0.1:40000 > target 127.0.0.1:5287",
        '   0.000000 1 > MPA Request revision=2 crc=wanted markers="not wanted" ird=4 ord=4 nonce=' + "00" * 16,
        '   0.001000 1 < MPA Reply accepted=yes crc=on markers="not wanted" ird=4 ord=4 nonce=' + "00" * 16,
        "   0.002000 1 > Send HELLO request_id=1 requested_features=INVALIDATE requested_quota=4 requested_handles=16"
        " completion_credits=8 max_message=1024 initiator_id=" + "00" * 16 + " name=prefill",
        "   0.003000 1 < Send HELLO_ACK request_id=1 status=SUCCESS block_size=4096 request_credits=8 max_message=1024"
        " table_stag=0xabc answers=HELLO elapsed_s=0.001000",
        "   0.004000 1 > Send LOAD request_id=7 handle=0x1ff generation=0 flags=ALLOW_UNSEALED"
        " data=(stag=0x1234 to=0x5000 length=8)",
        "   0.005000 1 < RDMA Write stag=0x1234 to=0x5000 length=8 segments=1",
        "   0.005500 1 < Send COMPLETION request_id=7 handle=0x1ff generation=2 status=SUCCESS data_length=8"
        " block_offset=0x8000 answers=LOAD elapsed_s=0.001500",
        "   0.006000 1 > TCP closed",
    ]


def test_json(capture: bytes) -> None:
    result = run(capture, "--json")
    assert result.exit_code == 0
    records = lines(result)
    assert [record.get("message") for record in records] == [
        None,
        None,
        "HELLO",
        "HELLO_ACK",
        "LOAD",
        None,
        "COMPLETION",
        "closed",
    ]
    assert records[4] == {
        "time_s": START_S + 0.004,
        "connection": 1,
        "from": "127.0.0.1:40000",
        "to": "127.0.0.1:5287",
        "sender": "initiator",
        "carrier": "Send",
        "message": "LOAD",
        "fields": {
            "request_id": 7,
            "handle": 0x1FF,
            "generation": 0,
            "flags": ["ALLOW_UNSEALED"],
            "data": {"stag": 0x1234, "to": 0x5000, "length": 8},
            "completion": None,
        },
    }


def test_a_file_by_name(capture: bytes, tmp_path: Path) -> None:
    path = tmp_path / "session.pcap"
    path.write_bytes(capture)
    result = CliRunner().invoke(decode, [str(path)])
    assert result.exit_code == 0
    assert "COMPLETION" in result.stdout


def test_several_connections_keep_their_numbers() -> None:
    """Among them one of something else, and one on ports that were used before."""
    recording = TcpRecording()
    recording.connection(START_S, Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 80)).octets(
        START_S, b"GET / HTTP/1.1\r\n", from_client=True
    )
    first = Session(recording.connection(START_S, INITIATOR, TARGET))
    second = Session(recording.connection(START_S, Endpoint("127.0.0.1", 40001), TARGET))
    second.load()
    first.load()
    again = Session(recording.connection(START_S, INITIATOR, TARGET, first_sequence=99))
    again.load()
    records = lines(run(pcap(recording), "--json"))
    completed = [record["connection"] for record in records if record.get("message") == "COMPLETION"]
    assert completed == [3, 2, 4]
    assert not [record for record in records if "problem" in record]


def test_nothing_of_the_peers_text_reaches_the_terminal_as_it_came() -> None:
    recording = TcpRecording()
    Session(recording.connection(START_S, INITIATOR, TARGET), name="\x1b]0;owned\x07 \x9b2J \u202e")
    result = run(pcap(recording))
    assert 'name="\\u001b]0;owned\\u0007 \\u009b2J \\u202e"' in result.stdout


def test_problems_stand_in_their_line_and_do_not_end_it(capture: bytes) -> None:
    recording = TcpRecording()
    session = Session(recording.connection(START_S, INITIATOR, TARGET))
    session.send(0.004, LOAD.pack() + b"!", from_client=True)
    session.send(0.005, COMPLETION.pack()[:-1], from_client=False)
    result = run(pcap(recording))
    assert result.exit_code == 0
    load, completion = result.stdout.splitlines()[-2:]
    assert "LOAD" in load and " !! MALFORMED: message: 1 octets follow the 40 of LOAD" in load
    assert "COMPLETION" in completion and " !! message: COMPLETION" in completion
    assert any("problem" in record for record in lines(run(pcap(recording), "--json")))


def test_a_bad_crc() -> None:
    recording = TcpRecording()
    session = Session(recording.connection(START_S, INITIATOR, TARGET))
    octets = bytearray(session.encoders[True].encode([bytes(40)]))
    octets[-1] ^= 0xFF
    session.connection.octets(START_S, bytes(octets), from_client=True)
    result = run(pcap(recording))
    assert result.exit_code == 0
    assert "FPDU !! the CRC of an FPDU" in result.stdout


def test_lost_packets(capture: bytes) -> None:
    """What follows the gap is not decoded, and the output says so."""
    recording = TcpRecording()
    session = Session(recording.connection(START_S, INITIATOR, TARGET))
    session.load()
    lost = [index for index, (_, packet) in enumerate(recording.packets) if b"8 octets" in packet]
    del recording.packets[lost[0]]
    result = run(pcap(recording))
    assert result.exit_code == 0
    assert "COMPLETION" not in result.stdout
    assert "capture !! it lacks 28 octets" in result.stdout
    assert "capture !! it has no answer to request 7 LOAD" in result.stdout


@pytest.mark.parametrize("as_json", [False, True])
def test_a_truncated_capture_gives_what_is_there_and_exit_code_2(capture: bytes, as_json: bool) -> None:
    result = run(capture[:-10], *["--json"] * as_json)
    assert result.exit_code == 2
    assert "COMPLETION" in result.stdout
    assert result.stderr == "Error: the file ends in the middle of packet 11: it was cut short\n"


def test_a_capture_without_kbtp() -> None:
    recording = TcpRecording()
    connection = recording.connection(START_S, Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 80))
    connection.octets(START_S, b"GET / HTTP/1.1\r\n", from_client=True)
    result = run(pcap(recording))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "No KBTP traffic: 4 packets, 4 of them TCP segments, of 1 connections: 0 captured from their MPA Request on, "
        "0 of these with KBTP connection data.\n"
    )


def test_iwarp_without_kbtp_is_shown_and_is_not_kbtp() -> None:
    recording = TcpRecording()
    Session(recording.connection(START_S, INITIATOR, TARGET), private_data=b"other")
    result = run(pcap(recording))
    assert result.exit_code == 1
    assert "MPA Request" in result.stdout
    assert "1 captured from their MPA Request on, 0 of these" in result.stderr


def test_an_unknown_link_type() -> None:
    recording = TcpRecording()
    Session(recording.connection(START_S, INITIATOR, TARGET))
    octets = bytearray(pcap(recording))
    octets[20:24] = (195).to_bytes(4, "little")
    result = run(bytes(octets))
    assert result.exit_code == 2
    assert "link type 195 is not known" in result.stderr


# --- hex dumps ---


def test_a_hex_dump(tmp_path: Path) -> None:
    result = run(f"{LOAD.pack().hex(' ')}\n{COMPLETION.pack().hex()}\n")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "> LOAD request_id=7 handle=0x1ff generation=0 flags=ALLOW_UNSEALED data=(stag=0x1234 to=0x5000 length=8)",
        "< COMPLETION request_id=7 handle=0x1ff generation=2 status=SUCCESS data_length=8 block_offset=0x8000",
    ]
    record = lines(run(LOAD.pack().hex(), "--json"))[0]
    assert (record["sender"], record["message"]) == ("initiator", "LOAD")
    assert "time_s" not in record


def test_a_hex_dump_of_something_else_is_still_told() -> None:
    result = run("01 02 03\n")
    assert result.exit_code == 0
    assert result.stdout == "> octets=010203 !! message: the common header has 24 octets, only 3 are there\n"


@pytest.mark.parametrize(
    ("octets", "exit_code", "message"),
    [
        (b"", 1, "No KBTP traffic: there is no message in the hex dump."),
        (b"# nothing\n", 1, "No KBTP traffic: there is no message in the hex dump."),
        (b"\x7fELF\x02\xff", 2, "Error: neither a pcap or pcapng capture nor text with a hex dump"),
        (
            b"hello, world\n",
            2,
            "Error: neither a pcap or pcapng capture nor a hex dump: line 1: not hexadecimal digits",
        ),
        (b"\xd4\xc3\xb2\xa1\x02", 2, "Error: the file ends in the middle of packet 1: it was cut short"),
    ],
)
def test_what_is_neither(octets: bytes, exit_code: int, message: str) -> None:
    result = run(octets)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr == f"{message}\n"


def test_a_file_that_is_not_there() -> None:
    result = CliRunner().invoke(decode, ["no-such-file.pcap"])
    assert result.exit_code == 2
    assert "No such file" in result.stderr
