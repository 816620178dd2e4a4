"""Samples of several sequences: which ones share a sample, the positions of their tokens, padding.

Shape suffixes: B micro batch, S sequence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.tokenizer import Tokenizer


def best_fit(
    lengths: npt.NDArray[np.integer], order: npt.NDArray[np.int64], capacity: int
) -> npt.NDArray[np.int64]:
    """The number of the sample, from 0, of each sequence in `order`: the fullest one with space for
    all of it, else a new one. `lengths` has those of every sequence, none above `capacity` tokens.

    Best fit needs at most 1.7 times the fewest samples possible (Johnson et al. 1974); on lengths
    of instruction data it is within a few percent. In a random order, unlike one by length, samples
    are random mixtures and no epoch repeats those of another.
    """
    open_samples: list[list[int]] = [[] for _ in range(capacity + 1)]  # by their free space
    spaces = 0  # bit s is set where a sample has space for s tokens: shifts find the next in C
    sample_of = np.empty(len(order), np.int64)
    samples = 0
    for place, length in enumerate(lengths[order].tolist()):
        assert length <= capacity
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            sample = open_samples[space].pop()
            if not open_samples[space]:
                spaces ^= 1 << space
        else:
            space, sample = capacity, samples
            samples += 1
        sample_of[place] = sample
        space -= length
        if space:
            open_samples[space].append(sample)
            spaces |= 1 << space
    return sample_of


def padding_token(tokenizer: Tokenizer) -> int:
    """The tokenizer's padding token, or the end of document where it has none."""
    try:
        return tokenizer.pad
    except ValueError:
        return tokenizer.eod


def positions_within(document_ids_BS: Tensor) -> Tensor:
    """int64 [B, S]: positions that restart where the id (int64) changes."""
    last_B1 = document_ids_BS[:, -1:]
    return restarting_positions(document_ids_BS.diff(append=last_B1 + 1) != 0)


def restarting_positions(is_last_BS: Tensor) -> Tensor:
    """int64 [B, S]: positions that restart after each last token of a sequence (bool)."""
    positions_S = torch.arange(is_last_BS.shape[1])
    start_BS = torch.zeros_like(is_last_BS, dtype=torch.int64)
    start_BS[:, 1:] = torch.where(is_last_BS[:, :-1], positions_S[1:], 0)
    return positions_S - start_BS.cummax(dim=1).values
