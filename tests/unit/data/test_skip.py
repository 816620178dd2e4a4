"""Samples that are passed over; the rest keep their order."""

import random

import pytest

from megatron.config import ConfigError
from megatron.data.skip import SkippedSamples, check_skipped, parse_skipped, position


class Numbers:
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> int:
        return index

    def origin(self, index: int, /) -> list:
        return [index]


def test_against_removing_them_from_a_list() -> None:
    rng = random.Random(1)
    for _ in range(200):
        length = rng.randrange(1, 60)
        values = []
        for _ in range(rng.randrange(4)):
            first = rng.randrange(60)
            values.append(f"{first}:{first + rng.randrange(1, 9)}")
        skipped = parse_skipped(values)
        out = {n for v in values for n in range(*map(int, v.split(":")))}
        stream = [n for n in range(200) if n not in out]
        dataset = SkippedSamples(Numbers(length), skipped)
        assert [position(skipped, i) for i in range(80)] == stream[:80]
        assert [dataset[i] for i in range(length)] == [n % length for n in stream[:length]]
        assert dataset.origin(0) == [dataset[0]] and len(dataset) == length


@pytest.mark.parametrize("value", ["5", "5:5", "6:5", "-1:4", "a:b", "1:2:3", ":5"])
def test_values_that_are_no_range(value: str) -> None:
    with pytest.raises(ConfigError, match="--skip-samples .* must be FIRST:LAST"):
        parse_skipped([value])


def test_a_continued_run_skips_what_was_skipped() -> None:
    check_skipped((), ("100:120",), 100)
    check_skipped(("10:20",), ("10:20", "90:95"), 80)  # has read up to 90
    check_skipped(("10:20", "500:600"), ("10:20",), 80)  # thought better of it in time
    check_skipped(("10:20", "15:30"), ("10:30",), 80)
    for before, now, consumed in [
        ((), ("50:60",), 100),
        (("10:20",), (), 80),
        (("10:20",), ("10:20", "80:85"), 80),
        (("10:20",), ("10:21",), 80),
    ]:
        with pytest.raises(ConfigError, match="repeated or lost"):
            check_skipped(before, now, consumed)


def test_the_boundary_of_what_was_read() -> None:
    check_skipped(("80:90",), ("80:95",), 80)  # at the range, nothing behind it was read
    check_skipped(("80:90",), (), 80)
    check_skipped(("0:5",), (), 0)
    with pytest.raises(ConfigError, match="has read up to sample 91 and skipped 80:90"):
        check_skipped(("80:90",), ("80:95",), 81)
