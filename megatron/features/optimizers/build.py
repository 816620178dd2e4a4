"""Optimizers of a run: which rule updates each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from megatron.config import ConfigError, RunConfig
from megatron.engine.state import places
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.optimizer import OptimizerPlan
from megatron.features.optimizers.flags import OptimizersConfig
from megatron.features.optimizers.muon import Muon, MuonSettings, Rows, in_order
from megatron.features.optimizers.newton_schulz import steps_of
from megatron.features.optimizers.rules import Adam, Group, Lion, RuledOptimizer, UpdateRule
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import Shard, shard_of

_VOCABULARY = ("embedding.", "output_layer.", "encoder_embedding.", "decoder_embedding.")
"""Beginnings of the names of matrices that have a row for each token or position."""


def plan(config: RunConfig, trained: Mapping[nn.Parameter, str], mesh: Mesh) -> OptimizerPlan:
    """The rules of ``--optimizer`` for these parameters. Raises ConfigError where none is a matrix
    that Muon updates, or where ranks cannot keep a projection whole."""
    flags, optimizer = config.section(OptimizersConfig), config.optimizer
    lion = Lion((flags.lion_beta1, flags.lion_beta2))
    if optimizer.optimizer == "lion":
        return _plan({"lion": lion}, dict.fromkeys(trained, "lion"), {})
    matrices = [param for param, name in trained.items() if is_matrix(name, shard_of(param))]
    adam = Adam((optimizer.adam_beta1, optimizer.adam_beta2), optimizer.adam_eps)
    scalar, other = flags.muon_scalar_optimizer, {"adam": adam, "lion": lion}
    settings = MuonSettings(
        momentum=flags.muon_momentum,
        nesterov=flags.muon_nesterov,
        coefficients=steps_of(flags.muon_coefficient_type, flags.muon_num_ns_steps),
        scale_mode=flags.muon_scale_mode,
        factor=flags.muon_extra_scale_factor,
        product_dtype=torch.bfloat16
        if flags.muon_fp32_matmul_prec in ("low", "medium")
        else torch.float32,
        rows={p: rows_of(trained[p], shard_of(p), config) for p in matrices}.__getitem__,
    )
    rules: dict[str, UpdateRule] = {
        "muon": Muon(settings, matrices, mesh),
        scalar: other[scalar],
    }
    of_matrices = dict.fromkeys(matrices, "muon")
    kinds = {param: of_matrices.get(param, scalar) for param in trained}
    return _plan(rules, kinds, {scalar: flags.muon_scalar_lr_factor})


def _plan(
    rules: Mapping[str, UpdateRule], kinds: Mapping[nn.Parameter, str], factors: Mapping[str, float]
) -> OptimizerPlan:
    def make(groups: list[Group], defaults: dict[str, object]) -> Optimizer:
        return RuledOptimizer(groups, rules, defaults)

    return OptimizerPlan(kinds, factors, make)


def attach(engine: TrainEngine) -> None:
    """Let Muon find this rank's parts of the matrices."""
    rules = engine.optimizer.rules  # type: ignore[attr-defined]
    rules["muon"].place_of = places(engine)


def is_matrix(name: str, shard: Shard) -> bool:
    """True for a parameter that Muon updates: a matrix, or one for each expert, that is no table of
    tokens, positions or classes, and no convolution of each channel by itself."""
    dimensions = 3 if ".experts." in name else 2
    fits = len(shard.full_shape) == dimensions
    return fits and ".conv." not in name and not name.startswith(_VOCABULARY)


def rows_of(name: str, shard: Shard, config: RunConfig) -> Sequence[Rows]:
    """Rows of each of the matrices that are fused in a parameter."""
    flags, model = config.section(OptimizersConfig), config.model
    rows = shard.full_shape[-2]
    parts = next((cut.parts for cut in shard.cuts if cut.parts), (rows,))
    if ".in_proj." in name:  # of a recurrent layer
        return in_order(parts)
    if ".qkv." in name:
        if flags.muon_split_qkv:
            gated = model.attention.attention_output_gate
            return (
                _queries_and_gates(parts, model.attention.kv_channels) if gated else in_order(parts)
            )
        if shard.part:
            raise ConfigError(
                "--muon-no-split-qkv needs a key and value head for each tensor-parallel rank; "
                "give fewer ranks (--tensor-model-parallel-size), or leave the flag out"
            )
    gated = model.mlp.gated and name.endswith((".up.weight",))
    return in_order((rows // 2, rows // 2) if gated and flags.muon_split_mlp else (rows,))


def _queries_and_gates(parts: Sequence[int], width: int) -> Sequence[Rows]:
    """Rows of queries, gates, keys and values, where those of each head's gate follow its
    queries'."""
    heads = torch.arange(parts[0]).view(-1, 2, width)
    return heads[:, 0].flatten(), heads[:, 1].flatten(), *in_order(parts)[1:]
