"""Tables of what was measured, and whether the programs wrote the same texts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from generating.load import Request

Found = Mapping[str, Any]
TIE = 1e-4
"""Log-probabilities that are closer to each other than this may be ranked either way by float32."""
TIES = {"llama.cpp": 1e-2}
"""Settings where products and activations are not all float32."""


def table(found: Mapping[tuple[str, int], Sequence[Found]], prompt: int, new: int) -> str:
    """A line for each program and concurrency; ``prompt`` and ``new`` tokens are those of a round.
    Ratios are medians of the rounds', of the first program at the same concurrency."""
    lines = [
        "| | at once | new tokens per CPU s | all tokens per CPU s | first is faster by | "
        "first token, median s | 95 % | peak MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first, _ = next(iter(found))
    for (name, concurrency), rounds in found.items():
        seconds = statistics.median(each["cpu_seconds"] for each in rounds)
        pairs = zip(rounds, found[first, concurrency], strict=True)
        ratio = statistics.median(a["cpu_seconds"] / b["cpu_seconds"] for a, b in pairs)
        firsts = sorted(seconds for each in rounds for seconds in each["first_cpu"])
        late = firsts[min(len(firsts) - 1, int(0.95 * len(firsts)))]
        peak = max(each["peak_bytes"] for each in rounds) / 1e6
        lines.append(
            f"| {name} | {concurrency} | {new / seconds:,.0f} | {(prompt + new) / seconds:,.0f} | "
            f"{ratio:.2f} | {statistics.median(firsts):.2f} | {late:.2f} | {peak:,.0f} |"
        )
    return "\n".join(lines)


def cache_line(sample: Found) -> str:
    """Memory of keys and values after a round, next to its formula."""
    pages, size = sample["cache_pages"], sample["page_bytes"]
    return (
        f"Keys and values: {sample['cache_resident_bytes'] / 1e6:,.1f} MB are in memory; at most "
        f"{pages:,} pages of {sample['page_positions']} positions were in use, of "
        f"{size / 1e6:,.2f} MB each: {pages * size / 1e6:,.1f} MB."
    )


def differences(
    requests: Sequence[Request], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Requests whose texts differ, and the first position of the text at which they do."""
    found = []
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert len(a) == len(b) == requests[place].new_tokens, f"request {place}: {len(a), len(b)}"
        if list(a) != list(b):
            pairs = enumerate(zip(a, b, strict=True))
            found.append((place, next(position for position, (x, y) in pairs if x != y)))
    return found


def gaps(
    model: Any,
    requests: Sequence[Request],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    where: Iterable[tuple[int, int]],
) -> list[float]:
    """By how much the log-probabilities of the two tokens differ at each first difference, in
    float64 by transformers."""
    import torch

    result = []
    for place, position in where:
        ids = [*requests[place].prompt, *ours[place][:position]]
        with torch.no_grad():
            logits = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
        result.append(abs(float(logits[ours[place][position]] - logits[theirs[place][position]])))
    return result
