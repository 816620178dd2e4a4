"""Flags of the layout, and axes of the mesh: ranks that divide sequences and their communication;
pipelines, their schedule and stages."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    ConfigError,
    ConfigResolver,
    needs_value,
    option,
)
from megatron.config.layouts import COMMUNICATIONS, SCHEDULES, Layout, complete_schedule, refusal
from megatron.config.model import ModelConfig


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
    context_parallel_size: int | None = option(
        None, derived="ds-sequence-parallel-size, or 1", bounds=POSITIVE, role="layout"
    )
    """Context-parallel size: ranks that each sequence is divided over, in every layer."""
    cp_comm_type: tuple[str, ...] = option(
        (),
        choices=COMMUNICATIONS,
        spellings={"all_gather": "allgather"},
        derived="p2p; a2a with --ds-sequence-parallel-size",
        role="layout",
    )
    """How ranks that divide a sequence communicate in attention: keys and values travel in a ring
    (p2p), heads are exchanged for the sequence (a2a, Ulysses), keys and values are gathered
    (allgather), or neighbours exchange heads and rings connect the neighbourhoods (a2a+p2p). One
    value, or one for each block."""
    hierarchical_context_parallel_sizes: tuple[int, ...] = option((), role="layout")
    """With --cp-comm-type a2a+p2p: number of neighbouring ranks that exchange heads, and number of
    ranks of a ring; their product is the context-parallel size."""
    ds_sequence_parallel_size: int = option(1, bounds=POSITIVE, role="layout")
    """Context-parallel size, with --cp-comm-type a2a where no other is given: the sequence
    parallelism of DeepSpeed (Ulysses)."""
    force_ds_sequence_parallel: bool = option(False, role="layout")
    """Same as --cp-comm-type a2a."""
    expert_model_parallel_size: int = option(
        1, aliases=("--moe-expert-parallel-size",), bounds=POSITIVE, role="layout"
    )
    """Expert-parallel size: ranks that the experts of a layer are divided over, among the
    data-parallel ranks; and among the tensor-parallel ranks too where experts are not cut."""
    expert_tensor_parallel_size: int | None = option(
        None,
        bounds=POSITIVE,
        derived="the tensor-parallel size; 1 with --moe-expert-parallel-size",
        role="layout",
    )
    """Ranks that share the weight matrices of an expert: the tensor-parallel size, or 1 for whole
    experts."""
    enable_expert_tensor_parallelism: bool = option(False, role="layout")
    """Same as --expert-tensor-parallel-size with the tensor-parallel size."""
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
    num_gpus_per_node: int | None = option(
        None, derived="1, or as many as a launcher has started", bounds=POSITIVE, role="layout"
    )
    """Processes that this program starts itself on its node, where no launcher has: one for each
    GPU, or on the CPU of a node without GPUs."""
    num_nodes: int | None = option(None, derived="1", bounds=POSITIVE, role="layout")
    """Nodes with --num-gpus-per-node processes each; the same command is started on every node."""
    node_ips: str | None = option(None, role="layout")
    """Addresses or names of --num-nodes nodes, separated by commas, of which the first is where
    they meet. The place of its own address is a node's rank; NODE_RANK in the environment
    overrides it."""
    ctrl_port: int = option(
        50051, bounds=POSITIVE, role="layout", needs=needs_value("node_ips", refused=False)
    )
    """Port of the first of --node-ips where the nodes meet."""
    data_parallel_size: int = option(1, internal=True)
    """Data-parallel size: world size / (tensor x pipeline x context size)."""
    world_size: int = option(1, internal=True)
    """Number of processes."""
    expert_axis: int = option(1, internal=True)
    """Ranks along the mesh's axis of experts, which divides the data-parallel size."""
    folded: bool = option(False, internal=True)
    """Experts are cut over that axis and the tensor-parallel ranks together."""

    @property
    def launched_processes(self) -> int | None:
        """Number of processes that the flags ask for; None if they leave it to a launcher."""
        if self.num_gpus_per_node is None and self.num_nodes is None:
            return None
        return (self.num_gpus_per_node or 1) * (self.num_nodes or 1)


