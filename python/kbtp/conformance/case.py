"""A case: a function that is handed a probe, talks to the peer under test and raises `Deviation` for a broken rule.

    FRAMING = Group("mpa-framing")

    @FRAMING.either("F6")
    def wrong_crc(probe: Probe) -> None:
        \"\"\"An FPDU with a wrong CRC is not delivered and the stream ends with 2/0/02.\"\"\"
        stream = probe.session().stream
        ...

`target`, `initiator` and `either` say which peer is under test; the docstring is the title.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from kbtp.conformance.probe import InitiatorProbe, Probe, TargetProbe
from kbtp.conformance.rule import Level

CASE_TIMEOUT_S = 10.0

CaseFunction: TypeAlias = Callable[[Any], None]
_TargetFunction = TypeVar("_TargetFunction", bound=Callable[[TargetProbe], None])
_InitiatorFunction = TypeVar("_InitiatorFunction", bound=Callable[[InitiatorProbe], None])
_EitherFunction = TypeVar("_EitherFunction", bound=Callable[[Probe], None])


class Role(Enum):
    """Who is under test."""

    TARGET = "target"
    INITIATOR = "initiator"


@dataclass(frozen=True, slots=True)
class Case:
    """`name` is unique: role, group and function. `needs` are names of `kbtp.conformance.setup.NEEDS`."""

    name: str
    role: Role
    rules: tuple[str, ...]
    title: str
    run: CaseFunction
    needs: frozenset[str]
    alone: bool
    timeout_s: float
    level: Level | None


@dataclass(frozen=True, slots=True)
class Group:
    """The cases of one module.

    Of the decorators' arguments, `rules` are the ids of the rules that are broken if the case fails; `needs` is what
    the peer has to be configured for; `alone` keeps every other case away from the target meanwhile; `timeout_s` is
    for the whole case; `level` replaces that of the first rule.
    """

    name: str
    cases: list[Case] = field(default_factory=list)
    needs: tuple[str, ...] = ()
    """Of each case, beside its own."""

    def target(
        self, *rules: str, needs: tuple[str, ...] = (), alone: bool = False, timeout_s: float = CASE_TIMEOUT_S,
        level: Level | None = None,
    ) -> Callable[[_TargetFunction], _TargetFunction]:  # fmt: skip
        def register(function: _TargetFunction) -> _TargetFunction:
            self._add(Role.TARGET, function, rules, needs, alone, timeout_s, level)
            return function

        return register

    def initiator(
        self, *rules: str, needs: tuple[str, ...] = (), timeout_s: float = CASE_TIMEOUT_S, level: Level | None = None
    ) -> Callable[[_InitiatorFunction], _InitiatorFunction]:
        def register(function: _InitiatorFunction) -> _InitiatorFunction:
            self._add(Role.INITIATOR, function, rules, needs, False, timeout_s, level)
            return function

        return register

    def either(
        self, *rules: str, needs: tuple[str, ...] = (), timeout_s: float = CASE_TIMEOUT_S, level: Level | None = None
    ) -> Callable[[_EitherFunction], _EitherFunction]:
        def register(function: _EitherFunction) -> _EitherFunction:
            for role in Role:
                self._add(role, function, rules, needs, False, timeout_s, level)
            return function

        return register

    def _add(
        self, role: Role, function: CaseFunction, rules: tuple[str, ...], needs: tuple[str, ...], alone: bool,
        timeout_s: float, level: Level | None,
    ) -> None:  # fmt: skip
        title = " ".join((inspect.getdoc(function) or "").split())
        name = f"{role.value}/{self.name}/{function.__name__.replace('_', '-')}"
        self.cases.append(
            Case(name, role, rules, title, function, frozenset((*self.needs, *needs)), alone, timeout_s, level)
        )
