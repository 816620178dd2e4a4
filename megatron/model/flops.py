"""FLOPs of a transformer: GEMMs with two operations per multiply-add.

Model FLOPs have the backward pass as twice the forward pass and nothing for recomputation, so that
the model-FLOP utilisation (MFU) of two runs compares what they achieve and not how they save
memory. With what is recomputed they are the hardware FLOPs, whose utilisation (HFU) says how busy
the device is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config import ModelConfig


@dataclass(frozen=True)
class TransformerShape:
    """The numbers of a transformer that its FLOPs depend on, under the names of the flags. Where
    there is a decoder behind an encoder, layers and sequence are the encoder's, and a token is one
    of these: it has its share of the decoder's work for its sample."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    padded_vocab_size: int
    gated: bool = False
    windows: tuple[int | None, ...] = ()
    """Keys that a query of each block sees, None for all; empty where all blocks see all."""
    bidirectional: bool = False
    """Whether tokens also see later ones, in the blocks that are not a decoder's."""
    decoder_windows: tuple[int | None, ...] = ()
    """The same of the decoder's blocks, one for each; empty without a decoder."""
    decoder_seq_length: int = 0

    @classmethod
    def of(cls, model: ModelConfig) -> TransformerShape:
        """The shape of a stack of blocks with a head, vocabulary sizes filled in."""
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            ffn_hidden_size=model.mlp.ffn_hidden_size,
            num_attention_heads=model.attention.num_attention_heads,
            num_query_groups=model.attention.num_query_groups,
            kv_channels=model.attention.kv_channels,
            seq_length=model.seq_length,
            padded_vocab_size=model.vocabulary.padded,
            gated=model.mlp.gated,
            windows=model.windows,
        )

    def flops_per_token(self, *, causal: bool) -> float:
        """Model FLOPs of one token, forward and backward.

        With ``causal=False`` attention scores count whole, as in the formula of Narayanan et al.
        2021 (arXiv:2104.04473, section 5.1), ``72 B s L h^2 (1 + s/6h + V/12hL)`` without
        recomputation, which Megatron-LM extends to grouped queries and gated MLPs. With
        ``causal=True`` a query counts half of the sequence, the mean of what it attends to, as in
        Dao 2023 (FlashAttention-2, arXiv:2307.08691, section 4.1). A block with a window counts the
        window instead of the sequence, causally w - w^2 / 2s keys of it. What is bidirectional, or
        attends to an encoder, counts whole.
        """
        head: float = 2 * self.hidden_size * self.padded_vocab_size
        if self.decoder_windows:
            head = self._of_decoder(head)
        return 3.0 * (self._matrices() + self._attention(causal) + head)

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
        if recompute == "selective":
            return self._attention(causal)
        count = self.num_layers + len(self.decoder_windows)
        share = 1.0 if blocks is None else min(1.0, blocks / count)
        return share * (self._matrices() + self._attention(causal))

    def _matrices(self) -> float:
        """Forward FLOPs of one token in the linear layers of all blocks."""
        query_size = self.num_attention_heads * self.kv_channels
        kv_size = self.num_query_groups * self.kv_channels
        projections = 2 * self.hidden_size * (2 * query_size + 2 * kv_size)
        mlp = 2 * (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size
        found = float(self.num_layers * (projections + mlp))
        for _ in self.decoder_windows:
            # Of cross-attention the keys and values are computed for each of the encoder's tokens.
            queries, keys = 4 * self.hidden_size * query_size, 4 * self.hidden_size * kv_size
            found += self._of_decoder(projections + mlp + queries) + keys
        return found

    def _attention(self, causal: bool) -> float:
        """Forward FLOPs of one token in the scores of all blocks, and the mix of values."""
        windows = self.windows or (None,) * self.num_layers
        keys = _keys(windows, self.seq_length, causal and not self.bidirectional)
        if self.decoder_windows:
            own = _keys(self.decoder_windows, self.decoder_seq_length, causal)
            keys += self._of_decoder(own + len(self.decoder_windows) * self.seq_length)
        return 2 * (2 * self.num_attention_heads * self.kv_channels * keys)

    def _of_decoder(self, flops: float) -> float:
        """What a token of the decoder takes, for one of the encoder."""
        return flops * self.decoder_seq_length / self.seq_length

    def flops_per_step(self, samples: int, *, causal: bool) -> float:
        """Model FLOPs of an optimizer step on ``samples`` sequences, over all devices."""
        return samples * self.seq_length * self.flops_per_token(causal=causal)


def _keys(windows: Sequence[int | None], length: int, causal: bool) -> float:
    """Keys that a query attends to, averaged over the sequence and summed over the blocks."""
    seen = [min(w or length, length) for w in windows]
    # The first queries of a causal window have fewer keys before them.
    return sum(w - w**2 / (2 * length) if causal else w for w in seen)
