"""The use of experts in numbers, and the warning of experts that are not used."""

import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from configs import model_config
from routers import random_logits
from torch.utils.checkpoint import checkpoint

from megatron.apps.pictures.expert_loads import plot_loads, read_loads
from megatron.config.engine import FastPathsConfig
from megatron.engine import compilation
from megatron.families import build_model
from megatron.features.experts import report
from megatron.features.experts.balance import Balance, Balances
from megatron.features.experts.exchange import SharedTokens
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.report import ExpertsReport, LayerUse, collapse
from megatron.features.trackers.tags import tagged
from megatron.model.layer_list import LayerState, initialise
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import Buffer
from megatron.training.registry import METRICS


def part(**fields):
    flags = {"num_experts": (4,), "num_layers": 3, "moe_layer_freq": "[0,1,1]"} | fields
    return model_config(**flags).part(ExpertsConfig)


class Lines:
    """A report and a writer that keep what they get."""

    def __init__(self):
        self.at_line, self.after_line, self.rows = [], [], []

    def scalars(self, kind, step, values, **at):
        self.rows.append((kind, step, dict(values), at))

    def line(self):
        (numbers,), (write,) = self.at_line, self.after_line
        values = numbers(1.0)
        write(self)
        return values


def reporting(config, *layers):
    """A report of these layers, and their balances."""
    balances = Balances({n: Balance(config, 4, None) for n in layers}, Mesh())
    lines = Lines()
    plan = SimpleNamespace(lengths=SimpleNamespace(tokens=lambda samples: 10 * samples))
    engine = SimpleNamespace(kernels=balances)
    context = SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(blocks_ahead=0)),
        mesh=Mesh(),
        device=torch.device("cpu"),
        engine=engine,
        plan=plan,
        report=lines,
    )
    callback = ExpertsReport(config, context)
    callback.after_step(SimpleNamespace(consumed_samples=6), SimpleNamespace(iteration=3))
    return callback, balances, lines


def test_numbers_of_a_layer_against_formulas():
    use = LayerUse.of([6, 0, 3, 1, 2])
    shares = [0.6, 0.3, 0.1]
    assert use.max_over_mean == pytest.approx(6 / 2.5)
    assert use.entropy == pytest.approx(-sum(s * math.log2(s) for s in shares) / 2)
    assert use.dropped_share == pytest.approx(2 / 12) and use.idle == 1
    assert LayerUse.of([5, 5, 5, 5, 0]) == (1.0, pytest.approx(1.0), 0.0, 0)
    assert LayerUse.of([0, 9, 0, 0, 0]) == (4.0, 0.0, 0.0, 3)


def test_padding_is_not_a_dropped_choice():
    class Padded(SharedTokens):
        @property
        def samples_T(self):
            return torch.tensor([0, 0, 1, -1])

    balance = Balance(part(), 4, None)
    experts_TK = torch.tensor([[0, 1], [4, 1], [2, 4], [4, 4]])
    balance.count(experts_TK, random_logits(4, 4), Padded(2, 2))
    balance.count(experts_TK, random_logits(4, 4), Padded(2, 2))
    assert balance.counts_E.tolist() == [2, 4, 2, 0, 4]


def test_log_line_has_the_worst_layer_and_rows_have_all():
    callback, balances, lines = reporting(part(), 1, 2)
    balances.total_NE = torch.tensor([[4, 4, 4, 4, 0], [8, 0, 4, 2, 2]])
    numbers = lines.line()
    assert numbers.keys() <= METRICS.keys()
    worst = LayerUse.of([8, 0, 4, 2, 2])
    assert numbers == {
        "experts_max_over_mean": worst.max_over_mean, "experts_entropy": worst.entropy,
        "experts_idle": 1, "experts_dropped_share": 1 / 8,
    }  # fmt: skip
    (kind, step, values, at), *loads = lines.rows
    assert (kind, step, at) == ("experts", 3, {"samples": 6, "tokens": 60})
    assert values["max_over_mean_layer_1"] == 1.0
    assert values["dropped_share_layer_2"] == pytest.approx(1 / 8)
    assert loads[1][2] == {
        "layer": 2, "expert_0": 0.5, "expert_1": 0.0, "expert_2": 0.25, "expert_3": 0.125,
    }  # fmt: skip
    assert dict(tagged(kind, values))["experts/max over mean layer 2"] == worst.max_over_mean
    assert not list(tagged("expert_loads", loads[0][2]))
    # Nothing is counted twice, nor written again at the end of a training.
    assert balances.total_NE is None and lines.line() == {} and len(lines.rows) == 3
    balances.total_NE = torch.ones(2, 5, dtype=torch.int64)
    callback.went_back(None)
    assert lines.line() == {}


