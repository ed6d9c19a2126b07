"""The baseline, `bench/baseline/floor.c`: what plain sockets allow to whoever calls a C library from Python."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.peers import Cpus, PeerKind, Start, serve_target
from bench.peers.one_sided import Addressed
from kbtp.testing.bench.process import BenchFailed, Message
from kbtp.testing.bench.workload import Call, Slots

PROTOCOL = "bare-sockets"


def kind(name: str, library: Path, spin_us: int) -> PeerKind:
    """Bare sockets on both sides of which one looks for octets for `spin_us` before it blocks."""

    def serve(_program: str, octets: int, cpus: Cpus, started: Start) -> Message:
        told = serve_target(PROTOCOL, {}, sys.executable, octets, cpus, started, str(library), str(spin_us))
        return {**told, "library": str(library), "spin_us": spin_us}

    return PeerKind(name, PROTOCOL, lambda: sys.executable, "", serve)


def _library(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path, use_errno=True)
    library.floor_serve.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.floor_connect.argtypes = [ctypes.c_uint16, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)]
    library.floor_exchange.argtypes = [
        ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32,
    ]  # fmt: skip
    return library


def target(octets: int, library: str, spin_us: str) -> tuple[object, Message]:
    """What must live for the memory to be there, and what clients need to know."""
    floor = _library(library)
    port = floor.floor_serve(octets, int(spin_us))
    if port < 0:
        raise BenchFailed(f"bare sockets: cannot serve {octets} octets: {os.strerror(ctypes.get_errno())}")
    return floor, {"port": port}


class BareSockets(Addressed):
    def __init__(self, slots: Slots, blocks: int, settings: Message) -> None:
        floor, number = _library(settings["library"]), ctypes.c_uint64()
        self._socket = floor.floor_connect(settings["port"], settings["spin_us"], ctypes.byref(number))
        if self._socket < 0:
            raise BenchFailed(f"bare sockets: cannot connect: {os.strerror(ctypes.get_errno())}")
        # Each client has blocks of its own.
        super().__init__(slots, blocks, number.value * (blocks + slots.count) * slots.block_bytes)
        self._exchange: Callable[..., int] = floor.floor_exchange

    def transfer(self, write: bool, local: list[int], remote: list[int], lengths: list[int]) -> Call:
        count = len(local)
        addresses, offsets = (ctypes.c_uint64 * count)(*local), (ctypes.c_uint64 * count)(*remote)
        exchange = partial(self._exchange, self._socket, write, count, addresses, offsets, lengths[0])

        def transfer() -> None:
            if exchange():
                raise BenchFailed("bare sockets: the connection has failed")

        return transfer

    def close(self) -> None:
        os.close(self._socket)
