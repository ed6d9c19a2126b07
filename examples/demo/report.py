"""What a run of the demo has measured and shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

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
        """Where the two texts differ; empty if they are equal token for token."""
        for index, pair in enumerate(zip(self.reference_tokens, self.cached_tokens, strict=False)):
            if pair[0] != pair[1]:
                return f"new token {index + 1} is {pair[1]} with the cache and {pair[0]} without it"
        if len(self.reference_tokens) != len(self.cached_tokens):
            return f"{len(self.cached_tokens)} new tokens with the cache and {len(self.reference_tokens)} without it"
        return ""

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
        verdict = Text("NO", "bold red") if self.difference else Text("yes, token for token", "green")
        table.add_row(f"{len(self.reference_tokens)} new tokens are equal", verdict)
        return table


def _milliseconds(duration_s: float, octets: int = 0) -> str:
    rate = f"{octets / duration_s / 1e9:.2f} GB/s, " if octets and duration_s > 0 else ""
    return f"{rate}{duration_s * 1e3:,.1f} ms"
