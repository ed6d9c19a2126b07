"""`kbtp doctor`: what this machine can do, and where reaching a target stops."""

from __future__ import annotations

import json

import click

from kbtp import __version__
from kbtp.cli.keys import key_file_option
from kbtp.cli.units import Seconds
from kbtp.doctor.reach import TIMEOUT_MAX_S, reach
from kbtp.doctor.read_machine import read_machine
from kbtp.doctor.read_rdma import read_rdma
from kbtp.doctor.read_rnics import read_rnics
from kbtp.doctor.report import Report, Visit, lines_of, object_of
from kbtp.doctor.tree import Tree
from kbtp.errors import ApiMisuse
from kbtp.initiator.session import InitiatorConfig
from kbtp.key_file import read_key


@click.command()
@click.argument("url", required=False)
@click.option("--namespace", help="Must equal the target's, when it has one.", envvar="KBTP_NAMESPACE")
@key_file_option
@click.option("--timeout", "timeout_s", type=Seconds(), default=5.0, show_default="5s", help="For each step to URL.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(url: str | None, namespace: str | None, key_file: str | None, timeout_s: float, as_json: bool) -> int:
    """Say what this machine can do: RDMA devices, RNICs of kbtp, limits; and with URL how far the target is reached.

    Each line is ok, a note or a problem, and says what to do. The way to a target is name look-up, TCP, MPA, HELLO and
    an orderly end; the first step that fails is named, and none is tried after it.

    The exit status is 0 if nothing is wrong and 1 if there is a problem.

    \b
    Examples:
      kbtp doctor
      kbtp doctor kbtp://10.0.0.7
      kbtp doctor kbtp://10.0.0.7 --key-file prefill.key --timeout 1s
      kbtp doctor --json | jq '.sections[].findings[] | select(.level == "problem")'
    """
    if not 0 < timeout_s <= TIMEOUT_MAX_S:
        raise ApiMisuse(f"--timeout: more than 0 and at most {TIMEOUT_MAX_S:g}s, so that each step ends")
    visit = None
    if url is not None:
        config = InitiatorConfig(
            name="kbtp doctor",
            namespace=None if namespace is None else namespace.encode(),
            handles=1,
            key=None if key_file is None else read_key(key_file),
        )
        visit = Visit(url, reach(url, config, timeout_s))
    tree = Tree()
    report = Report.of(read_rdma(tree), read_rnics(__version__), read_machine(tree), visit)
    if as_json:
        click.echo(json.dumps(object_of(report)))
    else:
        for line in lines_of(report):
            click.echo(line)
    return 1 if report.problems else 0
