"""Seeds and states of random numbers, which some ranks draw alike and others differently."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.parallel.mesh import Group
from megatron.util.digests import hash64


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from anything printable, stable over processes and versions."""
    return hash64("\0".join(map(str, parts)).encode()) >> 1


def generator(seed: int, name: str) -> torch.Generator:
    """The CPU generator of the initial values of the parameter ``name``."""
    return torch.Generator().manual_seed(derive_seed(seed, name))


def dropout_seed(seed: int, first_sample: int) -> int:
    """Seed of the dropout masks of the micro batch that starts at a sample."""
    return derive_seed(seed, "dropout", first_sample)


def seed_devices(seed: int) -> None:
    """Seeds the generators of the CPU and of every GPU that this process uses.
    ``torch.manual_seed`` gives the same numbers, but also formats the stack for each absent
    accelerator (0.3 ms a call)."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        for of_device in torch.cuda.default_generators:
            of_device.manual_seed(seed)


@contextlib.contextmanager
def tensor_parallel_random(*groups: Group) -> Iterator[None]:
    """Random numbers inside the block differ between the ranks of the groups. Outside, all ranks
    that have the same samples draw the same numbers, so that they draw a common seed here; the
    state outside is restored on leaving."""
    ranks = [group.rank for group in groups if group.size > 1]
    if not ranks:
        yield
        return
    common = int(torch.randint(2**62, (), dtype=torch.int64))
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        seed_devices(derive_seed(common, *ranks))
        yield


def random_state() -> dict[str, Tensor]:
    """The states of torch's generators on this process, as tensors."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
