"""`python -m interop.offloads DEVICE`: the device gets TCP segments as they are to be, and neither cuts nor joins them.

As `ethtool -K DEVICE tso off gso off gro off`, which the guest has not.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import sys

SIOCETHTOOL = 0x8946
OFFLOADS = {"tso": (0x1E, 0x1F), "gso": (0x23, 0x24), "gro": (0x2B, 0x2C)}
"""ETHTOOL_G* and ETHTOOL_S* of linux/ethtool.h."""


def ethtool(sock: socket.socket, device: str, command: int) -> int:
    """Ask for a flag, or clear it: what the kernel has left in the value, which was zero."""
    value = array.array("I", (command, 0))
    fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP", device.encode(), value.buffer_info()[0]))
    return value[1]


def main() -> int:
    device = sys.argv[1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name, (ask, clear) in OFFLOADS.items():
            ethtool(sock, device, clear)
            if ethtool(sock, device, ask):
                print(f"{device} keeps {name}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
