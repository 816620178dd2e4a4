"""How the work is laid out over processes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, POSITIVE, ConfigError, option
from megatron.config.layouts import SCHEDULES, Layout, complete_schedule, refusal
from megatron.config.model import ModelConfig
from megatron.config.resolver import ConfigResolver, shared

LOGITS_CHUNK_MIB = {"cpu": 64, "cuda": 256}
"""What ``--logits-chunk-mib`` is unless it is given. Each chunk adds to the gradient of the token
table in float32, which weighs more beside the products of a GPU."""


@dataclass(frozen=True, kw_only=True)
class ParallelFlags:
    """Layout: how the work is laid out over processes."""

    tensor_model_parallel_size: int = option(
        1, aliases=("--model-parallel-size",), bounds=POSITIVE, role="layout"
    )
    """Processes that share each layer's matrices."""
    sequence_parallel: bool = option(False, role="layout")
    """Split activations along the sequence between the tensor-parallel layers."""
    pipeline_model_parallel_size: int = option(1, bounds=POSITIVE, role="layout")
    """Processes that the layer list is cut over."""
    no_pipeline_parallel: bool = option(False, role="layout")
    """State that the model runs as a plain module; an error together with more than one stage."""
    pipeline_schedule: str | None = option(
        None,
        choices=SCHEDULES,
        derived="interleaved with several stages per process, else 1f1b",
        role="layout",
    )
    """Order in which a pipeline's processes work through the micro batches."""
    num_layers_per_virtual_pipeline_stage: int | None = option(None, bounds=POSITIVE, role="layout")
    """Blocks per stage of an interleaved pipeline; each process holds several stages."""
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        derived="num-layers / pipeline size / num-layers-per-virtual-pipeline-stage; else 2 with "
        "--pipeline-schedule interleaved or dualpipev, 1 without",
        bounds=POSITIVE,
        role="layout",
    )
    """Stages that each process of a pipeline holds."""
    pipeline_partition: str = option("blocks", aliases=("--pipe-partition-method",))
    """How the layer list is cut into stages: blocks (as many blocks in each, as far as that goes),
    parameters (as many parameters in each), or the number of blocks of each stage: 3,4,4,3."""
    recompute_activations: bool = option(False)
    """Short for --recompute-granularity selective."""
    recompute_granularity: str | None = option(None, choices=("selective", "full"))
    """What is computed again in the backward pass: attention only, or whole layers."""
    recompute_method: str | None = option(None, choices=("uniform", "block"))
    """With full granularity: every layer in chunks of --recompute-num-layers (uniform), or only the
    first --recompute-num-layers layers of each pipeline stage (block)."""
    recompute_num_layers: int = option(1, bounds=POSITIVE)
    """Layers per recomputed chunk (uniform), or how many layers of a stage are recomputed (block).
    """
    logits_chunk_mib: int | None = option(
        None, derived="64 on a CPU, 256 on a GPU", bounds=NOT_NEGATIVE
    )
    """MiB of logits that a process holds at a time while it computes the loss; 0 for all of them.
    """
    checkpoint_activations: bool = option(False, aliases=("--deepspeed-activation-checkpointing",))
    """Older spelling of --recompute-granularity full --recompute-method uniform."""
    distributed_backend: str | None = option(
        None, choices=("nccl", "gloo"), derived="nccl on GPUs, gloo on CPU"
    )
    """Library that carries the collectives."""
    distributed_timeout_minutes: float = option(10.0, bounds=POSITIVE)
    """Minutes after which a collective that has not finished is an error."""
    local_rank: int | None = option(
        None,
        flag="--local_rank",
        aliases=("--local-rank",),
        derived="environment LOCAL_RANK",
        role="course",
    )
    """Number of this process on its node; launchers pass it."""
    data_parallel_size: int = option(1, internal=True)
    """Replicas of the model: world size / (tensor x pipeline size)."""
    world_size: int = option(1, internal=True)
    """Number of processes."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is laid out over processes; fields are those of :class:`ParallelFlags`.

    ``recompute_granularity`` is None where nothing is recomputed, ``recompute_method`` where whole
    layers are not, and ``logits_chunk_mib``, ``distributed_backend`` and ``local_rank`` where the
    device and the launcher decide.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    pipeline_schedule: str = "1f1b"
    num_virtual_stages_per_pipeline_rank: int = 1
    pipeline_partition: str = "blocks"
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int = 1
    logits_chunk_mib: int | None = None
    distributed_backend: str | None = None
    distributed_timeout_minutes: float = 10.0
    local_rank: int | None = None
    data_parallel_size: int = 1
    world_size: int = 1

    @property
    def stages(self) -> int:
        """Stages of the pipeline, those that share a process included."""
        return self.pipeline_model_parallel_size * self.num_virtual_stages_per_pipeline_rank


def resolve_parallel(
    flags: ParallelFlags, model: ModelConfig, world_size: int, resolver: ConfigResolver
) -> ParallelConfig:
    """The layout that flags ask for, of a model over so many processes.

    Raises:
        ConfigError: they contradict each other, or sizes do not divide each other.
    """
    replicas = _replicas(flags, model, world_size, resolver)
    schedule, chunks = _schedule(flags, model, resolver)
    _check_partition(flags, model, flags.pipeline_model_parallel_size * chunks, resolver)
    granularity, method = _recompute(flags, resolver)
    return ParallelConfig(
        **shared(flags, ParallelConfig)
        | {
            "data_parallel_size": replicas,
            "world_size": resolver.put("world_size", world_size, "launcher"),
            "pipeline_schedule": schedule,
            "num_virtual_stages_per_pipeline_rank": chunks,
            "recompute_granularity": granularity,
            "recompute_method": method,
        }
    )


def _replicas(
    flags: ParallelFlags, model: ModelConfig, world_size: int, resolver: ConfigResolver
) -> int:
    tensor, pipeline = "tensor_model_parallel_size", "pipeline_model_parallel_size"
    resolver.check(
        not (flags.no_pipeline_parallel and flags.pipeline_model_parallel_size > 1),
        f"--no-pipeline-parallel contradicts {resolver.show(pipeline)}",
    )
    size = flags.tensor_model_parallel_size
    model_parallel = size * flags.pipeline_model_parallel_size
    resolver.check(
        world_size % model_parallel == 0,
        f"{resolver.show(tensor)} x {resolver.show(pipeline)} must divide the {world_size} "
        "processes",
    )
    for name in ("num_attention_heads", "ffn_hidden_size"):
        resolver.check_divides(tensor, name)
    groups = model.attention.num_query_groups
    resolver.check(
        groups % size == 0 or size % groups == 0,
        f"{resolver.show('num_query_groups')} and {resolver.show(tensor)}: one must be a multiple "
        "of the other, so that every process holds whole key and value heads",
    )
    if flags.sequence_parallel:
        resolver.check_divides(tensor, "seq_length")
    how = "processes / (tensor x pipeline)"
    return resolver.put("data_parallel_size", world_size // model_parallel, how)


def _schedule(
    flags: ParallelFlags, model: ModelConfig, resolver: ConfigResolver
) -> tuple[str, int]:
    """The schedule, and stages per process."""
    chunks, blocks = (
        "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
    )  # fmt: skip
    given = flags.num_virtual_stages_per_pipeline_rank
    if flags.num_layers_per_virtual_pipeline_stage is not None:
        resolver.check(
            flags.pipeline_schedule in (None, "interleaved"),
            f"{resolver.show(blocks)} asks for an interleaved pipeline and contradicts "
            f"{resolver.show('pipeline_schedule')}",
        )
        ranks = flags.pipeline_model_parallel_size
        rule = refusal(Layout(pipeline=ranks, schedule="interleaved", chunks=2))
        if rule is not None:  # there is no pipeline
            asked = f"{resolver.show(blocks)}, {resolver.show('pipeline_model_parallel_size')}"
            raise ConfigError(f"{asked}: {rule.explanation(ramp=False)}")
        found = _chunks(
            model.num_layers, ranks, flags.num_layers_per_virtual_pipeline_stage, resolver
        )
        resolver.check(
            given in (None, found),
            f"{resolver.show(chunks)} contradicts {resolver.show(blocks)}, which makes it {found}",
        )
        given = resolver.fill(chunks, given, found, "num-layers / pipeline size / blocks per stage")
    schedule, count = complete_schedule(flags.pipeline_schedule, given)
    resolver.fill(chunks, given, count, f"pipeline-schedule {schedule}")
    how = f"{count} stage{'s' * (count > 1)} per process"
    return resolver.fill("pipeline_schedule", flags.pipeline_schedule, schedule, how), count


def _chunks(layers: int, ranks: int, wanted: int, resolver: ConfigResolver) -> int:
    """Stages per process that --num-layers-per-virtual-pipeline-stage comes to."""
    share, rest = divmod(layers, ranks)
    if not rest and share % wanted == 0 and share > wanted:
        return share // wanted
    fitting = [n for n in range(1, share) if not rest and share % n == 0]
    raise ConfigError(
        f"{resolver.show('num_layers_per_virtual_pipeline_stage')}: each of the {ranks} processes "
        "of the pipeline must hold two or more stages of that many blocks, all "
        f"{resolver.show('num_layers')} together; "
        + (
            f"possible: {', '.join(map(str, fitting))}"
            if fitting
            else "no number does that; uneven stages come from "
            "--num-virtual-stages-per-pipeline-rank and --pipeline-partition"
        )
    )


def _check_partition(
    flags: ParallelFlags, model: ModelConfig, stages: int, resolver: ConfigResolver
) -> None:
    """Checks --pipeline-partition, and that every stage gets a block."""
    layers, partition = model.num_layers, flags.pipeline_partition
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


def _recompute(flags: ParallelFlags, resolver: ConfigResolver) -> tuple[str | None, str | None]:
    """What is computed again, and how much of it."""
    granularity = flags.recompute_granularity
    for flag, given, meaning in (
        ("--checkpoint-activations", flags.checkpoint_activations, "full"),
        ("--recompute-activations", flags.recompute_activations, "selective"),
    ):
        if given:
            resolver.check(
                granularity in (None, meaning),
                f"{flag} contradicts {resolver.show('recompute_granularity')}",
            )
            granularity = resolver.put("recompute_granularity", meaning, flag)
    if granularity == "full":
        method = flags.recompute_method
        return granularity, resolver.fill(
            "recompute_method", method, "uniform", "full recomputation"
        )
    for name in ("recompute_method", "recompute_num_layers"):
        resolver.check(
            not resolver.given(name), f"{resolver.show(name)} needs --recompute-granularity full"
        )
    return granularity, None
