"""Layers of bi-encoders: one or two BERTs. A query's score for a context is the inner product of
their embeddings.

An embedding is the hidden state of [CLS], or its linear projection. Training maximizes the score of
each query's own context among the contexts of all data-parallel ranks (Lee et al. 2019,
arXiv:1906.00300, section 5; Karpukhin et al. 2020, arXiv:2004.04906, section 3.2).

Shapes: B queries and C contexts of a rank, R queries and A contexts of all ranks, D embedding size,
S sequence (a rank's slice of it with sequence parallelism), H hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig, ParallelConfig
from megatron.features.masked.bert import masks
from megatron.features.masked.heads import LabelledBatch, first_token
from megatron.features.masked.layers import bert_layers, leave_encoder
from megatron.features.retrieval.flags import BiencoderConfig
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.parallel.layers import WholeLinear
from megatron.parallel.loss_head import Targets
from megatron.parallel.mesh import SAMPLES, Group
from megatron.parallel.shard import initial
from megatron.parallel.tensor_parallel import TensorParallel

QUERY, CONTEXT, SHARED = "query_model", "context_model", "shared_model"
"""Prefixes of the canonical names of the encoders' parameters, as in Megatron's checkpoints."""
RETRIEVAL_LOSS = "retrieval loss"
HEAD, PROJECTION = "head", "projection"


class RetrieverBatch(NamedTuple):
    """Micro batch of queries and contexts. A query's label is the index of its context in the
    batch. A context's label is 1, or 0 if the row is a placeholder."""

    query: LabelledBatch
    context: LabelledBatch

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RetrieverBatch:
        return RetrieverBatch(*(rows.to(device, non_blocking) for rows in self))


class VectorHead(nn.Module):
    """Head that computes a text's embedding, which is the same on every tensor-parallel rank."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, width = tp, model.part(BiencoderConfig).biencoder_projection_dim
        if width:
            init, whole = initial(model), tp.whole
            linear = WholeLinear(model.hidden_size, width, bias=True, init=init, tp=whole)
            self.add_module(PROJECTION, linear)

    def forward(self, state: LayerState) -> LayerState:
        """Replace the state's hidden states [B, S, H] with embeddings [B, 1, D]."""
        x_BD = first_token(self.tp, state.hidden)
        for linear in self.children():
            x_BD = linear(x_BD)
        return state.with_hidden(x_BD[:, None])


