"""What a file of the project may not be or contain: too long, or a place where unfinished work hides."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
THIS_FILE = Path(__file__).resolve()

FILE_LINES_MAX = 500
TEST_FILE_LINES_MAX = 1000
FUNCTION_LINES_MAX = 70


@dataclass(frozen=True, slots=True)
class Banned:
    """A pattern that no line of the files matching `suffixes` ("": all of them) contains."""

    pattern: str
    suffixes: tuple[str, ...]
    why: str


# This file is left out, being the one that has to spell them.
BANNED = (
    Banned(r"\btime\.sleep\(|\basyncio\.sleep\((?!0\))", (".py",), "wait for the condition, with a deadline"),
    Banned(r"\bpytest\.(mark\.)?(skip|skipif|importorskip|xfail)\b", (".py",), "a test runs or is not there"),
    Banned(r"\bunittest\.skip|\bSkipTest\b", (".py",), "a test runs or is not there"),
    Banned(r"\b(TODO|FIXME|XXX)\b", (".py", ".rs", ".toml", ".md", ".pml", ".lua"), "finish it or leave it out"),
    Banned(r"\bNotImplementedError\b|\b(todo|unimplemented)!\(", (".py", ".rs"), "finish it or leave it out"),
    Banned(r"(^|[^\w.])/(work|tmp|root)/\w", ("",), "paths of one machine; tests have tmp_path"),
    Banned(
        r"https?://[\w.]*(debian|pypi|pythonhosted|crates|npmjs)", ("",), "package registries are the tools' settings"
    ),
)


def _files_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or (path.name.startswith(".") and path.name not in (".ci", ".gitignore")):
            continue
        if path.is_file():
            yield path
        # Build trees and environments mark themselves, with CACHEDIR.TAG mostly; cargo's does not if others made it.
        elif (
            path != ROOT / "rust" / "target"
            and not (path / "CACHEDIR.TAG").exists()
            and not (path / "pyvenv.cfg").exists()
            and path.name != "__pycache__"
        ):
            yield from _files_below(path)


@cache
def _texts() -> list[tuple[Path, str]]:
    """Every text file of the project outside build trees, and its text."""
    texts = []
    for folder in (
        "python", "tests", "examples", "vectors", "docs", "rust",
        "bench", "conformance", "interop", "model", "mutants", ".ci",
    ):  # fmt: skip
        if (ROOT / folder).is_dir():
            for path in _files_below(ROOT / folder):
                if path.suffix not in (".pyc", ".so", ".pcap"):
                    texts.append((path, path.read_text()))
    for path in sorted(ROOT.iterdir()):
        if path.is_file() and path.name in ("Makefile", "README.md", "pyproject.toml", ".gitignore", "CHANGELOG.md"):
            texts.append((path, path.read_text()))
    return texts


def _sources() -> Iterator[tuple[Path, str]]:
    yield from ((path, text) for path, text in _texts() if path.suffix == ".py")


def banned_lines(text: str, suffix: str, banned: Banned) -> list[int]:
    """Numbers of the lines that hold what `banned` bans."""
    if not any(suffix.endswith(end) for end in banned.suffixes):
        return []
    return [number for number, line in enumerate(text.splitlines(), 1) if re.search(banned.pattern, line)]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below `node`; what they are made of, most of the tree, holds no function with a body of lines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _statements(child)


def long_functions(source: str) -> list[tuple[int, str, int]]:
    """Line, name and length of each function over the cap."""
    return [
        (node.lineno, node.name, length)
        for node in _statements(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and (length := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def test_files_have_one_subject() -> None:
    too_long = []
    for path, text in _sources():
        relative = path.relative_to(ROOT)
        cap = TEST_FILE_LINES_MAX if relative.parts[0] == "tests" else FILE_LINES_MAX
        lines = len(text.splitlines())
        if lines > cap:
            too_long.append(f"{relative}: {lines} lines, at most {cap}")
    assert not too_long, "\n" + "\n".join(too_long)


def test_functions_fit_on_a_screen() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{line} {name}: {length} lines, at most {FUNCTION_LINES_MAX}"
        for path, text in _sources()
        for line, name, length in long_functions(text)
    ]
    assert not too_long, "\n" + "\n".join(too_long)


@pytest.mark.parametrize("banned", BANNED, ids=lambda banned: banned.why)
def test_no_line_holds_what_is_banned(banned: Banned) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {banned.why}"
        for path, text in _texts()
        if path != THIS_FILE
        for number in banned_lines(text, path.suffix, banned)
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("line", "suffix"),
    [
        ("    time.sleep(0.1)", ".py"),
        ("    await asyncio.sleep(1)", ".py"),
        ("@pytest.mark.skipif(True)", ".py"),
        ('    pytest.skip("no tshark")', ".py"),
        ("@pytest.mark.xfail", ".py"),
        ("x = 1  # TODO: more", ".py"),
        ("raise NotImplementedError", ".py"),
        ('open("/root/x")', ".py"),
        ("see https://" + "pypi.org/project/kbtp", ".md"),
    ],
)
def test_the_table_catches(line: str, suffix: str) -> None:
    assert any(banned_lines(line, suffix, banned) == [1] for banned in BANNED)


@pytest.mark.parametrize(
    ("line", "suffix"),
    [
        ("    await asyncio.sleep(0)", ".py"),
        ("xfail_strict = true", ".toml"),
        ('path = tmp_path / "x"', ".py"),
        ("the time.sleep( of this page", ".md"),
    ],
)
def test_the_table_lets_pass(line: str, suffix: str) -> None:
    assert not any(banned_lines(line, suffix, banned) for banned in BANNED)


def test_a_long_function_is_found() -> None:
    source = "def short():\n    pass\n\n\ndef long():\n" + "    pass\n" * FUNCTION_LINES_MAX
    assert long_functions(source) == [(5, "long", FUNCTION_LINES_MAX + 1)]


@pytest.mark.parametrize(
    "around",
    [
        "class A:",
        "def f():",
        "if a:",
        "try:\n    pass\nexcept A:",
        "match a:\n  case 1:",
        "with a:",
        "for a in b:\n  while c:",
    ],
)
def test_a_long_function_is_found_wherever_it_stands(around: str) -> None:
    source = around + "\n    async def long():\n" + "        pass\n" * FUNCTION_LINES_MAX
    if around.startswith("try"):
        source += "finally:\n    pass\n"
    assert [name for _, name, _ in long_functions(source) if name != "f"] == ["long"]
