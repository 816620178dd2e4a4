"""Rates, decay and epsilon of single parameters; references: formulas of Megatron's flags, torch's
AdamW with a group for each parameter."""

import numpy as np
import pytest
import torch

from megatron.config import ConfigError, ModelFlags, OptimizerConfig, RunConfig
from megatron.config.features import Feature
from megatron.engine.update import optimizer as optimizer_module
from megatron.engine.update.optimizer import Factors, build_optimizer, factors_of, set_rates
from megatron.features.parameter_groups.feature import FEATURE
from megatron.features.parameter_groups.groups import check_patterns, group_lines
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import Init, Shard, parameter
from megatron.run.run import parse_run
from megatron.training.plan import TrainingPlan

SHAPES = {
    "embedding.word_embeddings.weight": (3, 2),
    "layers.0.attention.qkv.weight": (6, 2),
    "layers.0.attention.q_norm.weight": (2,),
    "layers.1.up.weight": (2, 2),
    "layers.1.up.bias": (2,),
    "output_layer.weight": (3, 2),
}
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--tokenizer-type NullTokenizer --vocab-size 99 --mock-data"
).split()
MODEL = ModelFlags(num_layers=1, hidden_size=2, num_attention_heads=1, seq_length=2).resolve()


def grouped(names=SHAPES, **options):
    """Parameters by name, and an optimizer of the groups that these flags make."""
    params = {name: parameter(Shard(SHAPES[name]), Init()) for name in names}
    for number, param in enumerate(params.values()):
        param.data = torch.linspace(0.5, 1.0 + number, param.numel()).view_as(param)
    config = RunConfig(MODEL, optimizer=OptimizerConfig(lr=0.5, **options))
    by_param = {param: name for name, param in params.items()}
    check_patterns(by_param, config.optimizer, Mesh())
    factors = factors_of(by_param, config)
    return params, build_optimizer(by_param, config.optimizer, factors), config.optimizer, factors


def numbers(params, optimizer):
    """(rate, decay) of each parameter."""
    of = {p: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    return {name: of[param] for name, param in params.items()}


def test_rates_of_groups():
    """The first pattern that matches a name counts; a factor of 0 keeps weights as they are."""
    rates = ("layers.1.*=0", "*.weight=0.1", "layers.*=7")
    params, optimizer, _, _ = grouped(lr_group=rates)
    set_rates(optimizer, 0.5, 0.2)
    assert [rate for rate, _ in numbers(params, optimizer).values()] == [0.05] * 3 + [0.0] * 2 + [
        0.05
    ]
    assert [d for _, d in numbers(params, optimizer).values()] == [0.2, 0.2, 0.0, 0.2, 0.0, 0.2]
    before = {name: param.detach().clone() for name, param in params.items()}
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    moved = {name for name, param in params.items() if not torch.equal(before[name], param)}
    assert {*SHAPES} - moved == {"layers.1.up.weight", "layers.1.up.bias"}


def test_decay_by_pattern_and_of_qk_norms():
    flags = {"wd_group": ("embedding.*=0", "*.up.*=3"), "apply_wd_to_qk_layernorm": True}
    params, optimizer, _, _ = grouped(**flags)
    set_rates(optimizer, 0.5, 0.25)
    assert [d for _, d in numbers(params, optimizer).values()] == [0.0, 0.25, 0.25, 0.75, 0.0, 0.25]
    # AdamW without a gradient's effect: W (1 - lr wd).
    for param in params.values():
        param.grad = torch.zeros_like(param)
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer.step()
    for name, (rate, decay) in numbers(params, optimizer).items():
        torch.testing.assert_close(params[name].detach(), before[name] * (1 - rate * decay))


def test_old_spelling_of_the_decay_of_qk_norms():
    config = OptimizerConfig(no_weight_decay_cond_type="apply_wd_to_qk_layernorm")
    assert config.decays_qk_norms and not OptimizerConfig().decays_qk_norms


class Halved(Feature):
    def update_factors(self, config, names, rules):
        return {param: Factors(0.5, 3.0, 1e3) for param, name in names.items() if ".up." in name}


def test_factors_of_a_feature_are_multiplied(monkeypatch):
    """Against torch's AdamW with these numbers; --decoupled-lr replaces a feature's factor."""
    monkeypatch.setattr(optimizer_module, "taking_part", lambda: (Halved(), FEATURE))
    params, optimizer, options, factors = grouped(lr_group=("layers.1.*=4",), adam_eps=1e-3)
    set_rates(optimizer, 0.5, 0.25)
    reference = [torch.nn.Parameter(p.detach().clone()) for p in params.values()]
    of_up = {"layers.1.up.weight": (1.0, 0.75, 1.0), "layers.1.up.bias": (1.0, 0.0, 1.0)}
    plain = torch.optim.AdamW([
        dict(zip(("params", "lr", "weight_decay", "eps"), ([p], *of_up.get(
            name, (0.5, 0.25 if len(SHAPES[name]) > 1 else 0.0, 1e-3))), strict=True))
        for name, p in zip(params, reference, strict=True)
    ])  # fmt: skip
    for one, other in zip(params.values(), reference, strict=True):
        one.grad, other.grad = torch.cos(one.detach()), torch.cos(other.detach())
    optimizer.step(), plain.step()
    for name, other in zip(params, reference, strict=True):
        torch.testing.assert_close(params[name], other, rtol=1e-6, atol=1e-7)
    lines = group_lines({p: n for n, p in params.items()}, factors, options, Mesh())
    rates = "group of parameters: learning rate 1, weight decay 0.03, epsilon 1"
    assert lines[0] == f"{rates}: 4 in layers.1.up.weight"
    assert lines[-1].startswith("group of parameters: learning rate 0.5, weight decay none: 2 in ")
    assert len(lines) == 4


@pytest.mark.parametrize("flag", ["lr_group", "wd_group"])
def test_a_pattern_of_no_parameter_is_refused(flag):
    name = flag.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"--{name} layer: no parameter .* embedding\.word"):
        grouped(**{flag: ("layer=2",)})


