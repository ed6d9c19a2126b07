"""The demo's modules are scripts that import their neighbours, so their folder has to be on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"
sys.path.insert(0, str(DEMO))

import gguf  # noqa: E402
import smollm2  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return DEMO


@pytest.fixture(scope="session")
def reader() -> gguf.GGUFReader:
    return smollm2.open_gguf()


@pytest.fixture(scope="session")
def model(reader: gguf.GGUFReader) -> smollm2.Model:
    return smollm2.Model(reader)


@pytest.fixture(scope="session")
def tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    return Tokenizer(reader)
