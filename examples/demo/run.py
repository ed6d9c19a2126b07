"""`make demo`: what a KV cache outside of the process that computed it is good for, in two parts.

1. `hand_over.py`: a prefill process stores the KV cache of a prompt by block, and a decode process goes on with it.
2. `share.py`: two instances with a keyed cache are asked about one document; the second loads what the first computed.

Texts with a loaded cache and without must be equal token for token; if they are not, this says so and ends with exit
code 1.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from child import DemoFailed
from display import Display
from hand_over import hand_over
from report import Report, SharedPrefix
from rich.console import Console
from share import share

_HERE = Path(__file__).parent
_QUESTIONS = "How many rooms does the guest house have?", "How much does a night cost?"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    prompt_path: Path
    document_path: Path
    questions: tuple[str, str]
    new_token_count: int
    pool_blocks: int


async def demo(options: Options, display: Display) -> tuple[Report, SharedPrefix]:
    """Both parts, one after the other; raises DemoFailed."""
    # Cancelled as Ctrl-C does it, so that no child is left behind: also when the terminal is closed.
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)

    display.begin("1 of 2: one process computes a prompt, another goes on with it")
    handed = await hand_over(options.prompt_path, options.new_token_count, options.pool_blocks, display)
    display.begin("2 of 2: two instances are asked about one document")
    shared = await share(
        options.document_path, options.questions, options.new_token_count, options.pool_blocks, display
    )
    return handed, shared


def show(handed: Report, shared: SharedPrefix, options: Options, display: Display, console: Console) -> None:
    """The tables, and what was written."""
    prompt = options.prompt_path.read_text(encoding="utf-8").strip()
    display.begin("1 of 2: the KV cache has moved from the prefill process to the decode process")
    console.print(handed.table())
    display.say(f"the prompt ends:            {prompt.splitlines()[-1]}")
    display.say(f"the prefill process wrote: {handed.reference_text!r}")
    display.say(f"the decode process wrote:  {handed.cached_text!r}")

    display.begin("2 of 2: the second instance has found the document in the cache")
    console.print(shared.table())
    display.say(f"the first was asked:        {shared.questions[0]}")
    display.say(f"it answered:               {shared.first.text!r}")
    display.say(f"the second was asked:       {shared.questions[1]}")
    display.say(f"with the cache it says:    {shared.second.text!r}")
    display.say(f"without the cache:         {shared.compared.text!r}")
    display.say(shared.summary)


@click.command()
@click.option(
    "--prompt",
    "prompt_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=_HERE / "prompt.txt",
    help="The text to continue.",
)
@click.option(
    "--document",
    "document_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=_HERE / "document.txt",
    help="The text that both questions are about.",
)
@click.option("--questions", nargs=2, default=_QUESTIONS, help="Two questions about the document.")
@click.option(
    "--new-tokens",
    "new_token_count",
    type=click.IntRange(1, 512),
    default=32,
    show_default=True,
    help="How many to write.",
)
@click.option("--pool-blocks", type=click.IntRange(1), default=64, show_default=True, help="The size of each target.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the tables.")
def main(as_json: bool, **chosen: Any) -> None:
    """Move the KV cache of a prompt from process to process, share that of a document, and prove that it arrived."""
    options = Options(**chosen)
    console = Console(stderr=as_json)
    display = Display(console)
    began = time.monotonic()
    try:
        handed, shared = asyncio.run(demo(options, display))
    except DemoFailed as failure:
        display.fail(str(failure))
        sys.exit(1)
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.print("stopped; all processes have ended")
        sys.exit(130)
    if as_json:
        print(json.dumps({**handed.as_dict(), "shared_prefix": shared.as_dict()}))
    else:
        show(handed, shared, options, display, console)
    failures = [part.failure for part in (handed, shared) if part.failure]
    for why in failures:
        display.fail(why)
    if failures:
        sys.exit(1)
    display.say(f"\nall of it took {time.monotonic() - began:.0f} s, and no process is left")


if __name__ == "__main__":
    main()
