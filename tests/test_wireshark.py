"""The Wireshark dissector: tshark with it reads what `kbtp decode` reads."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import kbtp
from kbtp.iwarp.ddp import pack_untagged
from kbtp.iwarp.fpdu import FpduEncoder
from kbtp.iwarp.mpa import ActiveStartup, MpaOptions, PassiveStartup
from kbtp.iwarp.rdmap import RdmapOpcode, control_octet
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server
from kbtp.testing.capture import CapturingProxy, TcpRecording
from kbtp.testing.describe import INITIATOR, TARGET, Record, describe_message
from kbtp.testing.packets import Endpoint
from kbtp.testing.traffic import CaptureDissector
from kbtp.types import Feature, HelloAckFlag, Opcode, OptionType, RequestFlag, Status
from kbtp.wire import (
    AllocStore,
    Auth,
    Bind,
    Completion,
    CompletionDescriptor,
    ConnectionData,
    DataDescriptor,
    Free,
    Hello,
    HelloAck,
    Load,
    Store,
)

pytestmark = pytest.mark.tshark

BLOCK_BYTES = 64 * 1024
START_S = 1_800_000_000.0
CONNECTION_DATA = ConnectionData(bytes(range(16))).pack()
HELLO = Hello(1, Feature.INVALIDATE, 4, 16, 8, 1024, name="prefill")
HELLO_ACK = HelloAck(1, block_size=4096, request_credits=8, max_message=1024)
LOAD = Load(7, 0x1FF, 3, RequestFlag.INVALIDATE, DataDescriptor(0x1234, 0x5000, 4096))
COMPLETION = Completion(7, 0x1FF, 3, Status.SUCCESS, 4096, 0x8000)


Tshark = Callable[..., str]
Values = Callable[..., list[list[list[str]]]]


@pytest.fixture(scope="module")
def tshark(tmp_path_factory: pytest.TempPathFactory) -> Tshark:
    """Runs tshark as somebody who has installed the dissector, and nothing else; what it prints."""
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "HOME": str(home)}

    def run(*command: str) -> str:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=50, env=environment)
        assert "Lua" not in done.stderr, done.stderr
        return done.stdout

    installed = run(sys.executable, "-m", "kbtp", "wireshark", "install")
    assert Path(installed.strip()).is_relative_to(home)
    return lambda *arguments: run("tshark", *arguments)


@pytest.fixture(scope="module")
def values(tshark: Tshark) -> Values:
    """By frame that `only` lets through, by field name: the values of it."""

    def read(pcap: Path, *names: str, only: str = "kbtp.opcode", passes: int = 1) -> list[list[list[str]]]:
        asked = [word for name in names for word in ("-e", name)]
        form = ["-T", "fields", "-E", "separator=/t", "-E", "occurrence=a", "-E", "aggregator=;"]
        text = tshark("-r", str(pcap), *(["-2"] if passes == 2 else []), "-Y", only, *form, *asked)
        return [[one.split(";") if one else [] for one in line.split("\t")] for line in text.splitlines()]

    return read


class Session:
    """A recorded connection, a packet a message, past MPA start-up; 10 ms between packets."""

    def __init__(self, path: Path, private_data: bytes = CONNECTION_DATA) -> None:
        self.path = path
        self.recording = TcpRecording()
        self.connection = self.recording.connection(START_S, Endpoint("127.0.0.1", 40000), Endpoint("127.0.0.1", 5287))
        self.now_s = START_S
        self.encoders = {end: FpduEncoder(crc=True, markers=False) for end in (INITIATOR, TARGET)}
        self.msn = {INITIATOR: 0, TARGET: 0}
        active, passive = ActiveStartup(MpaOptions(), private_data, 4, 4), PassiveStartup(MpaOptions())
        passive.receive_data(active.request)
        self.packet(INITIATOR, active.request)
        self.packet(TARGET, passive.accept(private_data, 4, 4)[0])

    def packet(self, sender: str, octets: bytes) -> None:
        self.now_s += 0.01
        self.connection.octets(self.now_s, octets, from_client=sender == INITIATOR)

    def fpdus(
        self, sender: str, message: bytes, *, cut: int = 1 << 14, opcode: RdmapOpcode = RdmapOpcode.SEND
    ) -> bytes:
        self.msn[sender] += 1
        octets = b""
        for at in range(0, max(1, len(message)), cut):
            last = at + cut >= len(message)
            header = pack_untagged(control_octet(opcode), 0, 0, self.msn[sender], at, last=last)
            octets += self.encoders[sender].encode([header, message[at : at + cut]])
        return octets

    def send(self, sender: str, message: bytes, **how: int) -> None:
        self.packet(sender, self.fpdus(sender, message, **how))

    def write(self) -> Path:
        with self.path.open("wb") as file:
            self.recording.write(file)
        return self.path


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Past HELLO and HELLO_ACK, which are in frames 6 and 7."""
    session = Session(tmp_path / "session.pcap")
    session.send(INITIATOR, HELLO.pack())
    session.send(TARGET, HELLO_ACK.pack())
    return session


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real session of both sides: all four operations, inline and by RDMA, and refusals."""
    pcap = tmp_path_factory.mktemp("recorded") / "session.pcap"
    server = Server(TargetConfig(block_size_bytes=BLOCK_BYTES, pool_blocks=4), open_rnic())
    target = server.listen(port=0)
    server.start()
    with CapturingProxy(target.host, target.port) as proxy:
        host, port = proxy.address
        with kbtp.connect(f"kbtp://{host}:{port}", quota=3, name="recorded") as client:
            large = client.alloc_store(bytes(BLOCK_BYTES))
            small = client.alloc_store(b"small", seal=False)
            client.store(small, bytes(40_000))
            into = bytearray(BLOCK_BYTES)
            client.load(large, into=into)
            with pytest.raises(kbtp.Sealed):
                client.store(small, b"no")
            # Several requests in a packet.
            client.load_many([large] * 8, into=[bytearray(BLOCK_BYTES) for _ in range(8)])
            client.free(small)
            with pytest.raises(kbtp.NotBound):
                client.load(small, into=into)
        proxy.write(pcap)
    server.stop()
    return pcap


def told(pcap: Path) -> Iterator[Record]:
    """The KBTP messages of a capture as `kbtp decode` has them."""
    dissector = CaptureDissector()
    for located in (*dissector.read(pcap.read_bytes()), *dissector.finish()):
        if located.record.carrier.startswith("Send"):
            yield located.record


def header_of(record: Record) -> tuple[int, ...]:
    found = record.fields
    status = Status[str(found["status"])] if "status" in found else 0
    numbers = (int(str(found.get(name, 0))) for name in ("request_id", "handle", "generation"))
    return (Opcode[record.message], *numbers, status)


def test_a_recorded_session_is_read_as_kbtp_decode_reads_it(recorded: Path, values: Values) -> None:
    expected = [header_of(record) for record in told(recorded)]
    names = ("kbtp.opcode", "kbtp.request_id", "kbtp.handle", "kbtp.generation", "kbtp.status")
    seen = [
        tuple(int(value, 0) for value in message)
        for frame in values(recorded, *names)
        for message in zip(*frame, strict=True)
    ]
    assert len(seen) == 32
    assert seen == expected


def test_requests_are_matched_to_their_completions(recorded: Path, values: Values) -> None:
    answers = [record for record in told(recorded) if "elapsed_s" in record.fields]
    seen = [
        (Opcode(int(asked)).name, float(time_s))
        for frame in values(recorded, "kbtp.request", "kbtp.time", only="kbtp.time")
        for asked, time_s in zip(*frame, strict=True)
    ]
    assert [name for name, _ in seen] == [record.fields["answers"] for record in answers]
    assert [time_s for _, time_s in seen] == pytest.approx([record.fields["elapsed_s"] for record in answers], abs=2e-6)


def test_both_frames_name_each_other(session: Session, values: Values) -> None:
    session.send(INITIATOR, LOAD.pack())
    session.send(TARGET, COMPLETION.pack())
    names = ("frame.number", "kbtp.response_in", "kbtp.response_to", "kbtp.time")
    frames = values(session.write(), *names, passes=2)
    assert [frame[:3] for frame in frames] == [
        [["6"], ["7"], []],
        [["7"], [], ["6"]],
        [["8"], ["9"], []],
        [["9"], [], ["8"]],
    ]
    assert [[float(time_s) for time_s in frame[3]] for frame in frames] == [[], [pytest.approx(0.01)]] * 2


EVERY_MESSAGE = [
    Hello(2**64 - 1, Feature(0x1F), 4, 2**40, 8, 4096, bytes(range(16)), "prefill", b"\x00model", Auth(9, bytes(32))),
    HelloAck(
        1,
        flags=HelloAckFlag.RESUMED,
        granted_features=Feature(0x0E),
        **{
            part.name: number
            for number, part in enumerate(fields(HelloAck), 2048)
            if part.type == "int" or part.name.endswith(("stag", "handle", "base"))
            if part.name not in ("request_id", "ring_order", "counter_byte_order")
        },
        ring_order=5,
        counter_byte_order=1,
        name="target",
    ),
    HelloAck(1, status=Status.ACCESS_DENIED),
    LOAD,
    Load(8, 1, 0, RequestFlag.RECORD | RequestFlag.ALLOW_UNSEALED, DataDescriptor(1, 2, 3), CompletionDescriptor(4, 5)),
    Store(9, 2**64 - 1, 65535, RequestFlag.INLINE | RequestFlag.SEAL, DataDescriptor(0, 0, 4), None, b"data"),
    AllocStore(10, 2, 0, RequestFlag.SEAL | RequestFlag.INVALIDATE, DataDescriptor(2**32 - 1, 2**64 - 1, 2**32 - 1)),
    Free(11, 3, 1, RequestFlag.RECORD, CompletionDescriptor(2**32 - 1, 2**64 - 1)),
    Bind(12, 4, 0, RequestFlag.SEAL, 2**32 - 1, 4096, 2**40),
    COMPLETION,
    Completion(13, 5, 6, Status.TICKET_MISMATCH, 0, 0),
]
RENAMED = {"requested_features": "features", "granted_features": "features"}


def flat(message: object, prefix: str = "") -> dict[str, object]:
    """The fields of a message that are there, under the dissector's names."""
    found: dict[str, object] = {}
    for part in fields(message):  # type: ignore[arg-type]
        value, name = getattr(message, part.name), prefix + RENAMED.get(part.name, part.name)
        if is_dataclass(value):
            found |= flat(value, f"{name}.")
        elif value is not None and value != () and not (part.name == "inline_data" and not value):
            found[f"kbtp.{name}"] = value
    return found