class InBatchLoss(nn.Module):
    """Cross entropy of each query's own context among the contexts of all data-parallel ranks.
    Collective across these ranks."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        part, self.ranks = model.part(BiencoderConfig), tp.over(*SAMPLES)
        self.scale = model.hidden_size**-0.5 if part.retriever_score_scaling else 1.0
        self.most = part.retriever_report_topk_accuracies

    def forward(self, state: LayerState) -> LayerState:
        """Compute losses from embeddings. Query embeddings are in ``encoder`` [B, 1, D] and context
        embeddings in ``hidden`` [C, 1, D]. If ``encoder`` is None, ``hidden`` has queries followed
        by contexts. Without targets, return the state unchanged."""
        if state.targets is None:
            return state
        query_BD, context_CD = vectors_of(state)
        labels_B, kept_C = state.batch.query.labels_B, state.batch.context.labels_B
        ranks, count = self.ranks, len(context_CD)
        query_RD, context_AD = (_AllRows.apply(x, ranks) for x in (query_BD, context_CD))
        labels_R = all_rows(labels_B + ranks.rank * count, ranks)
        scores_RA = self.scale * query_RD @ context_AD.t()
        scores_RA = scores_RA.masked_fill(all_rows(kept_C, ranks) == 0, float("-inf"))
        state = state.with_loss(RETRIEVAL_LOSS, F.cross_entropy(scores_RA, labels_R))
        places_R = places(scores_RA.detach(), labels_R)
        for k in self.most:
            share = (places_R < k).to(scores_RA.dtype).mean()
            state = state.with_loss(accuracy_name(k), 100.0 * share)
        return state


def accuracy_name(k: int) -> str:
    """Return the log name of top-``k`` accuracy."""
    return f"top{k}_acc"


def losses_of(model: ModelConfig) -> dict[str, float]:
    """Return `ModelSpec.losses` for a bi-encoder."""
    most = model.part(BiencoderConfig).retriever_report_topk_accuracies
    return {RETRIEVAL_LOSS: 1.0, **dict.fromkeys(map(accuracy_name, most), 0.0)}


def vectors_of(state: LayerState) -> tuple[Tensor, Tensor]:
    """Return the embeddings of queries [B, D] and of contexts [C, D], in float32 or float64."""
    vectors = state.hidden[:, 0]
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    if state.encoder is None:
        query, context = vectors.split([len(rows.tokens_BS) for rows in state.batch])
        return query, context
    return state.encoder[:, 0].to(vectors.dtype), vectors


def places(scores_RA: Tensor, labels_R: Tensor) -> Tensor:
    """Return the rank of each query's own context, from 0, int64 [R]: the number of contexts with a
    higher score, or with the same score and a smaller index."""
    right_R1 = scores_RA.gather(1, labels_R[:, None])
    before = torch.arange(scores_RA.shape[1], device=scores_RA.device) < labels_R[:, None]
    return ((scores_RA > right_R1) | ((scores_RA == right_R1) & before)).sum(1)


def all_rows(x: Tensor, ranks: Group) -> Tensor:
    """All-gather rows in rank order. Each rank must have the same number of rows."""
    if ranks.size == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in ranks.ranks]
    dist.all_gather(parts, x.contiguous(), group=ranks.handle)
    return torch.cat(parts)


class _AllRows(torch.autograd.Function):
    """Differentiable :func:`all_rows`. Every rank computes the whole loss, and gradients are
    averaged over ranks, so the backward pass multiplies the gradient of a rank's own rows by the
    number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Group) -> Tensor:
        ctx.ranks, ctx.count = ranks, len(x)
        return all_rows(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        first = ctx.ranks.rank * ctx.count
        return grad[first : first + ctx.count] * ctx.ranks.size, None


def encoder_layers(
    model: ModelConfig, parallel: ParallelConfig, name: str, tp: TensorParallel
) -> list[LayerSpec]:
    """Return the layers of the encoder ``name``, from token embeddings to the text's embedding."""
    layers = bert_layers(replace(model, head="span"), parallel, tp)
    end = [layer.name for layer in layers].index("final_norm") + 1
    layers = [*layers[:end], LayerSpec(HEAD, partial(VectorHead, model, tp))]
    return [replace(layer, name=f"{name}.{layer.name}") for layer in layers]


def biencoder_layers(
    model: ModelConfig, parallel: ParallelConfig, tp: TensorParallel | None = None
) -> list[LayerSpec]:
    """Return the layers of a bi-encoder and its loss. ``tp`` is None for a single process."""
    tp = tp or TensorParallel()
    loss = LayerSpec("loss", partial(InBatchLoss, model, tp))
    if model.part(BiencoderConfig).biencoder_shared_query_context_model:
        return [*encoder_layers(model, parallel, SHARED, tp), loss]
    words, positions, *rest = encoder_layers(model, parallel, CONTEXT, tp)
    entering = partial(_enter_context, model)
    words = replace(words, forward=entering, with_next_block=True)
    # the first stage's state has the attention mask of the queries, not the contexts
    if parallel.pipeline_model_parallel_size > 1:
        reading = partial(_read_context, model)
        rest = [replace(layer, forward=reading) if layer.block else layer for layer in rest]
    context = [words, replace(positions, with_next_block=True), *rest]
    *queries, head = encoder_layers(model, parallel, QUERY, tp)
    return [*queries, replace(head, forward=leave_encoder), *context, loss]


def _enter_context(model: ModelConfig, words: nn.Module, state: LayerState) -> LayerState:
    rows, seen = state.batch.context, masks(model, state.batch.context)
    return words(state.changed(hidden=rows.tokens_BS, token_types=rows.types_BS, masks=seen))


def _read_context(model: ModelConfig, block: nn.Module, state: LayerState) -> LayerState:
    return block(state.changed(masks=masks(model, state.batch.context)))


def context_start(model: ModelConfig) -> int | None:
    """Return the index of the layer that embeds contexts' tokens; None with a shared encoder."""
    # + 4: token and position embeddings, final norm, and head of the query encoder
    return model.num_layers + 4 if model.blocks > model.num_layers else None


def travels(
    model: ModelConfig, state: LayerState, tp: TensorParallel, index: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors sent across a pipeline stage boundary: the hidden states [B,
    S / slices, H]. Inside the context encoder, the query embeddings [B, 1, D] are sent too; where
    it begins, only these are sent."""
    start, queries = context_start(model), len(state.batch.query.tokens_BS)
    width = model.part(BiencoderConfig).biencoder_projection_dim or model.hidden_size
    if start is not None and index == start:
        return {"encoder": (queries, 1, width)}
    within = start is not None and index > start
    samples, length = (state.batch.context.tokens_BS if within else state.hidden).shape
    assert length % tp.slices == 0
    shapes: dict[str, tuple[int, ...]] = {"encoder": (queries, 1, width)} if within else {}
    return {"hidden": (samples, length // tp.slices, model.hidden_size)} | shapes


def rows_state(model: ModelConfig, rows: LabelledBatch, batch: Any) -> LayerState:
    """Return the initial state for a batch of texts ``rows``, for the first encoder."""
    return LayerState(
        hidden=rows.tokens_BS,
        token_types=rows.types_BS,
        masks=masks(model, rows),
        targets=Targets(rows.labels_B, torch.ones_like(rows.labels_B), of_samples=True),
        batch=batch,
    )


def begin(model: ModelConfig, batch: RetrieverBatch) -> LayerState:
    """Return a micro batch's initial state. A shared encoder reads queries, then contexts."""
    query, context = batch
    if not model.part(BiencoderConfig).biencoder_shared_query_context_model:
        return rows_state(model, query, batch)
    tokens, types, kept = (torch.cat(pair) for pair in zip(query[:3], context[:3], strict=True))
    padded = query.padded or context.padded
    rows = LabelledBatch(tokens, types, kept, query.labels_B, padded=padded)
    return rows_state(model, rows, batch)
