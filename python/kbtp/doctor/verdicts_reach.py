"""What it means where reaching a target stops, and what to do. No I/O."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

from kbtp.doctor.facts import printable
from kbtp.errors import KbtpError, OperationRefused, WireFormatError
from kbtp.iwarp.mpa import REPLY_KEY, REQUEST_KEY, MpaRejected, MpaStartupError, Negotiated
from kbtp.keys import Key
from kbtp.types import Feature, Status, TerminateInfo
from kbtp.wire import ConnectionData, HelloAck

SHOWN_OCTETS = 48
_NOT_OURS = "give the port of a KBTP target; another service listens on this one"
_SEE_ITS_LOG = "see the target's log"
_STARTED = "`kbtp serve --host ADDRESS --port PORT` listens on loopback alone unless told otherwise"


class Unreached(Exception):
    """A step that failed: what is so, what to `do`, and what was `seen`."""

    def __init__(self, says: str, do: str, seen: dict[str, object] | None = None) -> None:
        super().__init__(says)
        self.says = says
        self.do = do
        self.seen = seen or {}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One address that no TCP connection came about with."""

    address: str
    error: OSError

    @property
    def outcome(self) -> str:
        if isinstance(self.error, TimeoutError):
            return "timed out"
        names = {errno.ECONNREFUSED: "refused", errno.ENETUNREACH: "unreachable", errno.EHOSTUNREACH: "unreachable"}
        return names.get(self.error.errno or 0, "failed")

    def __str__(self) -> str:
        why = f" ({self.error.strerror or self.error})" if self.outcome in ("unreachable", "failed") else ""
        return f"{self.address} {self.outcome}{why}"


@dataclass(slots=True)
class Passed:
    """A step that held: what it says, and what was seen."""

    says: str
    seen: dict[str, object] = field(default_factory=dict)


# --- look-up and TCP ---------------------------------------------------------------------------


def lookup_failed(host: str, why: str) -> Unreached:
    return Unreached(f"{host}: {why}", "check the name, /etc/hosts and the name server; or give an address")


def tcp_failed(attempts: list[Attempt]) -> Unreached:
    outcomes = {attempt.outcome for attempt in attempts}
    if outcomes == {"refused"}:
        do = f"the machine is there and nothing listens on that port: start the target. {_STARTED}"
    elif outcomes == {"timed out"}:
        do = "the machine is down, or a firewall drops what goes to that port: see whether it answers, and allow TCP"
    elif outcomes == {"unreachable"}:
        do = "no route leads there: check the address, `ip route get ADDRESS`, and that the machine is up"
    elif any(attempt.error.errno == errno.EINVAL for attempt in attempts):
        do = "an IPv6 link-local address needs its netdev: kbtp://[fe80::1%eth0]"
    else:
        do = "check each address, its route, firewalls in between, and that a target listens there"
    tried = [{"address": attempt.address, "outcome": attempt.outcome} for attempt in attempts]
    return Unreached("; ".join(map(str, attempts)), do, {"attempts": tried})


# --- MPA ---------------------------------------------------------------------------------------


def octets_text(came: bytes) -> str:
    """What came, for people: as text where it is that, else in hexadecimal."""
    shown, more = came[:SHOWN_OCTETS], "..." if len(came) > SHOWN_OCTETS else ""
    try:
        text = " ".join(shown.decode("ascii").split())
    except UnicodeDecodeError:
        text = ""
    if text and text.isprintable():
        return f'"{text}"{more}'
    return f"{shown.hex(' ')}{more}"


def no_mpa_reply(came: bytes, error: MpaStartupError) -> Unreached:
    seen: dict[str, object] = {"came": octets_text(came)}
    if came[: len(REPLY_KEY)] == REPLY_KEY:
        return Unreached(f"its MPA Reply is none to go on with: {error}", "update the older of the two", seen)
    if came[: len(REQUEST_KEY)] == REQUEST_KEY:
        return Unreached(f"it is an initiator itself: {error}", _NOT_OURS, seen)
    return Unreached(f"what answers does not speak MPA; it said {octets_text(came)} ({error})", _NOT_OURS, seen)


def silent_before_reply(timeout_s: float, came: bytes) -> Unreached:
    if came:
        return Unreached(
            f"its MPA Reply began and did not end within {timeout_s:g} s: {octets_text(came)}",
            "the path may drop larger packets (MTU), or the target hangs",
            {"came": octets_text(came)},
        )
    return Unreached(
        f"TCP is connected, and nothing answers the MPA Request within {timeout_s:g} s",
        f"{_NOT_OURS}, or the target hangs: {_SEE_ITS_LOG}",
    )


def closed_before_reply(how: str) -> Unreached:
    return Unreached(
        f"it {how} instead of answering the MPA Request",
        f"{_NOT_OURS}; or the target speaks another MPA revision, or has no file descriptors left: {_SEE_ITS_LOG}",
    )


