"""MLP of a transformer block.

Shapes: B batch, S sequence, H hidden size, F this rank's slice of the inner width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.model.activations import XIELU, activation_of
from megatron.model.norm import AllHeadsNorm
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.shard import initial
from megatron.parallel.tensor_parallel import TensorParallel


class MLP(nn.Module):
    """Up projection, activation, down projection. Ranks of ``tp`` share the inner width.

    With U, G and D the weights of up, gate and down and f the activation, y = f(x U^T) D^T, or with
    a gate y = (f(x G^T) * (x U^T)) D^T (Shazeer 2020, arXiv:2002.05202), where gate and up are one
    GEMM, gate first. Each projection adds its bias, if it has one.

    With a sub-norm, the input of the down projection is normalised over the whole inner width (Wang
    et al. 2022, arXiv:2210.06423).

    Args:
        config: configuration of the model.
        tp: tensor-parallel group over which the weights are sharded.
        inner: inner width over all ranks; by default the configuration's.

    Attributes:
        recomputes_activation: whether the backward pass recomputes the activation.
    """

    recomputes_activation = False

    def __init__(self, config: ModelConfig, tp: TensorParallel, inner: int | None = None) -> None:
        super().__init__()
        mlp, inner = config.mlp, inner or config.mlp.ffn_hidden_size
        self.activation = XIELU(tp) if mlp.activation == "xielu" else activation_of(mlp)
        self.up = ColumnParallelLinear(
            config.hidden_size,
            (inner, inner) if mlp.gated else (inner,),
            bias=mlp.bias,
            init=initial(config),
            tp=tp,
        )
        # The norm treats each inner channel as a head.
        self.sub_norm = AllHeadsNorm.of(config, inner, tp, 1) if config.norm.sub_norm else None
        self.down = RowParallelLinear(
            inner,
            config.hidden_size,
            bias=mlp.bias,
            init=initial(config, scaled=True),
            tp=tp,
        )

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Map [B, S, H] to the same shape."""
        up_BSF = self.up(x_BSH)
        if self.recomputes_activation and up_BSF.requires_grad:
            return checkpoint(self._down, up_BSF, use_reentrant=False)  # type: ignore[no-any-return]
        return self._down(up_BSF)

    def _down(self, up_BSF: Tensor) -> Tensor:
        inner_BSF = self.activation(up_BSF)
        if self.sub_norm is not None:
            inner_BSF = self.sub_norm(inner_BSF.unsqueeze(-1)).squeeze(-1)
        return self.down(inner_BSF)
