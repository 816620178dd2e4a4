"""A device that is not the CPU, where there is no GPU: torch's "meta" device.

Its tensors have shapes and layouts but no values. What the host reads from them raises (torch has
nothing to give), and under :class:`OneDevice` whatever was made on the CPU by mistake does too.
What kernels compute is not looked at.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """Lets no tensor of the CPU into the work of the device, but numbers without dimensions, which
    kernels of GPUs take as arguments."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in _tensors((args, kwargs)):
            number = not tensor.dim()
            assert number or tensor.device == GPU, f"{func} gets {tensor.shape} of the CPU"
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            assert tensor.device == GPU, f"{func} makes {tensor.shape} on the CPU"
        return result


def _tensors(tree: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
