"""The counts of a step on a null GPU are the recorded ones (counts.json).

Needs a CUDA build of torch and gcc, which `make null-gpu` has; the ordinary suite skips it, unless
its torch is such a build.
"""

import pytest
from nullgpu import build, table
from nullgpu.cells import CELLS

REASON = build.missing()
here = pytest.mark.skipif(REASON is not None, reason=f"{REASON}")
ALWAYS = "one bf16"


@here
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == ALWAYS else pytest.mark.proof) for n in CELLS]
)
def test_counts_are_those_of_the_record(name):
    """Graphs, breaks, launches, waits of the host, collectives and bytes, and memory."""
    known = table.record()
    if known["torch"] != table.version("torch"):
        pytest.skip(f"recorded with torch {known['torch']}")
    found = table.count(name)
    assert table.differences(found["counts"], known["cells"][name]) == [], found["reasons"]


WAITING = {"dp2 zero3", "ep2"}
"""DeepSpeed's stage 3 waits once for each micro batch, and the host reads how many rows go to each
rank's experts."""


def test_the_record_has_every_cell_and_few_waits():
    """No other step waits for the device, and no block of one rank is in parts or for any size."""
    cells = table.record()["cells"]
    assert set(cells) == set(CELLS)
    counted = {name: each for name, each in cells.items() if "out_of_memory" not in each}
    assert {name for name, each in counted.items() if each["syncs"]} <= WAITING
    assert not any(each.get("symbolic_graphs") for each in counted.values())
    assert not any(each["breaks"] for name, each in counted.items() if CELLS[name].ranks == 1)


def test_differences_are_named():
    recorded = {"graphs": 3, "syncs": 0, "peak_gib": 10.0}
    assert table.differences({"graphs": 3, "peak_gib": 10.1}, recorded) == []
    worse = {"graphs": 3, "syncs": 4, "all_reduce": 2, "peak_gib": 11.0}
    assert table.differences(worse, recorded) == [
        "syncs is 4, recorded 0", "peak_gib is 11, recorded 10", "all_reduce is 2, recorded 0",
    ]  # fmt: skip


def test_a_table_shows_what_changed():
    old = {"graphs": 12, "breaks": 16, "collectives": 50, "all_reduce_bytes": 2e6, "peak_gib": 4.5}
    new = {**old, "graphs": 3, "breaks": 0, "exposed": 1, "exposed_bytes": 1e6}
    lines = table.markdown({"tp2": new, "7B fp8": {"out_of_memory": 1}}, {"tp2": old}).splitlines()
    assert lines[2] == (
        "| tp2 | 12 -> 3 | 16 -> 0 | 0 | 0 | 0 | 50 | 0 -> 1 | 2.0 | 0.0 -> 1.0 | 4.50 |"
    )
    assert lines[3].endswith("| out of memory |")


def test_stubs_are_those_that_the_source_lacks():
    """Functions that make handles set them; no other does more than return 0."""
    assert build._stub("cublasCreate_v2").count("*h = (void *)1") == 1
    assert build._stub("cudaProfilerStart") == "int cudaProfilerStart(void) { return 0; }\n"
    source = build.SOURCE.read_text(encoding="utf-8")
    defined = {name for pair in build._DEFINED.findall(source) for name in pair if name}
    assert {"cudaMalloc", "cublasGemmEx", "ncclAllReduce", "cuGetProcAddress_v2"} <= defined


@pytest.mark.skipif(REASON is None, reason="everything is here")
def test_what_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["table.py", "--cells", "one bf16"])
    with pytest.raises(SystemExit, match="2"):
        table.main()
    assert f"error: {REASON}" in capsys.readouterr().err
