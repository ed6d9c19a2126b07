"""The RNIC of rdma-core: InfiniBand, RoCEv2 and iWARP devices, through libibverbs and librdmacm loaded at run time.

It is the native RNIC with other streams: queue pairs of a device instead of TCP connections (`rust/crates/kbtp-verbs`,
and `verbs_*.rs` of `kbtp-rnic`). Sequences and requests are carried out in Rust as there.
"""

from __future__ import annotations

import os

from kbtp import _native
from kbtp.rnic.native import NativeOptions, NativeRnic

DEVICE_VARIABLE = "KBTP_RDMA_DEVICE"


class RdmaCoreRnic(NativeRnic):
    """`kbtp.verbs.api.Rnic` over one device of rdma-core.

    Of the options those count that are not about MPA and TCP: `disconnect_s`, `spin_us` and those for tests.

    Raises:
        OSError: there is no such device, or what it takes to use it is not there; says what would help.
    """

    def __init__(self, options: NativeOptions | None = None, device: str | None = None) -> None:
        """`device`, such as "mlx5_0"; else the one that the environment variable KBTP_RDMA_DEVICE names, else the first
        that has an active port."""
        self._device = device or os.environ.get(DEVICE_VARIABLE) or None
        super().__init__(options)

    def _open(self) -> _native.Device:
        return _native.Device.rdma_core(
            name=self._device,
            disconnect_s=self.options.disconnect_s,
            spin_us=self.options.spin_us,
            forced_punts=self.options.forced_punts,
            forced_punts_seed=self.options.forced_punts_seed,
        )

    @property
    def name(self) -> str:
        return "rdma_core"