def as_shown(value: object, shown: str) -> object:
    """What tshark shows of a field, as `value` would be in Python."""
    if isinstance(value, str):
        return shown
    return bytes.fromhex(shown) if isinstance(value, bytes) else int(shown, 0)


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: f"{type(message).__name__}")
def test_every_field_of_every_message(
    session: Session, message: Hello | HelloAck | Load | Completion, values: Values
) -> None:
    sender = TARGET if message.OPCODE in (Opcode.HELLO_ACK, Opcode.COMPLETION) else INITIATOR
    session.send(sender, message.pack())
    expected = flat(message)
    [frame] = values(session.write(), *expected, only="frame.number == 8")
    shown = {
        name: as_shown(value, *of_it) for (name, value), of_it in zip(expected.items(), frame, strict=True) if of_it
    }
    assert shown == expected
    assert values(
        session.path, "kbtp.malformed", "kbtp.unsupported", "kbtp.length_error", only="frame.number == 8"
    ) == [[[], [], []]]


def changed(octets: bytes, at: int, value: bytes) -> bytes:
    return octets[:at] + value + octets[at + len(value) :]


FREE = Free(11, 3, 1, RequestFlag.NONE)
STORE = Store(9, 1, 0, RequestFlag.INLINE, DataDescriptor(0, 0, 4), None, b"data")
FAULTS = {
    "half a header": (LOAD.pack()[:23], "malformed"),
    "an octet short": (LOAD.pack()[:-1], "malformed"),
    "an octet too many": (FREE.pack() + b"\0", "malformed"),
    "version": (changed(LOAD.pack(), 0, b"\x02"), "unsupported"),
    "opcode": (changed(LOAD.pack(), 1, b"\x63"), "unsupported"),
    "flag": (changed(LOAD.pack(), 2, b"\x00\x02"), "unsupported"),
    "flags that do not go together": (changed(LOAD.pack(), 2, b"\x00\x0c"), "unsupported"),
    "inline length": (changed(STORE.pack(), 39, b"\x05"), "length_error"),
    "no credits": (changed(HELLO.pack(), 40, bytes(4)), "malformed"),
    "Max Message": (changed(HELLO.pack(), 44, b"\x00\x00\x03\xff"), "malformed"),
    "an option cut short": (HELLO.pack()[:-1], "malformed"),
    "an option twice": (HELLO.pack() + HELLO.pack()[64:], "malformed"),
    "an option nobody knows": (HELLO.pack() + b"\x00\x09\x00\x00", "unsupported"),
}


