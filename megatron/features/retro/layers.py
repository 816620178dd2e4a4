"""RETRO as a list of layers: a GPT in which some blocks attend to the neighbours that were
retrieved for each chunk of a sample (Borgeaud et al. 2022, arXiv:2112.04426, section 2; Wang et al.
2023, arXiv:2304.06762).

A sample is split into chunks of m tokens. A token attends to the neighbours of a chunk only once
the chunk is complete: from the last token of chunk i to the token before the last of chunk i + 1,
tokens attend to the neighbours of chunk i (chunked cross-attention, section 2.4 of the paper).

Shapes: B batch, S sequence, L whole chunks per sample, M tokens per chunk, K neighbours per chunk,
R tokens per neighbour with its continuation; N heads and D head width as in attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig, ParallelConfig
from megatron.features.cross_attention.layers import CrossAttention, CrossBlock
from megatron.features.retro.flags import RetrievalConfig
from megatron.features.retro.neighbors import NeighborStore
from megatron.model.attention import Attention
from megatron.model.block import Block
from megatron.model.embedding import InputEmbedding, vocabulary_layers
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.norm import FinalNorm
from megatron.parallel.tensor_parallel import TensorParallel

ADDED_PARTS = frozenset(
    {"cross_attention", "cross_attention_norm", "cross_attention_post_norm", "encoder"}
)
"""Name components of the parameters that are not in a GPT."""


class Folding(Protocol):
    """Cuts sequences into parts that attend by themselves: between projections and kernel, so that
    tensor and sequence parallelism know nothing of it."""

    def fold(self, q_BSND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the parts, each a separate sample. The positions in a
        part are 0, 1, 2, ..., and it has no masks."""
        ...

    def unfold(self, y_PSND: Tensor, samples: int, length: int) -> Tensor:
        """Return the attention output of the parts in the shape of ``samples`` samples with
        ``length`` queries each, [B, S, N, D]."""
        ...


def _folded(
    attended: Callable[..., Tensor],
    folding: Folding,
    heads: tuple[Tensor, Tensor, Tensor],
    state: LayerState,
) -> Tensor:
    samples, length = heads[0].shape[:2]
    y_PSND = attended(*folding.fold(*heads), state.changed(position_ids=None, masks=None))
    return folding.unfold(y_PSND, samples, length)


@dataclass(frozen=True)
class PartsApart:
    """Block-diagonal attention: the n-th group of ``queries`` tokens attends only to the n-th group
    of ``keys`` tokens in the same or another sequence. Used for the encoder's self-attention within
    a neighbour, and for the cross-attention of a chunk's neighbours to the chunk."""

    queries: int
    keys: int

    def fold(self, q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = k_BSKD.shape[1] // self.keys * self.keys
        k, v = (_parts(x[:, :whole], self.keys) for x in (k_BSKD, v_BSKD))
        return _parts(q_BTND, self.queries), k, v

    def unfold(self, y_PTND: Tensor, samples: int, length: int) -> Tensor:
        return _joined(y_PTND, samples)


@dataclass(frozen=True)
class ChunksToNeighbors:
    """Chunked cross-attention: ``chunk`` tokens, starting with the last token of a chunk, attend to
    the chunk's neighbours, which have ``retrieved`` tokens in total. A sample's first ``chunk`` - 1
    tokens attend to nothing, and their output is zero."""

    retrieved: int
    chunk: int

    def fold(self, q_BSND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = q_BSND.shape[1]
        attending = q_BSND[:, self.chunk - 1 :]
        missing = length // self.chunk * self.chunk - attending.shape[1]
        q = _parts(F.pad(attending, (0, 0, 0, 0, 0, missing)), self.chunk)
        k, v = (_parts(x, self.retrieved) for x in (k_BTKD, v_BTKD))
        return q, k, v

    def unfold(self, y_PMND: Tensor, samples: int, length: int) -> Tensor:
        y_BSND = _joined(y_PMND, samples)
        return F.pad(y_BSND, (0, 0, 0, 0, self.chunk - 1, 0))[:, :length]


def _parts(x_BSND: Tensor, length: int) -> Tensor:
    return x_BSND.unflatten(1, (-1, length)).flatten(0, 1)


def _joined(x_PSND: Tensor, samples: int) -> Tensor:
    return x_PSND.unflatten(0, (samples, -1)).flatten(1, 2)


class NeighborAttention(Attention):
    """Attention of every neighbour, of so many tokens, to itself."""

    def __init__(self, *arguments: Any, neighbor: int) -> None:
        super().__init__(*arguments)
        self.folding = PartsApart(neighbor, neighbor)
        self.packed = None  # heads are cut into parts before RoPE

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, turned: bool = False
    ) -> Tensor:
        """See :meth:`Attention.attended`."""
        return _folded(super().attended, self.folding, (q, k, v), state)


class ChunkedCrossAttention(CrossAttention):
    """Attention between neighbours and chunks, as a ``folding`` pairs them."""

    def __init__(self, *arguments: Any, folding: Folding) -> None:
        super().__init__(*arguments)
        self.folding = folding

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, turned: bool = False
    ) -> Tensor:
        """See :meth:`Attention.attended`."""
        return _folded(super().attended, self.folding, (q, k, v), state)

    def attend_stored(self, state: LayerState) -> Callable[..., Tensor]:
        """Return the function of the cache that attends to neighbours (:class:`NeighborStore`)."""
        assert state.cache is not None
        return partial(state.cache.neighbors.attend, state.encoder)


