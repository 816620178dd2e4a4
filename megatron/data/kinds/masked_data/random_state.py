"""Random numbers that depend on the seed, the part and the number of an epoch or sample alone."""

from __future__ import annotations

import zlib

import numpy as np

_EPOCHS, _SAMPLES = 0, 1


def epoch_rng(seed: int, part: str, epoch: int) -> np.random.Generator:
    """For which tokens the samples of an epoch are made of; `part` is "train", "valid" ..."""
    return np.random.default_rng([seed, zlib.crc32(part.encode()), _EPOCHS, epoch])


def sample_rng(seed: int, part: str, index: int) -> np.random.Generator:
    """For what is drawn within sample `index`: cuts, masks, spans."""
    return np.random.default_rng([seed, zlib.crc32(part.encode()), _SAMPLES, index])
