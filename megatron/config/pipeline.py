"""Flags of pipelines: schedule, stages, and the blocks of each stage."""

from __future__ import annotations

from megatron.config.flags import ConfigError, ConfigResolver
from megatron.config.layouts import Layout, complete_schedule, refusal
from megatron.config.model import ModelConfig
from megatron.config.parallel_flags import ParallelFlags


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
    schedule, count = complete_schedule(flags.pipeline_schedule, given)
    resolver.fill(chunks, given, count, f"pipeline-schedule {schedule}")
    how = f"{count} stage{'s' * (count > 1)} per process"
    return resolver.fill("pipeline_schedule", flags.pipeline_schedule, schedule, how), count


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
