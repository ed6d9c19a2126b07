"""RDMA devices, as /sys/class/infiniband shows them, and the libraries that programs use them through."""

from __future__ import annotations

import ctypes
import ipaddress
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from kbtp.doctor.facts import (
    Device,
    DeviceLimits,
    Gid,
    GidScope,
    Library,
    Netdev,
    Number,
    Port,
    RdmaFacts,
    Text,
    Unknown,
    printable,
)
from kbtp.doctor.tree import Tree

_CLASS = "/sys/class/infiniband"
_NET_CLASS = "/sys/class/net"
_VERBS_CLASS = "/sys/class/infiniband_verbs"
HARDWARE_ADDRESS_BYTES = 6
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")

_PROGRAM = Path(__file__).with_name("query_verbs.py")
_ASK_TIMEOUT_S = 10.0

_Item = TypeVar("_Item")
_Told: TypeAlias = Mapping[str, Any] | Unknown
"""By device what `query_verbs` prints."""


def ask_libibverbs() -> _Told:
    """In a process of its own: a device's driver is loaded into it."""
    command = [sys.executable, "-I", str(_PROGRAM)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Unknown(f"libibverbs says nothing within {_ASK_TIMEOUT_S:g} s")
    except (OSError, ValueError) as error:
        return Unknown(f"libibverbs cannot be asked: {error}")
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return Unknown(f"asking libibverbs failed: {printable(said[-1])}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def read_rdma(
    tree: Tree, libraries: tuple[str, ...] = LIBRARIES, ask: Callable[[], _Told] = ask_libibverbs
) -> RdmaFacts:
    devices: tuple[Device, ...] | Unknown = ()
    if tree.exists(_CLASS):
        names = tree.names(_CLASS)
        told: _Told = ask() if _known(names) else {}
        devices = names if isinstance(names, Unknown) else tuple(_device(tree, name, _of(told, name)) for name in names)
    return RdmaFacts(devices, tree.may_open("/dev/infiniband/rdma_cm"), tuple(_library(name) for name in libraries))


def _of(told: _Told, device: str) -> _Told:
    if isinstance(told, Unknown):
        return told
    found: _Told = told.get(device, Unknown("libibverbs cannot open it"))
    return found


def _limits(told: _Told) -> DeviceLimits | Unknown:
    if isinstance(told, Unknown):
        return told
    return DeviceLimits(**told["limits"]) if "limits" in told else Unknown("libibverbs does not tell them")


def _active_mtu_bytes(told: _Told, port: str) -> Number:
    if isinstance(told, Unknown):
        return told
    mtu_bytes: Number = told["mtus_bytes"].get(port, Unknown("libibverbs does not tell it"))
    return mtu_bytes


def _library(name: str) -> Library:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return Library(name, False, str(error))
    return Library(name, True)


def _device(tree: Tree, name: str, told: _Told) -> Device:
    folder = f"{_CLASS}/{name}"
    uverbs = _uverbs(tree, name)
    numbers = tree.names(f"{folder}/ports")
    ports: tuple[Port, ...] | Unknown
    ports = numbers if isinstance(numbers, Unknown) else tuple(_port(tree, folder, number, told) for number in numbers)
    gids = [gid for port in _known(ports) for gid in _known(port.gids)]
    return Device(
        name,
        node_type=_said(tree.text(f"{folder}/node_type")),
        firmware=tree.text(f"{folder}/fw_ver"),
        model=tree.text(f"{folder}/hca_type"),
        board=tree.text(f"{folder}/board_id"),
        node_guid=tree.text(f"{folder}/node_guid"),
        uverbs=uverbs,
        may_open=uverbs if isinstance(uverbs, Unknown) else tree.may_open(uverbs),
        limits=_limits(told),
        netdevs=tuple(_netdev(tree, netdev) for netdev in _netdev_names(tree, folder, _known(numbers), gids)),
        ports=ports,
    )


def _known(items: Sequence[_Item] | Unknown) -> Sequence[_Item]:
    return () if isinstance(items, Unknown) else items


def _said(text: Text) -> Text:
    """Of `4: ACTIVE` what the number means."""
    return text if isinstance(text, Unknown) else text.partition(": ")[2] or text


def _uverbs(tree: Tree, device: str) -> Text:
    for node in _known(tree.names(_VERBS_CLASS)):
        if tree.text(f"{_VERBS_CLASS}/{node}/ibdev") == device:
            return f"/dev/infiniband/{node}"
    return Unknown(f"nothing in {_VERBS_CLASS} belongs to it: is the module ib_uverbs loaded?")


def _port(tree: Tree, device_folder: str, number: str, told: _Told) -> Port:
    folder = f"{device_folder}/ports/{number}"
    return Port(
        number,
        state=_said(tree.text(f"{folder}/state")),
        physical_state=_said(tree.text(f"{folder}/phys_state")),
        link_layer=tree.text(f"{folder}/link_layer"),
        rate=tree.text(f"{folder}/rate"),
        active_mtu_bytes=_active_mtu_bytes(told, number),
        gids=_gids(tree, folder),
    )


def _gids(tree: Tree, folder: str) -> tuple[Gid, ...] | Unknown:
    """Those that are set, in the order of the table."""
    names = tree.names(f"{folder}/gids")
    if isinstance(names, Unknown):
        return names
    found = []
    for index in sorted(int(name) for name in names if name.isdecimal()):
        gid = _gid(tree.text(f"{folder}/gids/{index}"))
        if gid is not None:
            found.append(Gid(index, gid[0], gid[1], tree.text(f"{folder}/gid_attrs/types/{index}")))
    return tuple(found)


def _gid(text: Text) -> tuple[str, GidScope] | None:
    if isinstance(text, Unknown):
        return None
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return None
    if address.is_unspecified:
        return None
    if address.packed[HARDWARE_ADDRESS_BYTES:] == bytes(len(address.packed) - HARDWARE_ADDRESS_BYTES):
        return address.packed[:HARDWARE_ADDRESS_BYTES].hex(":"), GidScope.HARDWARE
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped), GidScope.IPV4
    return str(address), GidScope.LINK_LOCAL if address.is_link_local else GidScope.IPV6


