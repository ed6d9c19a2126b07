"""The initiator's session without I/O: HELLO, credits, handles, and which request a COMPLETION answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kbtp.initiator.session
from kbtp import errors
from kbtp.errors import ApiMisuse, ConnectionLost, NoSpace, PeerMisbehaved
from kbtp.initiator.batches import Batch, loading, sealing
from kbtp.initiator.operations import Operation
from kbtp.initiator.session import HandleChooser, InitiatorConfig, InitiatorSession, SaidHello
from kbtp.types import BlockRef, Feature, HelloAckFlag, Opcode, RequestFlag, Status
from kbtp.wire import AllocStore, Completion, Free, HelloAck, Load, Nonces, Store, parse_request

FIRST_HANDLE = 5000
NONCES = Nonces(initiator=bytes(16), target=bytes(16))

ACK: dict[str, Any] = {
    "granted_features": Feature.INVALIDATE,
    "block_size": 4096,
    "pool_blocks": 16,
    "allocation_quota": 4,
    "request_credits": 2,
    "max_message": 1024,
    "first_handle": FIRST_HANDLE,
    "handle_count": 3,
    "table_handles": 64,
}


def accepted(config: InitiatorConfig, message: memoryview) -> HelloAck:
    """As an answer to the HELLO of `config`."""
    return kbtp.initiator.session.accepted(config, SaidHello.on(config, NONCES), message)


def session(config: InitiatorConfig | None = None, **changes: Any) -> InitiatorSession:
    config = config or InitiatorConfig()
    return InitiatorSession(config, accepted(config, memoryview(HelloAck(0, **{**ACK, **changes}).pack())))


def load_operation(block: object, into: object, generation: object, allow_unsealed: bool) -> Operation:
    return only(Batch(Opcode.LOAD, loading(allow_unsealed), (block,), (into,), generation))


def store_operation(block: object, data: object, generation: object, seal: bool) -> Operation:
    return only(Batch(Opcode.STORE, sealing(seal), (block,), (data,), generation))


def alloc_store_operation(data: object, handle: object, seal: bool) -> Operation:
    return only(Batch(Opcode.ALLOC_STORE, sealing(seal), (handle,), (data,)))


def free_operation(block: object, generation: object) -> Operation:
    return only(Batch(Opcode.FREE, RequestFlag.NONE, (block,), None, generation))


def only(batch: Batch) -> Operation:
    """The one operation of `batch`; raises what is wrong with it."""
    (operation,) = batch.operations()
    if operation.result is not None:
        operation.result.raise_for_status()
    return operation


def started(one: InitiatorSession, operation: Operation) -> Operation:
    """`operation` submitted and given out."""
    one.submit(operation)
    assert one.ready() is operation
    return operation


def complete(one: InitiatorSession, operation: Operation, status: Status, **fields: Any) -> Operation | None:
    """`operation` is answered with `status`."""
    answer = Completion(
        **{
            "request_id": operation.request_id,
            "handle": operation.chosen_handle,
            "generation": 2,
            "status": status,
            **fields,
        }
    )
    return one.received(memoryview(answer.pack()))


# --- what is asked for -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"initiator_id": bytes(16)}, "16 octets that are not all zero"),
        ({"initiator_id": b"short"}, "16 octets"),
        ({"initiator_id": "sixteen letters!"}, "16 octets"),
        ({"quota": -1}, "quota of -1"),
        ({"quota": 1 << 32}, "quota"),
        ({"handles": 1 << 64}, "handles"),
        ({"completion_credits": 0}, "completion_credits of 0"),
        ({"max_message_bytes": 1023}, "max_message_bytes of 1023"),
        ({"read_depth": -1}, "read_depth"),
        ({"inline_max_bytes": -1}, "inline_max_bytes"),
        ({"name": "n" * 256}, "name"),
        ({"name": "\u00e9" * 128}, "name"),
        ({"namespace": b"n" * 256}, "namespace"),
    ],
)
def test_a_config_that_cannot_work_is_refused_at_once(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiMisuse, match=said):
        InitiatorConfig(**arguments)


def test_hello_says_what_the_config_says() -> None:
    config = InitiatorConfig(initiator_id=b"i" * 16, quota=7, handles=9, name="decode-0", namespace=b"llama")
    hello = parse_request(config.hello().pack())
    assert hello == config.hello()
    assert (hello.initiator_id, hello.requested_quota, hello.requested_handles) == (b"i" * 16, 7, 9)
    assert (hello.name, hello.namespace, hello.requested_features) == ("decode-0", b"llama", Feature.INVALIDATE)
    assert InitiatorConfig().hello().initiator_id == bytes(16)


# --- HELLO_ACK ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": 1}, "Request ID"),
        ({"granted_features": Feature.INVALIDATE | Feature.DIRECT_LOAD}, "Granted Features"),
        ({"granted_features": Feature.RECORD_COMPLETION}, "Granted Features"),
        ({"block_size": 256}, "Block Size"),
        ({"block_size": (1 << 30) + 64}, "Block Size"),
        ({"request_credits": 33}, "Request Credits"),
        ({"allocation_quota": 17}, "Allocation Quota"),
        ({"handle_count": 0}, "Handle Count"),
        ({"handle_count": 65}, "Handle Count"),
        ({"flags": HelloAckFlag.RESUMED}, "RESUMED"),
    ],
)
def test_a_hello_ack_that_grants_what_cannot_be_is_the_targets_fault(changes: dict[str, Any], field: str) -> None:
    """Profile 2."""
    with pytest.raises(PeerMisbehaved, match=f"impossible {field}"):
        accepted(InitiatorConfig(), memoryview(HelloAck(**{"request_id": 0, **ACK, **changes}).pack()))


def test_a_hello_ack_that_does_not_parse_is_the_targets_fault() -> None:
    ack = bytearray(HelloAck(0, **ACK).pack())
    ack[44:48] = (1023).to_bytes(4, "big")  # Max Message
    for message in (b"", b"rubbish", bytes(200), ack, ack[:151]):
        with pytest.raises(PeerMisbehaved, match="answer to HELLO"):
            accepted(InitiatorConfig(), memoryview(message))


@pytest.mark.parametrize(
    ("status", "raised", "advice"),
    [
        (Status.ACCESS_DENIED, errors.AccessDenied, "namespace differs"),
        (Status.NO_SPACE, errors.NoSpace, "no quota or no handles left"),
        (Status.NO_SESSION, errors.NoSession, "HELLO refused"),
        (Status.UNSUPPORTED, errors.Unsupported, "HELLO refused"),
    ],
)
def test_a_refused_hello_says_why(status: Status, raised: type[Exception], advice: str) -> None:
    with pytest.raises(raised, match=advice):
        accepted(InitiatorConfig(), memoryview(HelloAck(0, status=status).pack()))


@pytest.mark.parametrize("status", [Status.MALFORMED, Status.UNSUPPORTED])
def test_a_target_that_did_not_understand_hello_answers_with_a_completion(status: Status) -> None:
    with pytest.raises(errors.OperationRefused, match="did not understand HELLO") as caught:
        accepted(InitiatorConfig(), memoryview(Completion(0, 0, 0, status).pack()))
    assert caught.value.status is status


def test_any_other_completion_before_hello_ack_is_the_targets_fault() -> None:
    with pytest.raises(PeerMisbehaved, match="COMPLETION where HELLO_ACK was due"):
        accepted(InitiatorConfig(), memoryview(Completion(0, 0, 0, Status.SUCCESS).pack()))


def test_resumed_is_possible_for_an_identity() -> None:
    config = InitiatorConfig(initiator_id=b"i" * 16)
    assert session(config, flags=HelloAckFlag.RESUMED).ack.flags is HelloAckFlag.RESUMED


# --- requests ----------------------------------------------------------------------------------


def test_requests_carry_what_the_operation_says() -> None:
    one = session(request_credits=8)
    load = started(one, load_operation(BlockRef(7, 3, 100), bytearray(100), 0, True))
    message = parse_request(one.request(load, stag=0x11, to=0x22, length=100, inline=None, invalidate=True))
    assert isinstance(message, Load)
    assert (message.handle, message.generation, message.request_id) == (7, 3, load.request_id)
    assert message.flags == RequestFlag.ALLOW_UNSEALED | RequestFlag.INVALIDATE
    assert (message.data.stag, message.data.to, message.data.length) == (0x11, 0x22, 100)

    store = started(one, store_operation(5001, b"abc", 4, False))
    message = parse_request(one.request(store, stag=0, to=0, length=3, inline=b"abc", invalidate=True))
    assert isinstance(message, Store)
    assert (message.flags, message.generation, bytes(message.inline_data)) == (RequestFlag.INLINE, 4, b"abc")

    alloc = started(one, alloc_store_operation(b"x", None, True))
    message = parse_request(one.request(alloc, stag=1, to=2, length=1, inline=None))
    assert isinstance(message, AllocStore)
    assert (message.handle, message.generation, message.flags) == (FIRST_HANDLE, 0, RequestFlag.SEAL)

    free = started(one, free_operation(BlockRef(9, 2, 0), 0))
    message = parse_request(one.request(free, stag=0, to=0, length=0, inline=None))
    assert isinstance(message, Free)
    assert (message.handle, message.generation, message.flags) == (9, 2, RequestFlag.NONE)


def test_invalidate_is_asked_for_only_where_it_was_granted() -> None:
    one = session(granted_features=Feature.NONE)
    load = started(one, load_operation(7, bytearray(1), 0, False))
    message = parse_request(one.request(load, stag=1, to=0, length=1, inline=None, invalidate=True))
    assert message.flags == RequestFlag.NONE


def test_inline_data_fits_the_targets_max_message() -> None:
    """Profile 3 "Inline data"."""
    assert session(max_message=1024).inline_max_bytes == 1024 - 40
    assert session(max_message=1 << 20).inline_max_bytes == InitiatorConfig().inline_max_bytes
    assert session(InitiatorConfig(inline_max_bytes=0)).inline_max_bytes == 0


def test_no_more_requests_are_outstanding_than_there_are_credits() -> None:
    """Profile 3 "Credits"."""
    one = session(request_credits=2)
    operations = [load_operation(handle, bytearray(1), 0, False) for handle in range(5)]
    for operation in operations:
        one.submit(operation)
    assert (one.ready(), one.ready(), one.ready()) == (operations[0], operations[1], None)
    assert one.outstanding == 2
    complete(one, operations[1], Status.SUCCESS)
    assert (one.ready(), one.ready()) == (operations[2], None)
    assert len({operation.request_id for operation in operations[:3]}) == 3


def test_an_operation_that_cannot_be_sent_gives_credit_and_handle_back() -> None:
    one = session(request_credits=1)
    operation = started(one, alloc_store_operation(b"", None, True))
    one.withdraw(operation, ApiMisuse("no buffer"))
    assert operation.result is not None
    assert isinstance(operation.result.error, ApiMisuse)
    assert one.outstanding == 0
    taken = [started(one, alloc_store_operation(b"", None, True)).chosen_handle]
    complete(one, Operation(Opcode.ALLOC_STORE, None, chosen_handle=taken[0], request_id=2), Status.SUCCESS)
    for number in (3, 4):
        taken.append(started(one, alloc_store_operation(b"", None, True)).chosen_handle)
        complete(one, Operation(Opcode.ALLOC_STORE, None, chosen_handle=taken[-1], request_id=number), Status.SUCCESS)
    assert sorted(taken) == [FIRST_HANDLE, FIRST_HANDLE + 1, FIRST_HANDLE + 2]


# --- completions -------------------------------------------------------------------------------


def test_a_completion_becomes_the_result() -> None:
    one = session()
    operation = started(one, load_operation(7, bytearray(100), 0, False))
    one.request(operation, stag=1, to=0, length=100, inline=None)
    assert complete(one, operation, Status.SUCCESS, data_length=60, block_offset=65536) is operation
    result = operation.result
    assert result is not None
    assert result.ok
    assert result.ref == BlockRef(7, 2, 60)
    assert result.block_offset == 65536


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"request_id": 99}, "Request ID 99, which is not outstanding"),
        ({"handle": 8}, "names handle 8, asked was 7"),
        ({"data_length": 101}, "LOAD of 101 octets into 100"),
    ],
)
def test_a_completion_that_answers_nothing_asked_is_the_targets_fault(fields: dict[str, Any], said: str) -> None:
    one = session()
    operation = started(one, load_operation(7, bytearray(100), 0, False))
    one.request(operation, stag=1, to=0, length=100, inline=None)
    with pytest.raises(PeerMisbehaved, match=said):
        complete(one, operation, Status.SUCCESS, **fields)
    one.fail(ConnectionLost("misbehaved"))
    assert operation.result is not None


def test_a_second_completion_of_one_request_is_the_targets_fault() -> None:
    one = session()
    operation = started(one, free_operation(7, 0))
    complete(one, operation, Status.SUCCESS)
    with pytest.raises(PeerMisbehaved, match="not outstanding"):
        complete(one, operation, Status.SUCCESS)


def test_any_other_message_is_the_targets_fault() -> None:
    one = session()
    with pytest.raises(PeerMisbehaved, match="HELLO_ACK where a COMPLETION was due"):
        one.received(memoryview(HelloAck(0, **ACK).pack()))
    for message in (b"", b"rubbish", bytes(40), Completion(1, 2, 3, Status.SUCCESS).pack() + b"x"):
        with pytest.raises(PeerMisbehaved, match="COMPLETION: "):
            one.received(memoryview(message))


@given(st.binary(max_size=80))
def test_no_message_of_the_target_raises_anything_else(octets: bytes) -> None:
    one = session()
    started(one, load_operation(7, bytearray(1), 0, False))
    with pytest.raises(PeerMisbehaved):
        one.received(memoryview(octets))
    with pytest.raises((PeerMisbehaved, errors.OperationRefused)):
        accepted(InitiatorConfig(), memoryview(octets))


# --- handles -----------------------------------------------------------------------------------


def test_already_bound_moves_on_to_the_next_handle() -> None:
    """After RESUMED handles are bound that this process has never heard of."""
    one = session()
    operation = started(one, alloc_store_operation(b"", None, True))
    assert operation.chosen_handle == FIRST_HANDLE
    assert complete(one, operation, Status.ALREADY_BOUND) is None
    assert operation.result is None
    assert one.ready() is operation
    assert operation.chosen_handle == FIRST_HANDLE + 1
    assert complete(one, operation, Status.SUCCESS) is operation


def test_all_handles_bound_is_no_space() -> None:
    one = session()
    operation = started(one, alloc_store_operation(b"", None, True))
    for _ in range(2):
        complete(one, operation, Status.ALREADY_BOUND)
        assert one.ready() is operation
    complete(one, operation, Status.ALREADY_BOUND)
    assert one.ready() is None
    assert operation.result is not None
    assert operation.result.status is Status.NO_SPACE
    with pytest.raises(NoSpace, match="all 3 handles of this session are bound"):
        operation.result.raise_for_status()


def test_a_given_handle_that_is_bound_is_the_callers_matter() -> None:
    one = session()
    given_handle = started(one, alloc_store_operation(b"", FIRST_HANDLE, True))
    complete(one, given_handle, Status.ALREADY_BOUND)
    assert given_handle.result is not None
    assert given_handle.result.status is Status.ALREADY_BOUND
    assert started(one, alloc_store_operation(b"", None, True)).chosen_handle == FIRST_HANDLE + 1


@pytest.mark.parametrize("status", [Status.SUCCESS, Status.NOT_BOUND])
def test_a_freed_handle_is_chosen_again(status: Status) -> None:
    one = session(handle_count=1)
    complete(one, started(one, alloc_store_operation(b"", None, True)), Status.SUCCESS)
    complete(one, started(one, free_operation(FIRST_HANDLE, 0)), Status.GENERATION_MISMATCH)
    one.submit(alloc_store_operation(b"", None, True))
    assert one.ready() is None
    complete(one, started(one, free_operation(FIRST_HANDLE, 0)), status)
    assert started(one, alloc_store_operation(b"", None, True)).chosen_handle == FIRST_HANDLE


def test_a_refused_store_leaves_its_handle_free() -> None:
    one = session(handle_count=1)
    complete(one, started(one, alloc_store_operation(b"", None, True)), Status.LENGTH_ERROR)
    assert started(one, alloc_store_operation(b"", None, True)).chosen_handle == FIRST_HANDLE


@given(st.lists(st.tuples(st.sampled_from(["take", "bound", "free"]), st.integers(95, 110))), st.integers(1, 10))
def test_the_chooser_gives_out_every_unbound_handle_and_no_other(steps: list[tuple[str, int]], count: int) -> None:
    chooser = HandleChooser(100, count)
    handles = set(range(100, 100 + count))
    bound: set[int] = set()
    for step, handle in steps:
        if step == "take":
            taken = chooser.take()
            assert taken in handles - bound if handles - bound else taken is None
            bound |= {taken} - {None}
        elif step == "bound":
            chooser.bound(handle)
            bound |= {handle} & handles
        else:
            chooser.free(handle)
            bound.discard(handle)
    assert {chooser.take() for _ in handles - bound} == handles - bound
    assert chooser.take() is None


# --- the end -----------------------------------------------------------------------------------


def test_everything_submitted_ends_with_the_stream() -> None:
    one = session(request_credits=1)
    sent = started(one, free_operation(1, 0))
    waiting = free_operation(2, 0)
    one.submit(waiting)
    lost = ConnectionLost("gone")
    one.fail(lost)
    for operation in (sent, waiting):
        assert operation.result is not None
        assert operation.result.error is lost
        assert operation.result.status is None
    assert one.ready() is None
