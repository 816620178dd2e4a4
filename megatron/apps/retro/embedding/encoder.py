"""An embedder by a model of tokens: micro batches of texts, sorted by length, and their vectors.

Shape suffixes: B micro batch, S tokens, H hidden, V vector.
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
"""Most tokens of a batch on a CPU: with more of them the states of a layer leave its caches."""
Rows = Sequence[Sequence[int] | npt.NDArray[np.int32]]
"""The tokens of texts, without special ones."""


def readable(text: str) -> str:
    """A text without the ends of documents that GPT-2's tokenizer writes, which no embedder
    reads."""
    return text.replace("<|endoftext|>", "")


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
    """An :class:`~megatron.apps.retro.embedding.Embedder` by an encoder on ``device``, which reads
    ``most`` tokens of a text, among them the special ones ``before`` and ``after`` it, and ``size``
    texts at a time."""

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
        """Vectors of a batch, [B, V], on ``device``."""

    def lengths(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        return np.array([len(row) for row in self.tokens(texts)], np.int64)

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self.embed_tokens(self.tokens(texts))

    def embed_tokens(self, rows: Rows) -> npt.NDArray[np.float32]:
        """The vector of each text, [n, V]; zeros without tokens."""
        vectors = np.zeros((len(rows), self.width), np.float32)
        with torch.inference_mode():
            for batch in self._batches(rows):
                vectors_BV = self.vectors(batch.to(self.device))
                vectors[batch.texts] = vectors_BV.float().cpu().numpy()
        return vectors

    def _batches(self, rows: Rows) -> Iterator[TokenBatch]:
        """The longest texts come first: memory might not suffice for them."""
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
    """Means over the tokens between the special ones, in float32 or more, [B, H]: with one before
    and one after them those at positions 1 to length - 2, as in Megatron's Retro."""
    dtype = torch.promote_types(states_BSH.dtype, torch.float32)
    places_S = torch.arange(states_BSH.shape[1], device=states_BSH.device)
    inside_BS = (places_S >= before) & (places_S < lengths_B[:, None] - after)
    weights_BS = inside_BS.to(dtype) / (lengths_B[:, None] - before - after)
    return torch.einsum("bs,bsh->bh", weights_BS, states_BSH.to(dtype))


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of weights by name, in their dtype of use, in any order."""
    parts: list[str | memoryview] = []
    for name, weight in sorted(weights, key=lambda item: item[0]):
        flat = weight.detach().cpu().contiguous().view(-1)
        parts.append(f"{name} {weight.dtype} {tuple(weight.shape)}")
        parts.append(flat.view(torch.uint8).numpy().data)
    return digest_of_parts(parts)
