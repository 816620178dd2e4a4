"""Muon, SOAP and Adam-mini update parameters in every layout as one process does."""

import json
import math
import re
from collections.abc import Sequence
from functools import cache
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from training_jobs import TINY, run, saved_again, train

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.apps.parity.runs import watched_trainer
from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import locate_checkpoint
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.config.optimizer import STATES as STATE_NAMES
from megatron.engine.environment import distributed
from megatron.engine.state import more_states
from megatron.families import trained_spec
from megatron.features.optimizers.adam_mini import AdamMini
from megatron.features.optimizers.fused import is_matrix, rows_of
from megatron.features.optimizers.memory import states_per_parameter
from megatron.features.optimizers.muon import Muon, MuonSettings
from megatron.features.optimizers.newton_schulz import steps_of
from megatron.features.optimizers.rules import RuledOptimizer
from megatron.features.optimizers.soap import Soap, SoapSettings
from megatron.features.optimizers.whole import Rows, in_order
from megatron.formats.deepspeed_folders.universal import UniversalFolder, write_universal
from megatron.formats.sharded.writer import write_dcp
from megatron.model.layer_list import LayerStack
from megatron.parallel.mesh import Mesh, build_mesh
from megatron.parallel.shard import Cut, Shard, shard_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

SHAPES = {
    "qkv": Shard((24, 10), (Cut(0, parts=(16, 4, 4)),)),
    "proj": Shard((10, 16), (Cut(1),)),
    "up": Shard((16, 10), (Cut(0, parts=(8, 8)),)),
    "uncut": Shard((6, 10)),
    "experts": Shard((4, 8, 6), (Cut(0, "expert"), Cut(1, parts=(4, 4)))),
    "over both": Shard((8, 6, 4), (Cut(0, ("expert", "tensor")),)),
}
ROWS = {"qkv": (16, 4, 4), "proj": (10,), "up": (8, 8), "uncut": (6,), "experts": (4, 4),
        "over both": (6,)}  # fmt: skip
STEPS = 3
VECTORS = {
    "norm": Shard((10,)), "up.bias": Shard((16,), (Cut(0, parts=(8, 8)),)),
    "sinks": Shard((8,), (Cut(0),)), "experts.bias": Shard((4, 6), (Cut(0, "expert"),)),
    "vocabulary": Shard((12, 6), (Cut(0, unpadded=11),)),
}  # fmt: skip


def rule_of(kind: str, names: dict[nn.Parameter, str], mesh: Mesh):
    """The rule of a kind of test, with these names of parameters."""
    if kind == "adam-mini":
        named = {param: f"layers.0.{name}{'' if '.' in name else '.weight'}"
                 for param, name in names.items()}  # fmt: skip
        return AdamMini((0.9, 0.95), 1e-8, named, 4, mesh)

    def rows(param: nn.Parameter) -> list[slice]:
        return in_order(ROWS[names[param]])

    if kind.startswith("soap"):
        settings = SoapSettings((0.9, 0.95), 1e-8, 0.95, 2, kind == "soap-kl")
        return Soap(settings, names, rows, mesh)
    return Muon(
        MuonSettings(
            0.95, True, steps_of("quintic", 5), "spectral", 0.2, torch.float32,
            None if kind == "muon" else kind,
        ), names, rows, mesh,
    )  # fmt: skip