@pytest.mark.parametrize(("octets", "name"), FAULTS.values(), ids=FAULTS)
def test_what_is_wrong_is_expert_information(
    session: Session, octets: bytes, name: str, values: Values, tshark: Tshark
) -> None:
    session.send(INITIATOR, octets)
    kinds = [f"kbtp.{kind}" for kind in ("malformed", "unsupported", "length_error")]
    [frame] = values(session.write(), *kinds, only="frame.number == 8")
    assert [kind for kind, found in zip(kinds, frame, strict=True) if found] == [f"kbtp.{name}"]
    assert "[Malformed Packet" not in tshark("-r", str(session.path), "-V")
    record = describe_message(octets, INITIATOR)
    # What kbtp decode leaves to the session to refuse.
    assert record.problem or name == "length_error" or record.fields["unknown_options"]


def test_an_option_that_may_be_skipped(session: Session, values: Values) -> None:
    session.send(INITIATOR, HELLO.pack() + b"\x80\x01\x00\x03abc\x00")
    [frame] = values(
        session.write(), "kbtp.option.type", "kbtp.option.value", "kbtp.unsupported", only="frame.number==8"
    )
    assert frame == [["1", "32769"], ["616263"], []]


def test_refusals_and_answers_out_of_turn(session: Session, values: Values) -> None:
    session.send(TARGET, Completion(99, 1, 0, Status.NO_SPACE, 0, 0).pack())
    session.send(INITIATOR, LOAD.pack())
    session.send(INITIATOR, LOAD.pack())
    [unasked, first, second] = values(
        session.write(), "kbtp.refused", "kbtp.out_of_turn", "_ws.expert.message", only="frame.number > 7"
    )
    assert (unasked[0] != [], unasked[1] != []) == (True, True)
    assert "it answers no request" in unasked[2]
    assert first == [[], [], []]
    assert second[1] != []


