"""The order of the samples of a fine-tuning, as a function of the sample's number."""

from __future__ import annotations

from collections.abc import Sequence
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


class Repeated(RenumberedSamples[Sample]):
    """A data set again and again in its own order, of any number of samples."""

    def __init__(self, dataset: SampleDataset[Sample], count: int) -> None:
        super().__init__(dataset)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def number(self, index: int) -> int:
        return checked_index(index, self._count) % len(self.dataset)


def set_names(paths: Sequence[str], task: str, folders: bool) -> list[str]:
    """Names of validation sets: the part of their paths after the task's name, without ``.tsv`` or
    ``.json`` and with dashes: ``dev-matched``. Where a path lacks the task's name: the file's name,
    or of ``folders`` the last two. A name that occurs again gets a number."""
    names: list[str] = []
    for path in paths:
        name = found = _name(path, task, folders)
        number = 2
        while name in names:
            name, number = f"{found}-{number}", number + 1
        names.append(name)
    return names


def _name(path: str, task: str, folders: bool) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    at = path.rfind(task)
    after = path[at + len(task) :] if at >= 0 else ""
    if not after.strip("/_-."):
        after = "-".join(parts[-2:] if folders else parts[-1:])
    after = after.removesuffix(".tsv").removesuffix(".json").strip("/")
    return after.replace("/", "-").replace("_", "-").strip("-.")
