"""Layers for multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).

For each additional token, these layers follow the model's head: the model's token embedding of the
token before it, a projection that merges the embedding with the preceding hidden states, a block
with the configuration of the last layer, a norm, and the model's head. All are on the pipeline
stage of the last layer, which has copies of the embedding. Gradients are summed as for other tied
layers.

Tokens, positions and targets are shifted within whole sequences on every rank, before a rank takes
its slice of a sequence, so that context-parallel ranks need not communicate.

Shapes: B micro batch, S sequence (in layers a rank's slice of it with sequence parallelism), P
predicted positions, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig, ParallelConfig
from megatron.config.features import AHEAD
from megatron.data.gpt_batch import GPTBatch
from megatron.features.multi_token.flags import MultiTokenConfig, loss_name
from megatron.model.block import Block
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.norm import FinalNorm, build_norm
from megatron.model.spec import ModelSpec
from megatron.parallel.cross_entropy import linear_cross_entropy
from megatron.parallel.layers import WholeLinear
from megatron.parallel.loss_head import HeadInput, Targets
from megatron.parallel.shard import initial
from megatron.parallel.tensor_parallel import TensorParallel


def with_losses_ahead(spec: ModelSpec, model: ModelConfig) -> ModelSpec:
    """Return the specification of a model that is also trained on the losses of additional tokens.
    These losses have no perplexity and are not included in ``lm loss``."""
    weights = model.part(MultiTokenConfig).loss_weights

    def begin(batch: GPTBatch) -> LayerState:
        depths = map(partial(state_ahead, batch), range(1, len(weights) + 1))
        return spec.begin(batch).changed(batch=batch, ahead=tuple(depths))

    return replace(
        spec,
        begin=begin,
        losses={**spec.losses, **weights},
        no_perplexity=spec.no_perplexity | weights.keys(),
        training_only=spec.training_only | weights.keys(),
    )


def state_ahead(batch: GPTBatch, shift: int) -> LayerState:
    """Return the initial state of a micro batch ``shift`` tokens ahead. Each position has the token
    that is ``shift`` positions later, that token's position, and its target. The last ``shift``
    positions have no such token; their values are 0 and do not count.

    If attention is confined to documents, a position counts only if its target and everything that
    it reads are in its own document, as in Megatron-LM's packed sequences, because the model's
    hidden state has not seen the next document. The label of a sample's last token belongs to that
    token's document. Megatron-LM shifts samples cut from a stream across documents.
    """
    tokens_BS, documents_BS = batch.tokens_BS, batch.document_ids_BS
    positions_BS = batch.position_ids_BS
    if positions_BS is None:
        positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
    labels_BS, mask_BS = (shifted(x, shift) for x in (batch.labels_BS, batch.loss_mask_BS))
    tokens_BS = shifted(tokens_BS, shift)
    if documents_BS is not None:
        last_B1 = documents_BS[:, -1:]
        of_labels_BS = torch.cat((documents_BS[:, 1:], last_B1), dim=1)
        read_BS = shifted(documents_BS, shift, -1) == documents_BS
        tokens_BS = tokens_BS.masked_fill(~read_BS, 0)
        same_BS = read_BS & (shifted(of_labels_BS, shift, -1) == documents_BS)
        mask_BS = mask_BS * same_BS
    targets = Targets(labels_BS, mask_BS)
    if batch.positions_BP is not None:
        targets = _at_positions(targets, batch.positions_BP, shift)
    return LayerState(tokens_BS, position_ids=shifted(positions_BS, shift), targets=targets)


def shifted(x_BS: Tensor, shift: int, fill: int = 0) -> Tensor:
    """Shift [B, S] left by ``shift`` positions, and fill the end with ``fill``."""
    end_BS = x_BS.new_full((len(x_BS), shift), fill)
    return torch.cat((x_BS[:, shift:], end_BS), dim=1)


def _at_positions(targets: Targets, positions_BP: Tensor, shift: int) -> Targets:
    """Select the targets, already shifted, at ``positions_BP`` - ``shift``, so that the predicted
    tokens stay the same. At the start of a row this position does not exist; such targets get mask
    0."""
    length = targets.labels_BS.shape[1]
    before_BP = positions_BP % length >= shift
    places_BP = positions_BP - shift * before_BP
    labels_BP, mask_BP = targets.at(places_BP)[:2]
    return Targets(labels_BP, mask_BP * before_BP, places_BP)


class Merge(nn.Module):
    """Projection of a token's embedding and the preceding hidden states, each normalised, to the
    input of a block."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        width = config.hidden_size
        self.embed_norm, self.hidden_norm = build_norm(config, tp), build_norm(config, tp)
        self.merge = WholeLinear(2 * width, width, bias=False, init=initial(config), tp=tp)
        self.widens = config.fp32_residual_connection

    def forward(self, state: LayerState) -> LayerState:
        """Project ``hidden`` [B, S, 2 H], embeddings followed by hidden states, to [B, S, H]."""
        embedded_BSH, x_BSH = state.hidden.chunk(2, dim=-1)
        normed = self.embed_norm(embedded_BSH), self.hidden_norm(x_BSH)
        y_BSH = self.merge(torch.cat(normed, dim=-1))
        if self.widens:
            y_BSH = y_BSH.to(torch.promote_types(y_BSH.dtype, torch.float32))
        return state.with_hidden(y_BSH)


