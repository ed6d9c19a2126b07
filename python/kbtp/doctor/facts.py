"""What was found, as plain values. What could not be found out is `Unknown`; nothing here is judged."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

_TEXT_MAX_CHARACTERS = 200


def printable(text: str) -> str:
    """`text` without what would disturb a terminal, and not too long."""
    seen = "".join(character if character.isprintable() else "?" for character in text)
    return seen if len(seen) <= _TEXT_MAX_CHARACTERS else f"{seen[:_TEXT_MAX_CHARACTERS]}..."


@dataclass(frozen=True, slots=True)
class Unknown:
    """Not found out, and why."""

    why: str

    def __str__(self) -> str:
        return f"unknown: {self.why}"


Text: TypeAlias = str | Unknown
Number: TypeAlias = int | Unknown


class GidScope(str, Enum):
    """What an address a GID is."""

    LINK_LOCAL = "link-local"
    IPV4 = "IPv4"
    IPV6 = "IPv6"
    HARDWARE = "hardware address"
    """Of the netdev, with nothing behind it: what iWARP devices have."""


@dataclass(frozen=True, slots=True)
class Gid:
    index: int
    gid: str
    """As an IPv6 address is written; of one that carries an IPv4 address, that."""
    scope: GidScope
    type: Text
    """`IB/RoCE v1` or `RoCE v2`, as the system calls them."""


@dataclass(frozen=True, slots=True)
class Netdev:
    """The network device below an RDMA device."""

    name: str
    mtu_bytes: Number
    state: Text


@dataclass(frozen=True, slots=True)
class Port:
    number: str
    state: Text
    physical_state: Text
    link_layer: Text
    rate: Text
    active_mtu_bytes: Number
    gids: tuple[Gid, ...] | Unknown


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What libibverbs tells of a device's firmware."""

    region_bytes: int
    regions: int
    domains: int
    queue_pairs: int
    work_requests: int
    """Of one queue."""
    reads_served: int
    """RDMA Reads and atomics at once, of one queue pair: those of the peer."""
    reads_asked: int
    atomics: str
    """`none`, `of this device` or `global`."""


@dataclass(frozen=True, slots=True)
class Device:
    """As sysfs shows it, and libibverbs as far as that tells no more."""

    name: str
    node_type: Text
    """`CA` of InfiniBand and RoCE, `RNIC` of iWARP."""
    firmware: Text
    model: Text
    board: Text
    node_guid: Text
    uverbs: Text
    """Its device file below /dev/infiniband."""
    may_open: bool | Unknown
    """Whether this process may open that file."""
    limits: DeviceLimits | Unknown
    netdevs: tuple[Netdev, ...]
    ports: tuple[Port, ...] | Unknown


@dataclass(frozen=True, slots=True)
class Library:
    name: str
    loads: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class RdmaFacts:
    devices: tuple[Device, ...] | Unknown
    may_open_cm: bool | Unknown
    """Whether this process may open /dev/infiniband/rdma_cm."""
    libraries: tuple[Library, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource limit; None is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    kernel: str
    architecture: str
    memlock_bytes: Limit
    may_lock_any: bool | Unknown
    """CAP_IPC_LOCK: the limit on locked memory does not count."""
    open_files: Limit
    memory_bytes: Number
    available_memory_bytes: Number
    huge_pages: Number
    free_huge_pages: Number
    huge_page_bytes: Number
    transparent_huge_pages: Text
    """`always`, `madvise` or `never`."""
    processors: Number
    """Of the machine, online."""
    usable_processors: int
    """That this process may run on."""
    cgroup_processors: float | Unknown | None
    """What the control groups of this process let it use, None: all there are."""
    cgroup_memory_bytes: int | Unknown | None


@dataclass(frozen=True, slots=True)
class RnicTrial:
    name: str
    works: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class RnicFacts:
    package_version: str
    native_build: dict[str, str | bool] | Unknown
    reference_crc32c: Text
    trials: tuple[RnicTrial, ...]
    """Best first."""
    auto: str | None
    """Which of them `open_rnic("auto")` takes."""
    auto_why: str
    setting_error: str
    """Why none could even be tried."""
    asked_rnic: str | None
    """KBTP_RNIC."""
    asked_rnic_error: str
    asked_spin_us: str | None
    """KBTP_SPIN_US."""
    default_spin_us: int
    crc: bool
    """What KBTP_CRC says; on where it says nothing."""
