"""Rules of muP for each parameter: against the authors' package (Yang et al. 2022, mup 1.0.0),
where it is comparable, written here as its ``optim.py`` and ``init.py`` have it; and against the
package itself where it is installed (``pip install --no-deps mup==1.0.0``)."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from megatron.config import ConfigError
from megatron.engine.update.optimizer import Factors, factors_of
from megatron.families import trained_spec
from megatron.features.width.flags import WidthConfig
from megatron.model.layer_list import LayerStack
from megatron.parallel.shard import init_of, shard_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

MODEL = (
    "--num-layers 2 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--train-iters 4 --tokenizer-type NullTokenizer --vocab-size 99 --mock-data --eval-iters 0 "
    "--untie-embeddings-and-output-weights --swiglu"
).split()
BASE = "--hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 48".split()
WIDE = "--hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 384".split()
MUP = (
    "--use-mup --mup-base-hidden-size 16 --mup-base-ffn-hidden-size 48 --mup-base-head-dim 8"
).split()


def network(flags):
    """Configuration, and parameters by name."""
    config = parse_run(None, [*MODEL, *flags]).config
    stack = LayerStack(trained_spec(config).layers(TensorParallel()), config.parallel)
    return config, dict(stack.canonical_parameters())


def shape(param):
    return shard_of(param).full_shape


def of_package(name, base, wide):
    """(Adam's rate, SGD's rate, initial standard deviation), relative to the base's, as mup's
    MuAdam, MuSGD and ``rescale_params`` have them, from the shapes of two models."""
    ratios = [w / b for b, w in zip(shape(base), shape(wide), strict=True)]
    if "output_layer" in name or "embedding" in name:
        assert ratios[0] == 1.0  # the vocabulary
        return 1.0, ratios[1], 1.0  # MuReadout divides by the ratio, its weights keep theirs
    if len(ratios) == 1:  # a vector
        return 1.0, ratios[0], 1.0
    fan_out, fan_in = ratios
    return 1 / fan_in, fan_out / fan_in, fan_in**-0.5


def test_every_parameter_has_the_rates_and_initial_weights_of_the_package():
    """FFN wider than in proportion: 4 x the hidden size, 8 x the FFN. Norms of heads and gates of
    fused projections are in the shapes."""
    _, base = network(BASE)
    config, wide = network([*WIDE, *MUP])
    by_param = {param: name for name, param in wide.items()}
    adam = factors_of(by_param, config)
    sgd = factors_of(by_param, network([*WIDE, *MUP, "--optimizer", "sgd"])[0])
    for name, param in wide.items():
        of_adam, of_sgd, std = of_package(name, base[name], param)
        assert adam[param].rate == pytest.approx(of_adam, rel=1e-15), name
        assert sgd[param].rate == pytest.approx(of_sgd, rel=1e-15), name
        assert init_of(param).std == pytest.approx(init_of(base[name]).std * std, rel=1e-15), name
        assert adam[param].epsilon == (adam[param].rate if param.dim() > 1 else 1.0), name
        assert adam[param].decay == 1.0
    assert {f.rate for f in adam.values()} == {1.0, 1 / 4, 1 / 8}
    scaled = factors_of(by_param, network([*WIDE, *MUP, "--mup-scale-weight-decay"])[0])
    assert all(f.decay * f.rate == 1.0 for p, f in scaled.items() if p.dim() > 1)


def torch_model(mup, shapes):
    """A torch network with the parameters of one of ours, each a layer of the package's kind."""

    def layer(name, size):
        if "output_layer" in name:
            return mup.MuReadout(size[1], size[0], bias=False)
        if "embedding" in name:
            return nn.Embedding(*size)
        return nn.Linear(size[1], size[0], bias=False) if len(size) == 2 else nn.LayerNorm(size)

    kept = {name.replace(".", "-"): layer(name, size) for name, size in shapes.items()}
    return nn.ModuleDict(kept)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_rates_and_decay_are_those_that_the_package_gives_a_torch_network(optimizer):
    """Learning rate and decay of every parameter that mup 1.0.0's MuAdamW and MuSGD have from
    ``set_base_shapes``, its initial standard deviation by ``mup.init.normal_``, and the factor of
    MuReadout's logits."""
    mup = pytest.importorskip("mup")
    optim = pytest.importorskip("mup.optim")
    _, base = network(BASE)
    flags = [*WIDE, *MUP, "--mup-scale-weight-decay", "--optimizer", optimizer]
    config, params = network(flags)
    models = [
        torch_model(mup, {name: shape(param) for name, param in each.items()})
        for each in (base, params)
    ]
    theirs = mup.set_base_shapes(models[1], models[0])
    make = {"adam": optim.MuAdamW, "sgd": optim.MuSGD}[optimizer]
    groups = make(theirs.parameters(), lr=0.5, weight_decay=0.25).param_groups
    numbers = {p: (g["lr"] / 0.5, g["weight_decay"] / 0.25) for g in groups for p in g["params"]}
    factors = factors_of({param: name for name, param in params.items()}, config)
    torch.manual_seed(3)
    for name, param in params.items():
        layer = theirs[name.replace(".", "-")]
        rate, decay = numbers[layer.weight if name.endswith("weight") else layer.bias]
        assert factors[param].rate == pytest.approx(rate, rel=1e-15), name
        if optimizer == "adam" and param.dim() > 1:
            assert factors[param].decay == pytest.approx(decay, rel=1e-15), name
            mup.init.normal_(layer.weight, std=init_of(base[name]).std)
            std = float(layer.weight.detach().std())
            assert init_of(param).std == pytest.approx(std, rel=0.03), name
    (readout,) = (m for m in theirs.modules() if isinstance(m, mup.MuReadout))
    assert config.model.embedding.logits_scaling == readout.width_mult()


