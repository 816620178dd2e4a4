"""FLOPs of a transformer: GEMMs with two operations per multiply-add.

Model FLOPs have the backward pass as twice the forward pass and nothing for recomputation, so that
the model-FLOP utilisation (MFU) of two runs compares what they achieve and not how they save
memory. With what is recomputed they are the hardware FLOPs, whose utilisation (HFU) says how busy
the device is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.config import ModelConfig
from megatron.config.blocks import Chunk, Window


@dataclass(frozen=True)
class TransformerShape:
    """The numbers of a transformer that its FLOPs depend on, under the names of the flags.

    Tokens are those of ``seq_length``; a decoder that attends to this stack's output has a shape,
    and a sequence, of its own, and the head is the decoder's."""

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
    """Keys that a query of each block sees, None for all and 0 without softmax attention; empty
    where all blocks see all."""
    sees_later: bool = False
    """True if a token sees later ones too."""
    predictions: int | None = None
    """Tokens of a sample whose logits are computed, None for all."""
    heads: int = 1
    """How many tokens each position predicts, each by an output head."""
    other: float = 0.0
    """Forward FLOPs of a sample in layers next to blocks and vocabulary."""
    decoder: TransformerShape | None = None
    within: tuple[float, float] = (0.0, 0.0)
    """Forward FLOPs of a sample that the blocks have beyond a transformer's: in linear layers, and
    in scores and the mix of values."""
    value_channels: int | None = None
    """Size of a value head; None if equal to the other heads."""
    full_channels: int | None = None
    """Channels of a key and a value head in blocks without a window, None for those of others."""
    additions: float | None = None
    """Forward FLOPs of a token in the low-rank additions to this stack, next to which no weight has
    a gradient; None where all weights are trained."""
    shorter: tuple[int, int] | None = None
    """Number of blocks that read fewer of the tokens than the others, and of their tokens; they
    count as average blocks."""

    @property
    def causal(self) -> bool:
        """True if any block's attention is causal."""
        return not self.sees_later or (self.decoder is not None and self.decoder.causal)

    @classmethod
    def of(cls, model: ModelConfig) -> TransformerShape:
        """The shape of a stack of blocks with a head, vocabulary sizes filled in. Blocks that
        predict further tokens are among its blocks."""
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
            # Each merges the embedding of a token with hidden states.
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
        """Model FLOPs of one token, forward and backward.

        With ``causal=False`` attention scores count whole, as in the formula of Narayanan et al.
        2021 (arXiv:2104.04473, section 5.1), ``72 B s L h^2 (1 + s/6h + V/12hL)`` without
        recomputation, which Megatron-LM extends to grouped queries and gated MLPs. With
        ``causal=True`` a query counts half of the sequence, the mean of what it attends to, as in
        Dao 2023 (FlashAttention-2, arXiv:2307.08691, section 4.1). A block with a window counts the
        window instead of the sequence, causally w - w^2 / 2s keys of it. Tokens that see later ones
        count the whole sequence in either case. Gradients of frozen weights do not count.
        """
        forward = self._matrices() + self._attention(causal) + self._outside_blocks(causal)
        if self.additions is None:
            return 3.0 * forward
        return 3.0 * (forward + self._added()) - self._products()

    def _added(self) -> float:
        """Forward FLOPs of one token in all low-rank additions."""
        of_decoder = 0.0 if self.decoder is None else self._per_token(self.decoder._added())
        return (self.additions or 0.0) + of_decoder

    def _products(self) -> float:
        """Forward FLOPs of one token in products with weights, equal to the FLOPs of the weights'
        gradients."""
        decoder = self.decoder
        if decoder is None:
            return self._matrices() + self._outside_blocks(causal=False)
        of_decoder = self._per_token(decoder._products())
        return self._matrices() + of_decoder + self._cross_matrices()

    def recomputed_flops_per_token(
        self, recompute: str | None, *, causal: bool, blocks: int | None = None
    ) -> float:
        """FLOPs of one token that a recomputation of activations adds to the model's.

        Args:
            recompute: None; "selective" for attention; "uniform" or "block" for whole blocks.
            causal: as in :meth:`flops_per_token`.
            blocks: with "block", how many there are, counted as average ones; None for all.
        """
        if recompute is None:
            return 0.0
        attention, layers = self._attention(causal), self.num_layers
        matrices = self._matrices()
        if self.decoder is not None:
            layers += self.decoder.num_layers
            attention += self._per_token(self.decoder._attention(causal) + self._cross_attention())
            matrices += self._per_token(self.decoder._matrices()) + self._cross_matrices()
        if recompute == "selective":
            return attention
        share = 1.0 if blocks is None else min(1.0, blocks / layers)
        return share * (matrices + attention)

    def _outside_blocks(self, causal: bool) -> float:
        """Forward FLOPs of one token in everything but this stack's blocks."""
        decoder = self.decoder
        if decoder is not None:
            blocks = decoder._matrices() + decoder._attention(causal) + self._cross_attention()
            rest = self._per_token(blocks + decoder._outside_blocks(causal))
            return rest + self._cross_matrices()
        head = 2.0 * self.hidden_size * self.padded_vocab_size * self.heads
        share = 1.0 if self.predictions is None else self.predictions / self.seq_length
        return share * head + self.other / self.seq_length

    def _per_token(self, of_decoder: float) -> float:
        """FLOPs of one token of the decoder as those of one token here."""
        assert self.decoder is not None
        return of_decoder * self.decoder.seq_length / self.seq_length

    def _cross_matrices(self) -> float:
        """Forward FLOPs of one token in the linear layers of the decoder's cross-attention: queries
        and outputs for its own tokens, keys and values for this stack's tokens."""
        assert self.decoder is not None
        query_size = self.num_attention_heads * self.kv_channels
        kv_size = self.num_query_groups * self.kv_channels
        queries = self._per_token(2 * self.hidden_size * 2 * query_size)
        return self.decoder.num_layers * (queries + 2 * self.hidden_size * 2 * kv_size)

    def _cross_attention(self) -> float:
        """Forward FLOPs of one token of the decoder in the scores against this stack's tokens, and
        the mix of values."""
        assert self.decoder is not None
        keys = self.decoder.num_layers * self.seq_length
        return 2 * (2 * self.num_attention_heads * self.kv_channels * keys)

    @property
    def attention_flops(self) -> float:
        """Forward FLOPs of one token in the linear layers of a block's attention."""
        query_size = self.num_attention_heads * self.kv_channels
        kv_size = self.num_query_groups * self.kv_channels
        queries = (2 + self.attention_output_gate) * query_size  # with gates and output
        return 2 * self.hidden_size * (queries + 2 * kv_size)

    @property
    def mlp_flops(self) -> float:
        """Forward FLOPs of one token in the linear layers of a block's MLP."""
        return 2 * (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size

    def _matrices(self) -> float:
        """Forward FLOPs of one token in the linear layers of all blocks."""
        if self.shorter is not None:
            return self._of_lengths(TransformerShape._matrices)
        both = self.attention_flops + self.mlp_flops
        return self.num_layers * both + self.within[0] / self.seq_length

    def _attention(self, causal: bool) -> float:
        """Forward FLOPs of one token in the scores of all blocks, and the mix of values."""
        if self.shorter is not None:
            return self._of_lengths(lambda shape: shape._attention(causal))
        own = 2 * self.num_attention_heads * self._channels_and_keys(causal)
        return own + self.within[1] / self.seq_length

    def _of_lengths(self, per_token: Callable[[TransformerShape], float]) -> float:
        """FLOPs of one token in all blocks, of which some read fewer tokens."""
        assert self.shorter is not None
        blocks, tokens = self.shorter
        share, kept = blocks / self.num_layers, tokens / self.seq_length
        linear, scores = self.within
        within = linear * kept, scores * kept**2
        fewer = replace(self, seq_length=tokens, within=within, shorter=None)
        whole = per_token(replace(self, shorter=None))
        return (1 - share) * whole + share * kept * per_token(fewer)

    def _channels_and_keys(self, causal: bool) -> float:
        """Keys that a query attends to, averaged over the sequence, times the channels of their
        heads, summed over the blocks."""
        # The first queries of a causal window have fewer keys before them.
        halved = causal and not self.sees_later
        windows = self.windows or (None,) * self.num_layers
        return sum(self._channels_of(w) * self._seen(w, halved) for w in windows)

    def _channels_of(self, window: Window) -> int:
        """Channels of a key and a value head together, in blocks with a window."""
        if window is None and self.full_channels is not None:
            return self.full_channels
        values = self.kv_channels if self.value_channels is None else self.value_channels
        return self.kv_channels + values

    def _seen(self, window: Window, halved: bool) -> float:
        length = self.seq_length
        if isinstance(window, Chunk):
            whole, rest = divmod(length, window.size)
            return (whole * window.size**2 + rest**2) / length * (0.5 if halved else 1.0)
        if self.sees_later:  # a window has as many later keys as earlier ones
            window = window and window // 2 * 2 + 1
        width = length if window is None else min(window, length)
        return width - width**2 / (2 * length) if halved else width

    def scores_per_token(self) -> float:
        """Forward FLOPs of one token in the scores of causal blocks without a window, and the mix
        of values: what documents that share a sequence leave out in part. Of l tokens of a document
        a query sees l / 2 instead of s / 2 of the sequence, so that the share that remains is the
        sum of l^2 over s^2."""
        full = self.windows.count(None) if self.windows else self.num_layers
        keys = 0.0 if self.sees_later else full * self.seq_length / 2
        return 2 * self.num_attention_heads * self._channels_of(None) * keys

    def flops_per_step(self, samples: int, *, causal: bool) -> float:
        """Model FLOPs of an optimizer step on ``samples`` sequences, over all devices."""
        return samples * self.seq_length * self.flops_per_token(causal=causal)
