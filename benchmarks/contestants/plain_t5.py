"""A T5 (1.0) in plain PyTorch, as small as it comes: relative positions, one bias per stack.

Shapes: B batch, E tokens of the encoder, D of the decoder, S queries, T keys, H hidden, N heads,
W head width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contestants.setting import Setting

NO_LABEL = -1
BUCKETS, MAX_DISTANCE = 32, 128
EPS = 1e-6


class Attention(nn.Module):
    """Queries of one sequence, keys and values of the same or of another; unscaled."""

    def __init__(self, setting: Setting, cross: bool) -> None:
        super().__init__()
        hidden, self.heads, self.cross = setting.hidden_size, setting.heads, cross
        self.norm = nn.RMSNorm(hidden, eps=EPS)
        if cross:
            self.q = nn.Linear(hidden, hidden, bias=False)
            self.kv = nn.Linear(hidden, 2 * hidden, bias=False)
        else:
            self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BSH: Tensor, bias: Tensor, other_BTH: Tensor | None = None) -> Tensor:
        """[B, S, H] to [B, S, H]; the bias is an addend of the scores."""
        normed = self.norm(x_BSH)
        if self.cross:
            parts = self.q(normed), *self.kv(other_BTH).chunk(2, dim=-1)
        else:
            parts = self.qkv(normed).chunk(3, dim=-1)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in parts)
        y_BNSW = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return x_BSH + self.proj(y_BNSW.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """ReLU between two products."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(setting.hidden_size, eps=EPS)
        self.up = nn.Linear(setting.hidden_size, setting.ffn_hidden_size, bias=False)
        self.down = nn.Linear(setting.ffn_hidden_size, setting.hidden_size, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        return x_BSH + self.down(F.relu(self.up(self.norm(x_BSH))))


class Stack(nn.Module):
    """The encoder or the decoder."""

    def __init__(self, setting: Setting, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.relative = nn.Embedding(BUCKETS, setting.heads)
        kinds = (False, True) if causal else (False,)
        self.blocks = nn.ModuleList(
            nn.ModuleList([*(Attention(setting, cross) for cross in kinds), MLP(setting)])
            for _ in range(setting.layers)
        )
        self.norm = nn.RMSNorm(setting.hidden_size, eps=EPS)
        length = setting.decoder_length if causal else setting.seq_length
        self.register_buffer("buckets_SS", buckets(length, causal), persistent=False)

    def forward(
        self, x_BSH: Tensor, mask_B11T: Tensor, encoded_BTH: Tensor | None = None
    ) -> Tensor:
        """[B, S, H] to [B, S, H]; the mask is that of the encoder's padding."""
        bias = self.relative(self.buckets_SS).permute(2, 0, 1).unsqueeze(0)
        if self.causal:
            later_SS = torch.ones_like(self.buckets_SS, dtype=torch.bool).triu(1)
            bias = bias.masked_fill(later_SS, -torch.inf)
        else:
            bias = bias + mask_B11T
        for block in self.blocks:
            x_BSH = block[0](x_BSH, bias)
            if encoded_BTH is not None:
                x_BSH = block[1](x_BSH, mask_B11T, encoded_BTH)
            x_BSH = block[-1](x_BSH)
        return self.norm(x_BSH)


class T5(nn.Module):
    """Mean cross entropy of the decoder's labels."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.tokens = nn.Embedding(setting.vocab_size, setting.hidden_size)
        self.encoder, self.decoder = Stack(setting, False), Stack(setting, True)
        self.scale = setting.hidden_size**-0.5

    def forward(
        self,
        encoder_tokens_BE: Tensor,
        padding_mask_BE: Tensor,
        decoder_tokens_BD: Tensor,
        labels_BD: Tensor,
    ) -> Tensor:
        """int64 each, to a scalar."""
        x_BEH = self.tokens(encoder_tokens_BE)
        unseen_B11E = (padding_mask_BE == 0)[:, None, None]
        mask_B11E = torch.zeros_like(unseen_B11E, dtype=x_BEH.dtype)
        mask_B11E = mask_B11E.masked_fill(unseen_B11E, -torch.inf)
        encoded_BEH = self.encoder(x_BEH, mask_B11E)
        y_BDH = self.decoder(self.tokens(decoder_tokens_BD), mask_B11E, encoded_BEH)
        logits_BDV = F.linear(y_BDH * self.scale, self.tokens.weight)
        return F.cross_entropy(
            logits_BDV.flatten(0, 1).float(), labels_BD.flatten(), ignore_index=NO_LABEL
        )

    @torch.no_grad()
    def initialise(self, std: float = 0.02) -> None:
        """Normal matrices."""
        for param in self.parameters():
            if param.dim() > 1:
                param.normal_(std=std)


def buckets(length: int, causal: bool) -> Tensor:
    """int64 [S, T]: the bucket of each distance, exact for near ones, logarithmic for others."""
    places = torch.arange(length)
    distances_SS = places[None, :] - places[:, None]
    count, result_SS = BUCKETS, torch.zeros_like(distances_SS)
    if causal:
        distances_SS = (-distances_SS).clamp(min=0)
    else:
        count //= 2
        result_SS = (distances_SS > 0) * count
        distances_SS = distances_SS.abs()
    exact = count // 2
    ratio_SS = (distances_SS.clamp(min=1) / exact).log() / math.log(MAX_DISTANCE / exact)
    far_SS = (exact + (ratio_SS * (count - exact)).long()).clamp(max=count - 1)
    return result_SS + torch.where(distances_SS < exact, distances_SS, far_SS)