def test_collapse():
    assert collapse([100, 100, 100, 100, 0], 2) is None
    assert "1 of 4 experts got none of the last 200 tokens" in collapse([200, 100, 0, 100, 0], 2)
    assert collapse([3, 1, 0, 0, 0], 1) is None  # too few tokens to tell
    one = [600, *[60] * 10, 0]
    assert "one of 11 experts got 50%" in collapse([601, *one[1:]], 1)
    assert collapse(one, 1) is None
    assert collapse([100] * 2 + [0], 2) is None  # all experts of all tokens


def test_warning_comes_once_and_not_at_the_first_line(monkeypatch):
    _, balances, lines = reporting(part(), 1, 2)
    messages, counts = [], []
    monkeypatch.setattr(report.logger, "warning", lambda text, *of: messages.append(text % of))
    for _ in range(4):
        balances.total_NE = torch.tensor([[100, 100, 100, 100, 0], [300, 0, 0, 100, 0]])
        lines.line()
        counts.append(len(messages))
    assert counts == [0, 1, 1, 1]
    assert "router of layer 2" in messages[0] and "2 of 4 experts got none" in messages[0]
    assert messages[0].endswith("give --moe-aux-loss-coeff, for example 0.01")


def test_bias_of_a_frozen_router_stays():
    balance = Balance(part(), 4, Buffer(4))
    counts_E = torch.tensor([1, 2, 3, 4])
    balance.frozen = True
    balance.end_step(counts_E, Mesh().samples)
    assert not balance.bias.values.any()
    balance.frozen = False
    balance.end_step(counts_E, Mesh().samples)
    assert balance.bias.values.tolist() == pytest.approx([1e-3, 1e-3, -1e-3, -1e-3])


def test_picture(tmp_path):
    rows = [
        {"kind": "expert_loads", "iteration": n, "consumed_samples": n, "consumed_tokens": 10 * n,
         "layer": layer, "expert_0": 0.3, "expert_1": 0.1 * n}
        for n in (1, 2) for layer in (1, 4)
    ]  # fmt: skip
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loads = read_loads(path)
    assert list(loads) == [1, 4] and loads[4].tokens == [10.0, 20.0]
    assert loads[1].loads_ER.flatten().tolist() == pytest.approx([1.5, 1.2, 0.5, 0.8])
    plot_loads(path, tmp_path / "experts.png", title="run")
    assert (tmp_path / "experts.png").stat().st_size > 10_000
    path.write_text(
        '{"kind": "train", "iteration": 1, "consumed_samples": 1, "consumed_tokens": 1}\n'
    )
    with pytest.raises(ValueError, match="the run has no experts"):
        read_loads(path)


@pytest.mark.proof
def test_blocks_are_compiled_around_experts(monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile",
        lambda f, mode, dynamic: compiled(f, backend="aot_eager", dynamic=dynamic),
    )  # fmt: skip

    def model():
        fields = {
            "num_layers": 2, "num_experts": (4,), "moe_layer_freq": "[0,1]",
            "padded_vocab_size": 64, "unpadded_vocab_size": 64, "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }  # fmt: skip
        stack = build_model(model_config(**fields)).double()
        for name, param in stack.canonical_parameters():
            initialise(name, param, 1)
        return stack

    eager, fast = model(), model()
    compilation.compile_blocks([fast.sequence], FastPathsConfig(), torch.device("cpu"))
    x_BSH = torch.randn(2, 8, 8, dtype=torch.float64)
    for _ in range(2):
        x_BSH = x_BSH + 0.1  # other sizes of experts
        grads = []
        for stack in (eager, fast):
            state = LayerState(x_BSH)
            for block in stack.blocks():
                state = block(state)
            state.total.square().sum().backward()
            grads.append([p.grad for block in stack.blocks() for p in block.parameters()])
        for pair in zip(*grads, strict=True):
            torch.testing.assert_close(*pair, rtol=1e-11, atol=1e-13)


def test_recomputed_layers_are_counted_once():
    fields = {"num_layers": 1, "num_experts": (4,), "padded_vocab_size": 64}
    rule = {"moe_router_load_balancing_type": ("quantile_balancing",)}
    config = model_config(unpadded_vocab_size=64, **fields, **rule)
    mlp = build_model(config).blocks()[0].mlp
    for param in mlp.parameters():
        torch.nn.init.normal_(param, std=0.5)
    counted = []
    for recomputed in (False, True):
        mlp.balance.forget()
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            x_BSH = torch.randn(2, 8, 8, generator=generator).requires_grad_()
            run = partial(checkpoint, use_reentrant=False) if recomputed else lambda f, x: f(x)
            run(lambda x_BSH: mlp(x_BSH, LayerState(x_BSH))[0], x_BSH).sum().backward()
        balance = mlp.balance
        counted.append((balance.counts_E.tolist(), balance.biases_E.tolist()))
        assert balance.micro_batches == 2 and sum(balance.counts_E) == 2 * 16 * 2
    assert counted[0] == counted[1]
    mlp.eval()
    mlp(x_BSH, LayerState(x_BSH))
    assert sum(balance.counts_E) == 2 * 16 * 2
