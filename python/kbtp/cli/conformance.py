"""`kbtp conformance`: what another implementer's target or initiator does wrong."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kbtp import limits
from kbtp.address import Address
from kbtp.cli.units import Seconds
from kbtp.conformance import catalogue
from kbtp.conformance.case import Case, Role
from kbtp.conformance.expectations import Expectations
from kbtp.conformance.initiators import initiators_of
from kbtp.conformance.report import as_junit, as_object, by_chapter
from kbtp.conformance.result import Outcome, Result
from kbtp.conformance.runner import InitiatorRunner, TargetRunner
from kbtp.conformance.setup import NEEDS, OF_STREAMS, Setup, what_streams_have
from kbtp.key_file import read_keys
from kbtp.keys import Key
from kbtp.rnic import open_rnic
from kbtp.verbs.api import Rnic

AT_ONCE = 4
_OF_KEYS = frozenset({"keys", "no-keys", "two-domains"})
_TO_TELL = [name for name in NEEDS if name not in _OF_KEYS | OF_STREAMS]
_TOLD = (Outcome.FAILED, Outcome.BROKEN, Outcome.UNEXPECTED, Outcome.NOT_RUN, Outcome.WARNED)


@click.command()
@click.argument("url", required=False)
@click.option("--role", type=click.Choice([role.value for role in Role]), default=Role.TARGET.value, show_default=True,
    help="Who is under test.")  # fmt: skip
@click.option(
    "--listen", help="Where an initiator under test connects to.  [default with --run: a free port on 127.0.0.1]"
)
@click.option("--run", "command", help="Starts the initiator under test; `{url}` in it is where to connect to.")
@click.option(
    "--with",
    "has",
    default="",
    help=f"What the peer is configured for, by commas: {', '.join(_TO_TELL)}.",
)
@click.option("--namespace", default="", help="The target's namespace.")
@click.option(
    "--key-file",
    type=click.Path(dir_okay=False),
    help="Keys of the target, or that of the initiator; the first one is used where any will do.",
)
@click.option("--mpa-timeout", type=Seconds(), default=limits.MPA_REQUEST_TIMEOUT_S, show_default="5s",
    help="How long the target waits for an MPA Request.")  # fmt: skip
@click.option("--hello-timeout", type=Seconds(), default=limits.HELLO_TIMEOUT_S, show_default="5s",
    help="How long the target waits for HELLO.")  # fmt: skip
@click.option("--drain", type=Seconds(), default=limits.DRAIN_S, show_default="5s",
    help="How long the target waits for a peer that does not read.")  # fmt: skip
@click.option("--linger", type=Seconds(), default=limits.LINGER_S, show_default="1h",
    help="How long blocks outlive their initiator's connection.")  # fmt: skip
@click.option("--patience", type=click.FloatRange(min=0.1), default=1.0, show_default=True,
    help="Wait so many times as long for what the peer should do.")  # fmt: skip
@click.option("--hello-delay", type=Seconds(), default=0.0, show_default="0s",
    help="Pause behind the MPA Reply: Linux siw overlooks what comes at once.")  # fmt: skip
@click.option("--crc/--no-crc", default=True, show_default=True,
    help="Ask for CRCs: Linux siw takes one for wrong that comes in two pieces.")  # fmt: skip
@click.option("--rnic", "rnic_name",
    help="Streams to a target are this RNIC's, as rdma_core, and only what is above iWARP is looked at.")  # fmt: skip
@click.option("--expect", "expectations_file", type=click.Path(path_type=Path, dir_okay=False),
    help="TOML: cases to skip and cases expected to fail, each with its reason.")  # fmt: skip
@click.option("-k", "words", multiple=True, help="Only cases whose name, rules or sections hold this; may be repeated.")
@click.option("--at-once", type=click.IntRange(1, 64), default=AT_ONCE, show_default=True, help="Cases at a time.")
@click.option("--list", "only_list", is_flag=True, help="List the cases and leave.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--junit", type=click.Path(path_type=Path, dir_okay=False), help="Write JUnit XML to this file.")
@click.pass_context
def conformance(
    ctx: click.Context, url: str | None, role: str, listen: str | None, command: str | None, has: str, namespace: str,
    key_file: str | None, mpa_timeout: float, hello_timeout: float, drain: float, linger: float, patience: float,
    hello_delay: float, crc: bool, rnic_name: str | None, expectations_file: Path | None, words: tuple[str, ...],
    at_once: int, only_list: bool, as_json: bool, junit: Path | None,
) -> None:  # fmt: skip
    """Hold the target at URL, or an initiator that connects to us, against the rules of KBTP and iWARP.

    Each case opens connections of its own and says what it expected and what it saw. A target is left as it was found,
    but do not try this on one that is in use: some cases take all of its blocks. An initiator has to store a short and
    a long block, load both, store to an unsealed one, free all and leave, again and again or as --run starts it.

    Exit status 1: a case has failed.

    \b
    Examples:
      kbtp conformance kbtp://127.0.0.1
      kbtp conformance kbtp://127.0.0.1 --with short-waits --drain 1s -k "profile 6"
      kbtp conformance --role initiator --run './my-client {url}' --expect known.toml
      kbtp conformance --list
    """
    chosen = [case for case in catalogue.cases(None if only_list else Role(role)) if _matches(case, words)]
    if only_list:
        _list(chosen)
        return
    if not chosen:
        raise click.UsageError("no case holds what -k says")
    every = catalogue.cases()
    expectations = Expectations.read(expectations_file, every) if expectations_file else Expectations()
    keys = () if key_file is None else tuple(read_keys(key_file))
    rnic = _open(rnic_name)
    waits_s = (mpa_timeout, hello_timeout, drain, linger)
    setup = Setup(_has(has, command, keys, rnic), namespace.encode(), keys, *waits_s, patience, hello_delay, crc)
    runner: TargetRunner | InitiatorRunner
    if Role(role) is Role.TARGET:
        if url is None or command is not None or listen is not None:
            raise click.UsageError("a target under test needs its URL, and neither --run nor --listen")
        runner = TargetRunner(Address.parse(url), setup, expectations, at_once=at_once, rnic=rnic)
    else:
        if url is not None:
            raise click.UsageError("an initiator connects to us: give --listen or --run, no URL")
        if listen is None and command is None:
            raise click.UsageError(
                "give --run and the command that starts the initiator, or --listen and where it connects to by itself"
            )
        if command is not None:
            _check_program(command)
        address = Address.parse(f"kbtp://{listen or '127.0.0.1:0'}")
        runner = InitiatorRunner(setup, expectations, initiators_of(command, at_once), address, rnic=rnic)
    peer = url or command or f"an initiator at {listen}"
    results = sorted(_watched(runner.run(chosen), len(chosen), as_json), key=lambda one: one.case.name)
    if as_json:
        click.echo(json.dumps(as_object(results, peer)))
    else:
        _tell(results)
    if junit is not None:
        _write(junit, as_junit(results, peer))
    ctx.exit(1 if any(result.outcome.fails_the_run for result in results) else 0)


def _open(rnic_name: str | None) -> Rnic | None:
    if rnic_name is None:
        return None
    try:
        return open_rnic(rnic_name)
    except (ImportError, OSError) as error:
        raise click.UsageError(f"--rnic {rnic_name}: {error}") from None


def _write(junit: Path, text: str) -> None:
    try:
        junit.write_text(text)
    except OSError as error:
        raise click.UsageError(
            f"cannot write --junit {junit}: {error.strerror}; name a file that you may write, in a folder that is there"
        ) from None


def _has(text: str, command: str | None, keys: Sequence[Key], rnic: Rnic | None) -> frozenset[str]:
    names = frozenset(filter(None, text.split(",")))
    known = [name for name in NEEDS if name not in OF_STREAMS]
    unknown = sorted(names - set(known))
    if unknown:
        raise click.UsageError(f"--with {unknown[0]!r}: there are {', '.join(known)}")
    of_keys = {"keys"} if keys else {"no-keys"}
    if len({key.domain for key in keys}) > 1:
        of_keys.add("two-domains")
    wrong = sorted(names & _OF_KEYS - of_keys)
    if wrong:
        raise click.UsageError(f"--with {wrong[0]}: --key-file says otherwise")
    loads = {"direct-loads"} if "direct" in names else set()
    return names | loads | of_keys | ({"one-by-one"} if command else set()) | what_streams_have(rnic)


def _check_program(command: str) -> None:
    """A mistyped --run is said once, not by each case."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise click.UsageError(f"--run {command!r}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise click.UsageError(f"--run {command!r}: there is no program {words[0] if words else ''!r}")


