"""Engines that end with the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import engine
import pytest

PROCESS_S = 120.0


@pytest.fixture
def open_engine(cluster) -> Iterator[Callable[..., engine.Engine]]:
    """`open_engine(**params)`: LMCache over `cluster`; `open_engine(spec)`: as that says."""
    with ExitStack() as stack:

        def open_(spec: dict[str, object] | None = None, **params: object) -> engine.Engine:
            opened = engine.Engine(spec or engine.configuration(cluster.url, **params))
            stack.callback(opened.close)
            return opened

        yield open_


@pytest.fixture
def in_another_process(cluster) -> Callable[[str, str], int]:
    """`in_another_process("load", prompt)`: what an engine there has stored or loaded."""

    def run(verb: str, prompt: str) -> int:
        done = subprocess.run(
            [sys.executable, Path(engine.__file__), json.dumps(engine.configuration(cluster.url)), verb, prompt],
            env={**os.environ, "PYTHONHASHSEED": "7"},
            stdout=subprocess.PIPE,
            timeout=PROCESS_S,
            check=True,
        )
        return int(json.loads(done.stdout.splitlines()[-1]))

    return run
