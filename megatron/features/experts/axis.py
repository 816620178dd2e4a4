"""Flags for expert parallelism: the ranks over which experts are distributed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import POSITIVE, ConfigError, ConfigResolver, option


@dataclass(frozen=True, kw_only=True)
class ExpertAxisFlags(FlagPart):
    """Ranks over which experts are distributed."""

    before: ClassVar[str] = "no_pipeline_parallel"

    expert_model_parallel_size: int = option(
        1, aliases=("--moe-expert-parallel-size",), bounds=POSITIVE, role="layout"
    )
    """Expert-parallel size: number of ranks over which the experts of a layer are distributed.
    These are data-parallel ranks, and with --expert-tensor-parallel-size 1 (whole experts) also
    tensor-parallel ranks."""
    expert_tensor_parallel_size: int | None = option(
        None,
        bounds=POSITIVE,
        derived="the tensor-parallel size; 1 with --moe-expert-parallel-size",
        role="layout",
    )
    """Number of ranks across which an expert is sharded: the tensor-parallel size, or 1 for whole
    experts."""
    enable_expert_tensor_parallelism: bool = option(False, role="layout")
    """Set --expert-tensor-parallel-size to the tensor-parallel size."""

    def experts(self, replicas: int, resolver: ConfigResolver) -> dict[str, Any]:
        """Return the fields of :class:`~megatron.config.ParallelConfig` that describe how experts
        are distributed. ``replicas`` is the data-parallel size."""
        tensor, how = resolver.values["tensor_model_parallel_size"], "expert and tensor sizes"
        together, axis = _experts(self, tensor, replicas, resolver)
        return {
            "expert_tensor_parallel_size": None if together == tensor else together,
            "expert_axis": resolver.put("expert_axis", axis, how),
            "folded": resolver.put("folded", axis < self.expert_model_parallel_size, how),
        }


def _experts(
    flags: ExpertAxisFlags, tensor: int, replicas: int, resolver: ConfigResolver
) -> tuple[int, int]:
    """Return the number of ranks that share an expert, and the size of the mesh's expert axis."""
    experts = flags.expert_model_parallel_size
    name, together = "expert_tensor_parallel_size", flags.expert_tensor_parallel_size
    shown, shown_experts = resolver.show(name), resolver.show("expert_model_parallel_size")
    shown_tensor = resolver.show("tensor_model_parallel_size")
    if flags.enable_expert_tensor_parallelism:
        resolver.check(
            together in (None, tensor),
            f"{shown} contradicts --enable-expert-tensor-parallelism, which makes it {tensor}",
        )
        together = resolver.fill(name, together, tensor, "--enable-expert-tensor-parallelism")
    elif resolver.origins["expert_model_parallel_size"] == "flag --moe-expert-parallel-size":
        how = "--moe-expert-parallel-size without --enable-expert-tensor-parallelism"
        together = resolver.fill(name, together, 1, how)
    together = resolver.fill(name, together, tensor, "tensor-model-parallel-size")
    resolver.check(
        together in (1, tensor),
        f"{shown} must be 1, for whole experts, or that of {shown_tensor}, for cut ones",
    )
    folded = together < tensor and experts > 1
    resolver.check(
        not folded or experts % tensor == 0,
        f"{shown_experts} must be 1 or a multiple of {shown_tensor} where experts are whole "
        f"(--expert-tensor-parallel-size 1); or cut them by --expert-tensor-parallel-size {tensor}",
    )
    axis = experts // tensor if folded else experts
    resolver.check(
        replicas % axis == 0,
        f"{shown_experts}"
        + (f" / {shown_tensor}" if folded else "")
        + f" must divide the data-parallel size, {replicas}; choose another size, or start more "
        "processes",
    )
    return together, axis


def check_divided(settings: dict[str, Any], stage: int) -> None:
    """Raise ConfigError if a DeepSpeed JSON has a setting that DeepSpeed handles incorrectly for
    expert-parallel parameters at this ZeRO stage."""
    from megatron.engine.deepspeed_json import get, offloads

    defaults: dict[str, Any] = {}
    if stage in (1, 2) and offloads(settings, "offload_optimizer"):
        defaults = {"contiguous_gradients": True, "reduce_scatter": True}
    elif stage == 3:
        defaults = {"zero_hpz_partition_size": 1, "zero_quantized_gradients": False}
    for name, default in defaults.items():
        value = get(settings, f"zero_optimization.{name}")
        if value not in (None, default):
            raise ConfigError(
                f"zero_optimization.{name} {json.dumps(value)} of the DeepSpeed JSON: experts that "
                f"are divided over ranks need {json.dumps(default)} at ZeRO {stage}; leave it out"
            )