def _matches(case: Case, words: tuple[str, ...]) -> bool:
    text = " ".join((case.name, *case.rules, *catalogue.sections_of(case)))
    return not words or any(word in text for word in words)


def _list(cases: Sequence[Case]) -> None:
    for case in cases:
        click.echo(f"{case.name}  [{', '.join(case.rules)}; {'; '.join(catalogue.sections_of(case))}]  {case.title}")


def _watched(results: Iterator[Result], count: int, quiet: bool) -> Iterator[Result]:
    """`results`, while a bar on standard error tells how far it is and a line what went wrong."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("cases", total=count)
        for result in results:
            if result.outcome in _TOLD and not quiet:
                progress.console.print(f"{'; '.join(catalogue.sections_of(result.case))}  {result}", markup=False)
            progress.advance(task)
            yield result


def _tell(results: Sequence[Result]) -> None:
    columns = [outcome for outcome in Outcome if any(result.outcome is outcome for result in results)]
    table = Table(title=f"{len(results)} cases", title_justify="left")
    table.add_column("section")
    for outcome in columns:
        table.add_column(outcome.value, justify="right")
    for chapter, counts in by_chapter(results).items():
        table.add_row(chapter, *(str(counts[outcome] or "") for outcome in columns))
    table.add_section()
    total = (str(sum(result.outcome is outcome for result in results)) for outcome in columns)
    table.add_row("all, each case once", *total)
    Console(width=None if os.isatty(1) else 150).print(table)
