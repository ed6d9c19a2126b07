"""What a caller may hand over to be loaded into or stored from, and how its memory is lent to the target."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kbtp import Status
from kbtp.errors import ApiMisuse
from kbtp.verbs.api import Access

Serve = Callable[..., Any]
Connect = Callable[..., Any]


class DlpackOnly:
    """A tensor whose framework knows DLPack and no buffer protocol."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **arguments: Any) -> object:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Bfloat16Tensor:
    """Two octets an element, of a type that numpy does not have (dlpack.h: kDLBfloat is 4)."""

    def __init__(self, elements: int) -> None:
        self.memory = bytearray(2 * elements)
        self._shape = (ctypes.c_int64 * 1)(elements)
        self._tensor = _DLTensor(
            data=ctypes.addressof(ctypes.c_char.from_buffer(self.memory)),
            device_type=1,
            ndim=1,
            code=4,
            bits=16,
            lanes=1,
            shape=self._shape,
        )

    def __dlpack__(self) -> object:
        return _new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "f4", "f8", "c16", "?", "M8[s]", "S3"])
def test_arrays_of_any_type_and_shape(serve: Serve, connect: Connect, dtype: str) -> None:
    client = connect(serve().url)
    for shape in ((24,), (4, 6), (2, 3, 80)):
        elements = int(np.prod(shape))
        itemsize = np.dtype(dtype).itemsize
        source = np.frombuffer(bytes(n % 2 for n in range(elements * itemsize)), dtype).reshape(shape)
        destination = np.zeros(shape, dtype)
        block = client.alloc_store(source)
        assert client.load(block, into=destination) == source.nbytes
        assert destination.tobytes() == source.tobytes()


