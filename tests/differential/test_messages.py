"""Both KBTP codecs see the same in the same octets, and make the same octets of the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbtp.errors import WireFormatError
from kbtp.types import Opcode, Status
from kbtp.wire import AllocStore, Completion, Free, Load, Store, parse_request
from kbtp.wire.header import CommonHeader

pytestmark = pytest.mark.timeout(600)

SERVED = (Opcode.LOAD, Opcode.STORE, Opcode.ALLOC_STORE, Opcode.FREE)
FLAGS = st.lists(st.sampled_from([1 << bit for bit in range(16)]), max_size=3).map(lambda bits: sum(set(bits)))
U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
# HELLO and BIND are Python's alone.
HEADERS = st.builds(
    CommonHeader,
    opcode=st.sampled_from(SERVED) | st.integers(0, 255).filter(lambda code: code not in (Opcode.HELLO, Opcode.BIND)),
    flags=FLAGS,
    request_id=U64,
    handle=U64,
    generation=U16,
    status=U16,
    version=st.sampled_from([1] * 9 + [0, 2, 255]),
)
BODIES = st.sampled_from([0, 15, 16, 17, 32, 33, 40]).flatmap(lambda size: st.binary(min_size=size, max_size=size))


def _told(octets: bytes) -> dict[str, Any]:
    try:
        request = parse_request(octets)
    except WireFormatError as error:
        return {"field": error.field, "status": error.status.name}
    assert isinstance(request, Load | Store | AllocStore | Free)
    data = (0, 0, 0) if isinstance(request, Free) else (request.data.stag, request.data.to, request.data.length)
    inline = bytes(request.inline_data) if isinstance(request, Store | AllocStore) else b""
    slot = request.completion
    return {
        "opcode": request.OPCODE.value,
        "request_id": request.request_id,
        "handle": request.handle,
        "generation": request.generation,
        "flags": int(request.flags),
        "data": list(data),
        "completion": None if slot is None else [slot.stag, slot.to],
        "inline_bytes": len(inline),
        "inline_data": inline.hex(),
        "packed": request.pack().hex(),
    }


@settings(max_examples=500, deadline=None)
@given(octets=st.builds(lambda header, body: header.pack() + body, HEADERS, BODIES), cut=st.integers(0, 30))
def test_requests_are_read_the_same(native_stack: Any, octets: bytes, cut: int) -> None:
    for message in (octets, octets[:cut], octets[: len(octets) - cut]):
        assert _told(message) == native_stack.ask("request", octets=message.hex())


@settings(max_examples=100, deadline=None)
@given(completion=st.builds(Completion, U64, U64, U16, st.sampled_from(Status), U32, U64))
def test_completions_are_written_the_same(native_stack: Any, completion: Completion) -> None:
    fields = {name: getattr(completion, name) for name in Completion.__slots__}
    assert completion.pack().hex() == native_stack.ask("completion", **fields)
