"""Sessions that do nothing: `python -m bench.idle_sessions URL COUNT RNIC`. Prints a line when all are open."""

from __future__ import annotations

import json
import sys

import kbtp
from kbtp.testing.bench.process import report_failure
from kbtp.testing.bench.target import allow_many_files


def main() -> int:
    url, count, rnic_name = sys.argv[1:]
    allow_many_files()
    rnic = kbtp.open_rnic(rnic_name)
    clients = []
    try:
        for _ in range(int(count)):
            clients.append(kbtp.connect(url, quota=1, handles=1, rnic=rnic))
    except Exception as error:
        report_failure(error, sys.stdout)
        return 1
    print(json.dumps({"sessions": len(clients)}), flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
