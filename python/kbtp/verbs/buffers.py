"""The octets of any buffer: the buffer protocol, and DLPack tensors in CPU memory.

KV caches are mostly bfloat16 or float8, which the buffer protocol has no letter for and numpy no type.
So a DLPack capsule is read here by hand (dlpack.h, versions 0 and 1): only where the octets lie and how many
they are matters, not what they mean.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kbtp.errors import ApiMisuse

# dlpack.h: DLDeviceType
_DL_CPU = 1
_DL_CUDA_HOST = 3
_DL_ROCM_HOST = 11
_HOST_DEVICES = {_DL_CPU, _DL_CUDA_HOST, _DL_ROCM_HOST}
_DEVICE_NAMES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed", 14: "oneAPI"}

# dlpack.h: DLManagedTensorVersioned.flags
_DL_FLAG_READ_ONLY = 1
_DL_FLAG_IS_COPIED = 2
_DL_FLAG_SUBBYTE_PADDED = 4

_DL_MAJOR_VERSION = 1

# PyCapsule_SetName keeps the pointer it is given, so these octets live as long as the module.
_LEGACY_NAME = b"dltensor"
_LEGACY_USED_NAME = b"used_dltensor"
_VERSIONED_NAME = b"dltensor_versioned"
_VERSIONED_USED_NAME = b"used_dltensor_versioned"


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    ]


# Prototypes of our own: attributes set on `ctypes.pythonapi` functions would be seen by everyone in the process.
_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@runtime_checkable
class DlpackTensor(Protocol):
    """A tensor of any framework that hands out DLPack capsules."""

    def __dlpack__(self, *, stream: object = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class RegisteredBuffer:
    """Where a buffer's octets are.

    `view` is one-dimensional, format "B", C-contiguous, at least one octet, read-only if the buffer is; the memory
    (a DLPack tensor too) lives as long as it or anything made from it does. `address` is that of the first octet.
    """

    view: memoryview
    address: int

    @property
    def writable(self) -> bool:
        return not self.view.readonly


def buffer_of(obj: object) -> RegisteredBuffer:
    """The octets of `obj`: any contiguous buffer of any type and shape, or a DLPack tensor in host memory.

    Raises:
        ApiMisuse: `obj` has neither protocol, is empty, has gaps (is not C-contiguous), is not in memory the CPU
            reaches, has a null pointer, or its framework would only hand out a copy.
    """
    try:
        # The buffer protocol without a format (PyBUF_SIMPLE): also types it has no letter for.
        octets = np.frombuffer(obj, dtype=np.uint8)  # type: ignore[call-overload]
    except (TypeError, AttributeError):  # numpy 1 asks for an attribute first
        if isinstance(obj, DlpackTensor):
            return _of_dlpack(obj)
        raise ApiMisuse(
            f"a buffer must have the buffer protocol or DLPack (__dlpack__ and __dlpack_device__); "
            f"got {type(obj).__name__}"
        ) from None
    except (ValueError, BufferError) as error:
        raise ApiMisuse(
            f"a buffer must be C-contiguous; this {type(obj).__name__} is not ({error}): register a contiguous one"
        ) from None
    if octets.nbytes == 0:
        raise ApiMisuse(f"a buffer must hold at least one octet; this {type(obj).__name__} holds none")
    return RegisteredBuffer(memoryview(octets), octets.ctypes.data)


def _of_dlpack(tensor: DlpackTensor) -> RegisteredBuffer:
    name = type(tensor).__name__
    device_type = int(tensor.__dlpack_device__()[0])
    _check_device(device_type, name)
    capsule = _capsule_of(tensor, name)
    if _capsule_is_valid(capsule, _VERSIONED_NAME):
        pointer = _capsule_pointer(capsule, _VERSIONED_NAME)
        versioned = _DLManagedTensorVersioned.from_address(pointer)
        if versioned.major != _DL_MAJOR_VERSION:
            raise ApiMisuse(f"DLPack {_DL_MAJOR_VERSION}.x is understood; {name} hands out {versioned.major}.x")
        flags, deleter, used_name = int(versioned.flags), versioned.deleter, _VERSIONED_USED_NAME
        dl_tensor = versioned.dl_tensor
    elif _capsule_is_valid(capsule, _LEGACY_NAME):
        pointer = _capsule_pointer(capsule, _LEGACY_NAME)
        legacy = _DLManagedTensor.from_address(pointer)
        flags, deleter, used_name = 0, legacy.deleter, _LEGACY_USED_NAME
        dl_tensor = legacy.dl_tensor
    else:
        raise ApiMisuse(
            f"__dlpack__ of {name} must return a capsule named dltensor or dltensor_versioned, not used yet"
        )
    # All checks come before the capsule is taken: until then its own destructor frees the tensor.
    address, length_bytes = _extent(dl_tensor, flags, name)
    _capsule_set_name(capsule, used_name)
    array = (ctypes.c_ubyte * length_bytes).from_address(address)
    if deleter:
        # The array is what every memoryview made below keeps alive, so the tensor goes when the last of them does.
        weakref.finalize(array, _Deleter(deleter), pointer).atexit = False
    view = memoryview(array).cast("B")
    return RegisteredBuffer(view.toreadonly() if flags & _DL_FLAG_READ_ONLY else view, address)


def _capsule_of(tensor: DlpackTensor, name: str) -> object:
    try:
        try:
            return tensor.__dlpack__(max_version=(_DL_MAJOR_VERSION, 0))  # type: ignore[call-arg]
        except TypeError:  # a framework that knows only the legacy form has no such argument
            return tensor.__dlpack__()
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise ApiMisuse(f"{name} gives no DLPack capsule ({error}): register a plain CPU tensor") from error


def _check_device(device_type: int, name: str) -> None:
    if device_type not in _HOST_DEVICES:
        device = _DEVICE_NAMES.get(device_type, f"DLPack device type {device_type}")
        raise ApiMisuse(f"a buffer must be in CPU memory; this {name} is in {device} memory: copy it to the CPU first")


def _extent(tensor: _DLTensor, flags: int, name: str) -> tuple[int, int]:
    """Address and octets of a tensor, or `ApiMisuse`."""
    _check_device(tensor.device.device_type, name)
    if flags & _DL_FLAG_IS_COPIED:
        raise ApiMisuse(f"{name} hands out a copy of itself, which a peer's write would never reach: register the copy")
    shape = [int(tensor.shape[axis]) for axis in range(tensor.ndim)]
    elements = 1
    for extent in shape:
        elements *= extent
    element_bits = tensor.dtype.bits * tensor.dtype.lanes
    if flags & _DL_FLAG_SUBBYTE_PADDED:
        element_bits = -(-tensor.dtype.bits // 8) * 8 * tensor.dtype.lanes
    length_bytes = -(-elements * element_bits // 8)
    if length_bytes <= 0:
        raise ApiMisuse(f"a buffer must hold at least one octet; this {name} has shape {tuple(shape)}")
    if not tensor.data:
        raise ApiMisuse(f"a buffer must be in memory; the data pointer of this {name} is null")
    if tensor.strides:
        strides = [int(tensor.strides[axis]) for axis in range(tensor.ndim)]
        if not _is_c_contiguous(shape, strides):
            raise ApiMisuse(
                f"a buffer must be C-contiguous; this {name} has shape {tuple(shape)} and strides {tuple(strides)} "
                f"(in elements): register a contiguous one"
            )
    return tensor.data + tensor.byte_offset, length_bytes


def _is_c_contiguous(shape: list[int], strides: list[int]) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        # The stride of an axis of one element is never used; frameworks put anything there.
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True
