"""A small encoder-decoder with padding, an auxiliary loss and two masks, for tests of what flows
between layers; ``toy_families/toy.py`` makes a family of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.features.cross_attention.layers import CrossBlock
from megatron.model.attention_masks import AttentionMasks
from megatron.model.block import Block
from megatron.model.embedding import LM_LOSS, InputEmbedding, TokenEmbedding
from megatron.model.layer_list import LayerSpec, LayerState, initialise
from megatron.model.norm import FinalNorm
from megatron.model.spec import Measure, ModelSpec
from megatron.parallel.loss_head import Targets
from megatron.parallel.shard import Init
from megatron.parallel.tensor_parallel import TensorParallel, reduce_from_ranks

VOCAB, SAMPLES, ENCODED, DECODED = 50, 2, 16, 8
SQUARE_LOSS = "square loss"
LOSSES = {LM_LOSS: 1.0, SQUARE_LOSS: 0.25}


@dataclass(frozen=True)
class PairBatch:
    """Two sequences a sample; of the first a part is padding."""

    encoded_BS: Tensor
    padding_BS: Tensor
    decoded_BT: Tensor
    labels_BT: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> PairBatch:
        """See :class:`Batch`."""
        moved = {f.name: getattr(self, f.name).to(device) for f in dataclasses.fields(self)}
        return PairBatch(**moved)


def draw_batches(seed: int = 0) -> Iterator[PairBatch]:
    """Micro batches without end, the same ones for a seed."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        lengths = torch.randint(ENCODED // 2, ENCODED + 1, (SAMPLES, 1), generator=draw)
        yield PairBatch(
            torch.randint(VOCAB, (SAMPLES, ENCODED), generator=draw),
            torch.arange(ENCODED) >= lengths,
            *torch.randint(VOCAB, (2, SAMPLES, DECODED), generator=draw),
        )


class SquareLoss(nn.Module):
    """An auxiliary loss in the middle: the mean square of the hidden states."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp

    def forward(self, state: LayerState) -> LayerState:
        """Leaves the hidden states alone."""
        x = state.hidden.to(torch.promote_types(state.hidden.dtype, torch.float32))
        mean = x.square().mean()
        if self.tp.split:
            mean = reduce_from_ranks(mean / self.tp.slices, self.tp.group)
        return state.with_loss(SQUARE_LOSS, mean)


def _enter_decoder(table: TokenEmbedding, state: LayerState) -> LayerState:
    return table(state._replace(hidden=state.batch.decoded_BT, encoder=state.hidden))


def layers(model: ModelConfig, tp: TensorParallel) -> list[LayerSpec]:
    """Two blocks that see all tokens, and two that see earlier ones, of which the first attends to
    the output of the others."""
    table = partial(TokenEmbedding, model, tp, None)

    def block(layer: int, cross: bool = False, **how: object) -> LayerSpec:
        build = partial(CrossBlock if cross else Block, model, layer, tp, False, **how)
        return LayerSpec(f"layers.{layer}", build, block=True)

    return [
        LayerSpec("words", table, "words"),
        LayerSpec("encoder.embedding", partial(InputEmbedding, model, tp)),
        block(0, kind="full"),
        LayerSpec("square", partial(SquareLoss, tp)),
        block(1, kind="full"),
        LayerSpec("encoder.norm", partial(FinalNorm, model, tp)),
        LayerSpec("words", table, "words", _enter_decoder),
        LayerSpec("decoder.embedding", partial(InputEmbedding, model, tp)),
        block(2, cross=True),
        block(3),
        LayerSpec("decoder.norm", partial(FinalNorm, model, tp)),
        LayerSpec("words", table, "words", lambda table, state: table(state, project=True)),
    ]


def begin(batch: PairBatch) -> LayerState:
    """The encoder's tokens; the decoder's come in the middle."""
    return LayerState(
        batch.encoded_BS,
        masks=AttentionMasks(padding_BT=batch.padding_BS),
        targets=Targets(batch.labels_BT, torch.ones_like(batch.labels_BT)),
        batch=batch,
    )


def travels(
    width: int, state: LayerState, tp: TensorParallel, place: int
) -> dict[str, tuple[int, ...]]:
    """Encoder output from the decoder on, the auxiliary loss once it is there."""
    samples, length = state.hidden.shape
    encoded = (samples, length // tp.slices, width)
    found: dict[str, tuple[int, ...]] = {"hidden": encoded}
    if place > 6:
        decoded = (samples, state.batch.decoded_BT.shape[1] // tp.slices, width)
        found = {"hidden": decoded, "encoder": encoded}
    return found | ({SQUARE_LOSS: ()} if place > 3 else {})


def toy_spec(model: ModelConfig) -> ModelSpec:
    """The toy, for a configuration's width and heads."""
    assert model.hidden_size is not None
    return ModelSpec(partial(layers, model), begin, partial(travels, model.hidden_size), LOSSES)


def fill(name: str, param: nn.Parameter, tp: TensorParallel) -> None:
    """Wide random values, so that every gradient is large."""
    param.init = Init(std=0.3)  # type: ignore[attr-defined]
    initialise(name, param, 1234, tp.coordinates)


def _counts(state: LayerState, batch: PairBatch) -> dict[str, Tensor]:
    assert state.targets is None
    correct = state.hidden[..., :VOCAB].argmax(-1) == batch.labels_BT
    return {"correct": correct.sum(), "counted": torch.tensor(correct.numel())}


COUNTS = Measure(("correct", "counted"), _counts, ends="logits")
"""An evaluation by logits; of whole ones, so that the vocabulary must not be cut."""
