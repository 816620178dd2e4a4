"""Flags of the parallel layout, and the resolution of pipeline schedules and stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.features import flag_parts
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, ConfigError, ConfigResolver, option
from megatron.config.layouts import SCHEDULES, Layout, complete_schedule, refusal
from megatron.config.model import ModelConfig
from megatron.config.sections import with_parts


@with_parts(flag_parts("parallel"))
@dataclass(frozen=True, kw_only=True)
class ParallelFlags:
    """Layout: how a run is distributed over processes."""

    tensor_model_parallel_size: int = option(
        1, aliases=("--model-parallel-size",), bounds=POSITIVE, role="layout"
    )
    """Tensor-parallel size: number of ranks that each layer's weight matrices are sharded over."""
    sequence_parallel: bool = option(False, role="layout")
    """Sequence parallelism: split activations along the sequence between tensor-parallel layers."""
    pipeline_model_parallel_size: int = option(1, bounds=POSITIVE, role="layout")
    """Pipeline-parallel size: number of ranks that the layers are divided over."""
    no_pipeline_parallel: bool = option(False, role="layout")
    """Do not use a pipeline. Cannot be combined with a --pipeline-model-parallel-size above 1."""
    pipeline_schedule: str | None = option(
        None,
        choices=SCHEDULES,
        derived="interleaved with several stages per process, else 1f1b",
        role="layout",
    )
    """Pipeline schedule: the order of the micro batches' forward and backward passes. zbh1 and
    dualpipev_zb compute weight gradients when a process would otherwise be idle."""
    num_layers_per_virtual_pipeline_stage: int | None = option(None, bounds=POSITIVE, role="layout")
    """Number of blocks per stage of an interleaved pipeline, where each rank has several stages."""
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        derived="num-layers / pipeline size / num-layers-per-virtual-pipeline-stage; else 2 with "
        "--pipeline-schedule interleaved, dualpipev or dualpipev_zb, 1 without",
        bounds=POSITIVE,
        role="layout",
    )
    """Number of pipeline stages per rank."""
    pipeline_partition: str = option("blocks", aliases=("--pipe-partition-method",))
    """How layers are divided into stages. blocks: as equally as possible by number of blocks, or by
    estimated compute if encoder and decoder blocks differ; parameters: about equally by number of
    parameters; or a list of the number of blocks in each stage, such as 3,4,4,3."""
    recompute_activations: bool = option(False)
    """Same as --recompute-granularity selective."""
    recompute_granularity: str | None = option(None, choices=("selective", "full"))
    """Recompute activations in the backward pass: those of some modules of each layer (selective),
    or those of whole layers (full)."""
    recompute_modules: tuple[str, ...] = option(
        (), choices=("core_attn", "mlp_act"), derived="core_attn with selective recomputation"
    )
    """Modules that selective recomputation recomputes: attention without its projections
    (core_attn), or the MLP's activation function (mlp_act), whose output is a fifth of the memory
    that a block with a gated MLP keeps. Implies --recompute-granularity selective."""
    recompute_method: str | None = option(None, choices=("uniform", "block"))
    """With --recompute-granularity full: recompute all layers in chunks of --recompute-num-layers
    (uniform), or only the first --recompute-num-layers layers of each stage (block)."""
    recompute_num_layers: int = option(
        1,
        aliases=("--checkpoint-num-layers", "--activations-checkpoint-num-layers"),
        bounds=POSITIVE,
    )
    """Number of layers per recomputed chunk (uniform) or recomputed per stage (block)."""
    logits_chunk_mib: int | None = option(
        None,
        derived="64 on a CPU, 256 on a GPU without a compiler; else 8,192 tokens, at most 2,560 "
        "MiB, and less where memory is short",
        bounds=NOT_NEGATIVE,
    )
    """Compute the loss in chunks of logits of this size in MiB; 0 computes all logits at once."""
    distributed_backend: str | None = option(
        None, choices=("nccl", "gloo"), derived="nccl on GPUs, gloo on CPU"
    )
    """Communication backend of torch.distributed."""
    distributed_timeout_minutes: float = option(10.0, bounds=POSITIVE)
    """Timeout of a collective in minutes. If it expires, the run fails."""
    local_rank: int | None = option(
        None,
        flag="--local_rank",
        aliases=("--local-rank",),
        derived="environment LOCAL_RANK",
        role="course",
    )
    """Rank of this process on its node, set by the launcher."""
    data_parallel_size: int = option(1, internal=True)
    """Data-parallel size: world size / (tensor x pipeline x context size)."""
    world_size: int = option(1, internal=True)
    """Number of processes."""
    expert_axis: int = option(1, internal=True)
    """Number of ranks along the mesh's expert axis. It divides the data-parallel size."""
    folded: bool = option(False, internal=True)
    """True if experts are sharded over the expert axis and the tensor-parallel ranks together."""

    def partition(self, model: ModelConfig, chunks: int, resolver: ConfigResolver) -> str:
        """Return the division of the layers into stages, as in ``--pipeline-partition``."""
        return self.pipeline_partition

    def schedule(self, resolver: ConfigResolver) -> str | None:
        """Return the schedule that the flags select, or None for the default."""
        return self.pipeline_schedule

    def recomputation(self, resolver: ConfigResolver) -> tuple[str | None, str | None]:
        """Return the granularity and method of recomputation, including what other flags imply."""
        name = "recompute_granularity"
        if self.recompute_activations:
            resolver.imply(name, "selective", "--recompute-activations")
        if self.recompute_modules:
            words = " ".join(self.recompute_modules)
            resolver.imply(name, "selective", f"--recompute-modules {words}")
        return resolver.values[name], self.recompute_method

    def context_size(self, resolver: ConfigResolver) -> int:
        """Return the context-parallel size: the number of ranks that share each sequence."""
        return 1

    def communication(
        self, model: ModelConfig, context: int, resolver: ConfigResolver
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the context-parallel communication types, one for all blocks or one per block, and
        the two sizes of hierarchical communication. Both are empty without context parallelism."""
        return (), ()

    def experts(self, replicas: int, resolver: ConfigResolver) -> dict[str, Any]:
        """Return how experts are divided among ``replicas`` data-parallel ranks, as fields of
        :class:`~megatron.config.parallel.ParallelConfig` by name."""
        return {}


def pipeline_schedule(
    flags: ParallelFlags, model: ModelConfig, resolver: ConfigResolver
) -> tuple[str, int]:
    chunks, blocks = (
        "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
    )  # fmt: skip
    given = flags.num_virtual_stages_per_pipeline_rank
    if flags.num_layers_per_virtual_pipeline_stage is not None:
        resolver.check(
            flags.pipeline_schedule in (None, "interleaved"),
            f"{resolver.show(blocks)} requires an interleaved pipeline and contradicts "
            f"{resolver.show('pipeline_schedule')}",
        )
        ranks = flags.pipeline_model_parallel_size
        rule = refusal(Layout(pipeline=ranks, schedule="interleaved", chunks=2))
        if rule is not None:  # without a pipeline
            both = f"{resolver.show(blocks)}, {resolver.show('pipeline_model_parallel_size')}"
            raise ConfigError(f"{both}: {rule.explanation(ramp=False)}")
        count = _chunks(model.blocks, ranks, flags.num_layers_per_virtual_pipeline_stage, resolver)
        resolver.check(
            given in (None, count),
            f"{resolver.show(chunks)} contradicts {resolver.show(blocks)}, which makes it {count}",
        )
        given = resolver.fill(chunks, given, count, "num-layers / pipeline size / blocks per stage")
    schedule, count = complete_schedule(flags.schedule(resolver), given)
    resolver.fill(chunks, given, count, f"pipeline-schedule {schedule}")
    how = f"{count} stage{'s' * (count > 1)} per process"
    return resolver.fill("pipeline_schedule", flags.pipeline_schedule, schedule, how), count


def _chunks(layers: int, ranks: int, wanted: int, resolver: ConfigResolver) -> int:
    """Return the stages per rank if each has ``wanted`` blocks. Raises ConfigError if uneven."""
    share, rest = divmod(layers, ranks)
    if not rest and share % wanted == 0 and share > wanted:
        return share // wanted
    fitting = [n for n in range(1, share) if not rest and share % n == 0]
    possible = f"possible: {', '.join(map(str, fitting))}"
    uneven = "--num-virtual-stages-per-pipeline-rank and --pipeline-partition"
    none = f"no number does that; uneven stages come from {uneven}"
    raise ConfigError(
        f"{resolver.show('num_layers_per_virtual_pipeline_stage')}: each of the {ranks} processes "
        "of the pipeline must hold two or more stages of that many blocks, all "
        f"{layers} together ({resolver.show('num_layers')}); {possible if fitting else none}"
    )


def check_partition(
    flags: ParallelFlags, model: ModelConfig, stages: int, resolver: ConfigResolver
) -> None:
    layers, partition = model.blocks, flags.pipeline_partition
    resolver.check(
        stages <= layers,
        f"{resolver.show('num_layers')}: each of the {stages} stages of the pipeline needs a block",
    )
    if partition in ("blocks", "parameters"):
        return
    numbers = [int(word) if word.isdecimal() else 0 for word in partition.split(",")]
    resolver.check(
        all(numbers),
        f"{resolver.show('pipeline_partition')} must be blocks, parameters, or the number of "
        "blocks of each stage, as in 3,4,4,3",
    )
    resolver.check(
        len(numbers) == stages and sum(numbers) == layers,
        f"{resolver.show('pipeline_partition')} lists {len(numbers)} stages of {sum(numbers)} "
        f"blocks together; the pipeline has {stages} stages and the model {layers} blocks",
    )
    each = flags.num_layers_per_virtual_pipeline_stage
    resolver.check(
        each is None or set(numbers) == {each},
        f"{resolver.show('pipeline_partition')} contradicts "
        f"{resolver.show('num_layers_per_virtual_pipeline_stage')}; give one of them",
    )
