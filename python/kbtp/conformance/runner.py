"""Running cases, several at a time where they do not disturb each other, and judging how they end."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kbtp.address import Address
from kbtp.conformance.case import Case
from kbtp.conformance.catalogue import level_of
from kbtp.conformance.deviation import Deviation, NotApplicable
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.initiators import Initiator
from kbtp.conformance.probe import InitiatorProbe, Probe, TargetProbe
from kbtp.conformance.result import Outcome, Result
from kbtp.conformance.rnic_listener import RnicListener
from kbtp.conformance.rnic_stream import RnicStream
from kbtp.conformance.rule import Level
from kbtp.conformance.setup import NEEDS, Setup
from kbtp.conformance.stream import Stream
from kbtp.conformance.tcp import Deadline, Tcp
from kbtp.errors import ApiMisuse, PeerMisbehaved, WireFormatError
from kbtp.verbs.api import Rnic

ALIVE_TIMEOUT_S = 5.0
LISTEN_BACKLOG = 16

MakeProbe = Callable[[Case, Deadline], Probe]


def run_case(case: Case, make_probe: MakeProbe, expectations: Expectations, setup: Setup) -> Result:
    """Never raises: whatever happens is a result."""
    reason = expectations.skip_reason(case) or _missing(case, setup)
    if reason:
        return Result(case, Outcome.SKIPPED, reason=reason)
    began_s = time.monotonic()
    probe: Probe | None = None
    try:
        probe = make_probe(case, Deadline(case.timeout_s * setup.patience))
        case.run(probe)
    except Deviation as deviation:
        result = _deviated(case, deviation, expectations.fail_reason(case))
    except NotApplicable as why:
        result = Result(case, Outcome.SKIPPED, reason=why.reason)
    except OSError as error:
        result = _deviated(case, Deviation("a connection", str(error)), expectations.fail_reason(case))
    except (WireFormatError, PeerMisbehaved) as error:
        result = _deviated(case, Deviation("octets that are well formed", str(error)), expectations.fail_reason(case))
    except Exception:  # a fault of the case must not take the run with it
        result = Result(case, Outcome.BROKEN, reason=traceback.format_exc())
    else:
        reason = expectations.fail_reason(case)
        result = Result(case, Outcome.UNEXPECTED if reason else Outcome.PASSED, reason=reason)
    finally:
        if probe is not None:
            probe.close()
    duration_s = time.monotonic() - began_s
    return Result(case, result.outcome, result.expected, result.saw, result.reason, duration_s)


def _missing(case: Case, setup: Setup) -> str:
    """What the case needs and the peer under test was not said to have."""
    missing = [NEEDS[need] for need in sorted(case.needs - setup.has)]
    return f"not configured for it: {'; '.join(missing)}" if missing else ""


def _deviated(case: Case, deviation: Deviation, reason: str) -> Result:
    warns = not deviation.binding or level_of(case) is Level.SHOULD
    unexpected = Outcome.WARNED if warns else Outcome.FAILED
    return Result(case, Outcome.EXPECTED if reason else unexpected, deviation.expected, deviation.saw, reason)


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Whoever leaves in the middle, by Ctrl-C for instance, waits for the cases at work alone."""
    pool = ThreadPoolExecutor(count, "case")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class TargetRunner:
    """Cases against the target at `address`. A target that no longer listens ends the run: the rest is "not run"."""

    def __init__(
        self, address: Address, setup: Setup, expectations: Expectations, *, at_once: int = 1, rnic: Rnic | None = None
    ) -> None:
        """`rnic` carries our streams; else the peer by hand speaks iWARP over TCP."""
        self._address = address
        self._setup = setup
        self._expectations = expectations
        self._at_once = at_once
        self._rnic = rnic
        self._gone_after = ""

    def run(self, cases: Sequence[Case]) -> Iterator[Result]:
        """Results as they come; cases that have to be alone come last."""
        with _threads(self._at_once) as pool:
            futures = [pool.submit(self._one, case) for case in cases if not case.alone]
            for future in as_completed(futures):
                yield future.result()
        for case in cases:
            if case.alone:
                yield self._one(case)

    def _one(self, case: Case) -> Result:
        if self._gone_after:
            return Result(case, Outcome.NOT_RUN, reason=f"the target is gone since {self._gone_after}")
        result = run_case(case, self._probe, self._expectations, self._setup)
        if result.outcome not in (Outcome.PASSED, Outcome.SKIPPED) and not self._listens():
            self._gone_after = self._gone_after or case.name
        return result

    def _probe(self, _case: Case, deadline: Deadline) -> Probe:
        return TargetProbe(self._setup, deadline, self._address.host, self._address.port, self._rnic)

    def _listens(self) -> bool:
        if self._rnic is not None:
            return self._accepts(self._rnic)
        try:
            tcp = Tcp.connect(self._address.host, self._address.port, Deadline(ALIVE_TIMEOUT_S))
        except OSError:
            return False
        with suppress(
            Deviation
        ):  # a whole start-up: Linux siw stops to listen when a connection ends before its Request
            Stream.initiate(tcp)
        tcp.close()
        return True

    def _accepts(self, rnic: Rnic) -> bool:
        deadline = Deadline(ALIVE_TIMEOUT_S)
        try:
            RnicStream.connect(rnic, self._address.host, self._address.port, deadline).close()
        except Deviation:
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Listening:
    """One place where an initiator under test connects to."""

    initiator: Initiator
    address: Address


