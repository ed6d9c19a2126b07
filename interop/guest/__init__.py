"""A guest whose kernel has real RDMA drivers: siw (iWARP over TCP) and rdma_rxe (RoCEv2).

`image.build` makes kernel and initramfs of Debian packages, `machine.Guest` boots them under QEMU, runs commands
inside and ends it; `python -m interop.guest` does the same from a shell.

The guest is 10.0.2.15 and sees this machine as 10.0.2.2. What listens in the guest is reached from here through the
ports of `Boot.forwards`. A shared folder is /mnt in the guest.
"""
