"""What is going on, a line each, with the seconds since the start."""

from __future__ import annotations

import time


class Progress:
    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def tell(self, line: str) -> None:
        print(f"[{time.monotonic() - self._began_s:4.0f} s] {line}", flush=True)
