"""What flows between the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron.model.attention_masks import AttentionMasks
from megatron.parallel.cross_entropy import Targets


class LayerCache(Protocol):
    """Keys and values of earlier positions, for generation."""

    def extend(self, layer: int, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new keys and values of a layer; returns all of its keys and values."""
        ...


class LayerState(NamedTuple):
    """What a layer takes and returns.

    ``hidden``, ``encoder`` and ``losses`` are computed, and can travel between pipeline stages; the
    others belong to the micro batch, of which every stage has its own copy. A layer leaves alone
    what it does not know.

    Attributes:
        hidden: token ids int64 [B, S] into the first layer, hidden states [B, S, H] between
            layers (this rank's slice of S where the sequence is split); logits
            [B, S, V / tensor size] out of the last layer when there are no targets.
        encoder: output of the encoder that decoder blocks attend to, [B, T, H], sliced as
            ``hidden`` is; None in a family without one.
        losses: scalars by name: those of layers on the way, and those that the last layer adds
            when there are targets.
        position_ids: positions int64 [B, S]; None for 0, 1, 2, ...
        masks: which tokens see which, beyond the kind of attention; None for all that it allows.
        cache: keys and values of earlier positions when generating.
        dropout_seed: what the dropout masks of this micro batch derive from; None leaves torch's
            generators alone.
        targets: what the last layer measures the loss by.
        batch: the micro batch itself, for layers in the middle that need more of it.
    """

    hidden: Tensor
    encoder: Tensor | None = None
    losses: Mapping[str, Tensor] = {}
    position_ids: Tensor | None = None
    masks: AttentionMasks | None = None
    cache: LayerCache | None = None
    dropout_seed: int | None = None
    targets: Targets | None = None
    batch: Any = None

    def with_hidden(self, hidden: Tensor) -> LayerState:
        """The same state with other hidden states."""
        return self._replace(hidden=hidden)

    def with_loss(self, name: str, loss: Tensor) -> LayerState:
        """The same state with a scalar added to the loss of that name, or as its first addend."""
        before = self.losses.get(name)
        total = loss if before is None else before + loss
        return self._replace(losses={**self.losses, name: total})