class BlockAhead(Block):
    """Block with the configuration of the model's last layer, but its own layer number."""

    def __init__(
        self, config: ModelConfig, depth: int, tp: TensorParallel, recompute_attention: bool
    ) -> None:
        super().__init__(config, config.num_layers - 1, tp, recompute_attention)
        for module in self.modules():
            if hasattr(module, "layer"):
                module.layer = config.num_layers + depth  # type: ignore[assignment]


def with_blocks_ahead(spec: ModelSpec, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
    """Return the specification with the multi-token prediction layers added after the head."""
    part = model.part(MultiTokenConfig)

    def layers(tp: TensorParallel) -> list[LayerSpec]:
        main = _with_keys(spec.layers(tp))
        last = max(place for place, layer in enumerate(main) if layer.block)
        ahead: list[LayerSpec] = []
        for depth in range(part.blocks_ahead):
            further = _further_layers(
                model, parallel, tp, 0 if part.mtp_use_repeated_layer else depth
            )
            if part.mtp_use_repeated_layer:
                further = [replace(layer, tied_key=f"ahead_{n}") for n, layer in enumerate(further)]
            run = partial(_if_predicting, depth, part.mtp_detach_heads)
            ahead += [
                replace(main[0], forward=partial(run, _embedded)),
                replace(main[1], forward=partial(run, _completed)),
                *(replace(layer, forward=partial(run, _applied)) for layer in further),
                replace(main[-1], forward=partial(run, _predicted)),
            ]
        per_token = len(ahead) // part.blocks_ahead
        ahead = [replace(layer, ahead=place // per_token) for place, layer in enumerate(ahead)]
        together = [replace(layer, with_next_block=True) for layer in (*main[last:], *ahead[:-3])]
        return [*main[:last], *together, *ahead[-3:]]

    return replace(spec, layers=layers)


def _further_layers(
    model: ModelConfig, parallel: ParallelConfig, tp: TensorParallel, depth: int
) -> list[LayerSpec]:
    """Return the layers that only one additional token uses: projection, block and norm."""
    selective, name = "core_attn" in parallel.recomputed_modules, f"{AHEAD}{depth}"
    return [
        LayerSpec(name, partial(Merge, model, tp)),
        LayerSpec(f"{name}.block", partial(BlockAhead, model, depth, tp, selective), block=True),
        LayerSpec(name, partial(FinalNorm, model, tp)),  # its parameters are {name}.norm.*
    ]


def _with_keys(layers: list[LayerSpec]) -> list[LayerSpec]:
    """Add tied keys to the layers that are used several times: the embedding and the head."""
    keys = {0: "embed", 1: "inputs", len(layers) - 1: "head"}
    return [
        replace(layer, tied_key=layer.tied_key or keys.get(place))
        for place, layer in enumerate(layers)
    ]


def _if_predicting(
    depth: int, detach: bool, run: Any, module: nn.Module, state: LayerState
) -> LayerState:
    """Run a layer if an additional token is to be predicted, otherwise return the state unchanged.
    Scoring predicts none, and generation only when it drafts tokens."""
    if not state.ahead or (state.targets is None and state.cache is None):
        return state
    return run(depth, detach, module, state)


def _embedded(depth: int, detach: bool, table: nn.Module, state: LayerState) -> LayerState:
    """Set ``hidden`` to [B, S, 2 H]: embeddings of the tokens ahead, followed by hidden states."""
    x_BSH = state.hidden.detach() if detach and depth == 0 else state.hidden
    embedded_BSH = table(state.ahead[depth]).hidden
    return state.with_hidden(torch.cat((embedded_BSH, x_BSH), dim=-1))


def _completed(depth: int, detach: bool, inputs: nn.Module, state: LayerState) -> LayerState:
    """Add positions, scale and dropout to embeddings in ``hidden``, as before the first block."""
    embedded_BSH, x_BSH = state.hidden.chunk(2, dim=-1)
    embedded_BSH = inputs(state.ahead[depth].with_hidden(embedded_BSH)).hidden
    if detach:
        embedded_BSH = _WithoutGradient.apply(embedded_BSH)
    return state.with_hidden(torch.cat((embedded_BSH, x_BSH), dim=-1))


def _applied(depth: int, detach: bool, module: nn.Module, state: LayerState) -> LayerState:
    return module(state)


def _predicted(depth: int, detach: bool, table: nn.Module, state: LayerState) -> LayerState:
    weights_2 = None if state.objective is None else state.batch.weights_2
    objective = LossAhead(depth, detach, weights_2)
    targets = state.ahead[depth].targets
    predicted = table(state.changed(targets=targets, objective=objective), project=True)
    return predicted.changed(targets=state.targets, objective=state.objective)


@dataclass(frozen=True)
class LossAhead:
    """Objective for one additional token: mean cross entropy over the tokens that count.

    Attributes:
        weights_2: weights of the micro batch within its step, if the model's own loss is
            weighted.
    """

    depth: int
    detach: bool
    weights_2: Tensor | None = None

    @property
    def losses(self) -> dict[str, float]:
        return {loss_name(self.depth): 1.0}

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        x_BPH, weight_VH, bias_V, targets, head = inputs
        if self.detach:
            weight_VH, bias_V = weight_VH.detach(), None if bias_V is None else bias_V.detach()
        loss = linear_cross_entropy(x_BPH, weight_VH, targets, head, bias_V)
        if self.weights_2 is not None:
            loss = loss * self.weights_2[0].to(loss.dtype)
        return {loss_name(self.depth): loss}


class _WithoutGradient(torch.autograd.Function):
    """Identity with a zero gradient. A pipeline stage needs a gradient, even a zero one, for each
    copy of a tied layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)
