"""--split, against a plain loop of the rule and by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.sources import parse_split, split_documents


def bounds_by_definition(shares: list[float], size: int) -> list[int]:
    total = sum(shares)
    shares = [share / total for share in shares]
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + int(round(share * float(size))))
    surplus = bounds[3] - size
    for i in (1, 2, 3):
        bounds[i] -= surplus
    return bounds


@pytest.mark.parametrize(
    ("split", "size", "bounds"),
    [
        ("969,30,1", 1000, (0, 969, 999, 1000)),
        ("969,30,1", 10_000, (0, 9690, 9990, 10_000)),
        ("969,30,1", 1, (0, 1, 1, 1)),
        ("949,50,1", 5, (0, 5, 5, 5)),
        ("98,2", 100, (0, 98, 100, 100)),
        ("1", 7, (0, 7, 7, 7)),
        ("1,1,1", 10, (0, 4, 7, 10)),  # 3 each; the one that is missing goes to training
        ("1,1,0", 5, (0, 3, 5, 5)),  # 2.5 rounds to even: 2 each
        ("0.5/0.25/0.25", 8, (0, 4, 6, 8)),
        ("0,0,1", 4, (0, 0, 0, 4)),
    ],
)
def test_by_hand(split: str, size: int, bounds: tuple[int, ...]) -> None:
    train, valid, test = split_documents(split, size)
    assert (train.start, train.stop, valid.stop, test.stop) == bounds
    assert (valid.start, test.start) == (train.stop, valid.stop)


@given(
    shares=st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any),
    size=st.integers(1, 10**7),
)
def test_against_the_definition(shares: list[int], size: int) -> None:
    bounds = bounds_by_definition([float(share) for share in shares], size)
    parts = split_documents(",".join(map(str, shares)), size)
    if min(bounds) >= 0:
        assert [(p.start, len(p)) for p in parts] == [
            (bounds[i], max(0, bounds[i + 1] - bounds[i])) for i in range(3)
        ]
    assert sum(len(p) for p in parts) == size
    assert len({d for p in parts for d in (p.start, p.stop) if not 0 <= d <= size}) == 0


def test_never_reads_from_the_end_of_the_file() -> None:
    # 0 + round(1.5) + round(1.5) is one too many: taken off, the first boundary would be -1.
    assert split_documents("0,1,1", 3) == (range(0, 0), range(0, 1), range(1, 3))


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan", "inf,1", "1,,2"])
def test_not_a_split(split: str) -> None:
    with pytest.raises(ValueError, match="--split"):
        parse_split(split)
