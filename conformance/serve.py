"""A target for one profile: `python -m conformance.serve RNIC FIELDS KEYS [HOST PORT]`, until its standard input ends.

`kbtp serve` has no options for how long it waits for HELLO and for an MPA Request; the suite would wait long for both.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from conformance.rnics import new_rnic
from kbtp.key_file import read_keys
from kbtp.keys import Keys, parse_direct
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server


def config_of(fields: dict[str, Any], keys_file: str) -> TargetConfig:
    """`fields` as JSON has them: octets are text, direct modes their names."""
    if "namespace" in fields:
        fields["namespace"] = fields["namespace"].encode()
    if "direct" in fields:
        fields["direct"] = parse_direct(fields["direct"])
    return TargetConfig(**fields, keys=read_keys(keys_file) if keys_file else Keys())


def main() -> None:
    rnic_name, fields, keys_file, *place = sys.argv[1:]
    host, port = place or ("127.0.0.1", "0")
    logging.basicConfig(level=logging.ERROR)  # what the suite does is worth a warning each time
    options = json.loads(fields)
    rnic = new_rnic(rnic_name, mpa=options.pop("mpa"), mpa_request_timeout_s=options.pop("mpa_request_timeout_s"))
    server = Server(config_of(options, keys_file), rnic)
    print(server.listen(host, int(port)), flush=True)
    server.start()
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
