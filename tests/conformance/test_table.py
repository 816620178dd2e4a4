"""The page of documented commands is that of the cases, and a case replaces sizes only."""

import os
import re

import pytest
import table
from documented import PATHS, SIZES, all_cases, cases, shrunk, small_flags

SCRIPT = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --lr 1"
"""What a script prints in a dry run."""
ALL = [*all_cases(), *cases("mistakes")]


def test_the_page_is_up_to_date():
    if os.environ.get("MEGATRON_REWRITE_DOCS"):
        table.PAGE.write_text(table.page())
    assert table.PAGE.read_text() == table.page(), (
        "MEGATRON_REWRITE_DOCS=1 pytest tests/conformance/test_table.py writes it"
    )


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_a_case_replaces_sizes_only(case):
    """Word by word: what differs is the value of a size or path flag, or a placeholder."""
    documented, small = case.run.split(), case.small().split()
    assert len(small) == len(documented)
    flag = ""
    for before, after in zip(documented, small, strict=True):
        if before.startswith("--"):
            flag = before
        if before != after and not any(place in before for place in case.paths):
            assert flag in (*SIZES, *PATHS), f"{case.id}: {before} became {after}"
            assert not before.startswith("--")


def test_what_is_no_size_cannot_be_replaced():
    text = "python x.py --num-layers 24 --lr 0.1 --rampup-batch-size 16 16 5859375 --fp16"
    small, used = shrunk(text, {"--num-layers": "4"}, "x")
    assert small == "python x.py --num-layers 4 --lr 0.1 --rampup-batch-size 2 2 8 --fp16"
    assert used == ["--num-layers", "--rampup-batch-size"]
    with pytest.raises(AssertionError, match="--lr is no size"):
        shrunk(text, {"--lr": "1"}, "x")
    with pytest.raises(AssertionError, match="--seq-length is not in the command"):
        shrunk(text, {"--seq-length": "8"}, "x")
    assert small_flags(SCRIPT, {}, "x") == "--num-layers 2"


def test_sizes_are_sizes():
    """No flag whose value is more than a size, a count, an interval or a path is in the lists."""
    kind = re.compile(
        r"size|length|layers|heads|channels|embeddings|iters|samples|interval|steps|workers|epochs|"
        r"gpus|nodes|proc|data|path|src|image|wheel|ips"
    )
    assert all(kind.search(flag) for flag in (*SIZES, *PATHS))
