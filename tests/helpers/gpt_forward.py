"""A forward pass through a whole GPT in one call."""

from torch import Tensor

from megatron.config import ModelConfig
from megatron.model.attention_flex import block_masks
from megatron.model.attention_masks import AttentionMasks
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerCache, LayerStack, LayerState
from megatron.parallel.loss_head import Targets


def forward(
    stack: LayerStack,
    tokens_BS: Tensor,
    position_ids_BS: Tensor | None = None,
    document_ids_BS: Tensor | None = None,
    *,
    model: ModelConfig | None = None,
    cache: LayerCache | None = None,
    dropout_seed: int | None = None,
    targets: Targets | None = None,
) -> Tensor:
    """The loss; without targets this rank's logits [B, S, V / tensor size]. With the model's
    configuration the masks are those of a run on this device."""
    blocks = {} if model is None else block_masks(model, tokens_BS, document_ids_BS)
    begin = LayerState(
        tokens_BS,
        position_ids=position_ids_BS,
        masks=AttentionMasks(document_ids_BS, blocks=blocks),
        cache=cache,
        dropout_seed=dropout_seed,
        targets=targets,
    )
    after = stack(begin)
    return after.hidden if targets is None else after.losses[LM_LOSS]
