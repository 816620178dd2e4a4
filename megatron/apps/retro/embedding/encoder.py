"""Base class of embedders that run a token model on micro batches of texts with similar lengths.

Shape suffixes: B micro batch, S tokens, H hidden, V embedding width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.features.evaluation.checkpoints import MULTIPLE
from megatron.util.digests import digest_of_parts

CPU_TOKENS = 2048
"""Maximum tokens per batch on a CPU. Hidden states of larger batches exceed the cache."""
Rows = Sequence[Sequence[int] | npt.NDArray[np.int32]]
"""Tokens of each text, without special tokens."""


def readable(text: str) -> str:
    """Return a text without GPT-2's end-of-document markers, which embedders cannot read."""
    return text.replace("<|endoftext|>", "")


class TokenBatch(NamedTuple):
    """Batch of texts of similar lengths.

    Attributes:
        texts: indices of the texts, [B].
        tokens_BS: token ids, including special tokens, then padding; int64.
        lengths_B: number of tokens of each text without padding; int64.
    """

    texts: npt.NDArray[np.int64]
    tokens_BS: Tensor
    lengths_B: Tensor

    @property
    def padded(self) -> bool:
        return int(self.lengths_B.min()) < self.tokens_BS.shape[1]

    @property
    def kept_BS(self) -> Tensor:
        """1 for tokens, 0 for padding; int64."""
        places_S = torch.arange(self.tokens_BS.shape[1], device=self.tokens_BS.device)
        return (places_S < self.lengths_B[:, None]).long()

    def to(self, device: torch.device) -> TokenBatch:
        tokens_BS = self.tokens_BS.to(device, non_blocking=True)
        return TokenBatch(self.texts, tokens_BS, self.lengths_B.to(device, non_blocking=True))


class EncoderEmbedder(ABC):
    """An :class:`~megatron.apps.retro.embedding.Embedder` that runs an encoder on ``device``. It
    reads at most ``most`` tokens of a text, including the special tokens ``before`` and ``after``
    the text. A batch has at most ``size`` texts."""

    width: int
    identity: Mapping[str, Any]
    before: Sequence[int]
    after: Sequence[int]
    most: int
    size: int
    pad: int
    device: torch.device

    @abstractmethod
    def tokens(self, texts: Sequence[str]) -> Rows: ...

    @abstractmethod
    def vectors(self, batch: TokenBatch) -> Tensor:
        """Return the embeddings of a batch, [B, V], on ``device``."""

    def lengths(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        return np.array([len(row) for row in self.tokens(texts)], np.int64)

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self.embed_tokens(self.tokens(texts))

    def embed_tokens(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Return the embedding of each text, [n, V]. A text without tokens gets zeros."""
        vectors = np.zeros((len(rows), self.width), np.float32)
        with torch.inference_mode():
            for batch in self._batches(rows):
                vectors_BV = self.vectors(batch.to(self.device))
                vectors[batch.texts] = vectors_BV.float().cpu().numpy()
        return vectors

    def _batches(self, rows: Rows) -> Iterator[TokenBatch]:
        """Yield batches, longest texts first, so that running out of memory shows immediately."""
        first, special = len(self.before), len(self.before) + len(self.after)
        inner = np.minimum(np.fromiter(map(len, rows), np.int64, len(rows)), self.most - special)
        order = np.argsort(-inner, kind="stable")
        order = order[: np.count_nonzero(inner)]
        cpu, start = self.device.type == "cpu", 0
        multiple = 1 if cpu else MULTIPLE
        while start < len(order):
            width = -(-(int(inner[order[start]]) + special) // multiple) * multiple
            size = min(self.size, max(1, CPU_TOKENS // width)) if cpu else self.size
            texts = order[start : start + size]
            start += size
            tokens = np.full((len(texts), width), self.pad, np.int64)
            tokens[:, :first] = self.before
            for row, text in enumerate(texts):
                end = first + inner[text]
                tokens[row, first:end] = rows[text][: inner[text]]
                tokens[row, end : end + len(self.after)] = self.after
            lengths_B = torch.from_numpy(inner[texts] + special)
            yield TokenBatch(texts, torch.from_numpy(tokens), lengths_B)


def mean_inside(states_BSH: Tensor, lengths_B: Tensor, before: int = 1, after: int = 1) -> Tensor:
    """Return the mean over the tokens between the special tokens, in float32 or wider, [B, H]. With
    one special token at each end, these are positions 1 to length - 2, as in Megatron's Retro."""
    dtype = torch.promote_types(states_BSH.dtype, torch.float32)
    places_S = torch.arange(states_BSH.shape[1], device=states_BSH.device)
    inside_BS = (places_S >= before) & (places_S < lengths_B[:, None] - after)
    weights_BS = inside_BS.to(dtype) / (lengths_B[:, None] - before - after)
    return torch.einsum("bs,bsh->bh", weights_BS, states_BSH.to(dtype))


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of named weights, in any order, in the dtype in which they are used."""
    parts: list[str | memoryview] = []
    for name, weight in sorted(weights, key=lambda item: item[0]):
        flat = weight.detach().cpu().contiguous().view(-1)
        parts.append(f"{name} {weight.dtype} {tuple(weight.shape)}")
        parts.append(flat.view(torch.uint8).numpy().data)
    return digest_of_parts(parts)
