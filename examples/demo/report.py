"""What a run of the demo has measured and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from events import Answered
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Report:
    """Times in seconds. The two texts were written by two processes, one of which never saw the prompt."""

    prompt_tokens: int
    blocks: int
    octets: int
    prefill_s: float
    store_s: float
    connect_s: float
    load_s: float
    first_token_without_cache_s: float
    first_token_with_cache_s: float
    reference_tokens: list[int]
    reference_text: str
    cached_tokens: list[int]
    cached_text: str

    @property
    def difference(self) -> str:
        return difference_of(self.reference_tokens, self.cached_tokens)

    @property
    def failure(self) -> str:
        """Why this did not show what it is to show; empty if it did."""
        return f"the texts differ: {self.difference}" if self.difference else ""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "equal": not self.difference}

    def table(self) -> Table:
        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_row("tokens in the prompt", str(self.prompt_tokens))
        table.add_row("blocks in the target", f"{self.blocks} of {self.octets // self.blocks:,} octets")
        table.add_row("octets", f"{self.octets:,}")
        table.add_row("prefill", _milliseconds(self.prefill_s))
        table.add_row("store", _milliseconds(self.store_s, self.octets))
        table.add_row("load", _milliseconds(self.load_s, self.octets))
        table.add_row("first token, without the cache", _milliseconds(self.first_token_without_cache_s))
        table.add_row("first token, with the cache", _milliseconds(self.first_token_with_cache_s))
        table.add_row(f"{len(self.reference_tokens)} new tokens are equal", _verdict(self.difference))
        return table


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Two requests whose prompts begin with one document, and the second of them once more, without the cache."""

    questions: tuple[str, str]
    first: Answered
    second: Answered
    compared: Answered

    @property
    def difference(self) -> str:
        return difference_of(self.compared.tokens, self.second.tokens)

    @property
    def failure(self) -> str:
        """Why this did not show what it is to show; empty if it did."""
        if not self.first.stored_token_count:
            return "the first request has put nothing into the cache"
        if not self.second.cached_token_count:
            return "the second request has found no prefix in the cache"
        return f"the answers differ: {self.difference}" if self.difference else ""

    def as_dict(self) -> dict[str, Any]:
        runs = {"first": self.first, "second": self.second, "second_without_cache": self.compared}
        return {
            "questions": list(self.questions),
            **{name: {**asdict(run), "first_token_s": run.first_token_s} for name, run in runs.items()},
            "equal": not self.difference,
        }

    def table(self) -> Table:
        runs = self.first, self.second, self.compared
        table = Table("request", "first", "second", "second, no cache")
        for column in table.columns[1:]:
            column.justify = "right"
        table.add_row("tokens in the prompt", *(str(run.prompt_token_count) for run in runs))
        table.add_row("from the cache", *(str(run.cached_token_count) for run in runs))
        table.add_row("look up", *(_milliseconds(run.look_up_s) for run in runs[:2]))
        table.add_row("load", "", _milliseconds(self.second.load_s, self.second.loaded_bytes))
        table.add_row("compute", *(_milliseconds(run.compute_s) for run in runs))
        table.add_row("first token", *(Text(_milliseconds(run.first_token_s), "bold") for run in runs))
        table.add_row("put into the cache", *(str(run.stored_token_count) for run in runs[:2]))
        verdict = _verdict(self.difference)
        table.add_row("new tokens are equal", "", verdict)
        return table

    @property
    def summary(self) -> str:
        """The one line that all of this is about."""
        with_s, without_s = self.second.first_token_s, self.compared.first_token_s
        return (
            f"the second request's first token: {_milliseconds(with_s)} with the prefix from the cache, "
            f"{_milliseconds(without_s)} without"
        )


def difference_of(reference_tokens: Sequence[int], cached_tokens: Sequence[int]) -> str:
    """Where two texts differ; empty if they are equal token for token."""
    for index, (reference, cached) in enumerate(zip(reference_tokens, cached_tokens, strict=False)):
        if reference != cached:
            return f"new token {index + 1} is {cached} with the cache and {reference} without it"
    if len(reference_tokens) != len(cached_tokens):
        return f"{len(cached_tokens)} new tokens with the cache and {len(reference_tokens)} without it"
    return ""


def _verdict(difference: str) -> Text:
    return Text("NO", "bold red") if difference else Text("yes, token for token", "green")


def _milliseconds(duration_s: float, octets: int = 0) -> str:
    rate = f"{octets / duration_s / 1e9:.2f} GB/s, " if octets and duration_s > 0 else ""
    return f"{rate}{duration_s * 1e3:,.1f} ms"
