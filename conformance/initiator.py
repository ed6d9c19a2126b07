"""The workload over an RNIC that starts streams otherwise: `python -m conformance.initiator MPA [OPTIONS]`."""

from __future__ import annotations

import sys
from functools import partial

from conformance.rnics import new_rnic
from kbtp.conformance.workload import main

if __name__ == "__main__":
    sys.exit(main(partial(new_rnic, mpa=sys.argv.pop(1))))
