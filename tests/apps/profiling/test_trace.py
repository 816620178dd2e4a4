"""Reading trace files, whole ones and others."""

import json

import pytest
from kineto import MAIN, event, memory, scope, step, write

from megatron.apps.profiling.trace import TraceError, read_trace


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_reads_plain_and_packed(tmp_path, name):
    path = write(
        tmp_path / name,
        event("aten::mm", 12, 20, Input_Dims=[[2, 3], [3, 4]]),
        step(1, 10, 30),
        memory(13, 64),
        megatron={"matmul_peak_flops": 5.0},
    )
    trace = read_trace(path)
    (thread,) = trace.host
    assert thread == str(MAIN) == trace.main_thread
    assert [e.name for e in trace.host[thread]] == ["ProfilerStep#1", "aten::mm"], "outer first"
    assert [(e.start, e.end) for e in trace.steps()] == [(0.0, 20.0)]
    assert trace.host[thread][1].args["Input Dims"] == [[2, 3], [3, 4]]
    assert trace.allocations == [(thread, 3.0, 64)]
    assert trace.rank == 3 and trace.about == {"matmul_peak_flops": 5.0}


@pytest.mark.parametrize(
    "content, says",
    [
        (b"\x1f\x8bbroken", "broken gzip file"),
        (b"{ no json", "not JSON"),
        (b"[1, 2]", 'has no list "traceEvents"'),
        (b'{"traceEvents": 3}', 'has no list "traceEvents"'),
        (json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op"}]}).encode(), "an event lacks"),
        (json.dumps({"traceEvents": ["text"]}).encode(), "an event lacks"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path, content, says):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=f"{path}: {says}"):
        read_trace(path)


def test_a_trace_without_steps_says_what_writes_them(tmp_path):
    trace = read_trace(write(tmp_path / "trace.json", scope("anything", 0, 10)))
    with pytest.raises(TraceError, match=r"trace.json: contains no training step .* --profile"):
        trace.steps()
