"""References, results and what a caller's arguments become."""

from __future__ import annotations

import pytest

from kbtp import errors
from kbtp.errors import ApiMisuse, ConnectionLost
from kbtp.initiator.batches import (
    Batch,
    Results,
    alloc_store_batch,
    free_batch,
    load_batch,
    loading,
    sealing,
    store_batch,
)
from kbtp.initiator.operations import Operation, Result
from kbtp.types import BlockRef, Opcode, RequestFlag, Status


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


@pytest.mark.parametrize(
    ("status", "raised", "advice"),
    [
        (Status.NOT_BOUND, errors.NotBound, "nothing is stored under this handle"),
        (Status.NOT_SEALED, errors.NotSealed, "allow_unsealed=True"),
        (Status.SEALED, errors.Sealed, "free it and store anew"),
        (Status.ALREADY_BOUND, errors.AlreadyBound, "let the client choose a handle"),
        (Status.GENERATION_MISMATCH, errors.GenerationMismatch, "freed and bound again"),
        (Status.HANDLE_OUT_OF_RANGE, errors.HandleOutOfRange, "one of our own"),
        (Status.LENGTH_ERROR, errors.LengthError, "longer than"),
        (Status.NO_SPACE, errors.NoSpace, "quota is used up"),
        (Status.TICKET_ABANDONED, errors.TicketAbandoned, "refused by the target"),
        (Status.TICKET_MISMATCH, errors.TicketMismatch, "nothing was stored; store again"),
        (Status.MALFORMED, errors.Malformed, "refused by the target"),
        (Status.UNSUPPORTED, errors.Unsupported, "does not offer"),
        (Status.ACCESS_DENIED, errors.AccessDenied, "refused"),
        (Status.NO_SESSION, errors.NoSession, "refused by the target"),
        (Status.TARGET_ERROR, errors.TargetError, "the block is as it was"),
    ],
)
def test_each_status_raises_its_own_exception_with_advice(
    status: Status, raised: type[errors.OperationRefused], advice: str
) -> None:
    result = Result(status, handle=12)
    assert not result.ok
    with pytest.raises(raised, match=advice) as caught:
        result.raise_for_status()
    assert caught.value.status is status
    assert str(caught.value).startswith(f"{status.name}: handle 12: ")


def test_a_load_that_did_not_fit_says_how_much_there_is() -> None:
    """Profile 2: LENGTH_ERROR of a LOAD carries the entry's Data Length."""
    with pytest.raises(errors.LengthError, match="it holds 300 octets"):
        Result(Status.LENGTH_ERROR, length_bytes=300).raise_for_status()


def test_success_is_returned_and_an_error_raised() -> None:
    good = Result(Status.SUCCESS, 5, 2, 100)
    assert good.raise_for_status() is good
    assert good.ref == BlockRef(5, 2, 100)
    lost = ConnectionLost("gone")
    with pytest.raises(ConnectionLost) as caught:
        Result(None, error=lost).raise_for_status()
    assert caught.value is lost


def test_a_reference_brings_its_generation_and_a_handle_means_any() -> None:
    reference = BlockRef(handle=8, generation=3, length_bytes=10)
    assert (load_operation(reference, b"", 0, False).handle, load_operation(reference, b"", 0, False).generation) == (
        8,
        3,
    )
    assert load_operation(reference, b"", 9, False).generation == 9
    assert load_operation(8, b"", 0, False).generation == 0
    assert store_operation(8, b"", 5, True).generation == 5
    assert free_operation(reference, 0).generation == 3


def test_flags_follow_the_arguments() -> None:
    assert load_operation(1, b"", 0, True).flags is RequestFlag.ALLOW_UNSEALED
    assert store_operation(1, b"", 0, True).flags is RequestFlag.SEAL
    assert store_operation(1, b"", 0, False).flags is RequestFlag.NONE
    assert alloc_store_operation(b"", None, False).flags is RequestFlag.NONE


@pytest.mark.parametrize("handle", [-1, 1 << 64, "7", None, 1.0])
def test_a_handle_is_a_number_of_64_bits(handle: object) -> None:
    for make in (
        lambda: load_operation(handle, b"", 0, False),
        lambda: store_operation(handle, b"", 0, True),
        lambda: free_operation(handle, 0),
        *([] if handle is None else [lambda: alloc_store_operation(b"", handle, True)]),
    ):
        with pytest.raises(ApiMisuse, match="handle"):
            make()


@pytest.mark.parametrize("generation", [-1, 1 << 16, "2"])
def test_a_generation_is_a_number_of_16_bits(generation: object) -> None:
    with pytest.raises(ApiMisuse, match="generation"):
        load_operation(1, b"", generation, False)


def test_a_batch_turns_a_bad_item_into_its_result_and_keeps_the_others() -> None:
    batches = (
        load_batch([1, -1, 2], [b"", b"", b""], False),
        store_batch([1, -1, 2], [b"", b"", b""], True),
        alloc_store_batch([b"", b"", b""], [1, -1, 2], True),
        free_batch([1, -1, 2]),
    )
    for batch in batches:
        first, bad, last = batch.operations()
        assert (first.handle, first.result) == (1, None)
        assert (last.handle, last.result) == (2, None)
        assert bad.result is not None
        assert isinstance(bad.result.error, ApiMisuse)


def test_a_batch_needs_equally_many_of_each() -> None:
    with pytest.raises(ApiMisuse, match="2 blocks, 1 into"):
        load_batch([1, 2], [b""], False)
    with pytest.raises(ApiMisuse, match="1 blocks, 2 data"):
        store_batch([1], [b"", b""], True)
    with pytest.raises(ApiMisuse, match="1 data, 0 handles"):
        alloc_store_batch([b""], [], True)


def test_an_operation_ends_once() -> None:
    ends: list[Operation] = []
    operation = Operation(Opcode.FREE, 1, when_done=ends.append)
    operation.finish(Result(Status.SUCCESS))
    operation.finish(Result(None, error=ConnectionLost("late")))
    assert operation.result == Result(Status.SUCCESS)
    assert ends == [operation]


def test_results_are_a_sequence_of_results_and_arrays() -> None:
    lost = ConnectionLost("gone")
    each = [Result(Status.SUCCESS, 5, 2, 100, 4096), Result(Status.NO_SPACE, 6), Result(None, 7, error=lost)]
    results = Results.of(each)
    assert (len(results), results[0], results[-1], results[1:], list(results)) == (3, each[0], each[2], each[1:], each)
    assert results == each
    assert not results.ok
    assert results.statuses[:2].tolist() == [Status.SUCCESS, Status.NO_SPACE]
    assert (results.handles.tolist(), results.generations.tolist()) == ([5, 6, 7], [2, 0, 0])
    assert (results.lengths_bytes.tolist(), results.block_offsets.tolist()) == ([100, 0, 0], [4096, 0, 0])
    assert results.refs[0] == BlockRef(5, 2, 100)
    with pytest.raises(IndexError):
        results[3]
    with pytest.raises(errors.NoSpace):
        results.raise_for_status()
    assert Results.of(each[:1]).raise_for_status().ok


def test_a_batch_ends_once_and_what_can_never_work_keeps_its_own_error() -> None:
    ends: list[str] = []
    batch = load_batch([1, -1], [b"", b""], False)
    batch.when_done = lambda: ends.append("done")
    batch.fail(ConnectionLost("gone"))
    batch.fail(ConnectionLost("again"))
    assert ends == ["done"]
    assert batch.results is not None
    assert [type(result.error) for result in batch.results] == [ConnectionLost, ApiMisuse]
