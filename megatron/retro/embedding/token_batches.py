"""From texts to the micro batches of an encoder: tokenized, cut, and sorted by length.

Shape suffixes: B micro batch, S tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BATCH_TOKENS = 4096
"""Most tokens of a micro batch on a CPU, whose caches hold no more: beyond it a token costs more
time, not less."""


class TokenBatch(NamedTuple):
    """Texts of similar lengths.

    Attributes:
        texts: their numbers, [B].
        tokens_BS: special tokens included, then padding; int64.
        lengths_B: tokens of each that are no padding; int64.
    """

    texts: npt.NDArray[np.int64]
    tokens_BS: Tensor
    lengths_B: Tensor

    @property
    def padded(self) -> bool:
        """Whether there is padding."""
        return int(self.lengths_B.min()) < self.tokens_BS.shape[1]

    def to(self, device: torch.device) -> TokenBatch:
        return self._replace(
            tokens_BS=self.tokens_BS.to(device, non_blocking=True),
            lengths_B=self.lengths_B.to(device, non_blocking=True),
        )

    def kept(self) -> Tensor:
        """bool [B, S]: True for tokens, False for padding."""
        places_S = torch.arange(self.tokens_BS.shape[1], device=self.tokens_BS.device)
        return places_S < self.lengths_B[:, None]


def token_batches(
    rows: Sequence[Sequence[int] | npt.NDArray[np.int32]], size: int, pad: int, multiple: int = 1
) -> Iterator[TokenBatch]:
    """The micro batches of tokenized texts, the longest first: for those memory might not suffice.

    Args:
        rows: ids of each text, special tokens included.
        size: most texts of a batch.
        multiple: of which padded lengths are.
    """
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        width = -(-int(lengths[order[start]]) // multiple) * multiple
        texts = order[start : start + size]
        tokens = np.full((len(texts), width), pad, np.int64)
        for row, text in enumerate(texts):
            tokens[row, : lengths[text]] = rows[text]
        yield TokenBatch(texts, torch.from_numpy(tokens), torch.from_numpy(lengths[texts]))
        start += len(texts)


def embedded(
    batches: Iterator[TokenBatch],
    states: Callable[[TokenBatch], Tensor],
    count: int,
    width: int,
    device: torch.device,
) -> npt.NDArray[np.float32]:
    """The vectors [B, H] that a function gives of each batch, in the order of the texts,
    [count, width]; zeros for a text in no batch."""
    found = np.zeros((count, width), np.float32)
    with torch.inference_mode():
        for batch in batches:
            found[batch.texts] = states(batch.to(device)).float().cpu().numpy()
    return found


def mean_inside(states_BSH: Tensor, lengths_B: Tensor) -> Tensor:
    """Means over the tokens between the special ones, positions 1 to length - 2, in float32 or
    more, [B, H]; zeros where there are none. Megatron's Retro makes its vectors so."""
    dtype = torch.promote_types(states_BSH.dtype, torch.float32)
    places_S = torch.arange(states_BSH.shape[1], device=states_BSH.device)
    inside_BS = (places_S > 0) & (places_S < lengths_B[:, None] - 1)
    weights_BS = inside_BS.to(dtype) / (lengths_B[:, None] - 2).clamp(min=1)
    return torch.einsum("bs,bsh->bh", weights_BS, states_BSH.to(dtype))
