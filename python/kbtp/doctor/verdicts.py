"""What the facts about RDMA devices and RNICs mean: one `Finding` a line. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kbtp import limits
from kbtp.doctor.facts import Device, Gid, GidScope, Netdev, Number, Port, RdmaFacts, RnicFacts, Unknown

POOL_BYTES = limits.DEFAULT_POOL_BLOCKS * limits.DEFAULT_BLOCK_SIZE_BYTES
ANY_SIZE_BYTES = 1 << 63
GIDS_SHOWN_MAX = 8
ROCE_HEADERS_BYTES = 96
"""What the Linux kernel takes off a netdev's MTU: GRH 40, UDP 8, BTH 12, XRC 4, AtomicETH 28, ICRC 4."""
RDMA_MTUS_BYTES = (256, 512, 1024, 2048, 4096)
ROCE_V2 = "RoCE v2"
_INSTALL_RDMA_CORE = "install rdma-core; on Debian: apt-get install ibverbs-providers librdmacm1"


class Level(str, Enum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """`about` what, what is so, and what to `do` about it."""

    level: Level
    about: str
    says: str
    do: str = ""


def ok(about: str, says: str) -> Finding:
    return Finding(Level.OK, about, says)


def note(about: str, says: str, do: str = "") -> Finding:
    return Finding(Level.NOTE, about, says, do)


def problem(about: str, says: str, do: str) -> Finding:
    return Finding(Level.PROBLEM, about, says, do)


# --- RDMA devices ------------------------------------------------------------------------------


def judge_rdma(facts: RdmaFacts) -> list[Finding]:
    devices = facts.devices
    if isinstance(devices, Unknown):
        found = [problem("devices", str(devices), "see that /sys is mounted and may be read here")]
    elif not devices:
        found = [note("devices", "none: user-space iWARP over TCP needs none")]
    else:
        found = [finding for device in devices for finding in _of_device(device)]
        if facts.may_open_cm is not True:
            found.append(
                problem("rdma_cm", _may_not_open(facts.may_open_cm), "load the module rdma_ucm, allow the device file")
            )
    for library in facts.libraries:
        if library.loads:
            found.append(ok(library.name, "there"))
        elif devices:
            found.append(problem(library.name, f"does not load: {library.why_not}", _INSTALL_RDMA_CORE))
        else:
            found.append(note(library.name, "does not load, and nothing here needs it"))
    return found


def transport_of(device: Device, port: Port) -> str:
    """By what a port is to be reached; the node type tells iWARP, the link layer the other two apart."""
    if device.node_type == "RNIC":
        return "iWARP"
    if port.link_layer == "InfiniBand":
        return "InfiniBand"
    if port.link_layer == "Ethernet" and not isinstance(device.node_type, Unknown):
        return "RoCE"
    return "unknown transport"


def _of_device(device: Device) -> Iterator[Finding]:
    ports = device.ports
    described = ["firmware not told" if isinstance(device.firmware, Unknown) else f"firmware {device.firmware}"]
    described += [str(value) for value in (device.model, device.board) if not isinstance(value, Unknown)]
    described += [f"over {netdev.name}" for netdev in device.netdevs]
    says = f"{device.node_type}, {', '.join(described)}"
    if isinstance(device.node_type, Unknown):
        yield note(device.name, says, "its driver is not one of the kernel's own, or it is just going away")
    else:
        yield ok(device.name, says)
    if device.may_open is not True:
        why = device.uverbs if isinstance(device.uverbs, Unknown) else _may_not_open(device.may_open)
        yield problem(
            device.name, f"programs cannot use it: {why}", "load ib_uverbs; allow /dev/infiniband/* to be used"
        )
    if isinstance(ports, Unknown):
        yield problem(device.name, f"its ports are {ports}", "see that /sys may be read here")
        return
    yield _of_limits(device)
    active = [port for port in ports if port.state == "ACTIVE"]
    for port in ports:
        about = f"{device.name} port {port.number}"
        yield _of_port(device, port, about, other_active=bool(active))
        if port.state == "ACTIVE":
            yield from _of_gids(device, port, about)
    if active and any(transport_of(device, port) == "RoCE" for port in ports):
        for netdev in device.netdevs:
            yield _of_roce_mtu(device, netdev, [port.active_mtu_bytes for port in active])


def _of_limits(device: Device) -> Finding:
    about, told = f"{device.name} limits", device.limits
    if isinstance(told, Unknown):
        return note(about, str(told))
    size = "any size" if told.region_bytes >= ANY_SIZE_BYTES else f"up to {told.region_bytes} octets"
    said = (
        f"{told.regions} regions of {size}; {told.queue_pairs} queue pairs; "
        f"RDMA Reads at once: {told.reads_asked} of ours, {told.reads_served} of the peer's; atomics: {told.atomics}"
    )
    if told.region_bytes < POOL_BYTES:
        return note(about, said, "a larger pool takes several regions; or `kbtp serve --pool-size` less")
    return ok(about, said)


def _may_not_open(may_open: bool | Unknown) -> str:
    return may_open.why if isinstance(may_open, Unknown) else "this user may not open its device file"


def _of_port(device: Device, port: Port, about: str, *, other_active: bool) -> Finding:
    transport = transport_of(device, port)
    if port.state == "ACTIVE":
        return ok(about, f"active, {transport}, {port.rate}")
    said = f"{port.state}, link {port.physical_state}, {transport}"
    if isinstance(port.state, Unknown) or port.state not in ("DOWN", "INIT", "ARMED", "NOP", "ACTIVE_DEFER"):
        return note(about, f"state {said}", "no such state is known; see what `rdma link` says")
    if transport == "InfiniBand" and port.state in ("INIT", "ARMED"):
        do = "no subnet manager has set it up: start opensm on one node, or the switch's own"
    elif transport == "InfiniBand":
        do = "connect the cable, and the port at its other end"
    else:
        names = " ".join(netdev.name for netdev in device.netdevs) or "NETDEV"
        do = f"connect the cable, or `ip link set {names} up`"
    return note(about, said, do) if other_active else problem(about, said, do)


def _of_gids(device: Device, port: Port, about: str) -> Iterator[Finding]:
    gids, transport = port.gids, transport_of(device, port)
    about = f"{about} GIDs"
    if transport == "iWARP":
        yield ok(about, "none needed: iWARP is reached at the IP addresses of its netdev")
        return
    if isinstance(gids, Unknown):
        yield note(about, str(gids))
        return
    shown = "; ".join(_gid_text(gid, transport) for gid in gids[:GIDS_SHOWN_MAX])
    if len(gids) > GIDS_SHOWN_MAX:
        shown += f"; and {len(gids) - GIDS_SHOWN_MAX} more"
    if transport != "RoCE":
        yield ok(about, shown) if gids else note(about, "none")
    elif any(gid.type == ROCE_V2 and gid.scope is not GidScope.LINK_LOCAL for gid in gids):
        yield ok(about, shown)
    else:
        netdev = " ".join(netdev.name for netdev in device.netdevs) or "NETDEV"
        yield problem(
            about,
            f"{shown or 'none'}: none is RoCE v2 with an address that others can reach",
            f"give the netdev an IP address: `ip address add ADDRESS/LENGTH dev {netdev}`",
        )


def _gid_text(gid: Gid, transport: str) -> str:
    kind = "" if isinstance(gid.type, Unknown) or transport == "InfiniBand" else f" {gid.type}"
    return f"{gid.index}: {gid.gid}{kind} ({gid.scope.value})"


def roce_mtu_bytes(netdev_mtu_bytes: int) -> int | None:
    """The largest RDMA MTU that fits; None if none does."""
    return max((mtu for mtu in RDMA_MTUS_BYTES if mtu + ROCE_HEADERS_BYTES <= netdev_mtu_bytes), default=None)


def _of_roce_mtu(device: Device, netdev: Netdev, active_bytes: list[Number]) -> Finding:
    about, needed = f"{device.name} MTU", RDMA_MTUS_BYTES[-1] + ROCE_HEADERS_BYTES
    if isinstance(netdev.mtu_bytes, Unknown):
        return note(about, f"that of {netdev.name} is {netdev.mtu_bytes}")
    fits = roce_mtu_bytes(netdev.mtu_bytes)
    said = f"{netdev.mtu_bytes} octets of {netdev.name}"
    more = (
        f"`ip link set {netdev.name} mtu 4200` or more, on switches and peers too: {needed} carry an RDMA MTU of 4096"
    )
    if fits is None:
        return problem(about, f"{said} are too few for any RDMA MTU", more)
    smaller = [mtu for mtu in active_bytes if not isinstance(mtu, Unknown) and mtu < fits]
    if smaller:
        return note(
            about,
            f"{said} leave room for {fits}, and {smaller[0]} is active",
            f"`ip link set {netdev.name} down`, then up",
        )
    if fits < RDMA_MTUS_BYTES[-1]:
        return note(about, f"{said} leave an RDMA MTU of {fits} of at most {RDMA_MTUS_BYTES[-1]}", more)
    return ok(about, f"{said} carry an RDMA MTU of {fits}, the largest")


# --- RNICs ---------------------------------------------------------------------------------------


def judge_rnics(facts: RnicFacts) -> list[Finding]:
    if facts.setting_error:
        found = [problem("settings", facts.setting_error, "correct that environment variable, or unset it")]
    else:
        found = [_of_auto(facts)]
    found += [
        ok(trial.name, "works") if trial.works else note(trial.name, f"does not work: {trial.why_not}")
        for trial in facts.trials
        if not (trial.name == "native" and not trial.works)  # what follows says it
    ]
    found.append(_of_native_build(facts))
    if isinstance(facts.reference_crc32c, Unknown):
        found.append(problem("reference RNIC", str(facts.reference_crc32c), "pip install crc32c"))
    else:
        found.append(ok("reference RNIC", f"in Python; CRC32c by {facts.reference_crc32c}"))
    return [*found, *_of_settings(facts)]


def _of_auto(facts: RnicFacts) -> Finding:
    if facts.auto is None:
        return problem("auto", f"no RNIC works on this machine: {facts.auto_why}", "see below what each needs")
    order = ", ".join(trial.name for trial in facts.trials)
    return ok("auto", f"takes {facts.auto}: {facts.auto_why}. Best first: {order}")


def _of_native_build(facts: RnicFacts) -> Finding:
    about, build = "native RNIC", facts.native_build
    again = "install kbtp again: `pip install kbtp`, or `make` in its sources"
    if isinstance(build, Unknown):
        return problem(about, f"not there: {build.why}. The reference RNIC is many times slower", again)
    said = (
        f"version {build['version']}, CRC32c by {build['crc32c']}, events from {build['events']}, "
        f"{'optimized' if build['optimized'] else 'not optimized'}"
    )
    if build["version"] != facts.package_version:
        return problem(about, f"{said}; but the package is version {facts.package_version}", again)
    if not build["optimized"]:
        return note(about, said, "build it with --release: this one is for finding faults")
    if "software" in str(build["crc32c"]):
        return note(about, said, "CRC32c has no instructions on this processor: expect less throughput")
    return ok(about, said)


def _of_settings(facts: RnicFacts) -> Iterator[Finding]:
    if facts.asked_rnic:
        if facts.asked_rnic_error:
            yield problem(
                "KBTP_RNIC", f"{facts.asked_rnic}: {facts.asked_rnic_error}", "unset it, or name one that works"
            )
        else:
            yield ok("KBTP_RNIC", f"{facts.asked_rnic}, for kbtp serve and kbtp bench")
    else:
        yield ok("KBTP_RNIC", "not set")
    if not facts.setting_error:
        spin_us = facts.asked_spin_us or facts.default_spin_us
        yield ok("KBTP_SPIN_US", f"{spin_us}{'' if facts.asked_spin_us else ', the default; not set'}")
        if not facts.crc:
            yield note(
                "KBTP_CRC",
                "off: what TCP's checksum overlooks is not noticed by a stream",
                "unset it, but where a peer on Linux siw takes right CRCs for wrong (docs/testing.md)",
            )
