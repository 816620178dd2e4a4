"""What benchmarks/generate.py asks for, compares and prints."""

import pytest
import torch
from generate import parser
from generating.load import Mix, Request, counts
from generating.report import differences, gaps, table
from gpu_suite.table import markdown

MIX = Mix(20, (16, 512), (16, 256), 1000)


def test_rounds_have_the_same_lengths_and_other_tokens():
    first, second = MIX.requests(0), MIX.requests(1)
    assert first == MIX.requests(0) and counts(first) == counts(second)
    assert all(a.prompt != b.prompt for a, b in zip(first, second, strict=True))
    assert {16 <= len(r.prompt) <= 512 and 16 <= r.new_tokens <= 256 for r in first} == {True}
    assert len({len(r.prompt) for r in first}) > 10


def test_table():
    sample = {"cpu_seconds": 2.0, "first_cpu": [0.5, 1.5], "peak_bytes": 3e9}
    slow = {**sample, "cpu_seconds": 5.0}
    found = {("ours", 4): [sample] * 3, ("generate", 4): [slow] * 3}
    assert table(found, 60, 40).splitlines()[2:] == [
        "| ours | 4 | 20 | 50 | 1.00 | 1.00 | 1.50 | 3,000 |",
        "| generate | 4 | 8 | 20 | 2.50 | 1.00 | 1.50 | 3,000 |",
    ]


class Fixed:
    """Logits that say nothing of the token 7 but that it is as probable as 8, less 0.25."""

    def __call__(self, ids, logits_to_keep):
        logits = torch.zeros(1, 1, 10)
        logits[0, 0, 8], logits[0, 0, 7] = float(ids.shape[1]), ids.shape[1] - 0.25
        return type("Output", (), {"logits": logits})


def test_differences_are_judged_by_the_probabilities_there():
    requests = [Request([1, 2], 3), Request([3], 2)]
    ours, theirs = [[5, 8, 6], [4, 4]], [[5, 7, 9], [4, 4]]
    where = differences(requests, ours, theirs)
    assert where == [(0, 1)]
    assert gaps(Fixed(), requests, ours, theirs, where) == [0.25]
    with pytest.raises(AssertionError):
        differences(requests, ours, [[5, 7], [4, 4]])


def test_row_of_a_gpu():
    row = {"program": "ours", "concurrency": 16, "new_per_second": 1234.6, "first_seconds": 0.125}
    cell = {"group": "generation", "shape": "", "variant": "124M", "contestant": ""}
    machine = {"device": "GPU", "peak_flops": 1e15, "peak_is": "data sheet", "cores": 8}
    found = {
        "cell": cell,
        "machine": {**machine, "python": "3"},
        "date": "2026-11-23",
        "rows": [row],
    }
    assert "| ours | 16 | 1,235 | 0.12 |" in markdown({"generation-124M": found})


def test_flags():
    options = parser().parse_args(["--programs", "ours", "--concurrency", "1", "64"])
    assert (options.concurrency, options.programs) == ([1, 64], ["ours"])
