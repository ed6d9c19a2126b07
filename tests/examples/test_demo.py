"""The demo as a whole, and what it does when a process fails."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import events
import pytest
from child import Child, DemoFailed, running
from report import Report

import kbtp

REPORT = Report(
    prompt_tokens=18,
    blocks=1,
    octets=368_640,
    prefill_s=1.0,
    store_s=0.001,
    connect_s=0.001,
    load_s=0.001,
    first_token_without_cache_s=1.1,
    first_token_with_cache_s=0.1,
    reference_tokens=[5, 6, 7],
    reference_text=" the old lamp",
    cached_tokens=[5, 6, 7],
    cached_text=" the old lamp",
)


def python(code: str) -> object:
    """A child process that runs `code`."""
    return running("prefill", "-c", code, environment={})


def test_three_processes_write_one_text(demo_folder: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The keeper is Marta. The baker is Oskar. The goat, who is not allowed on the stairs, is called Admiral. "
                      "Once more: the goat is called", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(demo_folder / "run.py"), "--json", "--prompt", str(prompt), "--new-tokens", "6"],
        capture_output=True,
        text=True,
        timeout=55,
        env={**os.environ, "PYTHONPATH": str(Path(kbtp.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["equal"] and len(result["cached_tokens"]) == 6
    assert result["cached_text"].startswith(" Admiral"), "which only a cached block told the decode process"
    assert result["octets"] == result["blocks"] * 368_640
    assert f"prefill: {result['blocks'] * 16} of" in done.stderr