def trained(mesh: Mesh, divided: bool, kind: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights after steps in float64, whole, from parts that a flat tensor has of what this rank's
    replicas divide among them, each parameter in another way, some all to the first; or, without,
    from whole shares. Names of the states that this rank writes."""
    random = torch.Generator().manual_seed(3)
    shapes = SHAPES | VECTORS if kind == "adam-mini" else SHAPES
    draws = [
        {name: torch.randn(s.canonical_shape, generator=random, dtype=torch.float64)
         for name, s in shapes.items()}
        for _ in range(STEPS + 1)
    ]  # fmt: skip
    places = mesh.coordinates
    params = {
        name: nn.Parameter(shard.cut(draws[0][name], places)) for name, shard in shapes.items()
    }
    bounds, length = {}, 0
    for number, (name, param) in enumerate(params.items()):
        param.shard = shapes[name]  # type: ignore[attr-defined]
        ranks = mesh.replicas(shapes[name])
        size, n = (ranks.size, ranks.rank) if divided else (1, 0)
        power = (1.5, 0.5, 1e-9)[number % 3]
        edges = [round(param.numel() * (k / size) ** power) for k in range(size + 1)]
        bounds[name] = (edges[n], edges[n + 1], length)
        length += edges[n + 1] - edges[n]
    flat = nn.Parameter(torch.zeros(length, dtype=torch.float64))

    def fill(target: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        for name, (start, end, at) in bounds.items():
            share = shapes[name].cut(values[name], places).reshape(-1)
            target[at : at + end - start] = share[start:end]

    names = {param: name for name, param in params.items()}
    rule = rule_of(kind, names, mesh)

    def place_of(param):
        start, end, at = bounds[names[param]]
        return start, flat, at, end - start or -1

    rule.place_of, rule.divided = place_of, divided
    optimizer = RuledOptimizer(
        [{"params": [flat], "rule": "rule"}], {"rule": rule}, {"lr": 0.1, "weight_decay": 0.1}
    )
    fill(flat.data, draws[0])
    for draw in draws[1:]:
        flat.grad = torch.zeros_like(flat)
        fill(flat.grad, draw)
        optimizer.step()
    whole = {}
    for name, (start, end, at) in bounds.items():
        share = torch.zeros(math.prod(params[name].shape), dtype=torch.float64)
        share[start:end] = flat.data[at : at + end - start]
        ranks = mesh.replicas(shapes[name])
        if divided and ranks.size > 1:
            dist.all_reduce(share, group=ranks.handle)
        whole[name] = torch.zeros(shapes[name].canonical_shape, dtype=torch.float64)
        shapes[name].place(whole[name], share.view(params[name].shape), places)
        if mesh.world.size > 1:
            counted = shapes[name].counted(places)
            whole[name] *= float(counted)
            dist.all_reduce(whole[name])
    return whole, [*optimizer.more_states()]


def on_mesh(
    sizes: dict[str, int], divided: bool, kind: str
) -> tuple[dict[str, np.ndarray], list[str]]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    weights, states = trained(build_mesh(sizes), divided, kind)
    return {name: each.numpy() for name, each in weights.items()}, states


@cache
def alone(kind: str) -> tuple[dict[str, np.ndarray], list[str]]:
    weights, states = trained(Mesh(), False, kind)
    return {name: each.numpy() for name, each in weights.items()}, states


MESHES = {
    "dp2": {}, "tp2": {"tensor": 2}, "tp2-dp2": {"tensor": 2}, "tp4": {"tensor": 4},
    "ep2-dp2": {"expert": 2}, "ep2-tp2": {"expert": 2, "tensor": 2},
}  # fmt: skip
SAMPLE_OF_MESHES = {
    ("muon", "ep2-tp2", True), ("muon", "tp2-dp2", False), ("soap-kl", "tp2-dp2", True),
    ("adam-mini", "ep2-tp2", True),
}  # fmt: skip
"""Each kind with states of its own, both kinds of parts, and both axes that cut matrices."""


@pytest.mark.parametrize("kind, layout, divided", [
    pytest.param(*case, marks=[] if case in SAMPLE_OF_MESHES else pytest.mark.proof)
    for case in product(
        ("muon", "normuon", "adamuon", "soap", "soap-kl", "adam-mini"), MESHES, (True, False))
])  # fmt: skip
def test_parts_are_updated_as_whole_parameters(pool, kind, layout, divided):
    """Float64, 1e-12: parameters of every kind of cut, dealt out over the ranks, of which one
    writes each state. ``divided``: as ZeRO 1 to 3 do it."""
    processes = 2 if layout in ("dp2", "tp2") else 4
    check_mesh(pool, processes, MESHES[layout], divided, kind)


def check_mesh(pool, processes, sizes, divided, kind):
    weights, states = alone(kind)
    written = []
    for of_rank, names in pool.run(processes, on_mesh, sizes, divided, kind):
        written += names
        for name, values in weights.items():
            np.testing.assert_allclose(of_rank[name], values, rtol=0, atol=1e-12, err_msg=name)
    if kind == "adam-mini":  # ranks write their parts of a state
        assert len(written) == len(set(written))
    else:
        assert sorted(written) == sorted(states)


ALL_FLAGS = FLAGS = [
    *TINY,
    *(
        "--optimizer muon --muon-nesterov --muon-momentum 0.95 --muon-extra-scale-factor 0.2 "
        "--muon-fp32-matmul-prec high --muon-coefficient-type polar_express --swiglu "
        "--disable-bias-linear --num-query-groups 2 --normalization RMSNorm "
        "--hidden-dropout 0 --attention-dropout 0 --train-iters 5 --global-batch-size 4 --lr 2e-3"
    ).split(),
]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-layer-freq 2 --lr 1e-3".split()
LAYOUTS = (
    "tp2 tp2-sp tp4 pp2 dp2-zero1 dp2-zero2 dp2-zero3 dp4-zero1 tp2-dp2-zero1 tp2-dp2-zero2 "
    "tp2-dp2-zero3 tp2-pp2 pp2-interleaved pp2-dualpipev cp2 pp2-dp2-zero1"
).split()


OTHERS = {
    "adaptive_muon": "--adaptive-muon-moment2-method normuon", "soap": "--adam-eps 1e-6",
    "ademamix": "", "adam_mini": "", "lion": "", "schedule_free": "--lr-decay-style constant",
    "adam": "--cautious-weight-decay --weight-decay-follows-lr --cautious-update",
}  # fmt: skip


TOLERANCE = {name: 2e-5 for name in OTHERS} | {"soap": 1e-3}
"""Larger with SOAP: its eigenvectors of small values depend on rounding."""


def of_optimizer(name: str) -> list[str]:
    return [] if name == "muon" else ["--optimizer", name, *OTHERS[name].split()]


@cache
def reference(*flags: str):
    return train([*FLAGS, "--zero-stage", "0", *flags])


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_alike(pool, layout):
    """The normal run has one of SOAP in test_any_layout_continues."""
    parsed = parse_layout(layout)
    layers = ["--num-layers", str(max(2, parsed.pipeline * parsed.chunks))]
    argv = [*FLAGS, *flags_for(parsed), *layers]
    record = pool.run(parsed.processes, train, argv, timeout=300)[0]
    expected = reference(*layers)
    np.testing.assert_allclose(record.losses, expected.losses, rtol=2e-5)
    np.testing.assert_allclose(record.norms, expected.norms, rtol=1e-3)


OTHERS_LAYOUTS = "tp4 tp2-sp cp2 dp2-zero2 dp2-zero3 dp4-zero1 pp2-dp2-zero1".split()


@pytest.mark.proof
@pytest.mark.parametrize("layout", OTHERS_LAYOUTS)
@pytest.mark.parametrize("optimizer", OTHERS)
def test_other_optimizers_train_alike(pool, optimizer, layout):
    parsed, flags = parse_layout(layout), of_optimizer(optimizer)
    argv = [*FLAGS, *flags_for(parsed), *flags]
    record = pool.run(parsed.processes, train, argv, timeout=300)[0]
    np.testing.assert_allclose(record.losses, reference(*flags).losses, rtol=TOLERANCE[optimizer])


@pytest.mark.parametrize("width", ["36", "68"])
def test_adam_mini_where_partitions_cut_rows(pool, width):
    """A fourth of all elements ends within a row, or has none of a parameter that does."""
    argv = [*TINY, "--train-iters", "3", "--optimizer", "adam_mini", "--ffn-hidden-size", width]
    ranks = pool.run(4, train, [*argv, "--zero-stage", "1"], timeout=300)
    alone = pool.run(1, train, [*argv, "--zero-stage", "0"], timeout=300)[0]
    np.testing.assert_allclose(ranks[0].losses, alone.losses, rtol=TOLERANCE["adam_mini"])


FREE = of_optimizer("schedule_free")
EVALUATED = "--eval-iters 2 --eval-interval 2 --split 8,2,0".split()


def validation_losses(argv: list[str]) -> list[str]:
    """Losses of the evaluations that a run prints; for the pool."""
    text, error = run(argv)
    assert error is None, error
    return re.findall(r"validation loss at .*?lm loss value: (\S+)", text)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=[] if x == "dp2-zero1" else pytest.mark.proof)
     for x in ("dp2-zero1", "tp2", "pp2", "dp2-zero2", "dp2-zero3")],
)  # fmt: skip
def test_schedule_free_evaluates_the_mean(pool, layout, tmp_path):
    """Evaluations have the loss of the weights that a checkpoint has."""
    parsed = parse_layout(layout)
    flags = [*FLAGS, *flags_for(parsed), *FREE]
    saving = [*flags, *EVALUATED, "--save", str(tmp_path), "--train-iters", "4"]
    (of_run, *_) = pool.run(parsed.processes, validation_losses, saving, timeout=300)
    alone = [*FLAGS, *EVALUATED, "--load", str(tmp_path), "--skip-train", "--no-load-optim"]
    (of_weights,) = pool.run(1, validation_losses, alone, timeout=300)
    assert of_run[-2:] == of_weights, (of_run, of_weights)  # of validation and test samples


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["dp2-zero1", "tp2", "pp2", "dp2-zero2", "dp2-zero3"])
def test_evaluations_change_no_step_of_schedule_free(pool, layout):
    parsed = parse_layout(layout)
    flags = [*FLAGS, *flags_for(parsed), *FREE]
    plain = pool.run(parsed.processes, train, [*flags, "--split", "8,2,0"], timeout=300)[0]
    stopped = pool.run(parsed.processes, train, [*flags, *EVALUATED], timeout=300)[0]
    np.testing.assert_array_equal(plain.losses, stopped.losses)


@pytest.mark.parametrize("rates", ["--decoupled-lr 5e-3", "--lr-group *.experts.*=0"])
def test_schedule_free_resumes_with_several_rates(pool, rates, tmp_path):
    """A checkpoint has the weights of steps in the mean once, for all parameters."""
    flags = [*FLAGS, *EXPERTS, *flags_for(parse_layout("ep2-zero1")), *FREE, *rates.split()]
    stops = [], ["--save", str(tmp_path), "--exit-interval", "2"], ["--load", str(tmp_path)]
    whole, first, second = (pool.run(2, train, [*flags, *more], timeout=300)[0] for more in stops)
    assert [*first.losses, *second.losses] == whole.losses
    for name, values in whole.state.items():
        np.testing.assert_array_equal(second.state[name], values, err_msg=name)


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["ep2", "ep2-tp2", "ep2-zero1", "ep2-zero2"])
def test_experts_train_alike(pool, layout):
    parsed = parse_layout(layout)
    flags = [*FLAGS, *EXPERTS, *flags_for(parsed)]
    record = pool.run(parsed.processes, train, flags, timeout=300)[0]
    np.testing.assert_allclose(record.losses, reference(*EXPERTS).losses, rtol=2e-5)


RECURRENT = "--experimental-attention-variant {} --linear-attention-freq [1,0]".format
LAYERS = {
    "latent": (
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 6 "
        "--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --position-embedding-type rope "
        "--num-query-groups 4"
    ),
    "mamba": f"{RECURRENT('mamba2')} --mamba-num-groups 2",
    "mamba-one-group": "--num-layers 4 --hybrid-layer-pattern M*M- --mamba-num-groups 1",
    "delta-gated": (
        f"{RECURRENT('gated_delta_net')} --attention-output-gate --linear-num-key-heads 2 "
        "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 6"
    ),
    "multi-token": "--mtp-num-layers 1 --untie-embeddings-and-output-weights",
}
STATES = "--mamba-state-dim 8 --mamba-head-dim 8".split()


def flags_of(kind: str) -> list[str]:
    return [*LAYERS[kind].split(), *(STATES if kind.startswith("mamba") else [])]


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["tp2", "tp2-dp2-zero3"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_every_kind_train_alike(pool, kind, layout):
    """Against one process; layers with fused matrices, and with key heads on several ranks."""
    parsed, flags = parse_layout(layout), flags_of(kind)
    argv = [*FLAGS, *flags, *flags_for(parsed)]
    record = pool.run(parsed.processes, train, argv, timeout=300)[0]
    np.testing.assert_allclose(record.losses, reference(*flags).losses, rtol=2e-5)


MATRICES = {
    "latent": {
        "attention.q_down.weight": (24,), "attention.q_up.weight": (40,),
        "attention.kv_down.weight": (20,), "attention.kv_up.weight": (56,),
        "attention.proj.weight": (32,),
    },
    "mamba": {
        "attention.in_proj.weight": (64, 64, 16, 16, 8), "attention.out_proj.weight": (32,),
    },
    "delta-gated": {
        "attention.in_proj.weight": (16, 16, 24, 24, 4, 4), "attention.out_proj.weight": (32,),
    },
    "multi-token": {
        "attention.qkv.weight": (32, 16, 16), "attention.proj.weight": (32,),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MATRICES)
def test_matrices_of_layers(kind):
    """Numbers of rows of the matrices that are fused in each weight of the first attention."""
    matrices = matrices_of([*FLAGS, *flags_of(kind)])
    first = {
        name.removeprefix("layers.0."): tuple(map(rows, shapes))
        for name, shapes in matrices.items()
        if name.startswith("layers.0.attention.")
    }
    assert first == MATRICES[kind]
    ahead = {"mtp.0.merge.weight", "mtp.0.block.attention.qkv.weight"}
    assert not ahead - matrices.keys() or kind != "multi-token"


def test_queries_and_gates_are_two_matrices():
    """Heads of 8 channels, the channels of a head's gate after its queries'."""
    argv = [*FLAGS, "--attention-output-gate"]
    queries, gates, *others = matrices_of(argv)["layers.0.attention.qkv.weight"]
    by_head = np.arange(64).reshape(4, 16)
    np.testing.assert_array_equal(queries, by_head[:, :8].ravel())
    np.testing.assert_array_equal(gates, by_head[:, 8:].ravel())
    assert others == [slice(64, 80), slice(80, 96)]
    (whole,) = matrices_of([*argv, "--muon-no-split-qkv"])["layers.0.attention.qkv.weight"]
    assert whole == slice(0, 96)


def matrices_of(argv: list[str]) -> dict[str, Sequence[Rows]]:
    """Rows of the matrices in each parameter that Muon updates, by its name."""
    config = parse_run(None, argv).config
    stack = LayerStack(trained_spec(config).layers(TensorParallel()), config.parallel)
    return {
        name: rows_of(name, shard_of(param), config)
        for name, param in stack.canonical_parameters()
        if is_matrix(name, shard_of(param))
    }


def rows(matrix: Rows) -> int:
    return matrix.stop - matrix.start if isinstance(matrix, slice) else len(matrix)


CONTINUED = (
    ("tp2-dp2-zero1", "pp2-dp2-zero1"), ("tp2-dp2-zero1", "tp2-dp2-zero1"), ("dp2-zero3", "tp4"),
    ("pp2", "dp2-zero2"), ("tp2-dp2-zero2", "dp2-zero3"), ("tp2", "dp2-zero1"),
)  # fmt: skip
SAMPLED = {("soap", *CONTINUED[-1])}
"""Default case: the most states, momentum of elements and matrices of whole ones."""


@pytest.mark.parametrize(
    "optimizer, saved, loaded",
    [
        pytest.param(name, *pair, marks=[] if (name, *pair) in SAMPLED else pytest.mark.proof)
        for name in ("muon", *OTHERS)
        for pair in CONTINUED
    ],
)
def test_any_layout_continues(pool, optimizer, saved, loaded, tmp_path):
    """Bitwise at the same layout; at another one as an uninterrupted run, to rounding. What is
    loaded and saved at another layout is the same bit for bit."""
    first, second = parse_layout(saved), parse_layout(loaded)
    FLAGS = [*ALL_FLAGS, *of_optimizer(optimizer)]
    to = [*FLAGS, *flags_for(first), "--save", str(tmp_path), "--exit-interval", "3"]
    pool.run(first.processes, train, to, timeout=300)
    again = [*FLAGS, *flags_for(second), "--load", str(tmp_path)]
    record = pool.run(second.processes, train, again, timeout=300)[0]
    if saved == loaded:
        flags = [*FLAGS, *flags_for(first)]
        whole = pool.run(first.processes, train, flags, timeout=300)[0]
        np.testing.assert_array_equal(record.losses, whole.losses[3:])
    expected = reference(*of_optimizer(optimizer)).losses[3:]
    np.testing.assert_allclose(record.losses, expected, rtol=TOLERANCE.get(optimizer, 2e-5))


@pytest.mark.proof
@pytest.mark.parametrize("optimizer", ["muon", *OTHERS])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_states_move_bitwise(pool, optimizer, experts, tmp_path):
    """A checkpoint that another layout has loaded, and saved at once, has the same tensors."""
    kind = EXPERTS if experts else []
    flags = [*ALL_FLAGS, *kind, *of_optimizer(optimizer)]
    path = [("tp2-dp2-zero1", False), ("dp2-zero3", False), ("ep2-tp2" if experts else "tp4", True)]
    states = []
    for number, (layout, _) in enumerate([*path, path[0]]):
        parsed = parse_layout(layout)
        load = ["--load", str(tmp_path / f"{number - 1}")] if number else []
        argv = [*flags, *flags_for(parsed), *load, "--save", str(tmp_path / f"{number}"),
                "--exit-interval", "3"]  # fmt: skip
        pool.run(parsed.processes, saved_again if number else train, argv, timeout=300)
        states.append(tensors_of(tmp_path / f"{number}"))
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        for key, values in other.items():
            assert torch.equal(values, states[0][key]), key


def tensors_of(folder) -> dict[str, torch.Tensor]:
    """All weights and states of a checkpoint, whole, by name."""
    actual = locate_checkpoint(folder)
    source = actual.open(verify=False)
    tensors = {f"{n}/{k}": source.tensor(n, k) for n in source.names() for k in source.kinds(n)}
    more: dict[str, torch.Tensor] = {}
    for path in sorted(actual.folder.glob("states-*.safetensors")):
        for key, values in load_file(path).items():
            name = key.partition("/")[0]
            more[name] = more[name] + values if name in more else values
    return tensors | more


def test_bad_input():
    """The flag, the reason and the remedy."""
    for words, text in (
        (["--fp16"], "--optimizer muon contradicts --fp16"),
        (["--muon-tp-mode", "blockwise"], "--muon-tp-mode blockwise"),
    ):
        with pytest.raises(ConfigError, match=text):
            resolve(FlagParser(*FLAG_CLASSES).settings([*FLAGS, *words]), 1)


def counted_states(argv: list[str]) -> tuple[float, float]:
    """Numbers of the optimizer next to a weight after a step, and those that are planned."""
    run_ = parse_run(None, [*argv, "--train-iters", "1"])
    with distributed(run_.config.parallel) as mesh:
        trainer = watched_trainer(run_, mesh, lambda result: None)
        trainer.fit()
        engine = trainer.engine
        states = sum(
            values.numel()
            for of_tensor in engine.optimizer.state.values()
            for name, values in of_tensor.items()
            if name in STATE_NAMES[run_.config.optimizer.optimizer] or name == "z"
        )
        more = sum(v.numel() for k, v in more_states(engine).items() if "schedule" not in k)
        weights = sum(param.numel() for param in engine.trained)
        return (states + more) / weights, states_per_parameter(run_.config)


@pytest.mark.parametrize("words, experts", [
    pytest.param(words, experts, marks=[] if (words, experts) in (
        ("soap", True), ("adam_mini", False)) else pytest.mark.proof)
    for words in (
        "soap", "adam_mini", "muon", "muon --muon-scalar-optimizer lion", "adaptive_muon", "lion",
        "ademamix", "schedule_free", "adaptive_muon --adaptive-muon-moment2-method normuon")
    for experts in (False, True)
])  # fmt: skip
def test_planned_states_are_those_that_exist(pool, words, experts):
    argv = [*FLAGS, *(EXPERTS if experts else []), "--zero-stage", "0", "--vocab-size", "127",
            "--optimizer", *words.split()]  # fmt: skip
    (counts,) = pool.run(1, counted_states, argv, timeout=300)
    assert counts[0] == pytest.approx(counts[1], rel=1e-12)


@pytest.mark.proof
def test_another_optimizer_is_refused(pool, tmp_path):
    """Both are named, and what becomes of the states."""
    pool.run(1, train, [*FLAGS, "--save", str(tmp_path)], timeout=300)
    argv = [*FLAGS, "--optimizer", "soap", "--load", str(tmp_path)]
    (error,) = pool.run(1, error_of, argv, timeout=300)
    for part in ("saved by --optimizer muon", "has --optimizer soap", "--no-load-optim"):
        assert part in error


def error_of(argv: list[str]) -> str:
    with pytest.raises(ValueError) as raised:
        train(argv)
    return str(raised.value)


def dealt(argv: list[str]) -> tuple[list[str], int, int]:
    """The states of matrices that this rank writes after two steps, exchanges of the second step,
    and groups of parameters; for the pool."""
    run_ = parse_run(None, [*argv, "--train-iters", "2"])
    calls, exchange = [0], dist.all_to_all_single

    def counted(*args, **options):
        calls[-1] += len(args) == 4  # the others are of gradients
        return exchange(*args, **options)

    with (
        distributed(run_.config.parallel) as mesh,
        mock.patch.object(dist, "all_to_all_single", counted),
    ):
        trainer = watched_trainer(run_, mesh, lambda result: calls.append(0))
        trainer.fit()
        engine = trainer.engine
        return sorted(more_states(engine)), calls[1], len(engine.optimizer.param_groups)


@pytest.mark.parametrize("stage", ["1", pytest.param("2", marks=pytest.mark.proof)])
def test_buckets_change_neither_owners_nor_exchanges(pool, stage, tmp_path):
    """Matrices are dealt out over all buckets at once, so that ranks have equal work."""
    results = []
    for size in (10**9, 3000):
        path = tmp_path / f"{size}.json"
        path.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": size}}))
        argv = [*FLAGS, *of_optimizer("soap"), "--zero-stage", stage, "--deepspeed_config"]
        results.append(pool.run(2, dealt, [*argv, str(path)], timeout=300))
    for (names, calls, groups), (of_buckets, calls_of_buckets, buckets) in zip(
        *results, strict=True
    ):
        assert buckets > groups
        assert names == of_buckets != []
        assert calls == calls_of_buckets == 2


@pytest.mark.parametrize(
    "optimizer", ["soap", *(pytest.param(n, marks=pytest.mark.proof) for n in ("ademamix", "muon"))]
)
def test_copies_have_no_partial_moments(pool, optimizer, tmp_path):
    """DeepSpeed's universal checkpoint is refused with the optimizer's name, and torch's has the
    weights alone, where the states are not Adam's; Muon's momentum has a place in the first."""
    words = "--train-iters 1 --untie-embeddings-and-output-weights --position-embedding-type rope"
    argv = [*FLAGS, *of_optimizer(optimizer), *words.split(), "--save", str(tmp_path / "run")]
    pool.run(1, train, argv, timeout=300)
    source = locate_checkpoint(tmp_path / "run").open()
    if optimizer == "muon":
        write_universal(source, tmp_path / "u")
        kinds = {
            kind for name in source.names() for kind in UniversalFolder(tmp_path / "u").kinds(name)
        }
        assert kinds == {"weight", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    else:
        with pytest.raises(CheckpointError, match=f"has states of --optimizer {optimizer}"):
            write_universal(source, tmp_path / "u")
    assert not write_dcp(source, tmp_path / "dcp", "float32")
