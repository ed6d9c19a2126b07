"""Machines made of files: what sysfs and procfs show of devices and limits that are not here."""

from __future__ import annotations

from pathlib import Path


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def device(name: str, files: dict[str, str | bytes]) -> dict[str, str | bytes]:
    return {f"sys/class/infiniband/{name}/{path}": content for path, content in files.items()}


def gids(port: int, *rows: tuple[int, str, str]) -> dict[str, str | bytes]:
    """(index, GID, type) each; what is not there is zero and has no type, as in the kernel."""
    found: dict[str, str | bytes] = {f"ports/{port}/gids/{index}": f"{ZERO_GID}\n" for index in range(16)}
    for index, gid, kind in rows:
        found[f"ports/{port}/gids/{index}"] = f"{gid}\n"
        found[f"ports/{port}/gid_attrs/types/{index}"] = f"{kind}\n"
    return found


def port(number: int, state: str, physical: str, link_layer: str, rate: str) -> dict[str, str | bytes]:
    folder = f"ports/{number}"
    return {
        f"{folder}/state": f"{state}\n",
        f"{folder}/phys_state": f"{physical}\n",
        f"{folder}/link_layer": f"{link_layer}\n",
        f"{folder}/rate": f"{rate}\n",
    }


def verbs_node(number: int, name: str) -> dict[str, str | bytes]:
    node = f"uverbs{number}"
    return {f"sys/class/infiniband_verbs/{node}/ibdev": f"{name}\n", f"dev/infiniband/{node}": ""}


ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL_GID = "fe80:0000:0000:0000:0a00:27ff:fe12:3456"
IPV4_GID = "0000:0000:0000:0000:0000:ffff:0a00:0007"
IPV6_GID = "2001:0db8:0000:0000:0000:0000:0000:0007"
ROCE_V1, ROCE_V2 = "IB/RoCE v1", "RoCE v2"

MLX5_GIDS = (
    (0, LINK_LOCAL_GID, ROCE_V1),
    (1, LINK_LOCAL_GID, ROCE_V2),
    (2, IPV4_GID, ROCE_V1),
    (3, IPV4_GID, ROCE_V2),
    (5, IPV6_GID, ROCE_V2),
)
CM: dict[str, str | bytes] = {"dev/infiniband/rdma_cm": ""}


def mlx5(*rows: tuple[int, str, str], mtu: int = 1500) -> dict[str, str | bytes]:
    """A RoCE device of hardware, with its netdev beside it on the bus."""
    return {
        **device(
            "mlx5_0",
            {
                "node_type": "1: CA\n",
                "fw_ver": "22.35.1012\n",
                "hca_type": "MT4125\n",
                "board_id": "MT_0000000359\n",
                "node_guid": "0c42:a103:0065:d1de\n",
                "device/net/enp1s0f0/dev_port": "0\n",
                **port(1, "4: ACTIVE", "5: LinkUp", "Ethernet", "100 Gb/sec (4X EDR)"),
                **gids(1, *rows),
            },
        ),
        "sys/class/net/enp1s0f0/mtu": f"{mtu}\n",
        "sys/class/net/enp1s0f0/operstate": "up\n",
        **verbs_node(0, "mlx5_0"),
        **CM,
    }


# As siw of Linux 6.1 shows itself: no firmware, no bus device, and whoever asks for the netdev of its GID is refused.
SIW: dict[str, str | bytes] = {
    **device(
        "siw0",
        {
            "node_type": "4: RNIC\n",
            "fw_ver": "\n",
            "node_guid": "5054:00ff:fe12:3456\n",
            **port(1, "4: ACTIVE", "5: LinkUp", "Ethernet", "2.5 Gb/sec (1X SDR)"),
            **gids(1, (0, "5254:0012:3456:0000:0000:0000:0000:0000", ROCE_V1)),
            "ports/1/gid_attrs/ndevs/0/refused": "",
        },
    ),
    "sys/class/net/lo/address": "00:00:00:00:00:00\n",
    "sys/class/net/eth0/address": "52:54:00:12:34:56\n",
    "sys/class/net/eth0/mtu": "1500\n",
    "sys/class/net/eth0/operstate": "up\n",
    **verbs_node(0, "siw0"),
    **CM,
}

IB_DOWN: dict[str, str | bytes] = {
    **device(
        "mlx4_0",
        {
            "node_type": "1: CA\n",
            "fw_ver": "2.42.5000\n",
            **port(1, "1: DOWN", "2: Polling", "InfiniBand", "10 Gb/sec (4X)"),
            **port(2, "2: INIT", "5: LinkUp", "InfiniBand", "40 Gb/sec (4X QDR)"),
            **gids(1, (0, LINK_LOCAL_GID, ROCE_V1)),
        },
    ),
    **verbs_node(3, "mlx4_0"),
    **CM,
}

GARBAGE: dict[str, str | bytes] = {
    **device(
        "odd",
        {
            "node_type": b"\xff\xfe\x00\x1b[31m",
            "fw_ver": "x" * 5000,
            "parent": "../../../etc\n",
            "hca_type/not_a_file": "",
            "ports/1/state": b"\x00\x00",
            "ports/1/phys_state": "77: Sideways\n",
            "ports/1/link_layer": "Pigeon\n",
            "ports/1/gids/0": "not a gid\n",
            "ports/1/gids/many": IPV6_GID,
            "ports/1/gids/1": b"\xff\xff",
            "ports/1/gid_attrs/ndevs/0": "no_such_netdev\n",
            "ports/not a number/state": "4: ACTIVE\n",
        },
    ),
    "sys/class/infiniband/a_file": "",
    "sys/class/infiniband_verbs/uverbs9/ibdev": b"\xff",
    "sys/class/infiniband_verbs/abi_version": "6\n",
}
