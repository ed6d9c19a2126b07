"""Arrays of KBTP messages: numpy dtypes of the layouts of `kbtp.wire.layouts`, octet for octet, and packing with them.

One row is one message as it goes on the wire. Reserved octets are fields too ("reserved"), so that copies of rows
copy them. `kbtp.wire.messages` says what stands where.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.limits import KBTP_VERSION
from kbtp.types import Opcode, RequestFlag
from kbtp.wire import layouts
from kbtp.wire.header import STATUS_BY_VALUE, Octets, flags_fault
from kbtp.wire.layouts import Layout, fits
from kbtp.wire.records import Completion

Messages: TypeAlias = npt.NDArray[np.void]
"""One-dimensional; its dtype is one of those below."""


def _dtype(layout: Layout) -> np.dtype[np.void]:
    return np.dtype([(name, f">u{bits // 8}") for name, bits in layout.bits.items()])


_COMPLETION_DESCRIPTOR_IN_MESSAGE = layouts.COMPLETION_DESCRIPTOR.prefixed("completion_")
_TRANSFER = layouts.HEADER + layouts.DATA_DESCRIPTOR
_BIND = layouts.HEADER + layouts.BIND_BODY

HEADER: Final = _dtype(layouts.HEADER)
DATA_DESCRIPTOR: Final = _dtype(layouts.DATA_DESCRIPTOR)
COMPLETION_DESCRIPTOR: Final = _dtype(layouts.COMPLETION_DESCRIPTOR)
LOAD: Final = _dtype(_TRANSFER)
LOAD_RECORD: Final = _dtype(_TRANSFER + _COMPLETION_DESCRIPTOR_IN_MESSAGE)
STORE: Final = LOAD
"""ALLOC_STORE too; inline data follows in the same Send."""
STORE_RECORD: Final = LOAD_RECORD
FREE: Final = HEADER
FREE_RECORD: Final = _dtype(layouts.HEADER + _COMPLETION_DESCRIPTOR_IN_MESSAGE)
BIND: Final = _dtype(_BIND)
BIND_RECORD: Final = _dtype(_BIND + _COMPLETION_DESCRIPTOR_IN_MESSAGE)
COMPLETION: Final = _dtype(layouts.HEADER + layouts.COMPLETION_BODY)
COMPLETION_RECORD: Final = _dtype(layouts.COMPLETION_RECORD)
TABLE_ENTRY: Final = _dtype(layouts.TABLE_ENTRY)
RING_SLOT: Final = _dtype(layouts.RING_SLOT)


def pack_loads(
    request_ids: npt.ArrayLike,
    handles: npt.ArrayLike,
    generations: npt.ArrayLike,
    flags: npt.ArrayLike,
    stags: npt.ArrayLike,
    tos: npt.ArrayLike,
    lengths: npt.ArrayLike,
    completion_stags: npt.ArrayLike | None = None,
    completion_tos: npt.ArrayLike | None = None,
) -> Messages:
    """LOADs, one a row: dtype LOAD, or LOAD_RECORD if the Completion Descriptors are given.

    Each argument is one number for all rows or an array of shape (rows,). Raises `ApiMisuse` naming the field that a
    value does not fit, for flags a LOAD cannot have, and for shapes that do not go together. RECORD must be set in all
    rows or in none, as the Completion Descriptors are given or not.
    """
    columns = _transfer_columns(request_ids, handles, generations, flags, stags, tos, lengths)
    return _pack(Opcode.LOAD, columns, completion_stags, completion_tos)


def pack_stores(
    request_ids: npt.ArrayLike,
    handles: npt.ArrayLike,
    generations: npt.ArrayLike,
    flags: npt.ArrayLike,
    stags: npt.ArrayLike,
    tos: npt.ArrayLike,
    lengths: npt.ArrayLike,
    completion_stags: npt.ArrayLike | None = None,
    completion_tos: npt.ArrayLike | None = None,
) -> Messages:
    """STOREs, one a row: dtype STORE or STORE_RECORD. Arguments and errors are those of `pack_loads`.

    With INLINE the row is what stands before the data in the Send; `lengths` are those of the data, `stags` and
    `tos` are zero.
    """
    columns = _transfer_columns(request_ids, handles, generations, flags, stags, tos, lengths)
    return _pack(Opcode.STORE, columns, completion_stags, completion_tos)


def pack_alloc_stores(
    request_ids: npt.ArrayLike,
    handles: npt.ArrayLike,
    generations: npt.ArrayLike,
    flags: npt.ArrayLike,
    stags: npt.ArrayLike,
    tos: npt.ArrayLike,
    lengths: npt.ArrayLike,
    completion_stags: npt.ArrayLike | None = None,
    completion_tos: npt.ArrayLike | None = None,
) -> Messages:
    """ALLOC_STOREs, one a row; otherwise `pack_stores`."""
    columns = _transfer_columns(request_ids, handles, generations, flags, stags, tos, lengths)
    return _pack(Opcode.ALLOC_STORE, columns, completion_stags, completion_tos)


def pack_frees(
    request_ids: npt.ArrayLike,
    handles: npt.ArrayLike,
    generations: npt.ArrayLike,
    flags: npt.ArrayLike,
    completion_stags: npt.ArrayLike | None = None,
    completion_tos: npt.ArrayLike | None = None,
) -> Messages:
    """FREEs, one a row: dtype FREE or FREE_RECORD. Arguments and errors are those of `pack_loads`."""
    columns = {"request_id": request_ids, "handle": handles, "generation": generations, "flags": flags}
    return _pack(Opcode.FREE, columns, completion_stags, completion_tos)


def parse_completions(buffer: Octets | npt.NDArray[np.uint8]) -> Messages:
    """COMPLETIONs that lie end to end, as dtype COMPLETION: a view, not a copy.

    Raises `WireFormatError` for the first row that `Completion.parse` would refuse, saying which, and if the octets
    are no multiple of 40.
    """
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    if not view.c_contiguous:
        raise ApiMisuse("buffer: the COMPLETIONs must lie end to end")
    if view.nbytes % COMPLETION.itemsize:
        raise WireFormatError("message", f"{view.nbytes} octets are no multiple of {COMPLETION.itemsize}")
    if not view.nbytes:  # np.frombuffer takes no empty buffer
        return np.empty(0, COMPLETION)
    completions = np.frombuffer(view, COMPLETION)
    good = (
        (completions["version"] == KBTP_VERSION)
        & (completions["opcode"] == Opcode.COMPLETION)
        & (completions["flags"] == 0)
        & np.isin(completions["status"], list(STATUS_BY_VALUE))
    )
    for row in np.flatnonzero(~good):
        try:
            Completion.parse(completions[row].tobytes())
        except WireFormatError as fault:
            raise WireFormatError(fault.field, f"row {row}: {fault.reason}", fault.status) from None
    return completions


_REQUEST_DTYPES: Final[dict[Opcode, tuple[np.dtype[np.void], np.dtype[np.void]]]] = {
    Opcode.LOAD: (LOAD, LOAD_RECORD),
    Opcode.STORE: (STORE, STORE_RECORD),
    Opcode.ALLOC_STORE: (STORE, STORE_RECORD),
    Opcode.FREE: (FREE, FREE_RECORD),
}


def _transfer_columns(
    request_ids: npt.ArrayLike,
    handles: npt.ArrayLike,
    generations: npt.ArrayLike,
    flags: npt.ArrayLike,
    stags: npt.ArrayLike,
    tos: npt.ArrayLike,
    lengths: npt.ArrayLike,
) -> dict[str, npt.ArrayLike]:
    return {
        "request_id": request_ids,
        "handle": handles,
        "generation": generations,
        "flags": flags,
        "stag": stags,
        "to": tos,
        "length": lengths,
    }


def _pack(
    opcode: Opcode,
    columns: dict[str, npt.ArrayLike],
    completion_stags: npt.ArrayLike | None,
    completion_tos: npt.ArrayLike | None,
) -> Messages:
    if completion_stags is not None and completion_tos is not None:
        columns = columns | {"completion_stag": completion_stags, "completion_to": completion_tos}
        dtype = _REQUEST_DTYPES[opcode][1]
    elif completion_stags is None and completion_tos is None:
        dtype = _REQUEST_DTYPES[opcode][0]
    else:
        raise ApiMisuse("completion_stags and completion_tos: both or neither")
    checked = {name: _column(name, values, dtype[name].itemsize * 8) for name, values in columns.items()}
    _check_flags(opcode, checked, record="completion_to" in checked)
    try:
        rows = np.broadcast(*checked.values())
    except ValueError as fault:
        raise ApiMisuse(f"the arrays differ in length: {fault}") from None
    messages = np.zeros(rows.size, dtype)
    messages["version"] = KBTP_VERSION
    messages["opcode"] = opcode
    for name, column in checked.items():
        messages[name] = column
    return messages


def _column(name: str, values: npt.ArrayLike, bits: int) -> npt.NDArray[np.integer]:
    """`values` with shape () or (rows,), every one known to fit: numpy itself would cut them without a word."""
    try:
        column = np.asarray(values)
    except ValueError as fault:
        raise ApiMisuse(f"{name}: {fault}") from None
    if column.ndim > 1:
        raise ApiMisuse(f"{name}: needs one number or an array of shape (rows,), not {column.shape}")
    if not column.size:
        return column.astype(np.uint64)
    # Python integers that no integer dtype holds together come out as objects or floats.
    if column.dtype.kind not in "ui" or not (fits(column.min(), bits) and fits(column.max(), bits)):
        raise ApiMisuse(f"{name}: needs unsigned integers of {bits} bits")
    return column


def _check_flags(opcode: Opcode, columns: dict[str, npt.NDArray[np.integer]], *, record: bool) -> None:
    for flags in np.unique(columns["flags"]).tolist():
        fault = flags_fault(opcode, flags)
        if fault is not None:
            raise ApiMisuse(f"flags: {fault}")
        if bool(flags & RequestFlag.RECORD) != record:
            raise ApiMisuse("flags: RECORD and Completion Descriptors come together or not at all")
        # Draft 5.2: with INLINE both are zero.
        if flags & RequestFlag.INLINE and (np.any(columns["stag"]) or np.any(columns["to"])):
            raise ApiMisuse("stag and to: zero with INLINE, and INLINE is for all rows or for none that has them")