def test_multipliers_of_the_network():
    """As Megatron-LM: logits x base / width, scores x sqrt(base head) / head ** power."""
    model = network([*WIDE, *MUP, "--mup-embedding-mult", "3", "--kv-channels", "32"])[0].model
    assert model.embedding.logits_scaling == 4.0 and model.embedding.embedding_multiplier == 3.0
    scale = model.attention.query_pre_attn_scalar**-0.5
    assert scale == pytest.approx(math.sqrt(8) / 32, rel=1e-15)
    assert model.residual_multiplier is None
    model = network([*WIDE, "--use-mup", "--mup-output-mult", "2"])[0].model
    assert model.embedding.logits_scaling == 0.5
    assert model.attention.query_pre_attn_scalar == 8.0**2  # 1 / d
    model = network([*WIDE, *MUP, "--mup-attn-scale-power", "0.5", "--mup-base-head-dim", "1"])[0]
    assert model.model.attention.query_pre_attn_scalar == 8.0


def test_depth_follows_complete_p():
    """Residual branches x base / depth; weights as the base draws them: sqrt(2 x 2 layers); epsilon
    / (width x depth); rates as without depth (arXiv:2505.01618, table 1, alpha 1)."""
    deep = ["--num-layers", "8", "--mup-base-num-layers", "2"]
    config, params = network([*WIDE, *MUP, *deep])
    assert config.model.residual_multiplier == 0.25
    factors = factors_of({param: name for name, param in params.items()}, config)
    name = "layers.7.attention.proj.weight"
    assert init_of(params[name]).std == pytest.approx(0.02 / math.sqrt(2 * 2) / math.sqrt(4))
    assert factors[params[name]] == Factors(1 / 4, 1.0, 1 / 16, False, True)
    assert factors[params["layers.7.mlp_norm.weight"]].rate == 1.0
    assert factors[params["embedding.word_embeddings.weight"]].epsilon == 1.0


def test_muon_keeps_the_rate_of_matrices():
    config, params = network([*WIDE, *MUP, "--optimizer", "muon"])
    rules = {p: "muon" if n.startswith("layers") and p.dim() > 1 else "adam"
             for n, p in params.items()}  # fmt: skip
    factors = factors_of({param: name for name, param in params.items()}, config, rules)
    assert {each.rate for each in factors.values()} == {1.0}
    assert init_of(params["layers.0.mlp.down.weight"]).std == pytest.approx(0.01 / math.sqrt(8))


def test_decoupled_rates_replace_those_of_muP():  # noqa: N802
    """As in Megatron-LM. SGD's rate of embeddings grows with the width without it."""
    flags = [*WIDE, *MUP, "--optimizer", "sgd"]
    config, params = network([*flags, "--decoupled-lr", "0.1"])
    names = {param: name for name, param in params.items()}
    table = params["embedding.word_embeddings.weight"]
    assert factors_of(names, config)[table] == Factors(1.0, 1.0, 1.0, True, True)
    assert factors_of(names, network(flags)[0])[table].rate == 4.0


