"""What the person at the terminal sees while the demo works."""

from __future__ import annotations

import events
from child import Child
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


class Display:
    """A bar for what takes long, or plain lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, title: str) -> None:
        self._console.print(f"\n[bold]{title}[/]", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def fail(self, why: str) -> None:
        self._console.print(Text.assemble(("DEMO FAILED", "bold red"), f": {why}"), soft_wrap=True)

    async def follow(self, child: Child, what: str, until: type[events.M]) -> events.M:
        """Show how many tokens `child` has computed, until it says what is waited for."""
        if not self._console.is_terminal:
            return await child.hear(
                until, lambda seen: self.say(f"{what}: {seen.done_tokens} of {seen.total_tokens} tokens")
            )
        columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn()
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(what, total=None)
            return await child.hear(
                until, lambda seen: bar.update(task, completed=seen.done_tokens, total=seen.total_tokens)
            )
