"""Batches cut to the length of their step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def truncated(batch: Any, seq_length: int) -> Any:
    """The first tokens of every sample: equal to the batch of samples of seq_length + 1 tokens.

    Raises:
        ValueError: samples are of another kind, of which more than the end would be lost.
    """
    if not hasattr(batch, "shortened"):
        raise ValueError(
            f"a curriculum of sequence lengths cuts samples of GPTs; a {type(batch).__name__} is "
            "made of parts that belong together: remove curriculum_learning or seqlen_truncate"
        )
    return batch.shortened(seq_length)


def cut(batches: Iterator[Any], seq_length: int) -> Iterator[Any]:
    """Batches cut to a length, each as it is asked for and none before."""
    return (truncated(batch, seq_length) for batch in batches)
