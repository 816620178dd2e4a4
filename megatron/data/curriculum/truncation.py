"""Batches cut to the length of their step.

Shape suffixes: B micro batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.data.batch import GPTBatch


def truncated(batch: GPTBatch, seq_length: int) -> GPTBatch:
    """The first tokens of every sample: equal to the batch of samples of seq_length + 1 tokens.

    Labels are the next tokens already, so nothing is lost at the end but what lies behind it.

    Raises:
        ValueError: samples are of another kind, of which more than the end would be lost.
    """
    if not isinstance(batch, GPTBatch):
        raise ValueError(
            f"a curriculum of sequence lengths cuts samples of GPTs; a {type(batch).__name__} is "
            "made of parts that belong together: remove curriculum_learning or seqlen_truncate"
        )
    assert batch.tokens_BS.shape[1] >= seq_length
    return GPTBatch._make(
        None if tensor_BS is None else tensor_BS[:, :seq_length].contiguous() for tensor_BS in batch
    )


def cut(batches: Iterator[GPTBatch], seq_length: int) -> Iterator[GPTBatch]:
    """Batches cut to a length, each as it is asked for and none before."""
    return (truncated(batch, seq_length) for batch in batches)
