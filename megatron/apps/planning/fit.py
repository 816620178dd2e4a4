"""Check of whether a run fits into memory, made before the model is built."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from megatron.apps.planning.memory import Memory, rank_memory
from megatron.apps.planning.parameters import rank_shares
from megatron.config import ConfigError, RunConfig
from megatron.config.layouts import Layout
from megatron.engine.deepspeed_json import Json
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.averages.feature import AveragesConfig
from megatron.features.context.flags import LongContextConfig
from megatron.features.float8.flags import Float8Flags
from megatron.features.optimizers.memory import states_per_parameter
from megatron.parallel.mesh import Mesh, coordinates_of

logger = logging.getLogger(__name__)

IGNORE = "MEGATRON_IGNORE_MEMORY"  # environment variable that turns the error into a warning
# This container's memory limit and usage, in cgroup versions 2 and 1.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a rank needs in device or host memory: ``least`` for weights and optimizer state
    alone, ``whole`` including gradients and activations."""

    least: float = 0.0
    whole: float = 0.0


def check_fits(config: RunConfig, content: Json, mesh: Mesh, device: torch.device) -> None:
    """Check that weights and optimizer state fit into the free memory of this rank's device and,
    with those of the machine's other ranks, into host memory. Raises ConfigError, with suggestions,
    if they do not. Warn if gradients and activations may not fit."""
    layout = config.layout(content)
    memories = _memories(config, layout)
    memory = memories[mesh.pipeline.rank]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        need = _on_device(config, layout, memory)
        _judge(config, layout, device.type, need, free, f"the GPU of rank {mesh.world.rank}")
    first = max(0, mesh.world.rank - int(os.environ.get("LOCAL_RANK", "0")))
    last = first + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ranks = range(first, min(last, mesh.world.size))
    stages = [coordinates_of(rank, mesh.sizes)["pipeline"][0] for rank in ranks]
    needs = [_on_machine(config, layout, memories[stage], device.type) for stage in stages]
    together = MemoryNeed(sum(need.least for need in needs), sum(need.whole for need in needs))
    where = "this machine" + (f", for its {len(ranks)} ranks" if len(ranks) > 1 else "")
    _judge(config, layout, device.type, together, free_memory(), where)


def free_memory() -> float:
    """Return the bytes of memory and swap that are free for this process within its container."""
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    for limit, used in _CGROUPS:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such cgroup, or no limit ("max")
            continue
    return float(free)


def _memories(config: RunConfig, layout: Layout) -> list[Memory]:
    """Return the estimated memory of each pipeline rank."""
    training, adapters, model = config.training, config.section(AdapterConfig), config.model
    # The decoder's length is not known until the data are read.
    if model.decoder_num_layers and model.decoder_seq_length is None:
        model = replace(model, decoder_seq_length=model.seq_length)
    micro_batches = training.global_batch_size // (training.micro_batch_size * layout.data)
    float8 = Float8Flags.of(config.fast_paths).float8_blocks(model.blocks)
    averages = len(config.section(AveragesConfig).names)
    shares = rank_shares(model, layout, config.parallel.pipeline_partition, float8)
    return [
        rank_memory(
            model,
            layout,
            training.micro_batch_size,
            max(1, micro_batches),
            share,
            adapters if adapters.lora else None,
            config.section(LongContextConfig),
            2.0 if training.skip_train else states_per_parameter(config) + averages,
        )
        for share in shares
    ]


def _optimizer(config: RunConfig, memory: Memory) -> float:
    """Return the bytes of optimizer state, or 0 if nothing is trained."""
    return 0.0 if config.training.skip_train else memory.optimizer


def _on_device(config: RunConfig, layout: Layout, memory: Memory) -> MemoryNeed:
    optimizer = _optimizer(config, memory) if layout.offload_optimizer is None else 0.0
    weights = memory.weights if layout.offload_param is None else 0.0
    rest = 0.0 if config.training.skip_train else memory.gradients + memory.activations
    return MemoryNeed(weights + optimizer, weights + optimizer + rest)


def _on_machine(config: RunConfig, layout: Layout, memory: Memory, device: str) -> MemoryNeed:
    if device == "cpu":
        places = layout.offload_optimizer, layout.offload_param
        states, weights = ("nvme" if place == "nvme" else None for place in places)
        everything = replace(layout, offload_optimizer=states, offload_param=weights)
        together = replace(memory, activations=memory.activations + memory.host)
        return _on_device(config, everything, together)
    optimizer = _optimizer(config, memory) if layout.offload_optimizer == "cpu" else 0.0
    least = optimizer + (memory.weights if layout.offload_param == "cpu" else 0.0)
    return MemoryNeed(least, least + (0.0 if config.training.skip_train else memory.host))


def _judge(
    config: RunConfig, layout: Layout, device: str, need: MemoryNeed, free: float, where: str
) -> None:
    shown = f"{free / 2**30:,.1f} GiB are free on {where}"
    if need.least > free:
        message = (
            f"the weights and the optimizer state of this model need {need.least / 2**30:,.1f} "
            f"GiB, and {shown}"
        )
        remedies = "; ".join(_remedies(config, layout, device))
        if not os.environ.get(IGNORE):
            raise ConfigError(f"{message}. What helps: {remedies}; {IGNORE}=1 starts all the same")
        logger.warning("%s (%s)", message, IGNORE)
    elif need.whole > free:
        logger.warning(
            "this run needs about %.1f GiB with gradients and activations, and %s: a smaller "
            "--micro-batch-size or --recompute-granularity full needs less",
            need.whole / 2**30,
            shown,
        )


def _remedies(config: RunConfig, layout: Layout, device: str) -> list[str]:
    """Return suggestions to reduce a rank's memory, omitting those that the run already uses."""
    remedies = []
    if layout.data > 1 and layout.zero < 3:
        remedies.append(f"--zero-stage 3 divides it over the {layout.data} data-parallel ranks")
    remedies.append(
        "more machines or GPUs, with --tensor-model-parallel-size, --pipeline-model-parallel-size "
        "or --zero-stage 3"
    )
    if config.precision.states is None and config.optimizer.optimizer == "adam":
        remedies.append(
            "--bf16 --use-precision-aware-optimizer --exp-avg-dtype int8 --exp-avg-sq-dtype int8"
        )
    if layout.offload_optimizer is None and device != "cpu":
        remedies.append('"offload_optimizer": {"device": "cpu" or "nvme"} in the DeepSpeed JSON')
    if not config.section(AdapterConfig).qlora:
        remedies.append("--lora --qlora, to tune a trained model")
    remedies.append("a smaller --num-layers or --hidden-size (tools/plan.py shows what fits)")
    return remedies