class RetrievalEncoder(nn.Module):
    """Encoder for the neighbours of each chunk. Its first block also attends to the chunk's hidden
    states. Like Megatron's encoder, it has no final norm."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, recompute_attention: bool) -> None:
        super().__init__()
        retrieval = config.part(RetrievalConfig)
        attention = replace(
            config.attention,
            attention_dropout=retrieval.retro_encoder_attention_dropout,
            sliding_window=None,
            attention_chunk_size=None,
        )
        config = replace(
            config, attention=attention, hidden_dropout=retrieval.retro_encoder_hidden_dropout
        )
        chunk = retrieval.retro_gpt_chunk_length
        apart = partial(NeighborAttention, neighbor=retrieval.retrieved_length)
        folding = PartsApart(retrieval.chunk_neighbors_length, chunk)
        across = partial(ChunkedCrossAttention, folding=folding)
        first = CrossBlock(config, 0, tp, recompute_attention, "full", apart, across)
        others = range(1, retrieval.retro_encoder_layers)
        self.layers = nn.ModuleList(
            [first, *(Block(config, n, tp, recompute_attention, "full", apart) for n in others)]
        )

    def forward(self, neighbors_BTH: Tensor, decoder_BSH: Tensor) -> Tensor:
        """Encode the embedded neighbours of all chunks, T = L x K x R concatenated tokens, given
        the decoder's hidden states. Return [B, T, H]."""
        state = LayerState(neighbors_BTH, encoder=decoder_BSH)
        for layer in self.layers:
            state = layer(state)
        return state.hidden.to(decoder_BSH.dtype)