LAYERS = {
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 48",
    "latent": "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 6 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --position-embedding-type rope",
    "ahead": "--mtp-num-layers 1",
    "learned": "--position-embedding-type learned_absolute --qk-layernorm",
}


@pytest.mark.parametrize("kind", LAYERS)
def test_matrices_of_other_layers_follow_their_inputs(kind):
    """Against the shapes of two models that differ in the hidden size alone; experts each."""
    flags = LAYERS[kind].split()
    narrow = "--hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 48".split()
    broad = "--hidden-size 64 --num-attention-heads 16 --ffn-hidden-size 192".split()
    _, base = network([*flags, *narrow])
    if kind == "experts":
        flags[-1] = "192"
    config, wide = network([*flags, *broad, *"--use-mup --mup-base-hidden-size 16".split()])
    factors = factors_of({param: name for name, param in wide.items()}, config)
    for name, param in wide.items():
        fan_in = shape(param)[-1] / shape(base[name])[-1]
        matrix = shard_of(param).decays and "embedding" not in name and "output" not in name
        expected = 1 / fan_in if matrix else 1.0
        assert factors[param].rate == expected, name
        if init_of(param).std:
            std = init_of(base[name]).std * math.sqrt(expected)
            assert init_of(param).std == pytest.approx(std), name


def test_a_layer_without_a_rule_is_refused():
    flags = "--experimental-attention-variant mamba2 --mamba-state-dim 8 --mamba-head-dim 8".split()
    with pytest.raises(ConfigError, match=r"--use-mup has no rule for layers\.0\.attention\.\w+"):
        network([*WIDE, *MUP, *flags, "--linear-attention-freq", "[1,0]"])


@pytest.mark.parametrize("flags, message", [
    ("--lora", "--use-mup contradicts --lora: .* freezes"),
    ("--embedding-multiplier 2", "--embedding-multiplier 2.0 contradicts --use-mup, which has"),
    ("--logits-scaling 2", "--logits-scaling 2.0 contradicts --use-mup"),
    ("--query-pre-attn-scalar 2", "--query-pre-attn-scalar 2.0 contradicts"),
    ("--scale-embeddings", "--scale-embeddings contradicts --use-mup, which says"),
    ("--init-method-xavier-uniform", "--init-method-xavier-uniform contradicts --use-mup"),
    ("--residual-multiplier 2 --mup-base-num-layers 2", "--residual-multiplier 2.0 contradicts"),
    ("--mup-base-hidden-size 0", "--mup-base-hidden-size 0 must be"),
])  # fmt: skip
def test_contradictions_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        network([*WIDE, *MUP, *flags.split()])


def test_a_flag_without_mup_is_refused():
    with pytest.raises(ConfigError, match="--mup-base-hidden-size 16 has an effect with --use-mup"):
        network([*WIDE, "--mup-base-hidden-size", "16"])


def test_values_that_differ_from_the_publications_are_noted():
    run = parse_run(None, [*MODEL, *WIDE, *MUP, "--optimizer", "muon"])
    notes = " ".join(run.resolved.notes)
    assert "without --mup-scale-weight-decay, as in Megatron-LM: learning rate x weight" in notes
    assert "updates are 2 times too large relative to the base's" in notes
    assert run.resolved.origins["logits_scaling"] == "derived: use-mup"


def test_initial_weights_have_the_scale_of_their_width():
    """Drawn ones, not their recipe; and of the base they are the same numbers."""
    _, params = network([*WIDE, *MUP])
    generator = torch.Generator().manual_seed(1)
    up = params["layers.0.mlp.up.weight"]
    drawn = init_of(up).draw(shape(up), generator)
    assert float(drawn.std()) == pytest.approx(0.02 / 2, rel=0.02)
    assert WidthConfig().ratio(network(BASE)[0].model) == 1.0
    _, at_base = network([*BASE, *MUP])
    _, plain = network(BASE)
    assert [init_of(p) for p in at_base.values()] == [init_of(p) for p in plain.values()]
    assert np.array_equal([*at_base], [*plain])