def rejected(reply: MpaRejected) -> Unreached:
    seen: dict[str, object] = {"rejected": True, "private_data": reply.private_data.hex()}
    try:
        ConnectionData.parse(reply.private_data)
    except WireFormatError as error:
        return Unreached(f"it speaks MPA, is no KBTP target, and rejects the connection ({error})", _NOT_OURS, seen)
    return Unreached(
        "a KBTP target rejects the connection",
        f"it is stopping, has as many sessions as it takes, or speaks another version of KBTP: {_SEE_ITS_LOG}",
        seen,
    )


def not_kbtp(error: WireFormatError, seen: dict[str, object]) -> Unreached:
    return Unreached(f"it speaks iWARP and is no KBTP target of this version ({error})", _NOT_OURS, seen)


def cannot_serve(failure: object, seen: dict[str, object]) -> Unreached:
    return Unreached(f"MPA cannot be settled: {failure}", "the target wants more RDMA Reads than we serve", seen)


def mpa_seen(negotiated: Negotiated) -> dict[str, object]:
    return {
        "revision": negotiated.revision,
        "crc": negotiated.crc,
        "markers_sent": negotiated.tx_markers,
        "ird": negotiated.ird,
        "ord": negotiated.ord_,
        "peer_ird": negotiated.peer_ird,
        "peer_ord": negotiated.peer_ord,
    }


def mpa_passed(negotiated: Negotiated) -> Passed:
    return Passed(
        f"revision {negotiated.revision}, CRC {'on' if negotiated.crc else 'off'}, "
        f"markers {'on' if negotiated.tx_markers else 'off'}, RDMA Reads at once: {negotiated.ord_} of ours, "
        f"{negotiated.ird} of the target's",
        mpa_seen(negotiated),
    )


# --- HELLO and the end -------------------------------------------------------------------------


def hello_refused(error: OperationRefused, key: Key | None) -> Unreached:
    do = {
        Status.ACCESS_DENIED: (
            "give --key-file, if the target wants a key, and --namespace as the target has it"
            if key is None
            else "`kbtp keys list` of the target's file has to show this key; give --namespace as the target has it"
        ),
        Status.NO_SPACE: "wait for other initiators to leave, or give the target more (`kbtp serve --pool-size`)",
        Status.UNSUPPORTED: "update the older of the two",
        Status.MALFORMED: "update the older of the two",
    }.get(error.status, _SEE_ITS_LOG)
    return Unreached(str(error), do, {"status": error.status.name})


def hello_misanswered(error: KbtpError) -> Unreached:
    cause = error.__cause__
    if isinstance(cause, WireFormatError) and cause.field == "auth":
        return Unreached(
            f"the target did not prove that it has our key: {cause.reason}",
            "the key files differ, or this is not your target: send it nothing before that is clear",
            {"authenticated": False},
        )
    return Unreached(f"its answer to HELLO breaks the protocol: {error}", "update the target, or report this")


def ended_with_terminate(info: TerminateInfo) -> Unreached:
    return Unreached(
        f"it ended the stream with Terminate {info}", f"what we sent did not please it: {_SEE_ITS_LOG}",
        {"terminate": str(info)},
    )  # fmt: skip


def closed_before_ack(how: str) -> Unreached:
    return Unreached(f"it {how} instead of answering HELLO", f"{_SEE_ITS_LOG}, which says why it ended the session")


def silent_before_ack(timeout_s: float) -> Unreached:
    return Unreached(f"no answer to HELLO within {timeout_s:g} s", f"the target is overloaded or hangs: {_SEE_ITS_LOG}")


def hello_passed(ack: HelloAck, version: int, key: Key | None) -> Passed:
    features = [feature.name or "" for feature in Feature if feature & ack.granted_features]
    seen: dict[str, object] = {
        "status": ack.status.name,
        "version": version,
        "authenticated": key is not None,
        "target_name": printable(ack.name or ""),
        "namespace": (ack.namespace or b"").decode(errors="backslashreplace"),
        "incarnation": f"{ack.incarnation:016x}",
        "features": features,
        "block_size_bytes": ack.block_size,
        "pool_blocks": ack.pool_blocks,
        "quota_blocks": ack.allocation_quota,
        "handle_count": ack.handle_count,
        "table_handles": ack.table_handles,
        "request_credits": ack.request_credits,
        "max_message_bytes": ack.max_message,
    }
    proof = "authenticated both ways" if key is not None else "no key asked for"
    named = f"target {printable(ack.name)!r}, " if ack.name else ""
    return Passed(
        f"{named}KBTP version {version}, {proof}; granted: {', '.join(features) or 'no features'}, "
        f"{ack.pool_blocks} blocks of {ack.block_size} octets, {ack.allocation_quota} for us, "
        f"{ack.request_credits} requests at once, messages of up to {ack.max_message} octets",
        seen,
    )


def not_ended(how: str) -> Unreached:
    return Unreached(
        f"the session was open, and the target {how} at its end", f"blocks are not in danger; {_SEE_ITS_LOG}"
    )