class RetroBlock(CrossBlock):
    """A block that attends to neighbours between its attention and its MLP. The first one of a
    model, which ``reads`` them, has the encoder: the state's ``encoder`` is the embedded neighbours
    before it, and the encoder's output after it."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        recompute_attention: bool,
        reads: bool,
    ) -> None:
        retrieval = config.part(RetrievalConfig)
        chunk = retrieval.retro_gpt_chunk_length
        folding = ChunksToNeighbors(retrieval.chunk_neighbors_length, chunk)
        across = partial(ChunkedCrossAttention, folding=folding)
        super().__init__(config, layer, tp, recompute_attention, across=across)
        self.tp, self.chunk, self.gate = tp, chunk, retrieval.retro_attention_gate
        self.encoder = RetrievalEncoder(config, tp, recompute_attention) if reads else None

    def attend_across(self, normed: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """See :meth:`CrossBlock.attend_across`; nothing is added to tokens before the last one of
        the first chunk, whose projection would have a bias, nor to any without neighbours."""
        if state.cache is not None:
            return self._attend_stored(normed, state, state.cache.neighbors)
        if state.encoder is None:
            return torch.zeros_like(normed), state
        if self.encoder is not None:
            state = state.changed(encoder=self.encoder(state.encoder, normed))
        seen, state = super().attend_across(normed, state)
        places_S = torch.arange(seen.shape[1] * self.tp.slices, device=seen.device)
        before_S = self.tp.own(places_S, 0) < self.chunk - 1
        return self._gated(seen, before_S), state

    def _attend_stored(
        self, normed: Tensor, state: LayerState, store: NeighborStore | None
    ) -> tuple[Tensor, LayerState]:
        """Attend to neighbours in generation, where a chunk may end at any current token."""
        if store is None:
            return torch.zeros_like(normed), state
        if self.encoder is not None:
            chunks = store.by_chunk(store.chunk_states(normed))
            read = [
                self.encoder(neighbors, chunk)
                for neighbors, chunk in zip(store.by_chunk(state.encoder), chunks, strict=True)
            ]
            state = state.changed(encoder=torch.cat(read, 1) if read else None)
        seen, state = super().attend_across(normed, state)
        assert state.position_ids is not None
        return self._gated(seen, state.position_ids[0] < self.chunk - 1), state

    def _gated(self, seen_BSH: Tensor, before_S: Tensor) -> Tensor:
        seen_BSH = seen_BSH.masked_fill(before_S[:, None], 0.0)
        return seen_BSH if self.gate == 1.0 else self.gate * seen_BSH


def _embed_neighbors(table: nn.Module, state: LayerState) -> LayerState:
    tokens_BT = state.batch.neighbors_BLKR.flatten(1)
    if not tokens_BT.shape[1]:
        return state
    return state.changed(encoder=table(LayerState(tokens_BT)).hidden)


def _place_neighbors(length: int, embedding: nn.Module, state: LayerState) -> LayerState:
    if state.encoder is None:
        return state
    neighbors_BLKR = state.batch.neighbors_BLKR
    places_R = torch.arange(length, device=neighbors_BLKR.device)
    places_T = places_R.repeat(neighbors_BLKR.shape[1] * neighbors_BLKR.shape[2])
    placed = embedding(LayerState(state.encoder, position_ids=places_T))
    return state.changed(encoder=placed.hidden)


def retro_layers(
    model: ModelConfig,
    parallel: ParallelConfig,
    costs: Sequence[float],
    tp: TensorParallel | None = None,
) -> list[LayerSpec]:
    """Return the layers of a RETRO model. They are a GPT's, with the same names, except that some
    blocks attend to neighbours. Before the first of these, the neighbours are embedded with the
    text's token and position embeddings. ``costs`` has the FLOPs of each block. ``tp`` is None for
    a single process."""
    tp = tp or TensorParallel()
    retrieval = model.part(RetrievalConfig)
    attending = [number - 1 for number in retrieval.retro_cross_attention_layers]
    selective = "core_attn" in parallel.recomputed_modules
    learned = model.positions.position_embedding_type == "learned_absolute"
    words, head = vocabulary_layers(model, parallel, tp, model.embedding.lm_head_bias)
    words = replace(words, tied_key="embed")
    shared = "positions" if learned or model.norm.embed_layernorm else None
    positions = LayerSpec("embedding", partial(InputEmbedding, model, tp), shared)
    place = partial(_place_neighbors, retrieval.retrieved_length)
    layers = [words, positions]
    for n, cost in enumerate(costs):
        block: Callable[[], nn.Module] = partial(Block, model, n, tp, selective)
        if n in attending:
            block = partial(RetroBlock, model, n, tp, selective, reads=n == attending[0])
        if n == attending[0]:
            layers += [
                replace(words, forward=_embed_neighbors, with_next_block=True),
                replace(positions, forward=place, with_next_block=True),
            ]
        layers.append(LayerSpec(f"layers.{n}", block, block=True, cost=int(cost)))
    return [*layers, LayerSpec("final_norm", partial(FinalNorm, model, tp)), head]


def encoder_travels(model: ModelConfig, index: int) -> bool:
    """Return whether any layer from ``index`` on reads the encoder output of a layer before it."""
    attending = model.part(RetrievalConfig).retro_cross_attention_layers
    before = 3  # token embeddings and positions, of the text and of its neighbours, minus one
    return before + attending[0] < index <= before + attending[-1]
