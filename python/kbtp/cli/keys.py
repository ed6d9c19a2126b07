"""`kbtp keys`: make and list the keys that a target lets initiators in with."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kbtp.key_file import add_key, read_keys, write_key
from kbtp.keys import DEFAULT_DOMAIN, Key, direct_text, parse_direct
from kbtp.limits import KEY_SECRET_MIN_BYTES

key_file_option = click.option(
    "--key-file", type=click.Path(), envvar="KBTP_KEY_FILE", help="File with the key to authenticate with."
)
"""For every verb that connects."""


@click.group()
def keys() -> None:
    """Make and list keys: who may open a session with a target, and in which trust domain.

    \b
    Examples:
      kbtp keys new --client prefill.key target.keys
      kbtp serve --keys target.keys
      kbtp stat --key-file prefill.key kbtp://127.0.0.1
    """


@keys.command()
@click.argument("file", type=click.Path())
@click.option("--domain", default=DEFAULT_DOMAIN, show_default=True,
    help="Trust domain: those of one see each other's blocks, those of others learn nothing of them.")  # fmt: skip
@click.option("--direct", default="none", show_default=True,
    help="Direct modes the key may use where the target offers them: none, load, alloc or load,alloc.")  # fmt: skip
@click.option("--client", "client_file", type=click.Path(), help="Also write a file for the key's initiators.")
@click.option("--show-secret", is_flag=True, help="Print the line of such a file, with the secret.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def new(file: str, domain: str, direct: str, client_file: str | None, show_secret: bool, as_json: bool) -> None:
    """Make a random key and append it to FILE, which is made if it is not there. Only its owner can read it.

    A running target takes it on when it is sent SIGHUP.
    """
    key = Key(secrets.randbits(32), secrets.token_bytes(KEY_SECRET_MIN_BYTES), domain, parse_direct(direct))
    if client_file is not None:
        write_key(client_file, key)
    try:
        add_key(file, key)
    except BaseException:
        if client_file is not None:
            Path(client_file).unlink(missing_ok=True)  # no target will know its key
        raise
    if as_json:
        made = {**_shown(key), "file": file, "client_file": client_file}
        click.echo(json.dumps({**made, "secret": key.secret.hex()} if show_secret else made))
        return
    click.echo(f"key {key.name} of trust domain {key.domain} is in {file}; direct modes: {direct_text(key.direct)}")
    if client_file is not None:
        click.echo(f"initiators use it with KBTP_KEY_FILE={client_file} or kbtp.connect(..., key_file={client_file!r})")
    if show_secret:
        click.echo(key.line)
    if client_file is None and not show_secret:
        click.echo("initiators need a file of their own with this key's line in it, that only they can read")


@keys.command("list")
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_(file: str, as_json: bool) -> None:
    """List the keys of FILE, without their secrets."""
    shown = [_shown(key) for key in read_keys(file)]
    if as_json:
        click.echo(json.dumps(shown))
        return
    table = Table(box=None)
    for heading in ("key", "trust domain", "direct modes"):
        table.add_column(heading)
    for one in shown:
        table.add_row(one["key_id"], one["domain"], one["direct"])
    Console().print(table)


def _shown(key: Key) -> dict[str, str]:
    return {"key_id": key.name, "domain": key.domain, "direct": direct_text(key.direct)}