def test_a_message_in_several_segments(session: Session, values: Values) -> None:
    """Wireshark's dissector puts it together; there is one message, in the frame of the last."""
    data = bytes(range(200))
    store = Store(9, 1, 0, RequestFlag.INLINE, DataDescriptor(0, 0, len(data)), None, data)
    session.send(INITIATOR, store.pack(), cut=100)
    [frame] = values(session.write(), "kbtp.opcode", "kbtp.inline_data", only="frame.number > 7 && kbtp")
    assert frame == [["4"], [data.hex()]]


def test_several_messages_in_one_packet(session: Session, values: Values) -> None:
    session.packet(INITIATOR, session.fpdus(INITIATOR, LOAD.pack()) + session.fpdus(INITIATOR, FREE.pack()))
    [frame] = values(session.write(), "kbtp.request_id", "_ws.col.Protocol", "_ws.col.Info", only="frame.number == 8")
    assert frame[:2] == [["7", "11"], ["KBTP"]]
    [info] = frame[2]
    assert info == (
        "LOAD id=7 handle=0x00000000000001ff generation=3 | FREE id=11 handle=0x0000000000000003 generation=1"
    )


def test_connection_data(session: Session, values: Values) -> None:
    assert (
        values(session.write(), "kbtp.connection.nonce", "kbtp.connection.version", only="iwarp_mpa.privatedata")
        == [[[bytes(range(16)).hex()], ["1"]]] * 2
    )


def test_what_is_not_kbtp_is_left_to_others(tmp_path: Path, values: Values) -> None:
    session = Session(tmp_path / "other.pcap", private_data=b"")
    session.send(INITIATOR, bytes(range(64)))
    session.packet(TARGET, session.fpdus(TARGET, LOAD.pack(), opcode=RdmapOpcode.TERMINATE))
    assert values(session.write(), "frame.number", only="kbtp") == []


def test_kbtp_is_known_without_its_connection_data(tmp_path: Path, values: Values) -> None:
    session = Session(tmp_path / "bare.pcap", private_data=b"")
    session.send(INITIATOR, HELLO.pack())
    session.send(INITIATOR, LOAD.pack()[:-1])
    assert values(session.write(), "kbtp.opcode", "kbtp.malformed") == [[["1"], []], [["3"], ["1"]]]


def test_numbers_have_the_names_of_the_registries(tshark: Tshark) -> None:
    told = [line.split("\t") for line in tshark("-G", "values").splitlines()]
    names: tuple[tuple[str, type[enum.IntEnum]], ...] = (
        ("kbtp.opcode", Opcode),
        ("kbtp.status", Status),
        ("kbtp.option.type", OptionType),
    )
    for field, registry in names:
        assert {row[2]: row[3] for row in told if row[:2] == ["V", field]} == {
            str(int(one)): one.name for one in registry
        }


def test_flags_have_the_names_of_the_registries(tshark: Tshark) -> None:
    told = [line.split("\t") for line in tshark("-G", "fields").splitlines()]
    masks = {row[2]: (row[1], int(row[6], 16)) for row in told if row[0] == "F" and row[2].startswith("kbtp.f")}
    for prefix, flags in (("flags", RequestFlag), ("flags", HelloAckFlag), ("features", Feature)):
        for flag in flags:
            if flag:
                assert masks[f"kbtp.{prefix}.{str(flag.name).lower()}"] == (flag.name, flag.value)
