"""A GPT-2 and a Llama in plain PyTorch, as small as they come.

Shapes: B batch, S sequence, H hidden, N heads, D head width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contestants.setting import Setting

ROTARY_BASE = 10000.0


class Block(nn.Module):
    """Pre-norm attention and MLP; query, key and value are one product, gate and up another."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        hidden, inner = setting.hidden_size, setting.ffn_hidden_size
        self.llama = setting.architecture == "llama"
        self.heads, self.kv_heads = setting.heads, setting.kv_heads
        self.width = hidden // setting.heads
        bias = not self.llama
        self.attention_norm = norm(setting)
        self.qkv = nn.Linear(hidden, hidden + 2 * self.kv_heads * self.width, bias)
        self.proj = nn.Linear(hidden, hidden, bias)
        self.mlp_norm = norm(setting)
        self.up = nn.Linear(hidden, 2 * inner if self.llama else inner, bias)
        self.down = nn.Linear(inner, hidden, bias)

    def forward(self, x_BSH: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        x_BSH = x_BSH + self._attention(self.attention_norm(x_BSH), angles)
        return x_BSH + self._mlp(self.mlp_norm(x_BSH))

    def _attention(self, x_BSH: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        kv = self.kv_heads * self.width
        sizes = [self.heads * self.width, kv, kv]
        q, k, v = (
            x.unflatten(-1, (-1, self.width)).transpose(1, 2)
            for x in self.qkv(x_BSH).split(sizes, dim=-1)
        )
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        grouped = self.kv_heads < self.heads
        y_BNSD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.proj(y_BNSD.transpose(1, 2).flatten(2))

    def _mlp(self, x_BSH: Tensor) -> Tensor:
        if self.llama:
            gate, up = self.up(x_BSH).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.up(x_BSH), approximate="tanh"))


class GPT(nn.Module):
    """Tokens and labels in, mean cross entropy out."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.llama = setting.architecture == "llama"
        hidden, vocab = setting.hidden_size, setting.vocab_size
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = None if self.llama else nn.Embedding(setting.seq_length, hidden)
        self.blocks = nn.ModuleList(Block(setting) for _ in range(setting.layers))
        self.norm = norm(setting)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if not self.llama:
            self.head.weight = self.tokens.weight
        width = hidden // setting.heads
        frequencies = ROTARY_BASE ** (-torch.arange(0, width, 2).float() / width)
        angles_SD = torch.arange(setting.seq_length).outer(frequencies).repeat(1, 2)
        self.register_buffer("cos_SD", angles_SD.cos(), persistent=False)
        self.register_buffer("sin_SD", angles_SD.sin(), persistent=False)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """int64 [B, S] each to a scalar, nats a token."""
        x_BSH = self.tokens(tokens_BS)
        if self.positions is not None:
            x_BSH = x_BSH + self.positions.weight
        angles = (self.cos_SD, self.sin_SD) if self.llama else None
        for block in self.blocks:
            x_BSH = block(x_BSH, angles)
        logits_BSV = self.head(self.norm(x_BSH))
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())

    @torch.no_grad()
    def initialise(self, std: float = 0.02) -> None:
        """GPT-2's own: normal matrices, projections into the stream by sqrt(2 x layers) smaller."""
        for name, param in self.named_parameters():
            if param.dim() > 1:
                inward = name.endswith(("proj.weight", "down.weight"))
                param.normal_(std=std / (2 * len(self.blocks)) ** 0.5 if inward else std)
            elif name.endswith("bias"):
                param.zero_()


def norm(setting: Setting) -> nn.Module:
    """LayerNorm or RMSNorm."""
    if setting.architecture == "llama":
        return nn.RMSNorm(setting.hidden_size, eps=1e-5)
    return nn.LayerNorm(setting.hidden_size)


def rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotary positions, the two halves of a head as real and imaginary parts."""
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD
