"""What can be registered: the buffer protocol, and DLPack tensors in host memory."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import struct
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from kbtp.errors import ApiMisuse
from kbtp.verbs.buffers import buffer_of

KDL_CPU, KDL_CUDA, KDL_CUDA_HOST, KDL_ROCM_HOST = 1, 2, 3, 11
BFLOAT16, FLOAT, FLOAT4 = 4, 2, 17  # dlpack.h: DLDataTypeCode
READ_ONLY, IS_COPIED, SUBBYTE_PADDED = 1, 2, 4

_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class HandMade:
    """A tensor that packs its DLPack structures by hand, field by field as dlpack.h draws them for 64-bit machines."""

    def __init__(
        self,
        *,
        shape: tuple[int, ...] = (2, 4),
        strides: tuple[int, ...] | None = None,
        dtype: tuple[int, int, int] = (BFLOAT16, 16, 1),
        device: int = KDL_CPU,
        capsule_device: int | None = None,
        offset_bytes: int = 0,
        flags: int = 0,
        null: bool = False,
        version: tuple[int, int] | None = (1, 0),
        name: bytes | None = None,
        with_deleter: bool = True,
    ) -> None:
        self.memory = (ctypes.c_ubyte * 256)(*range(256))
        self.deleted: list[int] = []
        self.asked: list[dict[str, object]] = []
        self.device = device
        self._version = version
        self._name = name or (b"dltensor_versioned" if version else b"dltensor")
        self._shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self._strides = (ctypes.c_int64 * len(strides))(*strides) if strides is not None else None
        self._deleter = _DELETER(self.deleted.append)
        dl_tensor = struct.pack(
            "=QiiiBBHQQQ",
            0 if null else ctypes.addressof(self.memory),
            device if capsule_device is None else capsule_device,
            0,
            len(shape),
            *dtype,
            ctypes.addressof(self._shape),
            ctypes.addressof(self._strides) if self._strides is not None else 0,
            offset_bytes,
        )
        deleter = (ctypes.cast(self._deleter, ctypes.c_void_p).value or 0) if with_deleter else 0
        if version:
            managed = struct.pack("=IIQQQ", *version, 0, deleter, flags) + dl_tensor
        else:
            managed = dl_tensor + struct.pack("=QQ", 0, deleter)
        self._managed = ctypes.create_string_buffer(managed, len(managed))
        self.capsule: object = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **asked: object) -> object:
        self.asked.append(asked)
        if not self._version and asked:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        self.capsule = _new_capsule(ctypes.addressof(self._managed), self._name, None)
        return self.capsule


class OnlyDlpack:
    """A numpy array without its buffer protocol; `legacy` frameworks do not know `max_version`."""

    def __init__(self, array: np.ndarray, *, legacy: bool) -> None:
        self._array = array
        self._legacy = legacy

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **asked: object) -> object:
        if self._legacy and asked:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self._array.__dlpack__(**asked)


# --- the buffer protocol ---


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(b"12345678"),
        lambda: memoryview(bytearray(8)),
        lambda: array.array("d", [1.0]),
        ctypes.c_uint64,
        lambda: mmap.mmap(-1, 8),
        lambda: np.zeros((2, 4), np.uint8),
        lambda: np.zeros((1, 4), ">u2"),
        lambda: np.zeros(1, [("a", "u4"), ("b", ">f4")]),
        lambda: np.zeros(1, "datetime64[s]"),
        lambda: np.zeros((), np.complex64),
        lambda: np.zeros((4, 8), np.uint8)[2],
    ],
)
def test_any_contiguous_writable_buffer_is_its_octets(make: Callable[[], object]) -> None:
    registered = buffer_of(make())

    assert (registered.view.format, registered.view.ndim, registered.view.nbytes) == ("B", 1, 8)
    assert registered.view.c_contiguous
    assert registered.writable
    registered.view[7] = 0xA5
    assert ctypes.string_at(registered.address, 8)[7] == 0xA5


def test_a_write_through_the_view_is_seen_in_the_buffer() -> None:
    values = np.zeros(4, np.uint32)

    registered = buffer_of(values)
    registered.view[4:8] = (7).to_bytes(4, "little")

    assert registered.address == values.ctypes.data
    assert values.view("<u4").tolist() == [0, 7, 0, 0]


@pytest.mark.parametrize(
    "buffer", [b"abc", memoryview(bytearray(b"abc")).toreadonly(), np.broadcast_to(np.uint8(1), 1)]
)
def test_a_read_only_buffer_has_a_read_only_view(buffer: object) -> None:
    assert not buffer_of(buffer).writable


def test_the_buffer_is_kept_alive_and_its_size_locked() -> None:
    growing = bytearray(4)
    registered = buffer_of(growing)

    with pytest.raises(BufferError):
        growing.append(1)
    del registered
    growing.append(1)


@pytest.mark.parametrize("buffer", [b"", bytearray(), np.zeros((3, 0))])
def test_an_empty_buffer_is_refused(buffer: object) -> None:
    with pytest.raises(ApiMisuse, match="at least one octet"):
        buffer_of(buffer)


@pytest.mark.parametrize("buffer", [np.zeros((4, 4)).T, np.zeros(8)[::2], memoryview(bytearray(8))[::2]])
def test_a_buffer_with_gaps_is_refused(buffer: object) -> None:
    with pytest.raises(ApiMisuse, match="must be C-contiguous"):
        buffer_of(buffer)


@pytest.mark.parametrize("thing", [5, "text", None, object()])
def test_what_is_no_buffer_is_refused(thing: object) -> None:
    with pytest.raises(ApiMisuse, match=f"buffer protocol or DLPack .*; got {type(thing).__name__}"):
        buffer_of(thing)


# --- DLPack from a real framework ---


@pytest.mark.parametrize("legacy", [False, True])
def test_dlpack_of_numpy_is_its_octets_and_lives_as_long_as_the_view(legacy: bool) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    gone = weakref.ref(values)
    address = values.ctypes.data

    registered = buffer_of(OnlyDlpack(values, legacy=legacy))

    assert (registered.address, registered.view.nbytes) == (address, 48)
    assert registered.view == values.tobytes()
    part = registered.view[4:8]
    del values, registered
    gc.collect()
    assert gone() is not None, "a view made from the view keeps the tensor alive"
    part[:] = b"\0\0\0\0"
    del part
    gc.collect()
    assert gone() is None


def test_a_read_only_array_of_a_framework_that_cannot_say_so_is_refused() -> None:
    values = np.arange(4, dtype=np.int64)
    values.flags.writeable = False

    with pytest.raises(ApiMisuse, match="gives no DLPack capsule"):
        buffer_of(OnlyDlpack(values, legacy=True))


# --- DLPack by hand ---


@pytest.mark.parametrize("version", [None, (1, 0), (1, 7)])
def test_a_bfloat16_tensor_of_either_capsule_form(version: tuple[int, int] | None) -> None:
    tensor = HandMade(version=version)

    registered = buffer_of(tensor)

    assert registered.view.nbytes == 2 * 4 * 2
    assert registered.address == ctypes.addressof(tensor.memory)
    assert registered.writable
    registered.view[3] = 0xEE
    assert tensor.memory[3] == 0xEE
    assert tensor.asked[0] == {"max_version": (1, 0)}
    used = b"used_dltensor_versioned" if version else b"used_dltensor"
    assert _capsule_name(tensor.capsule) == used


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_the_deleter_is_called_once_when_the_last_view_goes(version: tuple[int, int] | None) -> None:
    tensor = HandMade(version=version)
    registered = buffer_of(tensor)
    rest = registered.view[1:]

    del registered
    gc.collect()
    assert tensor.deleted == []
    del rest
    gc.collect()
    tensor.capsule = None
    gc.collect()
    assert tensor.deleted == [ctypes.addressof(tensor._managed)]


def test_a_tensor_without_a_deleter() -> None:
    assert buffer_of(HandMade(with_deleter=False)).view.nbytes == 16


def test_byte_offset_counts_from_the_data_pointer() -> None:
    tensor = HandMade(offset_bytes=32)

    registered = buffer_of(tensor)

    assert registered.address == ctypes.addressof(tensor.memory) + 32
    assert registered.view[0] == 32


@pytest.mark.parametrize(
    ("shape", "dtype", "flags", "length_bytes"),
    [
        ((), (FLOAT, 32, 1), 0, 4),
        ((3,), (FLOAT, 8, 1), 0, 3),
        ((3,), (FLOAT, 32, 4), 0, 48),
        ((5,), (FLOAT4, 4, 1), 0, 3),
        ((5,), (FLOAT4, 4, 1), SUBBYTE_PADDED, 5),
    ],
)
def test_length_of_a_tensor(shape: tuple[int, ...], dtype: tuple[int, int, int], flags: int, length_bytes: int) -> None:
    assert buffer_of(HandMade(shape=shape, dtype=dtype, flags=flags)).view.nbytes == length_bytes


def test_the_read_only_flag() -> None:
    assert not buffer_of(HandMade(flags=READ_ONLY)).writable


@pytest.mark.parametrize("strides", [(4, 1), (99, 1), None])
def test_contiguous_strides_are_accepted_and_those_of_single_elements_ignored(strides: tuple[int, ...] | None) -> None:
    shape = (1, 4) if strides == (99, 1) else (2, 4)
    assert buffer_of(HandMade(shape=shape, strides=strides)).view.nbytes == shape[0] * 8


@pytest.mark.parametrize("strides", [(1, 2), (8, 1), (4, 2), (-4, 1), (0, 0)])
def test_other_strides_are_refused(strides: tuple[int, ...]) -> None:
    tensor = HandMade(strides=strides)
    with pytest.raises(ApiMisuse, match="must be C-contiguous"):
        buffer_of(tensor)
    assert _capsule_name(tensor.capsule) == b"dltensor_versioned", "the capsule was not taken"


@pytest.mark.parametrize("device", [KDL_CPU, KDL_CUDA_HOST, KDL_ROCM_HOST])
def test_host_memory_pinned_or_not_is_accepted(device: int) -> None:
    assert buffer_of(HandMade(device=device)).view.nbytes == 16


def test_device_memory_is_refused_before_a_capsule_is_asked_for() -> None:
    tensor = HandMade(device=KDL_CUDA)
    with pytest.raises(ApiMisuse, match="in CUDA memory: copy it to the CPU first"):
        buffer_of(tensor)
    assert tensor.asked == []


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (HandMade(capsule_device=99), "DLPack device type 99"),
        (HandMade(shape=(0, 4)), "at least one octet"),
        (HandMade(null=True), "null"),
        (HandMade(flags=IS_COPIED), "a copy of itself"),
        (HandMade(version=(2, 0)), r"1\.x is understood"),
        (HandMade(name=b"used_dltensor"), "not used yet"),
    ],
)
def test_refused_tensors_keep_their_capsule(tensor: HandMade, message: str) -> None:
    with pytest.raises(ApiMisuse, match=message):
        buffer_of(tensor)
    assert tensor.deleted == []
