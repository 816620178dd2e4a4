"""A BERT in plain PyTorch, as small as it comes: post-norm blocks, masked-token and pair heads.

Shapes: B batch, S sequence, H hidden, N heads, D head width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contestants.setting import Setting

NO_LABEL = -1


class Block(nn.Module):
    """Post-norm attention and MLP; query, key and value are one product."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        hidden, self.heads = setting.hidden_size, setting.heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, setting.ffn_hidden_size)
        self.down = nn.Linear(setting.ffn_hidden_size, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)

    def forward(self, x_BSH: Tensor, mask_B11S: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]; the mask is an addend of the scores."""
        q, k, v = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x in self.qkv(x_BSH).chunk(3, dim=-1)
        )
        y_BNSD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B11S)
        x_BSH = self.attention_norm(x_BSH + self.proj(y_BNSD.transpose(1, 2).flatten(2)))
        return self.mlp_norm(x_BSH + self.down(F.gelu(self.up(x_BSH))))


class BERT(nn.Module):
    """The sum of both mean losses."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        hidden = setting.hidden_size
        self.tokens = nn.Embedding(setting.vocab_size, hidden)
        self.positions = nn.Embedding(setting.seq_length, hidden)
        self.types = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.blocks = nn.ModuleList(Block(setting) for _ in range(setting.layers))
        self.pooler = nn.Linear(hidden, hidden)
        self.pair = nn.Linear(hidden, 2)
        self.dense = nn.Linear(hidden, hidden)
        self.dense_norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, setting.vocab_size)
        self.head.weight = self.tokens.weight

    def forward(
        self,
        tokens_BS: Tensor,
        types_BS: Tensor,
        padding_mask_BS: Tensor,
        labels_BS: Tensor,
        is_random_B: Tensor,
    ) -> Tensor:
        """int64 each, to a scalar."""
        x_BSH = self.tokens(tokens_BS) + self.positions.weight + self.types(types_BS)
        x_BSH = self.norm(x_BSH)
        unseen_B11S = (padding_mask_BS == 0)[:, None, None]
        mask_B11S = torch.zeros_like(unseen_B11S, dtype=x_BSH.dtype)
        mask_B11S = mask_B11S.masked_fill(unseen_B11S, -torch.inf)
        for block in self.blocks:
            x_BSH = block(x_BSH, mask_B11S)
        pair_B2 = self.pair(torch.tanh(self.pooler(x_BSH[:, 0])))
        logits_BSV = self.head(self.dense_norm(F.gelu(self.dense(x_BSH))))
        words = F.cross_entropy(
            logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), ignore_index=NO_LABEL
        )
        return words + F.cross_entropy(pair_B2.float(), is_random_B)

    @torch.no_grad()
    def initialise(self, std: float = 0.02) -> None:
        """BERT's own: normal matrices."""
        for name, param in self.named_parameters():
            if param.dim() > 1:
                param.normal_(std=std)
            elif name.endswith("bias"):
                param.zero_()
