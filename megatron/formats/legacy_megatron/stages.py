"""Which pipeline rank of Megatron has which parameters.

The blocks of a stack are divided evenly. Where there are an encoder and a decoder, the first ranks
have the encoder's and the others, from the split rank on, the decoder's; the split rank has a copy
of the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron.config import ModelConfig
from megatron.formats.legacy_megatron.names import EMBEDDING, names_of_family, stack_name, stack_of


class _Span(NamedTuple):
    """The ranks of a stack, and the blocks of each."""

    ranks: range
    blocks: int


class Stages(NamedTuple):
    """The ranks of a pipeline; ``split`` is the first one of the second stack, None without one or
    with a single rank."""

    size: int
    spans: Mapping[str, _Span]
    split: int | None

    def of(self, theirs: str) -> tuple[int, ...]:
        """The ranks that have a parameter, by Megatron's name with the block's number in the whole
        stack."""
        if theirs.startswith(EMBEDDING):
            return (0,) if self.split is None else (0, self.split)
        stack = stack_name(theirs)
        if stack is None:
            return (self.size - 1,)
        ranks, blocks = self.spans[stack]
        numbered = stack_of(theirs)
        return (ranks[-1] if numbered is None else ranks[numbered[1] // blocks],)

    def first_block(self, theirs: str, rank: int) -> int:
        """The number in its stack of the block that a rank calls ``layers.0``."""
        stack = stack_name(theirs)
        return (
            0 if stack is None else (rank - self.spans[stack].ranks[0]) * self.spans[stack].blocks
        )


def stages_of(model: ModelConfig, size: int) -> Stages:
    """How a network is divided over ``size`` ranks; of several ways for two stacks, that with the
    fewest blocks on a rank. Raises ValueError if Megatron has no way."""
    stacks = names_of_family(model.family).stacks
    lengths = {name: stack.length(model) for name, stack in stacks.items()}
    flag = f"--target-pipeline-parallel-size {size}"
    if len(stacks) == 1 or size == 1:
        if size < 1 or any(length % size for length in lengths.values()):
            (length,) = lengths.values()
            raise ValueError(f"{flag} must divide the {length} layers")
        spans = {name: _Span(range(size), length // size) for name, length in lengths.items()}
        return Stages(size, spans, None)
    (first, before), (second, after) = lengths.items()
    splits = [
        split for split in range(1, size) if before % split == 0 and after % (size - split) == 0
    ]
    if not splits:
        raise ValueError(
            f"{flag}: the ranks cannot be divided into some that divide the {before} layers of the "
            f"{first} and others that divide the {after} of the {second}"
        )
    split = min(splits, key=lambda split: max(before // split, after // (size - split)))
    spans = {
        first: _Span(range(split), before // split),
        second: _Span(range(split, size), after // (size - split)),
    }
    return Stages(size, spans, split)
