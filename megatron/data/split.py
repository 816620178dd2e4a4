"""Which documents are for what: Megatron's `--split 969,30,1`, and ranges such as 0:0.95."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron.config import ConfigError


class Split(NamedTuple):
    """One value each for training, validation and test."""

    train: range
    valid: range
    test: range


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of a `--split` string, normalised to a sum of 1; missing ones are 0.

    Raises:
        ConfigError: the string is not up to three numbers >= 0, one of them > 0.
    """
    try:
        shares = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    total = sum(shares)
    usable = 1 <= len(shares) <= 3 and min(shares) >= 0 and 0 < total < math.inf
    if not usable:
        raise ConfigError(
            f"--split {split!r}: give up to three shares >= 0 (training, validation, test) "
            "with commas between them, such as 969,30,1"
        )
    train, valid, test = (share / total for share in shares + [0.0] * (3 - len(shares)))
    return train, valid, test


def split_documents(split: str, num_documents: int) -> Split:
    """The documents of each part, contiguous and in file order.

    Each share is rounded over the document count, the boundaries are summed up, and the rounding
    surplus is taken off every boundary after the first, as Megatron does it. (Where that gives a
    negative boundary Megatron would read documents from the end of the file; here it is 0.)

    Raises:
        ConfigError: the string is no split.
    """
    counts = (round(share * num_documents) for share in parse_split(split))
    bounds = list(accumulate(counts, initial=0))
    surplus = bounds[-1] - num_documents
    bounds[1:] = [max(bound - surplus, 0) for bound in bounds[1:]]
    return Split(*(range(start, max(start, stop)) for start, stop in pairwise(bounds)))


def parse_share(first: str, last: str, where: str) -> tuple[float, float]:
    """A range of documents in fractions of their number; an end that is left out is 0 or 1.

    Args:
        where: what gave it, for the message.

    Raises:
        ConfigError: it is not 0 <= first < last <= 1.
    """
    try:
        start, end = float(first or 0), float(last or 1)
    except ValueError:
        start, end = 1.0, 0.0
    if not 0 <= start < end <= 1:
        raise ConfigError(
            f"{where}: {first}:{last} is no range; it is FIRST:LAST with 0 <= FIRST < LAST <= 1, "
            "fractions of the documents"
        )
    return start, end


def share_documents(share: tuple[float, float], num_documents: int) -> range:
    """The documents of a range of fractions, in file order; both ends are rounded."""
    first, last = share
    return range(round(first * num_documents), round(last * num_documents))
