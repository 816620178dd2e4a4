"""Division of a layer list into pipeline stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def stage_bounds(
    blocks: Sequence[bool],
    weights: Sequence[int],
    stages: int,
    method: str,
    costs: Sequence[int] | None = None,
    with_next_block: Sequence[bool] | None = None,
) -> list[int]:
    """Where each stage starts in the layer list, followed by the list's length. Every stage gets at
    least one of the repeated blocks; other layers follow a block, or belong to the first or the
    last stage. Raises ValueError if the list does not fit.

    Args:
        weights: parameters of each layer.
        method: ``blocks`` (equal numbers of blocks; the remainder goes to the middle stages, away
            from embedding and head; where blocks differ in their costs, the costliest stage as
            cheap as possible), ``parameters`` (the largest stage as small as possible), or the
            numbers of blocks, separated by commas.
        costs: of each layer, for ``blocks``; None where all blocks cost the same.
        with_next_block: whether a layer must be on the stage of the next block; None: none must.
    """
    places = [place for place, block in enumerate(blocks) if block]
    if len(places) < stages:
        raise ValueError(f"{len(places)} blocks cannot be cut into {stages} pipeline stages")
    if method == "blocks":
        loads = [block * cost for block, cost in zip(blocks, costs or blocks, strict=True)]
        alike = len({loads[place] for place in places}) == 1
        counts = _even(len(places), stages) if alike else _balanced(places, loads, stages)
    elif method == "parameters":
        counts = _balanced(places, weights, stages)
    else:
        counts = explicit_counts(method)
        if len(counts) != stages or sum(counts) != len(places) or min(counts) < 1:
            raise ValueError(
                f"--pipeline-partition {method} must be {stages} positive numbers of blocks, one "
                f"per stage, with the sum {len(places)}"
            )
    starts = [places[first] for first in accumulate(counts[:-1])]
    if with_next_block is not None:
        starts = [_first_with_block(place, with_next_block) for place in starts]
    return [0, *starts, len(blocks)]


def _first_with_block(place: int, with_next_block: Sequence[bool]) -> int:
    while with_next_block[place - 1]:
        place -= 1
    return place


def explicit_counts(method: str) -> list[int]:
    """The numbers of ``3,4,4,3``; ValueError if it is not such a list."""
    try:
        return [int(count) for count in method.split(",")]
    except ValueError:
        raise ValueError(
            f"--pipeline-partition {method}: expected blocks, parameters, or the number of blocks "
            "of each stage, separated by commas"
        ) from None


def _even(blocks: int, stages: int) -> list[int]:
    each, over = divmod(blocks, stages)
    first = (stages - over) // 2
    return [each + (first <= stage < first + over) for stage in range(stages)]


def _balanced(places: Sequence[int], weights: Sequence[int], stages: int) -> list[int]:
    """Numbers of blocks per stage that make the heaviest stage as light as possible, by bisection
    over the bound."""
    begins, ends = [0, *places[1:]], [*places[1:], len(weights)]
    loads = [sum(weights[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    low, high = max(loads), sum(loads)
    bound = low + bisect_left(
        range(low, high + 1), True, key=lambda bound: len(_fill(loads, bound)) <= stages
    )
    counts = _fill(loads, bound)
    # Fewer stages than there are: splitting the fullest ones never makes the heaviest heavier.
    while len(counts) < stages:
        fullest = max(range(len(counts)), key=lambda stage: counts[stage])
        half = counts[fullest] // 2
        counts[fullest : fullest + 1] = [counts[fullest] - half, half]
    return counts


def _fill(loads: Sequence[int], bound: int) -> list[int]:
    counts, load = [0], 0
    for weight in loads:
        if load + weight > bound:
            counts.append(0)
            load = 0
        counts[-1] += 1
        load += weight
    return counts
