"""The suite finds faults: with a rule taken out of our target the cases that look at it fail, and they pass with it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

import kbtp.target.sequences
from kbtp.blocks import Entry
from kbtp.blocks.handles import HandleRange
from kbtp.blocks.pool import Pool
from kbtp.blocks.quota import QuotaLedger
from kbtp.blocks.store import BlockStore
from kbtp.conformance.case import Role
from kbtp.conformance.catalogue import cases
from kbtp.conformance.result import Outcome
from kbtp.conformance.setup import BY_HAND
from kbtp.keys import Key, Keys
from kbtp.target import checks, session
from kbtp.target.identity import Identities
from kbtp.target.turns import Turns
from kbtp.types import Feature, Status
from kbtp.wire import Hello
from tests.conformance.conftest import SHORT_S, cases_named, run_against


@dataclass(frozen=True, slots=True)
class Fault:
    """What is replaced in the target, and the cases that have to fail for it."""

    where: Any
    name: str
    by: Callable[..., Any]
    caught_by: tuple[str, ...]


def without(*statuses: Status) -> Callable[..., Status | None]:
    """The checks of a request, but for those of `statuses`."""

    def refusal(request: Any, entry: Entry | None, block_size_bytes: int) -> Status | None:
        status = checks.refusal(request, entry, block_size_bytes)
        return None if status in statuses else status

    return refusal


def first_not_started(self: Turns, handle: int) -> Any:
    """Nobody waits for anybody."""
    return next((task for task in self._by_handle.get(handle, ()) if not task.started), None)


def begin_generations_anew(self: BlockStore, handle_range: HandleRange) -> None:
    release_range(self, handle_range)
    self.table.initialize()


def one_credit_too_many(*accepted: Any, request_credits: int, **fields: Any) -> Any:
    return accepting(*accepted, request_credits=request_credits + 1, **fields)


release_range, accepting = BlockStore.release_range, session.accepting
sequences = kbtp.target.sequences
FAULTS = {
    "generation": Fault(
        sequences,
        "refusal",
        without(Status.GENERATION_MISMATCH),
        ("blocks/generation-zero-means-any", "order-of-checks/load-in-order", "order-of-checks/free-in-order"),
    ),
    "sealed": Fault(sequences, "refusal", without(Status.SEALED), ("blocks/store-changes-the-block",)),
    "not sealed": Fault(sequences, "refusal", without(Status.NOT_SEALED), ("blocks/allow-unsealed",)),
    "already bound": Fault(
        sequences, "refusal", without(Status.ALREADY_BOUND), ("order-of-checks/alloc-store-in-order",)
    ),
    "turns": Fault(Turns, "_startable_on", first_not_started, ("turns/everything-waits-for-a-store",)),
    "quota": Fault(QuotaLedger, "charge", lambda self, holder: True, ("quota/quota-is-kept",)),
    "invalidate": Fault(
        session,
        "invalidated_stag",
        lambda request: None,
        ("initiator-memory/invalidate", "hello/invalidate-served-unasked", "hello/no-session-invalidates-too"),
    ),
    "options": Fault(Hello, "check_options", lambda self: None, ("hello/unknown-options",)),
    "generations": Fault(BlockStore, "release_range", begin_generations_anew, ("quota/generations-survive-the-owner",)),
    "credits": Fault(session, "accepting", one_credit_too_many, ("credits/completions-never-exceed-the-buffers",)),
    "linger": Fault(
        Identities,
        "depart",
        lambda self, identity, now_s: self._leave(identity),
        ("identity/resumed-gets-back-what-it-had",),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    looking = cases_named(*fault.caught_by)
    right = run_against(serve(), looking)
    assert {result.outcome for result in right.values()} == {Outcome.PASSED}, right
    monkeypatch.setattr(fault.where, fault.name, fault.by)
    wrong = run_against(serve(), looking)
    assert {case: result.outcome for case, result in wrong.items()} == dict.fromkeys(fault.caught_by, Outcome.FAILED)
    assert all(result.expected and result.saw for result in wrong.values())


def test_a_block_that_is_not_cleared_is_caught(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second domain has to be given the first one's blocks for that, else nothing was seen."""
    name = "authentication/blocks-are-cleared-for-another-domain"
    direct = Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC
    keys = tuple(Key(1 + number, bytes(range(32)), domain, direct) for number, domain in enumerate(("here", "there")))
    setup = {"has": frozenset({"keys", "two-domains", "direct-alloc"}), "keys": keys}
    config = {"keys": Keys(keys), "direct": direct, "pool_blocks": 128, "direct_blocks": 32}
    right = run_against(serve(**config), cases_named(name), **setup)
    assert right[name].outcome is Outcome.PASSED, right
    monkeypatch.setattr(Pool, "clear", lambda self, block_offset: None)
    assert run_against(serve(**config), cases_named(name), **setup)[name].outcome is Outcome.FAILED


def test_a_target_with_keys_and_a_namespace_is_not_blamed(serve: Callable[..., str]) -> None:
    key = Key(7, bytes(range(32)))
    url = serve(keys=Keys((key,)), namespace=b"of a model")
    asked = ("target/hello/", "target/authentication/", "target/identity/", "target/ddp-messages/")
    looking = [case for case in cases(Role.TARGET) if case.name.startswith(asked)]
    results = run_against(url, looking, has=BY_HAND | {"keys", "namespace"}, keys=(key,), namespace=b"of a model")
    blamed = [str(result) for result in results.values() if result.outcome not in (Outcome.PASSED, Outcome.SKIPPED)]
    assert not blamed
    assert results["hello/hello-checks-in-order-with-namespace"].outcome is Outcome.PASSED
    assert results["authentication/replayed-hello"].outcome is Outcome.PASSED


def test_a_wait_that_was_stated_is_added_to_the_time_of_a_case(serve: Callable[..., str]) -> None:
    """The target waits longer than the case has by itself."""
    names = (
        "hello/hello-has-to-come-in-time",
        "hello/mpa-request-has-to-come-in-time",
        "mpa-startup/request-that-is-never-whole",
    )
    looking = [replace(case, timeout_s=SHORT_S * 0.8) for case in cases_named(*names)]
    results = run_against(serve(), looking, hello_timeout_s=SHORT_S, mpa_timeout_s=SHORT_S)
    assert {name: result.outcome for name, result in results.items()} == dict.fromkeys(names, Outcome.PASSED), results


@pytest.fixture
def other_service() -> Iterator[str]:
    """Something else than a target listens: it answers whatever comes with a line of text."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"kbtp://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_something_else_than_a_target_fails_and_breaks_nothing(other_service: str) -> None:
    """Every case ends with what it expected and saw, none with an error of its own."""
    results = run_against(other_service, cases(Role.TARGET))
    broken = [str(result) for result in results.values() if result.outcome is Outcome.BROKEN]
    assert not broken
    failed = [result for result in results.values() if result.outcome is Outcome.FAILED]
    assert len(failed) > 100
