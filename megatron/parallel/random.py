"""Seeds and states of random number generators. Some are the same on all ranks, others differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.parallel.mesh import Group
from megatron.util.digests import hash64


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed derived from printable values, stable across processes and versions."""
    return hash64("\0".join(map(str, parts)).encode()) >> 1


def generator(seed: int, name: str) -> torch.Generator:
    """Return the CPU generator that draws the initial values of the parameter ``name``."""
    return torch.Generator().manual_seed(derive_seed(seed, name))


def dropout_seed(seed: int, first_sample: int) -> int:
    """Return the dropout seed of the micro batch whose first sample has index ``first_sample``."""
    return derive_seed(seed, "dropout", first_sample)


def seed_devices(seed: int) -> None:
    """Seed the generators of the CPU and of every GPU in use, like ``torch.manual_seed``, which
    also formats the stack for each absent accelerator (0.3 ms a call)."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        for of_device in torch.cuda.default_generators:
            of_device.manual_seed(seed)


@contextlib.contextmanager
def tensor_parallel_random(*groups: Group) -> Iterator[None]:
    """In this context, random numbers differ between the ranks of the groups. Outside it, all ranks
    with the same samples must draw the same numbers; the common seed is drawn from these. The outer
    state is restored on exit."""
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
    """Return the states of this process's CPU and GPU generators in torch."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
