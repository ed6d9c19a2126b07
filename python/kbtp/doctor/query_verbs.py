"""What libibverbs tells of each device that sysfs does not: limits of the firmware, and the MTU that is active.

A program of its own, since a driver that is loaded here may take its process down with it: it is run as a file, imports
nothing of `kbtp`, and prints one JSON object, by name of the device. Structures are those of rdma-core's verbs.h, as
far as they are read.
"""

from __future__ import annotations

import ctypes
import json
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_uint8, c_uint32, c_uint64, c_void_p

MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
ATOMICS = {0: "none", 1: "of this device", 2: "global"}


class DeviceAttributes(ctypes.Structure):
    """struct ibv_device_attr, up to atomic_cap."""

    _fields_ = (
        ("fw_ver", c_char * 64),
        ("node_guid", c_uint64),
        ("sys_image_guid", c_uint64),
        ("max_mr_size", c_uint64),
        ("page_size_cap", c_uint64),
        ("vendor_id", c_uint32),
        ("vendor_part_id", c_uint32),
        ("hw_ver", c_uint32),
        ("max_qp", c_int),
        ("max_qp_wr", c_int),
        ("device_cap_flags", c_uint32),
        ("max_sge", c_int),
        ("max_sge_rd", c_int),
        ("max_cq", c_int),
        ("max_cqe", c_int),
        ("max_mr", c_int),
        ("max_pd", c_int),
        ("max_qp_rd_atom", c_int),
        ("max_ee_rd_atom", c_int),
        ("max_res_rd_atom", c_int),
        ("max_qp_init_rd_atom", c_int),
        ("max_ee_init_rd_atom", c_int),
        ("atomic_cap", c_int),
        ("rest", c_char * 512),
    )


class PortAttributes(ctypes.Structure):
    """struct ibv_port_attr, up to active_mtu."""

    _fields_ = (("state", c_int), ("max_mtu", c_int), ("active_mtu", c_int), ("rest", c_char * 512))


def devices() -> dict[str, object]:
    """Raises OSError if libibverbs is not there, AttributeError if it is another library."""
    verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    verbs.ibv_get_device_list.argtypes, verbs.ibv_get_device_list.restype = (POINTER(c_int),), POINTER(c_void_p)
    verbs.ibv_get_device_name.argtypes, verbs.ibv_get_device_name.restype = (c_void_p,), c_char_p
    verbs.ibv_open_device.argtypes, verbs.ibv_open_device.restype = (c_void_p,), c_void_p
    verbs.ibv_query_device.argtypes = (c_void_p, c_void_p)
    verbs.ibv_query_port.argtypes = (c_void_p, c_uint8, c_void_p)
    verbs.ibv_close_device.argtypes = (c_void_p,)
    count = c_int()
    listed = verbs.ibv_get_device_list(byref(count))
    found: dict[str, object] = {}
    for index in range(count.value if listed else 0):
        name = verbs.ibv_get_device_name(listed[index]).decode(errors="replace")
        context = verbs.ibv_open_device(listed[index])
        if context:
            found[name] = _device(verbs, context)
            verbs.ibv_close_device(context)
    return found


def _device(verbs: ctypes.CDLL, context: int) -> dict[str, object]:
    told: dict[str, object] = {"mtus_bytes": {}}
    attributes = DeviceAttributes()
    if verbs.ibv_query_device(context, byref(attributes)) == 0:
        told["limits"] = {
            "region_bytes": attributes.max_mr_size,
            "regions": attributes.max_mr,
            "domains": attributes.max_pd,
            "queue_pairs": attributes.max_qp,
            "work_requests": attributes.max_qp_wr,
            "reads_served": attributes.max_qp_rd_atom,
            "reads_asked": attributes.max_qp_init_rd_atom,
            "atomics": ATOMICS.get(attributes.atomic_cap, "unknown"),
        }
    mtus: dict[str, int] = {}
    for number in range(1, 256):
        port = PortAttributes()
        if verbs.ibv_query_port(context, number, byref(port)) != 0:
            break
        if port.active_mtu in MTU_BYTES:
            mtus[str(number)] = MTU_BYTES[port.active_mtu]
    told["mtus_bytes"] = mtus
    return told


if __name__ == "__main__":
    print(json.dumps(devices()))
