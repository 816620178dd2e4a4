"""Flags of the layout, and pipelines: their schedule and stages."""

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
    """Layout: how the work is divided over processes."""

    tensor_model_parallel_size: int = option(
        1, aliases=("--model-parallel-size",), bounds=POSITIVE, role="layout"
    )
    """Tensor-parallel size: ranks that share each layer's weight matrices."""
    sequence_parallel: bool = option(False, role="layout")
    """Sequence parallelism: split activations along the sequence between tensor-parallel layers."""
    pipeline_model_parallel_size: int = option(1, bounds=POSITIVE, role="layout")
    """Pipeline-parallel size: ranks that the layers are divided over."""
    no_pipeline_parallel: bool = option(False, role="layout")
    """Do not use a pipeline; contradicts --pipeline-model-parallel-size above 1."""
    pipeline_schedule: str | None = option(
        None,
        choices=SCHEDULES,
        derived="interleaved with several stages per process, else 1f1b",
        role="layout",
    )
    """Pipeline schedule: the order of forward and backward passes of the micro batches; with zbh1
    and dualpipev_zb gradients of weights are computed where a process would wait."""
    enable_zbh1_pipeline: bool = option(False, role="layout")
    """Same as --pipeline-schedule zbh1."""
    enable_zbh1_exact_semantics: bool = option(False, role="layout")
    """Sums of gradients in the order of 1f1b, which --pipeline-schedule zbh1 has in any case."""
    num_layers_per_virtual_pipeline_stage: int | None = option(None, bounds=POSITIVE, role="layout")
    """Number of blocks per stage of an interleaved pipeline, where each rank has several stages."""
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        derived="num-layers / pipeline size / num-layers-per-virtual-pipeline-stage; else 2 with "
        "--pipeline-schedule interleaved, dualpipev or dualpipev_zb, 1 without",
        bounds=POSITIVE,
        role="layout",
    )
    """Number of stages per rank of a pipeline."""
    pipeline_partition: str = option("blocks", aliases=("--pipe-partition-method",))
    """How the layers are divided into stages: blocks (the same number of blocks in each, as far as
    possible; where those of an encoder and a decoder differ, about the same work), parameters
    (about the same number of parameters in each), or the number of blocks of each stage, such as
    3,4,4,3."""
    pipeline_model_parallel_split_rank: int | None = option(None, role="layout")
    """Pipeline rank where the decoder of a model with an encoder and a decoder (T5) starts; without
    it the blocks of both are divided so that the costliest stage is as cheap as possible."""
    recompute_activations: bool = option(False)
    """Same as --recompute-granularity selective."""
    recompute_granularity: str | None = option(None, choices=("selective", "full"))
    """Activation recomputation in the backward pass: of parts of layers (selective), or of whole
    layers (full)."""
    recompute_modules: tuple[str, ...] = option(
        (), choices=("core_attn", "mlp_act"), derived="core_attn with selective recomputation"
    )
    """Parts of layers that selective recomputation computes again: attention without its matrices
    (core_attn), the activation of an MLP (mlp_act), whose output is a fifth of what a block with a
    gated MLP keeps. They imply --recompute-granularity selective."""
    recompute_method: str | None = option(None, choices=("uniform", "block"))
    """With --recompute-granularity full: recompute all layers, in chunks of --recompute-num-layers
    (uniform), or only the first --recompute-num-layers layers of each stage (block)."""
    recompute_num_layers: int = option(
        1,
        aliases=("--checkpoint-num-layers", "--activations-checkpoint-num-layers"),
        bounds=POSITIVE,
    )
    """Layers per recomputed chunk (uniform), or recomputed layers per stage (block)."""
    logits_chunk_mib: int | None = option(
        None,
        derived="64 on a CPU, 256 on a GPU without a compiler; else 8,192 tokens, at most 2,560 "
        "MiB, and less where memory is short",
        bounds=NOT_NEGATIVE,
    )
    """Logits are computed in chunks of this many MiB while the loss is computed; 0 computes all at
    once."""
    checkpoint_activations: bool = option(False, aliases=("--deepspeed-activation-checkpointing",))
    """Older name of --recompute-granularity full --recompute-method uniform."""
    activations_checkpoint_method: str | None = option(None, choices=("uniform", "block"))
    """Older name of --recompute-granularity full --recompute-method with the same value."""
    distributed_backend: str | None = option(
        None, choices=("nccl", "gloo"), derived="nccl on GPUs, gloo on CPU"
    )
    """Communication backend."""
    distributed_timeout_minutes: float = option(10.0, bounds=POSITIVE)
    """Minutes after which an unfinished collective is an error."""
    local_rank: int | None = option(
        None,
        flag="--local_rank",
        aliases=("--local-rank",),
        derived="environment LOCAL_RANK",
        role="course",
    )
    """Local rank of this process on its node; launchers pass it."""
    data_parallel_size: int = option(1, internal=True)
    """Data-parallel size: world size / (tensor x pipeline x context size)."""
    world_size: int = option(1, internal=True)
    """Number of processes."""
    expert_axis: int = option(1, internal=True)
    """Ranks along the mesh's axis of experts, which divides the data-parallel size."""
    folded: bool = option(False, internal=True)
    """Experts are cut over that axis and the tensor-parallel ranks together."""

    def context_size(self, resolver: ConfigResolver) -> int:
        """Ranks that divide a sequence."""
        return 1

    def communication(
        self, model: ModelConfig, context: int, resolver: ConfigResolver
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Communication of all blocks or of each over the context, and the two levels of it."""
        return (), ()

    def experts(self, replicas: int, resolver: ConfigResolver) -> dict[str, Any]:
        """Division of experts, among ``replicas`` data-parallel ranks, by the fields of
        :class:`~megatron.config.parallel.ParallelConfig`."""
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
        if rule is not None:  # there is no pipeline
            both = f"{resolver.show(blocks)}, {resolver.show('pipeline_model_parallel_size')}"
            raise ConfigError(f"{both}: {rule.explanation(ramp=False)}")
        count = _chunks(model.blocks, ranks, flags.num_layers_per_virtual_pipeline_stage, resolver)
        resolver.check(
            given in (None, count),
            f"{resolver.show(chunks)} contradicts {resolver.show(blocks)}, which makes it {count}",
        )
        given = resolver.fill(chunks, given, count, "num-layers / pipeline size / blocks per stage")
    schedule, count = complete_schedule(_zero_bubble(flags, resolver), given)
    resolver.fill(chunks, given, count, f"pipeline-schedule {schedule}")
    how = f"{count} stage{'s' * (count > 1)} per process"
    return resolver.fill("pipeline_schedule", flags.pipeline_schedule, schedule, how), count


def _zero_bubble(flags: ParallelFlags, resolver: ConfigResolver) -> str | None:
    """The schedule that flags name, those of Megatron-DeepSpeed among them."""
    schedule, zbh1 = flags.pipeline_schedule, flags.enable_zbh1_pipeline
    resolver.check(
        zbh1 or schedule == "zbh1" or not flags.enable_zbh1_exact_semantics,
        "--enable-zbh1-exact-semantics has an effect with --enable-zbh1-pipeline only",
    )
    if not zbh1:
        return schedule
    resolver.check(
        schedule in (None, "zbh1"),
        f"--enable-zbh1-pipeline contradicts {resolver.show('pipeline_schedule')}",
    )
    if not flags.enable_zbh1_exact_semantics:
        resolver.notes.append(
            "--enable-zbh1-pipeline: gradients are summed in the order of 1f1b, as with "
            "--enable-zbh1-exact-semantics"
        )
    return "zbh1"


def _chunks(layers: int, ranks: int, wanted: int, resolver: ConfigResolver) -> int:
    """Stages per rank that result from --num-layers-per-virtual-pipeline-stage."""
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


def split_partition(
    flags: ParallelFlags, model: ModelConfig, chunks: int, resolver: ConfigResolver
) -> str:
    """The number of blocks of each stage where the decoder starts at a rank; ConfigError if none
    can start there."""
    split, ranks = flags.pipeline_model_parallel_split_rank, flags.pipeline_model_parallel_size
    assert split is not None
    shown = resolver.show("pipeline_model_parallel_split_rank")
    decoder = model.decoder_num_layers
    if decoder is None:
        raise ConfigError(f"{shown}: this model has no decoder behind an encoder; leave it out")
    resolver.check(
        0 < split < ranks,
        f"{shown}: encoder and decoder need a process of the pipeline each, so with "
        f"{resolver.show('pipeline_model_parallel_size')} it must be "
        + (f"from 1 to {ranks - 1}" if ranks > 1 else "left out"),
    )
    resolver.check(
        chunks == 1,
        f"{shown} divides the processes of the pipeline, which have "
        f"{resolver.show('num_virtual_stages_per_pipeline_rank')}: give --pipeline-partition with "
        "the number of blocks of each stage, or leave both out",
    )
    resolver.check(
        not resolver.given("pipeline_partition"),
        f"{shown} contradicts {resolver.show('pipeline_partition')}; give one of them",
    )
    counts: list[int] = []
    for blocks, stages, name in (
        (model.num_layers, split, "num_layers"), (decoder, ranks - split, "decoder_num_layers"),
    ):  # fmt: skip
        resolver.check(
            blocks >= stages,
            f"{shown} leaves {stages} processes to {resolver.show(name)}: each needs a block",
        )
        # The first and the last stage also have the embedding and the head.
        each, over = divmod(blocks, stages)
        more = range(stages - over, stages) if name == "num_layers" else range(over)
        counts += [each + (stage in more) for stage in range(stages)]
    partition = ",".join(map(str, counts))
    how = f"decoder from {resolver.flag('pipeline_model_parallel_split_rank')} {split} on"
    return resolver.put("pipeline_partition", partition, how)
