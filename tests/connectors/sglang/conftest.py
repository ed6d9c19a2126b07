"""SGLang without a GPU: before any test imports it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# What it compiles stays in the environment, and what it compiles with is found though that is not activated.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))

os.environ["HF_HUB_OFFLINE"] = "1"  # no model is asked for

import absent  # noqa: F401
