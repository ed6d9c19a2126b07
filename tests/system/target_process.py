"""A target in a process of its own, for `test_many_initiators.py`: one JSON object a line on standard output.

Its arguments are the configuration, as JSON too, and the name of the RNIC.

It serves until standard input ends. Each line there is answered, once no session is left, with the number of free
blocks.
"""

from __future__ import annotations

import json
import sys
import threading

from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server


class WatchedServer(Server):
    """Tells when it has done something."""

    def __init__(self, config: TargetConfig) -> None:
        rnic = open_rnic(sys.argv[2])
        super().__init__(config, rnic, threads=3 if rnic.capabilities.executes_sequences else 1)
        self.changed = threading.Condition()

    def _step(self, until_s: float = float("inf")) -> None:
        super()._step(until_s)
        with self.changed:
            self.changed.notify_all()


def main() -> None:
    server = WatchedServer(TargetConfig(**json.loads(sys.argv[1])))
    url = str(server.listen(port=0))
    free = server.target.store.free_blocks
    server.start()
    print(json.dumps({"url": url, "free_blocks": free}), flush=True)
    for _ in sys.stdin:
        with server.changed:
            server.changed.wait_for(lambda: not server.target.sessions, 20)
            left = len(server.target.sessions)
        print(json.dumps({"free_blocks": server.target.store.free_blocks, "sessions": left}), flush=True)
    server.stop()


if __name__ == "__main__":
    main()
