"""FLOPs of a transformer's GEMMs, with two operations per multiply-add.

Model FLOPs count the backward pass as twice the forward pass, and exclude recomputation. The
model-FLOP utilisation (MFU) therefore compares runs independently of how they save memory. Hardware
FLOPs include recomputation; their utilisation (HFU) shows how busy the device is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.config import ModelConfig
from megatron.config.blocks import Chunk, Window


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a transformer that determine its FLOPs, named like the flags.

    FLOPs per token are averages over a sequence of ``seq_length`` tokens."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    padded_vocab_size: int
    gated: bool = False
    attention_output_gate: bool = False
    windows: tuple[Window, ...] = ()
    """Number of keys that a query sees in each block: None for all, 0 without softmax attention.
    Empty if queries see all keys in all blocks."""
    sees_later: bool = False
    """True if attention is not causal: tokens also see later ones."""
    predictions: int | None = None
    """Number of tokens per sample whose logits are computed; None for all."""
    heads: int = 1
    """Number of tokens that each position predicts, each with an output head."""
    other: float = 0.0
    """Forward FLOPs per sample in layers other than blocks and vocabulary."""
    within: tuple[float, float] = (0.0, 0.0)
    """Forward FLOPs per sample that blocks have in addition to a transformer's: in linear layers,
    and in attention scores and the weighted sum of values."""
    value_channels: int | None = None
    """Channels of a value head; None if they equal those of a key head."""
    full_channels: int | None = None
    """Channels of key and value head together in blocks without a window; None if as in others."""
    additions: float | None = None
    """Forward FLOPs per token in this stack's low-rank adapters, where all other weights are
    frozen; None if all weights are trained."""
    shorter: tuple[int, int] | None = None
    """Number of blocks that read only some of the tokens, and how many tokens they read. FLOPs
    assume that these blocks are like the average block."""

    @property
    def last(self) -> TransformerShape:
        """Stack of blocks whose output the head reads; the decoder if there are two stacks."""
        return self

    @property
    def causal(self) -> bool:
        """True if the attention of any block is causal."""
        return not self.sees_later

    @classmethod
    def of(cls, model: ModelConfig) -> TransformerShape:
        """Return the shape of a model as one stack of blocks with a head. The blocks include those
        of multi-token prediction. The model's vocabulary size must be known."""
        ahead, windows = model.blocks_ahead, model.windows
        shape = cls(
            num_layers=model.num_layers + ahead,
            hidden_size=model.hidden_size,
            ffn_hidden_size=model.mlp.ffn_hidden_size,
            num_attention_heads=model.attention.num_attention_heads,
            num_query_groups=model.attention.num_query_groups,
            kv_channels=model.attention.kv_channels,
            seq_length=model.seq_length,
            padded_vocab_size=model.vocabulary.padded,
            gated=model.mlp.gated,
            attention_output_gate=model.attention.attention_output_gate,
            windows=windows + windows[-1:] * ahead,
            heads=1 + ahead,
            # Each additional prediction projects an embedding and hidden states, 2H, to H.
            other=4.0 * model.hidden_size**2 * model.seq_length * ahead,
        )
        layers = [*range(model.num_layers), *[model.num_layers - 1] * ahead]
        without, no_mlp = (
            [not model.has(sublayer, layer) for layer in layers]
            for sublayer in ("attention", "mlp")
        )
        if not any((*without, *no_mlp)):
            return shape
        idle = sum(without) * shape.attention_flops + sum(no_mlp) * shape.mlp_flops
        windows = tuple(0 if no else w for no, w in zip(without, shape.windows, strict=True))
        return replace(shape, windows=windows, within=(-model.seq_length * idle, 0.0))

    def flops_per_token(self, *, causal: bool) -> float:
        """Return the model FLOPs of one token, forward and backward.

        With ``causal=False`` attention scores count in full, as in the formula of Narayanan et al.
        2021 (arXiv:2104.04473, section 5.1), ``72 B s L h^2 (1 + s/6h + V/12hL)`` without
        recomputation, which Megatron-LM extends to grouped queries and gated MLPs. With
        ``causal=True`` a query counts half of the sequence, which it sees on average, as in Dao
        2023 (FlashAttention-2, arXiv:2307.08691, section 4.1). In a block with a window of w, a
        query counts w keys, or w - w^2 / 2s with ``causal=True``. If tokens see later ones, a query
        counts the whole sequence in either case. Gradients of frozen weights do not count.
        """
        forward = self._matrices() + self._attention(causal) + self._outside_blocks(causal)
        if self.additions is None:
            return 3.0 * forward
        return 3.0 * (forward + self._added()) - self._products()

    def _added(self) -> float:
        """Return the forward FLOPs of one token in all low-rank adapters."""
        return self.additions or 0.0

    def _products(self) -> float:
        """Return the forward FLOPs of one token in products with weights. The weights' gradients
        take the same number."""
        return self._matrices() + self._outside_blocks(causal=False)

    def with_additions(self, own: float, of_decoder: float) -> TransformerShape:
        """Return the shape with low-rank adapters. ``own`` and ``of_decoder`` are the adapters'
        forward FLOPs per token in this stack and in its decoder, if it has one."""
        return replace(self, additions=own)

    def recomputed_flops_per_token(
        self, recompute: str | None, *, causal: bool, blocks: int | None = None
    ) -> float:
        """Return the FLOPs per token that recomputation adds to the model FLOPs.

        Args:
            recompute: None; "selective" for attention; "uniform" or "block" for whole blocks.
            causal: as in :meth:`flops_per_token`.
            blocks: with "block", the number of recomputed blocks, of average cost; None for all.
        """
        if recompute is None:
            return 0.0
        layers, matrices, attention = self._blocks(causal)
        if recompute == "selective":
            return attention
        share = 1.0 if blocks is None else min(1.0, blocks / layers)
        return share * (matrices + attention)

    def _blocks(self, causal: bool) -> tuple[int, float, float]:
        """Return the number of blocks, and the forward FLOPs of one token in their linear layers
        and in their attention scores and weighted sums of values."""
        return self.num_layers, self._matrices(), self._attention(causal)

    def _outside_blocks(self, causal: bool) -> float:
        """Return the forward FLOPs of one token outside this stack's blocks."""
        head = 2.0 * self.hidden_size * self.padded_vocab_size * self.heads
        share = 1.0 if self.predictions is None else self.predictions / self.seq_length
        return share * head + self.other / self.seq_length

    @property
    def attention_flops(self) -> float:
        """Forward FLOPs of one token in the linear layers of a block's attention."""
        query_size = self.num_attention_heads * self.kv_channels
        kv_size = self.num_query_groups * self.kv_channels
        # including gates and the output projection
        queries = (2 + self.attention_output_gate) * query_size
        return 2 * self.hidden_size * (queries + 2 * kv_size)

    @property
    def mlp_flops(self) -> float:
        """Forward FLOPs of one token in the linear layers of a block's MLP."""
        return 2 * (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size

    def _matrices(self) -> float:
        """Return the forward FLOPs of one token in the linear layers of all blocks."""
        if self.shorter is not None:
            return self._of_lengths(TransformerShape._matrices)
        both = self.attention_flops + self.mlp_flops
        return self.num_layers * both + self.within[0] / self.seq_length

    def _attention(self, causal: bool) -> float:
        """Return the forward FLOPs of one token in all scores and weighted sums of values."""
        if self.shorter is not None:
            return self._of_lengths(lambda shape: shape._attention(causal))
        own = 2 * self.num_attention_heads * self._channels_and_keys(causal)
        return own + self.within[1] / self.seq_length

    def _of_lengths(self, per_token: Callable[[TransformerShape], float]) -> float:
        """Return the FLOPs of one token in all blocks, some of which read fewer tokens."""
        assert self.shorter is not None
        blocks, tokens = self.shorter
        share, kept = blocks / self.num_layers, tokens / self.seq_length
        linear, scores = self.within
        within = linear * kept, scores * kept**2
        fewer = replace(self, seq_length=tokens, within=within, shorter=None)
        whole = per_token(replace(self, shorter=None))
        return (1 - share) * whole + share * kept * per_token(fewer)

    def _channels_and_keys(self, causal: bool) -> float:
        """Return the sum over blocks of (keys that a query attends to, averaged over the sequence)
        x (channels of a key and a value head)."""
        # The first queries of a sequence have fewer keys than the window.
        halved = causal and not self.sees_later
        windows = self.windows or (None,) * self.num_layers
        return sum(self._channels_of(w) * self._seen(w, halved) for w in windows)

    def _channels_of(self, window: Window) -> int:
        """Return the channels of a key and a value head together in blocks with this ``window``."""
        if window is None and self.full_channels is not None:
            return self.full_channels
        values = self.kv_channels if self.value_channels is None else self.value_channels
        return self.kv_channels + values

    def _seen(self, window: Window, halved: bool) -> float:
        length = self.seq_length
        if isinstance(window, Chunk):
            whole, rest = divmod(length, window.size)
            return (whole * window.size**2 + rest**2) / length * (0.5 if halved else 1.0)
        if self.sees_later:  # the window extends equally to both sides
            window = window and window // 2 * 2 + 1
        width = length if window is None else min(window, length)
        return width - width**2 / (2 * length) if halved else width

    def scores_per_token(self) -> float:
        """Return the forward FLOPs per token of scores and weighted sums in causal blocks without a
        window. Documents that share a sequence save some of them: in a document of l tokens a query
        sees l / 2 keys instead of s / 2, so the fraction sum(l^2) / s^2 remains."""
        full = self.windows.count(None) if self.windows else self.num_layers
        keys = 0.0 if self.sees_later else full * self.seq_length / 2
        return 2 * self.num_attention_heads * self._channels_of(None) * keys

    def flops_per_step(self, samples: int, *, causal: bool) -> float:
        """Return the model FLOPs of an optimizer step on ``samples`` sequences, on all devices."""
        return samples * self.seq_length * self.flops_per_token(causal=causal)
