"""Odd lengths over siw, in TCP segments that are just what our side's kernel has made.

siw takes a CRC for wrong where a segment ends between PAD and CRC, or within it (docs/testing.md). QEMU's network puts
all that passes into segments of its own, so both ends are in the guest: siw at one end of a pair of network devices,
our RNIC in a network namespace at the other, and nothing between them that cuts or joins segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from interop.checks import RNICS, Check, CheckFailed
from interop.guest.machine import Guest
from interop.kbtp_in_guest import OPERATIONS_S, PYTHON_IN_GUEST, START_S
from interop.odd_lengths import BLOCK_BYTES
from kbtp.limits import DEFAULT_PORT
from kbtp.rnic import CRC_VARIABLE


@dataclass(frozen=True, slots=True)
class Path:
    """`sessions` of each RNIC in each role."""

    mtu_bytes: int
    crc: bool
    sessions: int


WITH_CRC = Path(1500, crc=True, sessions=50)
WITHOUT_CRC = Path(1450, crc=False, sessions=20)
"""Segments of 1398 octets, no multiple of 4, end where they like: siw takes no CRC there, so neither side asks."""

OVER_SIW = "rdma_core:siw1"
SIW_ADDRESS, PEER_ADDRESS = "10.7.0.1", "10.7.0.2"
PYTHON_IN_PEER = f"ip netns exec peer {PYTHON_IN_GUEST}"

SET_UP = f"""
set -e
modprobe veth
ip netns add peer
ip link add veth0 type veth peer name veth1 netns peer
ip addr add {SIW_ADDRESS}/24 dev veth0
ip link set veth0 mtu $mtu up
ip -n peer addr add {PEER_ADDRESS}/24 dev veth1
ip -n peer link set veth1 mtu $mtu up
{PYTHON_IN_GUEST} -m interop.offloads veth0
{PYTHON_IN_PEER} -m interop.offloads veth1
rdma link add siw1 type siw netdev veth0
"""

TEAR_DOWN = """
rdma link delete siw1
ip netns delete peer
"""


def checks() -> list[Check]:
    return [
        Check(_name(path, role), partial(run, path=path))
        for path in (WITH_CRC, WITHOUT_CRC)
        for role, run in (("a target", _target_on_siw), ("an initiator", _initiator_on_siw))
    ]


def _name(path: Path, role: str) -> str:
    way = "" if path.crc else f" without CRC at an MTU of {path.mtu_bytes}"
    return f"kbtp: {path.sessions * len(RNICS)} sessions of odd lengths{way} with {role} on siw, none lost"


def _target_on_siw(guest: Guest, path: Path) -> None:
    python = PYTHON_IN_PEER if path.crc else f"{CRC_VARIABLE}=off {PYTHON_IN_PEER}"
    with _own_network(guest, path), _target(guest, PYTHON_IN_GUEST, SIW_ADDRESS, DEFAULT_PORT, OVER_SIW) as url:
        _sessions(guest, python, [url], RNICS, path.sessions)


def _initiator_on_siw(guest: Guest, path: Path) -> None:
    options = () if path.crc else ("--no-crc",)
    with _own_network(guest, path), ExitStack() as stack:
        urls = [
            stack.enter_context(_target(guest, PYTHON_IN_PEER, PEER_ADDRESS, DEFAULT_PORT + number, rnic, *options))
            for number, rnic in enumerate(RNICS)
        ]
        _sessions(guest, PYTHON_IN_GUEST, urls, [OVER_SIW], path.sessions)


@contextmanager
def _own_network(guest: Guest, path: Path) -> Iterator[None]:
    try:
        _run(guest, f"mtu={path.mtu_bytes}{SET_UP}", START_S)
        yield
    finally:
        guest.run(TEAR_DOWN)


@contextmanager
def _target(guest: Guest, python: str, host: str, port: int, rnic: str, *options: str) -> Iterator[str]:
    pool = " ".join([f"--block-size {BLOCK_BYTES} --pool-blocks 64 --direct load", *options])
    serve = f"exec {python} -m kbtp serve --host {host} --port {port} --rnic {rnic} {pool}"
    with guest.start(serve) as call:
        url = f"kbtp://{host}:{port}"
        call.await_line(url, START_S)
        yield url


def _sessions(guest: Guest, python: str, urls: list[str], rnics: list[str] | tuple[str, ...], count: int) -> None:
    over = " ".join(f"--rnic {rnic}" for rnic in rnics)
    program = f"{python} -m interop.odd_lengths {' '.join(urls)} {over} --count {count}"
    _run(guest, program, START_S + OPERATIONS_S)


def _run(guest: Guest, script: str, timeout_s: float) -> None:
    done = guest.run(script, timeout_s=timeout_s)
    if done.status:
        raise CheckFailed(done.output)
