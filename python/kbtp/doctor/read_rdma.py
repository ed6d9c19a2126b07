"""RDMA devices, as /sys/class/infiniband shows them, and the libraries that programs use them through."""

from __future__ import annotations

import ctypes
import ipaddress

from kbtp.doctor.facts import Device, Gid, GidScope, Library, Netdev, Port, RdmaFacts, Text, Unknown
from kbtp.doctor.tree import Tree

_CLASS = "/sys/class/infiniband"
_VERBS_CLASS = "/sys/class/infiniband_verbs"
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")


def read_rdma(tree: Tree, libraries: tuple[str, ...] = LIBRARIES) -> RdmaFacts:
    devices: tuple[Device, ...] | Unknown = ()
    if tree.exists(_CLASS):
        names = tree.names(_CLASS)
        devices = names if isinstance(names, Unknown) else tuple(_device(tree, name) for name in names)
    return RdmaFacts(devices, tree.may_open("/dev/infiniband/rdma_cm"), tuple(_library(name) for name in libraries))


def _library(name: str) -> Library:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return Library(name, False, str(error))
    return Library(name, True)


def _device(tree: Tree, name: str) -> Device:
    folder = f"{_CLASS}/{name}"
    uverbs = _uverbs(tree, name)
    numbers = tree.names(f"{folder}/ports")
    ports: tuple[Port, ...] | Unknown
    ports = numbers if isinstance(numbers, Unknown) else tuple(_port(tree, folder, number) for number in numbers)
    return Device(
        name,
        node_type=_said(tree.text(f"{folder}/node_type")),
        firmware=tree.text(f"{folder}/fw_ver"),
        model=tree.text(f"{folder}/hca_type"),
        board=tree.text(f"{folder}/board_id"),
        node_guid=tree.text(f"{folder}/node_guid"),
        uverbs=uverbs,
        may_open=uverbs if isinstance(uverbs, Unknown) else tree.may_open(uverbs),
        netdevs=tuple(_netdev(tree, netdev) for netdev in _netdev_names(tree, folder, numbers)),
        ports=ports,
    )


def _said(text: Text) -> Text:
    """Of `4: ACTIVE` what the number means."""
    return text if isinstance(text, Unknown) else text.partition(": ")[2] or text


def _uverbs(tree: Tree, device: str) -> Text:
    nodes = tree.names(_VERBS_CLASS)
    for node in [] if isinstance(nodes, Unknown) else nodes:
        if tree.text(f"{_VERBS_CLASS}/{node}/ibdev") == device:
            return f"/dev/infiniband/{node}"
    return Unknown(f"nothing in {_VERBS_CLASS} belongs to it: is the module ib_uverbs loaded?")


def _port(tree: Tree, device_folder: str, number: str) -> Port:
    folder = f"{device_folder}/ports/{number}"
    return Port(
        number,
        state=_said(tree.text(f"{folder}/state")),
        physical_state=_said(tree.text(f"{folder}/phys_state")),
        link_layer=tree.text(f"{folder}/link_layer"),
        rate=tree.text(f"{folder}/rate"),
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
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped), GidScope.IPV4
    return str(address), GidScope.LINK_LOCAL if address.is_link_local else GidScope.IPV6


def _netdev_names(tree: Tree, folder: str, ports: list[str] | Unknown) -> list[str]:
    """A hardware device shares its bus device with its netdev, rxe names its own, others tell with their GIDs."""
    names: dict[str, None] = {}
    parent = tree.text(f"{folder}/parent")
    if not isinstance(parent, Unknown):
        names[parent] = None
    for port in [] if isinstance(ports, Unknown) else ports:
        attributes = f"{folder}/ports/{port}/gid_attrs/ndevs"
        indexes = tree.names(attributes)
        for index in [] if isinstance(indexes, Unknown) else indexes:
            netdev = tree.text(f"{attributes}/{index}")
            if not isinstance(netdev, Unknown):
                names[netdev] = None
    beside = tree.names(f"{folder}/device/net")
    if not names and not isinstance(beside, Unknown):
        names |= dict.fromkeys(beside)
    return [name for name in names if "/" not in name and tree.exists(f"/sys/class/net/{name}")]


def _netdev(tree: Tree, name: str) -> Netdev:
    folder = f"/sys/class/net/{name}"
    return Netdev(name, tree.number(f"{folder}/mtu"), tree.text(f"{folder}/operstate"))
