"""The MLP of a block.

Shapes: B batch, S sequence, H hidden size, F inner channels of this rank.
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
    """Up, activation, down; the inner width is cut over ranks.

    With U, G and D the weights of up, gate and down and f the activation, y = f(x U^T) D^T, or with
    a gate y = (f(x G^T) * (x U^T)) D^T (Shazeer 2020, arXiv:2002.05202), where gate and up are one
    GEMM, gate first. Each product adds its bias, if there is one.

    With a sub-norm f(...) is normalised over all inner channels (Wang et al. 2022,
    arXiv:2210.06423).

    Args:
        config: of the model.
        tp: the ranks that the weights are cut over.
        inner: width between the projections, of all ranks; by default the configuration's.

    Attributes:
        recomputes_activation: the backward pass computes the activation again.
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
        # Each inner channel is a separate head.
        self.sub_norm = AllHeadsNorm.of(config, inner, tp, 1) if config.norm.sub_norm else None
        self.down = RowParallelLinear(
            inner,
            config.hidden_size,
            bias=mlp.bias,
            init=initial(config, scaled=True),
            tp=tp,
        )

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to the same shape."""
        up_BSF = self.up(x_BSH)
        if self.recomputes_activation and up_BSF.requires_grad:
            return checkpoint(self._down, up_BSF, use_reentrant=False)  # type: ignore[no-any-return]
        return self._down(up_BSF)

    def _down(self, up_BSF: Tensor) -> Tensor:
        inner_BSF = self.activation(up_BSF)
        if self.sub_norm is not None:
            inner_BSF = self.sub_norm(inner_BSF.unsqueeze(-1)).squeeze(-1)
        return self.down(inner_BSF)
