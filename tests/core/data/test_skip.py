"""Samples that are passed over; the rest keep their order."""

import random

import pytest

from megatron.config import ConfigError
from megatron.data.sampler import SkippedSamples, check_skipped, parse_skipped, position


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
    """One range after the other, each counted in what the ones before have left."""
    rng = random.Random(1)
    for _ in range(300):
        values, stream, length = [], list(range(400)), rng.randrange(100, 400)
        for _ in range(rng.randrange(5)):
            first = rng.randrange(60)
            last = first + rng.randrange(1, 9)
            values.append(f"{first}:{last}")
            del stream[first:last]
        skipped = parse_skipped(values)
        dataset = SkippedSamples(Numbers(length), skipped)
        assert [position(skipped, i) for i in range(300)] == stream[:300]
        kept = [n for n in stream if n < length]
        assert [dataset[i] for i in range(length)] == (kept + kept)[:length]
        assert dataset.origin(0) == [dataset[0]] and len(dataset) == length


@pytest.mark.parametrize("value", ["5", "5:5", "6:5", "-1:4", "a:b", "1:2:3", ":5"])
def test_values_that_are_no_range(value: str) -> None:
    with pytest.raises(ConfigError, match="--skip-samples .* must be FIRST:LAST"):
        parse_skipped([value])


@pytest.mark.parametrize("values", [["0:100"], ["90:101"], ["200:300"], ["0:60", "0:40"]])
def test_ranges_beyond_the_data(values: list[str]) -> None:
    with pytest.raises(ConfigError, match="--skip-samples: sample .* the training data have 100"):
        SkippedSamples(Numbers(100), parse_skipped(values))


def test_a_continued_run_skips_what_was_skipped() -> None:
    check_skipped((), ("100:120",), 100)
    check_skipped(("10:20",), ("10:20", "80:95"), 80)
    check_skipped(("10:20",), ("10:20", "85:95", "82:84"), 80)
    check_skipped(("10:20", "500:600"), ("10:20",), 80)  # thought better of it in time
    check_skipped(("10:20", "10:20"), ("10:30",), 80)
    check_skipped(("80:90",), ("80:95",), 80)  # nothing behind it was read yet
    check_skipped(("80:90",), (), 80)
    check_skipped(("0:5",), (), 0)
    for before, now, consumed in [
        ((), ("50:60",), 100),
        (("10:20",), (), 80),
        (("10:20",), ("10:20", "79:85"), 80),
        (("10:20",), ("10:20", "15:18"), 80),
        (("10:20",), ("10:21",), 80),
        (("80:90",), ("80:95",), 81),
    ]:
        with pytest.raises(ConfigError, match="repeated or lost"):
            check_skipped(before, now, consumed)
