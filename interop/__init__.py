"""Interoperability with the RDMA drivers of Linux, which run in a guest under QEMU; see docs/testing.md."""
