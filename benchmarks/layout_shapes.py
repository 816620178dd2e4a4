"""Models and layouts that benchmarks train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of the GPT that is trained, and of its batches.

    Attributes:
        layers: blocks.
        hidden: hidden size; heads are 64 wide.
        sequence: tokens of a sample.
        vocabulary: tokens of the vocabulary, a multiple of 128.
        micro_batch: samples that a process takes through the model at once.
        micro_batches: micro batches of a step.
    """

    layers: int = 4
    hidden: int = 256
    sequence: int = 256
    vocabulary: int = 8192
    micro_batch: int = 8
    micro_batches: int = 1

    def flags(self, replicas: int) -> list[str]:
        """Flags of ``pretrain_gpt.py`` that train this on made-up data."""
        heads = max(1, self.hidden // 64)
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} "
            f"--num-attention-heads {heads} --seq-length {self.sequence} "
            f"--micro-batch-size {self.micro_batch} "
            f"--global-batch-size {self.micro_batch * self.micro_batches * replicas} "
            f"--tokenizer-type NullTokenizer --vocab-size {self.vocabulary - 1} --mock-data "
            "--num-workers 0 --eval-iters 0 --lr 1e-4 --train-iters 100000 --peak-tflops 1 "
            "--hidden-dropout 0 --attention-dropout 0"
        ).split()

    @property
    def name(self) -> str:
        """Its numbers, for tables."""
        return (
            f"{self.layers} layers, hidden {self.hidden}, sequence {self.sequence}, "
            f"vocabulary {self.vocabulary:,}, {self.micro_batches} x {self.micro_batch} samples"
        )


@dataclass(frozen=True)
class LayoutFlags:
    """A layout by its flags.

    Attributes:
        name: short name, as in tables.
        processes: how many there are.
        replicas: data-parallel replicas.
        flags: what ``pretrain_gpt.py`` is given besides the model.
        copies: how many such trainings run next to each other, knowing nothing of each other.
    """

    name: str
    processes: int
    replicas: int
    flags: tuple[str, ...] = ()
    copies: int = 1


def _layout(
    name: str,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    more: str = "",
    copies: int = 1,
    context: int = 1,
) -> LayoutFlags:
    sizes = ("--tensor-model-parallel-size", str(tensor))
    sizes += ("--pipeline-model-parallel-size", str(pipeline))
    sizes += ("--context-parallel-size", str(context))
    flags = (*sizes, *more.split())
    return LayoutFlags(name, tensor * pipeline * data * context, data, flags, copies)


_ZERO = "--zero-stage"
LAYOUTS = {
    each.name: each
    for each in (
        _layout("dp1", more=f"{_ZERO} 1"),
        _layout("2 x dp1", more=f"{_ZERO} 1", copies=2),
        _layout("4 x dp1", more=f"{_ZERO} 1", copies=4),
        _layout("dp2", data=2, more=f"{_ZERO} 1"),
        _layout("dp2-zero2", data=2, more=f"{_ZERO} 2"),
        _layout("dp2-zero3", data=2, more=f"{_ZERO} 3"),
        _layout("tp2", tensor=2, more=f"{_ZERO} 1"),
        _layout("tp2-sp", tensor=2, more=f"{_ZERO} 1 --sequence-parallel"),
        _layout("pp2", pipeline=2, more=f"{_ZERO} 1"),
        _layout("cp2", context=2, more=f"{_ZERO} 1"),
        _layout("cp2-a2a", context=2, more=f"{_ZERO} 1 --cp-comm-type a2a"),
        _layout("cp2-allgather", context=2, more=f"{_ZERO} 1 --cp-comm-type allgather"),
        _layout("dp4", data=4, more=f"{_ZERO} 1"),
        _layout("tp2-dp2", tensor=2, data=2, more=f"{_ZERO} 1"),
        _layout("tp4", tensor=4, more=f"{_ZERO} 1"),
        _layout("pp2-tp2", pipeline=2, tensor=2, more=f"{_ZERO} 1"),
    )
}
"""Layouts by name. "2 x dp1" are two trainings of one process each that know nothing of each other:
what two cores can do that share memory and caches, the most that two processes can reach."""
