"""Muon updates whole matrices in every layout, as one process does."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from training_jobs import TINY, train

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.config.layouts import parse_layout
from megatron.families import trained_spec
from megatron.features.optimizers.build import is_matrix, rows_of
from megatron.features.optimizers.muon import Muon, MuonSettings, Rows, in_order
from megatron.features.optimizers.newton_schulz import steps_of
from megatron.features.optimizers.rules import RuledOptimizer
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


def trained(mesh: Mesh, divided: bool) -> dict[str, torch.Tensor]:
    """Weights after steps of Muon in float64, whole, from parts that a flat tensor has of what this
    rank's replicas divide among them, unevenly; or, without, from whole shares."""
    random = torch.Generator().manual_seed(3)
    draws = [
        {name: torch.randn(s.full_shape, generator=random, dtype=torch.float64)
         for name, s in SHAPES.items()}
        for _ in range(STEPS + 1)
    ]  # fmt: skip
    places = mesh.coordinates
    params = {
        name: nn.Parameter(shard.cut(draws[0][name], places)) for name, shard in SHAPES.items()
    }
    bounds, length = {}, 0
    for name, param in params.items():
        param.shard = SHAPES[name]  # type: ignore[attr-defined]
        ranks = mesh.replicas(SHAPES[name])
        size, n = (ranks.size, ranks.rank) if divided else (1, 0)
        edges = [round(param.numel() * (k / size) ** 1.5) for k in range(size + 1)]
        bounds[name] = (edges[n], edges[n + 1], length)
        length += edges[n + 1] - edges[n]
    flat = nn.Parameter(torch.zeros(length, dtype=torch.float64))

    def fill(target: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        for name, (start, end, at) in bounds.items():
            share = SHAPES[name].cut(values[name], places).reshape(-1)
            target[at : at + end - start] = share[start:end]

    names = {param: name for name, param in params.items()}
    settings = MuonSettings(
        0.95, True, steps_of("quintic", 5), "spectral", 0.2, torch.float32,
        lambda param: in_order(ROWS[names[param]]),
    )  # fmt: skip
    rule = Muon(settings, list(params.values()), mesh)

    def place_of(param):
        start, end, at = bounds[names[param]]
        return start, flat, at, end - start

    rule.place_of = place_of
    optimizer = RuledOptimizer(
        [{"params": [flat], "rule": "muon"}], {"muon": rule}, {"lr": 0.1, "weight_decay": 0.1}
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
        ranks = mesh.replicas(SHAPES[name])
        if divided and ranks.size > 1:
            dist.all_reduce(share, group=ranks.handle)
        whole[name] = torch.zeros(SHAPES[name].full_shape, dtype=torch.float64)
        SHAPES[name].place(whole[name], share.view(params[name].shape), places)
        if mesh.world.size > 1:
            counted = SHAPES[name].counted(places)
            whole[name] *= float(counted)
            dist.all_reduce(whole[name])
    return whole


def on_mesh(sizes: dict[str, int], divided: bool) -> dict[str, np.ndarray]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return {name: each.numpy() for name, each in trained(build_mesh(sizes), divided).items()}


@cache
def alone() -> dict[str, np.ndarray]:
    return {name: each.numpy() for name, each in trained(Mesh(), False).items()}


@pytest.mark.parametrize("divided", [True, False], ids=["zero", "whole"])
@pytest.mark.parametrize(
    "processes, sizes",
    [(2, {}), (2, {"tensor": 2}), (4, {"tensor": 2}), (4, {"tensor": 4}), (4, {"expert": 2}),
     (4, {"expert": 2, "tensor": 2})],
    ids=["dp2", "tp2", "tp2-dp2", "tp4", "ep2-dp2", "ep2-tp2"],
)  # fmt: skip
def test_parts_are_updated_as_whole_matrices(pool, processes, sizes, divided):
    """Float64, 1e-12: matrices of every kind of cut, dealt out over the ranks."""
    for of_rank in pool.run(processes, on_mesh, sizes, divided):
        for name, values in alone().items():
            np.testing.assert_allclose(of_rank[name], values, rtol=0, atol=1e-12, err_msg=name)


FLAGS = [
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
SAMPLE = ["tp2-dp2-zero1"]


@cache
def reference(*flags: str):
    return train([*FLAGS, "--zero-stage", "0", *flags])


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[] if x in SAMPLE else pytest.mark.proof) for x in LAYOUTS]
)
def test_layouts_train_alike(pool, layout):
    parsed = parse_layout(layout)
    layers = ["--num-layers", str(max(2, parsed.pipeline * parsed.chunks))]
    record = pool.run(parsed.processes, train, [*FLAGS, *parsed.flags(), *layers], timeout=300)[0]
    expected = reference(*layers)
    np.testing.assert_allclose(record.losses, expected.losses, rtol=2e-5)
    np.testing.assert_allclose(record.norms, expected.norms, rtol=1e-3)


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["ep2", "ep2-tp2", "ep2-zero1", "ep2-zero2"])
def test_experts_train_alike(pool, layout):
    parsed = parse_layout(layout)
    flags = [*FLAGS, *EXPERTS, *parsed.flags()]
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
    argv = [*FLAGS, *flags, *parsed.flags()]
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


@pytest.mark.parametrize(
    "saved, loaded",
    [
        pytest.param(saved, loaded, marks=[] if mark else pytest.mark.proof)
        for saved, loaded, mark in (
            ("tp2-dp2-zero1", "pp2-dp2-zero1", True),
            ("tp2-dp2-zero1", "tp2-dp2-zero1", False),
            ("dp2-zero3", "tp4", False),
            ("pp2", "dp2-zero2", False),
            ("tp2-dp2-zero2", "dp2-zero3", False),
        )
    ],
)
def test_any_layout_continues(pool, saved, loaded, tmp_path):
    """Bitwise at the same layout; at another one as an uninterrupted run, to rounding."""
    first, second = parse_layout(saved), parse_layout(loaded)
    to = [*FLAGS, *first.flags(), "--save", str(tmp_path), "--exit-interval", "3"]
    pool.run(first.processes, train, to, timeout=300)
    again = [*FLAGS, *second.flags(), "--load", str(tmp_path)]
    record = pool.run(second.processes, train, again, timeout=300)[0]
    if saved == loaded:
        flags = [*FLAGS, *first.flags()]
        whole = pool.run(first.processes, train, flags, timeout=300)[0]
        np.testing.assert_array_equal(record.losses, whole.losses[3:])
    np.testing.assert_allclose(record.losses, reference().losses[3:], rtol=2e-5)


def test_bad_input():
    """The flag, the reason and the remedy."""
    for words, text in (
        (["--fp16"], "--optimizer muon contradicts --fp16"),
        (["--muon-tp-mode", "blockwise"], "--muon-tp-mode blockwise"),
    ):
        with pytest.raises(ConfigError, match=text):
            resolve(FlagParser(*FLAG_CLASSES).settings([*FLAGS, *words]), 1)
