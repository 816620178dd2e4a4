"""What an update reads of DeepSpeed's optimizer of stages 1 and 2, without its engine."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn


def flat_partitions(
    groups: Sequence[Sequence[nn.Parameter]], padding: int = 0
) -> tuple[SimpleNamespace, torch.optim.Optimizer]:
    """A wrapper, and the AdamW in it, of a rank that has all parameters of each group."""
    flat, main = [], []
    for params in groups:
        values = torch.cat([param.detach().reshape(-1) for param in params])
        flat.append(torch.nn.functional.pad(values, (0, padding)))
        main.append(flat[-1].float().clone().requires_grad_())
    optimizer = torch.optim.AdamW([{"params": [each]} for each in main], lr=1e-3, fused=True)
    wrapper = SimpleNamespace(
        bit16_groups=groups,
        params_in_partition=groups,
        first_offset=[0 for _ in groups],
        bit16_groups_flat=flat,
        own_part=flat.__getitem__,
        single_partition_of_fp32_groups=main,
        averaged_gradients={},
        all_grad_tensors={},
        order_of_use=range(len(groups)),
        start_gather=lambda number: None,
        await_weights=lambda: None,
        gathers_late=False,
        _lazy_init_hp_params_optimizer_state=lambda: None,
    )
    return wrapper, optimizer


def set_gradients(wrapper: SimpleNamespace, grads: Sequence[Sequence[Tensor]]) -> None:
    """As DeepSpeed leaves them after the last backward pass of a step."""
    wrapper.averaged_gradients = dict(enumerate(grads))