def test_flags_that_choose_nothing_are_refused():
    others = [name for name in SHAPES if "norm" not in name]
    with pytest.raises(ConfigError, match="--apply-wd-to-qk-layernorm: no parameter"):
        grouped(others, apply_wd_to_qk_layernorm=True)
    with pytest.raises(ConfigError, match=r"--decoupled-lr 0\.1 \(embedding\.word_embeddings"):
        grouped([n for n in SHAPES if n.startswith("layers")], decoupled_lr=0.1)


@pytest.mark.parametrize("value", ["a", "=1", "a=", "a=b", "a=-1", "a=inf"])
def test_a_group_without_a_pattern_or_a_factor_is_refused(value):
    for config, flag in (
        (OptimizerConfig(lr_group=(value,)), "lr"), (OptimizerConfig(wd_group=(value,)), "wd")
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"--{flag}-group .* must be PATTERN=FACTOR"):
            config.lr_groups, config.wd_groups  # noqa: B018


def plan(flags: str) -> TrainingPlan:
    return TrainingPlan(parse_run(None, [*TINY, *flags.split()]).config)


def test_decoupled_rates_follow_the_schedule():
    """Megatron's OptimizerParamScheduler with the group's max_lr and min_lr: warm-up from the
    common initial rate, then min + (max - min) (1 + cos(pi r)) / 2."""
    run = plan(
        "--train-iters 10 --lr-decay-style cosine --lr 1 --min-lr 0.1 --lr-warmup-init 0.05 "
        "--lr-warmup-iters 2 --decoupled-lr 4 --decoupled-min-lr 0.5"
    )
    for step in range(11):
        _, _, rate = run.rates(step, 4 * step)
        share = (1 + np.cos(np.pi * (step - 2) / 8)) / 2
        expected = 0.05 + (4 - 0.05) * step / 2 if step <= 2 else 0.5 + share * 3.5
        assert rate == pytest.approx(expected, rel=1e-12)
    params, optimizer, _, _ = grouped(decoupled_lr=4.0, lr_group=("output_layer.*=2",))
    set_rates(optimizer, 0.5, 0.0, 3.0)
    assert [rate for rate, _ in numbers(params, optimizer).values()] == [3, 0.5, 0.5, 0.5, 0.5, 6]


def test_the_minimum_of_decoupled_rates_is_min_lr_by_default():
    run = plan("--train-iters 4 --lr 1 --min-lr 0.1 --decoupled-lr 0.2")
    assert run.rates(4, 16) == pytest.approx((0.1, 0.01, 0.1))
    assert len(plan("--train-iters 4 --lr 1").rates(1, 4)) == 2


@pytest.mark.parametrize("flags, message", [
    ("--decoupled-min-lr 0.1", "--decoupled-min-lr 0.1 has an effect with"),
    ("--decoupled-lr 0.1 --decoupled-min-lr 0.2", "--decoupled-min-lr 0.2 is above --decoupled-lr"),
    ("--decoupled-lr 1e-3 --min-lr 2e-3", "--decoupled-min-lr 0.002 is above --decoupled-lr"),
    ("--decoupled-lr 0.001 --lr-warmup-init 0.01 --lr-warmup-iters 2", "--lr-warmup-init 0.01 is"),
])  # fmt: skip
def test_wrong_decoupled_rates_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        plan(f"--train-iters 4 {flags}")
