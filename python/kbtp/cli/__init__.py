"""The `kbtp` command: one file per verb.

Exit status: 0 done, 1 the other side or the data was at fault, 2 the command was given something that cannot work.
Every failure is one line on standard error.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from kbtp import __version__
from kbtp.cli.bench import bench
from kbtp.cli.conformance import conformance
from kbtp.cli.decode import decode
from kbtp.cli.doctor import doctor
from kbtp.cli.drain import drain
from kbtp.cli.keys import keys
from kbtp.cli.replay import replay
from kbtp.cli.serve import serve
from kbtp.cli.stat import stat
from kbtp.cli.wireshark import wireshark
from kbtp.errors import ApiMisuse, KbtpError


@click.group(
    invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, message="kbtp %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Store and move blocks of KV cache between inference processes.

    \b
    Examples:
      kbtp serve --block-size 1MiB --pool-size 4GiB
      kbtp stat kbtp://127.0.0.1
      kbtp doctor kbtp://127.0.0.1
      kbtp decode session.pcap
      kbtp wireshark install
      kbtp bench --quick
      kbtp replay trace.jsonl --pool 25%
      kbtp keys new target.keys
      kbtp conformance kbtp://127.0.0.1

    With KBTP_CRC=off their sessions ask for no CRC of each frame: kbtp serve --help says when that helps.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _verb in (serve, stat, decode, wireshark, bench, keys, replay, drain, conformance, doctor):
    cli.add_command(_verb)


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    try:
        status = cli.main(prog_name="kbtp", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except ApiMisuse as error:
        _fail(str(error), 2)
    except KbtpError as error:
        _fail(str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"kbtp: {' '.join(message.split())}", err=True)
    sys.exit(status)
