"""Synthetic samples for `--mock-data`: no files, and something to learn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.data.samples import Piece

MEAN_DOCUMENT_TOKENS = 64


@dataclass(frozen=True)
class MockGPTDataset:
    """Sample i is a function of (seed, part, i) alone.

    A sample is made of short documents; each counts upwards (modulo the vocabulary) from a random
    token and ends with `eod_token`, so that the loss falls within a few steps.
    """

    num_samples: int
    seq_length: int
    vocab_size: int
    seed: int
    part: int = 0
    """0 training, 1 validation, 2 test: the parts share no samples."""
    eod_token: int | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> np.ndarray:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of a dataset of {self.num_samples} samples")
        rng = np.random.default_rng([self.seed, self.part, index])
        length = self.seq_length + 1
        ends = rng.random(length) < 1 / MEAN_DOCUMENT_TOKENS
        document = np.cumsum(ends, dtype=np.int64) - ends  # an end belongs to the document it ends
        first_tokens = rng.integers(self.vocab_size, size=document[-1] + 1)
        tokens = (first_tokens[document] + np.arange(length)) % self.vocab_size
        if self.eod_token is not None:
            tokens[ends] = self.eod_token
        return tokens.astype(np.int64)

    def origin(self, index: int, /) -> list[Piece]:
        """A sample is a sequence of its own."""
        return [Piece("--mock-data", index, 0, self.seq_length + 1)]
