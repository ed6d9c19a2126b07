"""`make demo`: a KV cache computed in one process, kept in a second, used in a third.

1. The target, `kbtp serve`, holds the blocks.
2. The prefill process reads a prompt and ALLOC_STOREs its KV cache, then writes the continuation by itself.
3. The decode process LOADs the blocks and writes the continuation without ever seeing the prompt.

Both texts must be equal token for token; if they are not, this says so and ends with exit code 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import click
import events
from child import Child, DemoFailed, running
from report import Report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_HERE = Path(__file__).parent

# Numpy's matrix products use one thread unless told otherwise. It must be the same number in both model processes,
# and more of them wait for each other in a busy loop: on a machine whose processors are taken (a container, a
# build machine) the prefill of this small model then takes ten times as long, not half.
_THREADS = {name: os.environ.get(name, "1") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}


class Display:
    """What the person at the terminal sees while it works: a bar, or plain lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    async def follow(self, child: Child) -> events.Stored:
        """Show the progress of the prefill until its blocks are stored."""
        if not self._console.is_terminal:
            return await child.hear(events.Stored, self._line)
        columns = TextColumn("prefill"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn()
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task("prefill", total=None)
            return await child.hear(
                events.Stored, lambda seen: bar.update(task, completed=seen.done_tokens, total=seen.total_tokens)
            )

    def _line(self, seen: events.Progress) -> None:
        self.say(f"prefill: {seen.done_tokens} of {seen.total_tokens} tokens")


async def demo(prompt_path: Path, new_token_count: int, pool_blocks: int, display: Display) -> Report:
    """Run the three processes, one after the other where times are taken; raises DemoFailed."""
    # Should this be cut short, the model processes end first and so do not see their target go.
    async with AsyncExitStack() as targets, AsyncExitStack() as models:
        display.say("two processes load SmolLM2-135M-Instruct ...")
        prefill = await models.enter_async_context(running("prefill", str(_HERE / "prefill.py"), environment=_THREADS))
        decode = await models.enter_async_context(running("decode", str(_HERE / "decode.py"), environment=_THREADS))
        ready = await prefill.hear(events.Ready)
        await decode.hear(events.Ready)

        sizes = ["--block-size", str(ready.block_bytes), "--pool-blocks", str(pool_blocks)]
        options = ["--port", "0", *sizes, "--namespace", ready.namespace, "--log-level", "warning"]
        serve = running("target", "-m", "kbtp", "serve", *options, environment={})
        target = await targets.enter_async_context(serve)
        url = await target.hear_url()
        display.say(f"the target serves {pool_blocks} blocks of {ready.block_bytes:,} octets at {url}")

        await prefill.tell(events.PrefillJob(url, str(prompt_path), new_token_count))
        stored = await display.follow(prefill)
        reference = await prefill.hear(events.Written)
        await prefill.end()
        display.say("the prefill process has stored its blocks and ended; the decode process loads them")

        await decode.tell(events.DecodeJob(url, stored.incarnation, stored.blocks, stored.tail, new_token_count))
        loaded = await decode.hear(events.Loaded)
        cached = await decode.hear(events.Written)
        await decode.end()
        await target.stop()

    return Report(
        prompt_tokens=stored.prompt_token_count,
        blocks=len(stored.blocks),
        octets=sum(length_bytes for _, _, length_bytes in stored.blocks),
        prefill_s=stored.prefill_s,
        store_s=stored.store_s,
        connect_s=loaded.connect_s,
        load_s=loaded.load_s,
        first_token_without_cache_s=stored.prefill_s + reference.first_token_s,
        first_token_with_cache_s=loaded.load_s + cached.first_token_s,
        reference_tokens=reference.tokens,
        reference_text=reference.text,
        cached_tokens=cached.tokens,
        cached_text=cached.text,
    )


async def _until_signalled(prompt_path: Path, new_token_count: int, pool_blocks: int, display: Display) -> Report:
    """`demo`, cancelled by SIGTERM as Ctrl-C does it, so that no child is left behind."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await demo(prompt_path, new_token_count, pool_blocks, display)


def show(report: Report, prompt: str, display: Display, console: Console) -> None:
    """The table, and what was written after the prompt's last line."""
    console.print(report.table())
    display.say(f"the prompt ends:            {prompt.splitlines()[-1]}")
    display.say(f"the prefill process wrote: {report.reference_text!r}")
    display.say(f"the decode process wrote:  {report.cached_text!r}")


@click.command()
@click.option(
    "--prompt",
    "prompt_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=_HERE / "prompt.txt",
    help="The text to continue.",
)
@click.option("--new-tokens", type=click.IntRange(1, 512), default=32, show_default=True, help="How many to write.")
@click.option("--pool-blocks", type=click.IntRange(1), default=64, show_default=True, help="The size of the target.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def main(prompt_path: Path, new_tokens: int, pool_blocks: int, as_json: bool) -> None:
    """Move the KV cache of a prompt from a prefill process to a decode process, and prove that it arrived."""
    console = Console(stderr=as_json)
    display = Display(console)
    try:
        report = asyncio.run(_until_signalled(prompt_path, new_tokens, pool_blocks, display))
    except DemoFailed as failure:
        console.print(f"[bold red]DEMO FAILED[/]: {failure}")
        sys.exit(1)
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.print("stopped; all processes have ended")
        sys.exit(130)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        show(report, prompt_path.read_text(encoding="utf-8").strip(), display, console)
    if report.difference:
        console.print(f"[bold red]DEMO FAILED[/]: the texts differ: {report.difference}")
        sys.exit(1)


if __name__ == "__main__":
    main()
