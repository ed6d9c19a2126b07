"""`kbtp stat URL`: what a session with a target sees."""

from __future__ import annotations

import json
import time

import click
from rich.console import Console
from rich.table import Table

import kbtp
from kbtp.cli.keys import key_file_option
from kbtp.cli.units import Seconds, format_size


@click.command()
@click.argument("url")
@click.option("--namespace", help="Must equal the target's, when it has one.", envvar="KBTP_NAMESPACE")
@key_file_option
@click.option("--timeout", "timeout_s", type=Seconds(), default=10.0, show_default="10s", help="For the exchange.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stat(url: str, namespace: str | None, key_file: str | None, timeout_s: float, as_json: bool) -> None:
    """Open a session with the target at URL, print what it grants, and leave.

    What the target counts is no initiator's business: `kbtp serve` prints it when it is sent SIGUSR1.

    \b
    Examples:
      kbtp stat kbtp://127.0.0.1
      kbtp stat kbtp://[::1]:5287 --namespace llama-3-8b/bf16 --json
      KBTP_KEY_FILE=prefill.key kbtp stat kbtp://10.0.0.7
    """
    began_s = time.monotonic()
    with kbtp.connect(
        url,
        name="kbtp stat",
        namespace=namespace,
        key_file=key_file,
        handles=1,
        timeout_s=timeout_s,
        connect_timeout_s=timeout_s,
    ) as client:
        terms = client.terms
    seen = {**terms.as_dict(), "connect_ms": round((time.monotonic() - began_s) * 1000, 2)}
    seen["incarnation"] = f"{terms.incarnation:016x}"
    if as_json:
        click.echo(json.dumps(seen))
        return
    seen["block_size_bytes"] = f"{terms.block_size_bytes} ({format_size(terms.block_size_bytes)})"
    seen["pool_blocks"] = f"{terms.pool_blocks} ({format_size(terms.pool_blocks * terms.block_size_bytes)})"
    seen["features"] = ", ".join(terms.features) or "none"
    table = Table(show_header=False, box=None)
    for key, value in seen.items():
        table.add_row(key.replace("_", " "), str(value))
    Console().print(table)