class InitiatorRunner:
    """Cases against initiators: `initiators` are started by us and work side by side, each for one case at a time.

    Without one that can be started there is one place to listen at, `listen`, where an initiator connects by itself.
    `rnic` carries our streams; else the peer by hand speaks iWARP over TCP.
    """

    def __init__(
        self,
        setup: Setup,
        expectations: Expectations,
        initiators: Iterable[Initiator],
        listen: Address,
        *,
        rnic: Rnic | None = None,
    ) -> None:
        self._rnic = rnic
        self._setup = setup
        self._expectations = expectations
        self._idle = [_Listening(initiator, listen) for initiator in initiators]
        self._places = threading.BoundedSemaphore(len(self._idle))

    def run(self, cases: Sequence[Case]) -> Iterator[Result]:
        try:
            with _threads(len(self._idle)) as pool:
                for future in as_completed([pool.submit(self._one, case) for case in cases]):
                    yield future.result()
        finally:
            for place in self._idle:
                place.initiator.stop()

    def _one(self, case: Case) -> Result:
        with self._places:
            place = self._idle.pop()
            try:
                with self._listening(place.address) as (listener, url):
                    return run_case(
                        case,
                        lambda _case, deadline: self._probe(place, listener, url, deadline),
                        self._expectations,
                        self._setup,
                    )
            finally:
                place.initiator.end_of_case()
                self._idle.append(place)

    @contextmanager
    def _listening(self, address: Address) -> Iterator[tuple[socket.socket | RnicListener, str]]:
        """And the URL of the place."""
        if self._rnic is None:
            with _listener(address) as listener:
                yield listener, str(Address(*listener.getsockname()[:2]))
            return
        with _told(address):
            carried = RnicListener(self._rnic, address)
        try:
            yield carried, str(carried.address)
        finally:
            carried.end()

    def _probe(self, place: _Listening, listener: socket.socket | RnicListener, url: str, deadline: Deadline) -> Probe:
        return InitiatorProbe(
            self._setup,
            deadline,
            listener,
            lambda: place.initiator.start(url),
            place.initiator.is_there,
            place.initiator.outcome,
        )


def _listener(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with _told(address):
        return socket.create_server((address.host, address.port), family=family, backlog=LISTEN_BACKLOG)


@contextmanager
def _told(address: Address) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:  # a name that IDNA cannot encode is a UnicodeError
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ApiMisuse(
            f"cannot listen on {address}: {why}; name an address of this machine and a port that is free"
        ) from None
