"""The layout: how the work is divided over processes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    ConfigError,
    ConfigResolver,
    needs_value,
    option,
    shared,
)
from megatron.config.layouts import SCHEDULES, Layout, complete_schedule, refusal
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
    """Pipeline schedule: the order of forward and backward passes of the micro batches."""
    num_layers_per_virtual_pipeline_stage: int | None = option(None, bounds=POSITIVE, role="layout")
    """Number of blocks per stage of an interleaved pipeline, where each rank has several stages."""
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        derived="num-layers / pipeline size / num-layers-per-virtual-pipeline-stage; else 2 with "
        "--pipeline-schedule interleaved or dualpipev, 1 without",
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
    """Activation recomputation in the backward pass: of attention only (selective), or of whole
    layers (full)."""
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
    """Data-parallel size: world size / (tensor x pipeline size)."""
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


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is divided over processes.

    ``recompute_*`` is None where nothing is recomputed; ``logits_chunk_mib``,
    ``distributed_backend`` and ``local_rank`` are None where device and launcher decide.
    ``expert_axis`` are the ranks along the axis ``expert`` of the mesh, a part of the
    ``data_parallel_size`` ones; with ``folded`` experts are cut over it and ``tensor`` together.
    ``expert_tensor_parallel_size`` is None where experts are cut as the rest, else 1.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
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
    expert_axis: int = 1
    folded: bool = False

    @property
    def experts_over_tensor(self) -> str:
        """How tensor-parallel ranks share experts, see
        :class:`~megatron.parallel.tensor_parallel.TensorParallel`."""
        if self.folded:
            return "folded"
        return "cut" if self.expert_tensor_parallel_size is None else "whole"

    @property
    def axes(self) -> dict[str, int]:
        """Ranks along the axes of the mesh; along ``data`` it has the rest of the processes."""
        return {
            "pipeline": self.pipeline_model_parallel_size,
            "expert": self.expert_axis,
            "tensor": self.tensor_model_parallel_size,
        }

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pipeline_model_parallel_size * self.num_virtual_stages_per_pipeline_rank


def resolve_parallel(
    flags: ParallelFlags, model: ModelConfig, world_size: int, resolver: ConfigResolver
) -> ParallelConfig:
    """Completes the layout over ``world_size`` processes."""
    _check_launch(flags, world_size, resolver)
    replicas = _replicas(flags, model, world_size, resolver)
    schedule, chunks = _schedule(flags, model, resolver)
    _check_partition(flags, model, flags.pipeline_model_parallel_size * chunks, resolver)
    partition = flags.pipeline_partition
    if flags.pipeline_model_parallel_split_rank is not None:
        partition = _split_partition(flags, model, chunks, resolver)
    granularity, method = _recompute(flags, resolver)
    together, axis = _experts(flags, replicas, resolver)
    tensor = flags.tensor_model_parallel_size
    return ParallelConfig(
        **shared(flags, ParallelConfig)
        | {
            "data_parallel_size": replicas,
            "expert_tensor_parallel_size": None if together == tensor else together,
            "expert_axis": resolver.put("expert_axis", axis, "expert and tensor sizes"),
            "folded": resolver.put(
                "folded", axis < flags.expert_model_parallel_size, "expert and tensor sizes"
            ),
            "world_size": resolver.put("world_size", world_size, "launcher"),
            "pipeline_schedule": schedule,
            "pipeline_partition": partition,
            "num_virtual_stages_per_pipeline_rank": chunks,
            "recompute_granularity": granularity,
            "recompute_method": method,
        }
    )


def _check_launch(flags: ParallelFlags, world_size: int, resolver: ConfigResolver) -> None:
    asked = flags.launched_processes
    resolver.check(
        asked in (None, world_size),
        f"--num-gpus-per-node {flags.num_gpus_per_node or 1} x --num-nodes {flags.num_nodes or 1} "
        f"is {asked} processes, and this run has {world_size}; make them equal, or leave out the "
        "flags",
    )
    if flags.node_ips is not None and (flags.num_nodes or 1) == 1:
        resolver.notes.append(f"{resolver.show('node_ips')} changes nothing: the run has one node")


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
        f"{resolver.show(tensor)} x {resolver.show(pipeline)} must divide the number of "
        f"processes, {world_size}; start a multiple of {model_parallel} processes, or choose other "
        "sizes",
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
        if model.decoder_seq_length is not None:
            resolver.check_divides(tensor, "decoder_seq_length")
    how = "processes / (tensor x pipeline)"
    return resolver.put("data_parallel_size", world_size // model_parallel, how)


def _experts(flags: ParallelFlags, replicas: int, resolver: ConfigResolver) -> tuple[int, int]:
    """Ranks that share an expert, and those along the axis of experts of the mesh."""
    experts, tensor = flags.expert_model_parallel_size, flags.tensor_model_parallel_size
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


def _schedule(
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
        found = _chunks(model.blocks, ranks, flags.num_layers_per_virtual_pipeline_stage, resolver)
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


def _check_partition(
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


def _split_partition(
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


def _recompute(flags: ParallelFlags, resolver: ConfigResolver) -> tuple[str | None, str | None]:
    granularity, method = flags.recompute_granularity, flags.recompute_method
    older = flags.activations_checkpoint_method
    for flag, given, meaning in (
        ("--checkpoint-activations", flags.checkpoint_activations, "full"),
        (f"--activations-checkpoint-method {older}", older is not None, "full"),
        ("--recompute-activations", flags.recompute_activations, "selective"),
    ):
        if given:
            resolver.check(
                granularity in (None, meaning),
                f"{flag} contradicts {resolver.show('recompute_granularity')}",
            )
            granularity = resolver.put("recompute_granularity", meaning, flag)
    if older is not None:
        resolver.check(
            method in (None, older),
            f"{resolver.show('activations_checkpoint_method')} contradicts "
            f"{resolver.show('recompute_method')}",
        )
        method = resolver.put("recompute_method", older, "--activations-checkpoint-method")
    if granularity == "full":
        return granularity, resolver.fill(
            "recompute_method", method, "uniform", "full recomputation"
        )
    for name in ("recompute_method", "recompute_num_layers"):
        resolver.check(
            not resolver.given(name), f"{resolver.show(name)} needs --recompute-granularity full"
        )
    return granularity, None
