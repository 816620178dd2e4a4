"""The order of the samples of a fine-tuning, as a function of the sample's number."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megatron.data.samples import RenumberedSamples, SampleDataset, checked_index

Sample = TypeVar("Sample")


def order_of_epoch(seed: int, epoch: int, samples: int) -> npt.NDArray[np.int64]:
    """The order of an epoch, from 0: that of torch's ``DistributedSampler`` for the sum of seed and
    epoch."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(samples, generator=generator).numpy()


class ShuffledEpochs(RenumberedSamples[Sample]):
    """A data set again and again, each time in another order; sample n is of epoch n // samples.
    ``count`` is the number of samples that are asked for, at most."""

    def __init__(self, dataset: SampleDataset[Sample], seed: int, count: int) -> None:
        super().__init__(dataset)
        self._seed, self._count = seed, count
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self._count

    def number(self, index: int) -> int:
        epoch, place = divmod(checked_index(index, self._count), len(self.dataset))
        if epoch not in self._orders:
            # A batch may have samples of two epochs; of those before nothing is needed any more.
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = order_of_epoch(self._seed, epoch, len(self.dataset))
        return int(self._orders[epoch][place])