def test_tensors_that_have_only_dlpack(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    for elements in (10, 1500):
        source = np.arange(elements, dtype=np.float32)
        destination = np.zeros(elements, np.float32)
        block = client.alloc_store(DlpackOnly(source))
        assert client.load(block, into=DlpackOnly(destination)) == 4 * elements
        assert (destination == source).all()


def test_bfloat16_tensors(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    source, destination = Bfloat16Tensor(3000), Bfloat16Tensor(3000)
    source.memory[:] = bytes(n % 251 for n in range(6000))
    block = client.alloc_store(source)
    assert client.load(block, into=destination) == 6000
    assert destination.memory == source.memory


def test_a_mapped_file_is_used_in_place(serve: Serve, connect: Connect, tmp_path: Any) -> None:
    client = connect(serve().url)
    path = tmp_path / "cache"
    path.write_bytes(bytes(8192))
    block = client.alloc_store(b"k" * 8192)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as mapped:
        client.load(block, into=mapped)
        assert mapped[:] == b"k" * 8192
    assert path.read_bytes() == b"k" * 8192


def test_slices_of_arrays_are_places_in_their_memory(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    cache = np.zeros((4, 1000), np.uint8)
    block = client.alloc_store(np.full(1000, 7, np.uint8))
    client.load(block, into=cache[2])
    assert cache.sum(axis=1).tolist() == [0, 0, 7000, 0]


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (b"constant", "read-only"),
        (np.zeros((8, 8), np.uint8)[:, 1], "C-contiguous"),
        (np.zeros(64, np.uint8)[::2], "C-contiguous"),
        ("text", "buffer protocol or DLPack"),
        (None, "buffer protocol or DLPack"),
    ],
    ids=["read-only", "column", "every other", "str", "None"],
)
def test_a_buffer_that_cannot_be_loaded_into(serve: Serve, connect: Connect, buffer: object, said: str) -> None:
    client = connect(serve().url)
    block = client.alloc_store(b"12345678")
    with pytest.raises(ApiMisuse, match=said):
        client.load(block, into=buffer)
    assert client.load(block, into=bytearray(8)) == 8


def test_a_released_buffer_costs_no_credit(serve: Serve, connect: Connect) -> None:
    client = connect(serve(request_credits=1).url)
    released = memoryview(bytearray(8))
    released.release()
    for _ in range(3):
        with pytest.raises(ApiMisuse, match="released"):
            client.alloc_store(released)
    assert client.alloc_store(b"x").length_bytes == 1


def test_a_buffer_of_4_gib_is_too_long_for_a_descriptor_and_stays_free_for_use(serve: Serve, connect: Connect) -> None:
    """Draft 5.2: Length has 32 bits. The mapping takes no memory until it is touched."""
    client = connect(serve().url)
    block = client.alloc_store(b"here")
    huge = mmap.mmap(-1, 1 << 32)
    with pytest.raises(ApiMisuse, match="32 bits"):
        client.load(block, into=huge)
    assert client.load(block, into=memoryview(huge)[:4]) == 4
    assert huge[:4] == b"here"


# --- one destination, several loads ------------------------------------------------------------


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("request_credits", [1, 8])
def test_the_same_destination_twice_in_a_batch_is_never_told_success_twice(
    serve: Serve, connect: Connect, registered: bool, request_credits: int
) -> None:
    """Completions come in any order (profile 3): which block is left in the buffer would be chance."""
    client = connect(serve(request_credits=request_credits).url, quota=4)
    blocks = [result.ref for result in client.alloc_store_many([b"A" * 6000, b"B" * 6000])]
    buffer = bytearray(6000)
    if registered:
        client.register(buffer)
    first, second = client.load_many(blocks, into=[buffer, buffer])
    assert first.status is Status.SUCCESS
    assert second.status is None
    assert isinstance(second.error, ApiMisuse)
    assert "another load is placing a block in the same memory" in str(second.error)
    assert buffer == b"A" * 6000
    assert client.load(blocks[1], into=buffer) == 6000
    assert buffer == b"B" * 6000


def test_destinations_that_touch_are_not_the_same(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url, quota=4)
    blocks = [result.ref for result in client.alloc_store_many([b"A" * 6000, b"B" * 6000])]
    buffer = memoryview(bytearray(12_000))
    assert [result.ok for result in client.load_many(blocks, into=[buffer[6000:], buffer[:6000]])] == [True, True]
    assert buffer == b"B" * 6000 + b"A" * 6000
    overlapping = client.load_many(blocks, into=[buffer[:6000], buffer[5999:11_999]])
    assert [result.ok for result in overlapping] == [True, False]


# --- registered memory -------------------------------------------------------------------------


def test_slices_of_a_registered_buffer_use_its_region(serve: Serve, connect: Connect) -> None:
    client = connect(serve(request_credits=32).url, quota=8)
    cache = np.zeros((8, 5000), np.uint8)
    region = client.register(cache)
    assert region.access == Access.REMOTE_READ | Access.REMOTE_WRITE
    cache[:4] = np.arange(1, 5, dtype=np.uint8)[:, None]
    blocks = [result.raise_for_status().ref for result in client.alloc_store_many(list(cache[:4]))]
    assert all(result.ok for result in client.load_many(blocks, into=list(cache[4:])))
    assert (cache[4:] == cache[:4]).all()
    assert region.valid


def test_a_buffer_that_reaches_beyond_a_registered_one_is_refused_as_a_destination(
    serve: Serve, connect: Connect
) -> None:
    client = connect(serve().url)
    memory = bytearray(12000)
    client.register(memoryview(memory)[:8000])
    block = client.alloc_store(bytes(5000))
    with pytest.raises(ApiMisuse, match="another valid region"):
        client.load(block, into=memoryview(memory)[6000:])
    assert client.alloc_store(memoryview(memory)[6000:], handle=client.terms.first_handle + 1).length_bytes == 6000


def test_a_read_only_buffer_is_registered_for_stores_alone(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    constant = bytes(range(256)) * 20
    assert client.register(constant).access == Access.REMOTE_READ
    block = client.alloc_store(constant)
    with pytest.raises(ApiMisuse, match="read-only"):
        client.load(block, into=constant)
    buffer = bytearray(len(constant))
    client.load(block, into=buffer)
    assert buffer == constant


def test_a_revoked_region_gives_way_to_a_new_one(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    memory = bytearray(10000)
    block = client.alloc_store(b"x" * 5000)
    client.register(memory).revoke()
    client.register(memoryview(memory)[:6000])
    assert client.load(block, into=memoryview(memory)[:5000]) == 5000
    assert client.load(block, into=memoryview(memory)[1000:6000]) == 5000
    assert memory == b"x" * 6000 + bytes(4000)


def test_regions_end_with_the_session(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    region = client.register(bytearray(10))
    client.close()
    assert not region.valid


def test_what_cannot_be_registered_is_misuse(serve: Serve, connect: Connect) -> None:
    client = connect(serve().url)
    for nothing in (b"", "text", np.zeros((4, 4))[:, 0]):
        with pytest.raises(ApiMisuse):
            client.register(nothing)
