"""`kbtp drain`: leave a target."""

from __future__ import annotations

import json

import click

from kbtp.cache.drain import drain_target
from kbtp.cache.index import open_index
from kbtp.limits import CACHE_TIMEOUT_S


@click.command()
@click.argument("index")
@click.argument("target")
@click.option("--undo", is_flag=True, help="Let values be put there again.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def drain(index: str, target: str, undo: bool, as_json: bool) -> None:
    """Have caches leave TARGET, as it announced itself in INDEX.

    No value is put there any more, and the records of those that are there are removed. Their blocks are freed by the
    writers that still live, and end with the others' linger time.

    \b
    Examples:
      kbtp drain valkey://index kbtp://10.0.0.7:5287
      kbtp drain kbtp://cache-server kbtp://10.0.0.7:5287 --undo
    """
    opened = open_index(index, CACHE_TIMEOUT_S)
    try:
        removed = drain_target(opened, target, undo=undo)
    finally:
        opened.close()
    if as_json:
        click.echo(json.dumps({"target": target, "draining": not undo, "removed_records": removed}))
    elif undo:
        click.echo(f"kbtp: {target} is used again")
    else:
        click.echo(f"kbtp: {target} is left; {removed} records removed")