def context_size(flags: ParallelFlags, resolver: ConfigResolver) -> int:
    """Ranks that divide a sequence."""
    name, ulysses = "context_parallel_size", flags.ds_sequence_parallel_size
    given = flags.context_parallel_size
    resolver.check(
        given is None or ulysses in (1, given),
        f"{resolver.show(name)} contradicts {resolver.show('ds_sequence_parallel_size')}: both are "
        "the number of ranks that divide a sequence; give one of them",
    )
    if given is None or ulysses > 1:
        return resolver.put(name, ulysses, "ds-sequence-parallel-size" if ulysses > 1 else "1")
    return given


def communication(
    flags: ParallelFlags, model: ModelConfig, context: int, resolver: ConfigResolver
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Communication of all blocks or of each over the context, and the two levels of it."""
    name, levels = "cp_comm_type", flags.hierarchical_context_parallel_sizes
    kinds, two_levels = flags.cp_comm_type, "hierarchical_context_parallel_sizes"
    forced = flags.force_ds_sequence_parallel
    if context == 1:
        unused = [name] * bool(kinds) + [two_levels] * bool(levels)
        for idle in [*unused, *(["force_ds_sequence_parallel"] if forced else [])]:
            resolver.notes.append(
                f"{resolver.show(idle)} changes nothing: every process has whole sequences, with "
                "--context-parallel-size 1"
            )
        return (), ()
    resolver.check(
        not forced or kinds in ((), ("a2a",)),
        f"--force-ds-sequence-parallel contradicts {resolver.show(name)}: it asks for a2a; give "
        "one of them",
    )
    if not kinds:
        ulysses = forced or flags.ds_sequence_parallel_size > 1
        how = "--force-ds-sequence-parallel" if forced else "ds-sequence-parallel-size"
        kinds = resolver.put(name, ("a2a",) if ulysses else ("p2p",), how if ulysses else "p2p")
    resolver.check(
        len(kinds) in (1, model.blocks),
        f"{resolver.show(name)} has {len(kinds)} values; give one, or one for each of the "
        f"{model.blocks} blocks",
    )
    if "a2a+p2p" in kinds:
        resolver.check(
            len(levels) == 2 and levels[0] * levels[1] == context and min(levels) > 0,
            f"{resolver.show(name)} exchanges heads between neighbours and connects them by rings: "
            f"--hierarchical-context-parallel-sizes must be two numbers with the product {context} "
            f"(--context-parallel-size), such as 2 {context // 2}"
            + (f", and is {' '.join(map(str, levels))}" if levels else ""),
        )
    elif levels:
        resolver.notes.append(
            f"{resolver.show(two_levels)} changes nothing without --cp-comm-type a2a+p2p"
        )
        levels = ()
    _check_context(flags, model, context, set(kinds), levels, resolver)
    return kinds if len(set(kinds)) > 1 else kinds[:1], levels


def _check_context(
    flags: ParallelFlags,
    model: ModelConfig,
    context: int,
    kinds: set[str],
    levels: tuple[int, ...],
    resolver: ConfigResolver,
) -> None:
    """Refuses lengths and heads that the ranks of a context cannot divide."""
    tensor = flags.tensor_model_parallel_size
    slices = tensor if flags.sequence_parallel else 1
    divisor = 2 * context * slices
    for name in ("seq_length", "decoder_seq_length"):
        length = getattr(model, name)
        resolver.check(
            length is None or length % divisor == 0,
            f"{resolver.show(name)} must be a multiple of {divisor}: each of the "
            f"{resolver.show('context_parallel_size')} ranks has two pieces of a sequence"
            + (f", each in {slices} slices of --sequence-parallel" if slices > 1 else "")
            + f"; the nearest is {max(1, round((length or 0) / divisor)) * divisor}",
        )
    heads = resolver.values["num_attention_heads"] // tensor
    for kind, ranks in (("a2a", context), ("a2a+p2p", levels[0] if levels else 1)):
        resolver.check(
            kind not in kinds or heads % ranks == 0,
            f"--cp-comm-type {kind}: {ranks} ranks exchange heads, and must divide the {heads} "
            f"query heads of a tensor-parallel rank ({resolver.show('num_attention_heads')}); use "
            "p2p or allgather, which divide no heads, or a2a+p2p with fewer ranks that exchange "
            "them",
        )


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
