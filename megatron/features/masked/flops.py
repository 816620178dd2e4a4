"""FLOPs of an encoder-decoder model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron.model.flops import TransformerShape


@dataclass(frozen=True)
class EncoderDecoderShape(TransformerShape):
    """Shape of an encoder, whose sequence length is ``seq_length``, and of the ``decoder`` that
    attends to its output, with its own sequence length. The head belongs to the decoder."""

    decoder: TransformerShape = field(kw_only=True)

    @property
    def last(self) -> TransformerShape:
        """Stack that has the head: the decoder."""
        return self.decoder

    @property
    def causal(self) -> bool:
        """True if any block's attention is causal."""
        return super().causal or self.decoder.causal

    def with_additions(self, own: float, of_decoder: float) -> TransformerShape:
        """Return the shape with low-rank adapters. ``own`` and ``of_decoder`` are their forward
        FLOPs per token of the encoder and of the decoder."""
        return replace(self, additions=own, decoder=replace(self.decoder, additions=of_decoder))

    def _added(self) -> float:
        return super()._added() + self._per_token(self.decoder._added())

    def _products(self) -> float:
        of_decoder = self._per_token(self.decoder._products())
        return self._matrices() + of_decoder + self._cross_matrices()

    def _blocks(self, causal: bool) -> tuple[int, float, float]:
        layers, matrices, attention = super()._blocks(causal)
        layers += self.decoder.num_layers
        attention += self._per_token(self.decoder._attention(causal) + self._cross_attention())
        matrices += self._per_token(self.decoder._matrices()) + self._cross_matrices()
        return layers, matrices, attention

    def _outside_blocks(self, causal: bool) -> float:
        decoder = self.decoder
        blocks = decoder._matrices() + decoder._attention(causal) + self._cross_attention()
        rest = self._per_token(blocks + decoder._outside_blocks(causal))
        return rest + self._cross_matrices()

    def _per_token(self, of_decoder: float) -> float:
        """Convert FLOPs per token of the decoder to FLOPs per token of the encoder."""
        return of_decoder * self.decoder.seq_length / self.seq_length

    def _cross_matrices(self) -> float:
        """Return the forward FLOPs of the decoder's cross-attention projections, per encoder token:
        queries and outputs of the decoder's tokens, keys and values of the encoder's tokens."""
        query_size = self.num_attention_heads * self.kv_channels
        kv_size = self.num_query_groups * self.kv_channels
        queries = self._per_token(2 * self.hidden_size * 2 * query_size)
        return self.decoder.num_layers * (queries + 2 * self.hidden_size * 2 * kv_size)

    def _cross_attention(self) -> float:
        """Return the forward FLOPs of cross-attention per decoder token: scores against the
        encoder's tokens, and the weighted sum of values."""
        keys = self.decoder.num_layers * self.seq_length
        return 2 * (2 * self.num_attention_heads * self.kv_channels * keys)