def _netdev_names(tree: Tree, folder: str, ports: Sequence[str], gids: list[Gid]) -> list[str]:
    """rxe names its netdev, others tell with their GIDs, a hardware device shares its bus device with it; siw has its
    hardware address."""
    names: dict[str, None] = {}
    parent = tree.text(f"{folder}/parent")
    if not isinstance(parent, Unknown):
        names[parent] = None
    for port in ports:
        attributes = f"{folder}/ports/{port}/gid_attrs/ndevs"
        for index in _known(tree.names(attributes)):
            netdev = tree.text(f"{attributes}/{index}")
            if not isinstance(netdev, Unknown):
                names[netdev] = None
    if not names:
        names |= dict.fromkeys(_known(tree.names(f"{folder}/device/net")))
    if not names:
        names |= dict.fromkeys(_netdevs_by_address(tree, gids))
    return [name for name in names if "/" not in name and tree.exists(f"{_NET_CLASS}/{name}")]


def _netdevs_by_address(tree: Tree, gids: list[Gid]) -> list[str]:
    addresses = {gid.gid for gid in gids if gid.scope is GidScope.HARDWARE}
    return [name for name in _known(tree.names(_NET_CLASS)) if _address_of(tree, name) in addresses]


def _address_of(tree: Tree, netdev: str) -> Text:
    return tree.text(f"{_NET_CLASS}/{netdev}/address")


def _netdev(tree: Tree, name: str) -> Netdev:
    folder = f"{_NET_CLASS}/{name}"
    return Netdev(name, tree.number(f"{folder}/mtu"), tree.text(f"{folder}/operstate"))
