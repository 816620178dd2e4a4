"""A CPU's step: traces built by hand, and torch's profiler as reference."""

import pytest
import torch
from kineto import WORKER, event, memory, scope, step, write
from torch.utils.flop_counter import FlopCounterMode

from megatron.apps.profiling.breakdown import break_down
from megatron.apps.profiling.tables import breakdown_text
from megatron.apps.profiling.trace import read_trace


def two_steps(path, *more, disturbance=0.0):
    """Two steps of 100 us; in the second, 200 us later, a product takes longer."""
    events = []
    for number in (0, 1):
        late = 200.0 * number
        slow = disturbance * number
        events += [
            step(number + 1, late, late + 100 + slow),
            scope("megatron::data", late + 2, late + 5),
            event("aten::stack", late + 3, late + 4),
            scope("megatron::forward", late + 10, late + 40),
            event("aten::layer_norm", late + 10, late + 14, Sequence_number=7),
            event("aten::linear", late + 15, late + 27, Sequence_number=8),
            event("aten::mm", late + 16, late + 26, Input_Dims=[[4, 8], [8, 2]], Sequence_number=8),
            event("aten::scaled_dot_product_attention", late + 28, late + 32, Sequence_number=9),
            event("aten::mul", late + 29, late + 31, Sequence_number=9),
            event("_LinearCrossEntropy", late + 33, late + 38, Sequence_number=10),
            event("aten::exp_", late + 34, late + 37, Sequence_number=11),
            event(
                "autograd::engine::evaluate_function: MulBackward0",
                late + 45,
                late + 50,
                Sequence_number=9,
            ),
            event("aten::mul", late + 46, late + 49),
            # A collective in another thread; the training thread works until 60, then waits.
            event("c10d::allreduce_", late + 52, late + 54),
            event("aten::mm", late + 55, late + 60, Input_Dims=[[2, 4], [4, 8]]),
            event(
                "gloo:all_reduce",
                late + 53,
                late + 70,
                cat="user_annotation",
                tid=WORKER,
                Input_Dims=[[1024, 256]],
                Input_type=["c10::BFloat16"],
            ),
            scope("megatron::optimizer", late + 75, late + 95 + slow),
            event("aten::_fused_adamw_", late + 76, late + 86 + slow),
            event("aten::_local_scalar_dense", late + 88 + slow, late + 89 + slow),
        ]
    return break_down(read_trace(write(path, *events, *more)))


def test_every_moment_is_counted_once(tmp_path):
    found = two_steps(tmp_path / "t.json", memory(17, 3 * 2**20), memory(217, 2**20))
    assert (found.steps, found.step, found.on_device, found.rank) == (2, 100.0, False, 3)
    assert dict(found.cells) == pytest.approx(
        {
            ("data", "data"): 3,
            ("norms", "forward"): 4,
            ("matrix products", "forward"): 12,
            ("attention", "forward"): 4,
            ("loss", "forward"): 3,
            ("host", "forward"): 30 - 4 - 12 - 4 - 3,
            ("attention", "backward"): 3,  # by the sequence number of its forward operator
            ("host", "backward"): 2,
            ("matrix products", "rest"): 5,
            ("communication", "rest"): 2 + 1 + 10,  # the call, 54 to 55, 60 to 70
            ("optimizer", "optimizer"): 10,
            ("host", "optimizer"): 10,
            ("host", "rest"): 100 - 3 - 30 - 5 - 5 - 13 - 20,
        }
    )
    assert sum(found.cells.values()) == pytest.approx(100)
    assert found.hidden == pytest.approx(17 - 11 - 1), "next to the product"
    (collective,) = found.collectives
    assert (collective.name, collective.calls) == ("gloo:all_reduce", 1)
    assert (collective.time, collective.amount) == (pytest.approx(17), 2 * 1024 * 256)
    (wait,) = found.waits
    assert (wait.name, wait.phase, wait.calls) == ("aten::_local_scalar_dense", "optimizer", 1)
    products = {(p.name, p.phase): (p.calls, p.amount) for p in found.gemms}
    assert products == {
        ("4 x 8 x 2", "forward"): (1, 128.0),
        ("2 x 4 x 8", "rest"): (1, 128.0),
    }
    by_name = {operator.name: operator for operator in found.operators}
    assert by_name["aten::mm"].time == pytest.approx(15)
    assert (by_name["aten::mm"].calls, by_name["aten::mm"].amount) == (2, 2 * 2**20)


def test_evaluations_and_saves_are_no_part_of_a_step(tmp_path):
    more = [scope("megatron::evaluate", 96, 99), event("aten::mm", 97, 98)]
    found = two_steps(tmp_path / "t.json", *more, scope("megatron::save", 296, 299))
    assert found.step == pytest.approx(97)
    assert found.of_category("matrix products") == pytest.approx(17)


def test_least_takes_each_operator_where_it_was_fastest(tmp_path):
    path = tmp_path / "t.json"
    assert two_steps(path, disturbance=50.0).step == pytest.approx(125)
    found = break_down(read_trace(path), least=True)
    assert found.step == pytest.approx(100) and found.kind == "least"
    assert found.of_category("optimizer") == pytest.approx(10)
    assert {p.calls for p in found.gemms} == {1}


def test_the_table_has_every_category_and_adds_up(tmp_path):
    text = breakdown_text(two_steps(tmp_path / "t.json"))
    lines = [line.split() for line in text.splitlines()]
    assert ["communication", "0.00", "0.00", "0.00", "0.00", "0.01", "0.01", "13.0%"] in lines
    assert any(line[0] == "step" and line[-1] == "100.0%" for line in lines if line)
    assert "next to other work" in text and "reads a value" in text


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real trace of two steps of a small model, torch's own averages, and its count of FLOPs."""
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    head = torch.nn.Linear(32, 50)
    params = [*layer.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(params, fused=True)
    tokens = torch.randn(2, 16, 32)
    labels = torch.randint(50, (32,))

    def train():
        optimizer.zero_grad()
        logits = head(layer(tokens)).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()

    with FlopCounterMode(display=False) as counter:
        train()
    counts = counter.get_flop_counts()["Global"]
    flops = sum(counts[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm) if op in counts)
    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, schedule=schedule, record_shapes=True) as profiler:
        for _ in range(3):
            train()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return break_down(read_trace(path)), profiler.key_averages(), flops


def test_own_times_are_those_of_torchs_averages(trained):
    found, averages, _ = trained
    theirs = {each.key: (each.self_cpu_time_total, each.count) for each in averages}
    for operator in found.operators:
        time, count = theirs[operator.name]
        assert operator.calls * 2 == count, operator.name
        # They round each event to whole microseconds or less.
        assert operator.time * 2 == pytest.approx(time, abs=0.01 * count + 1), operator.name
    ours = {operator.name for operator in found.operators}
    assert ours >= {name for name in theirs if name.startswith("aten::") and theirs[name][0] > 1}


def test_a_real_step_is_split_whole(trained):
    found, _, _ = trained
    assert sum(found.cells.values()) == pytest.approx(found.step)
    for category in ("attention", "matrix products", "norms", "elementwise", "loss", "host"):
        assert found.cells[category, "backward"] > 0, category
    assert found.of_category("optimizer") > 0


def test_flops_against_torchs_counter(trained):
    found, _, flops = trained
    assert sum(product.amount for product in found.gemms) == flops
