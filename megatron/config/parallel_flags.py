"""Flags of the layout."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, POSITIVE, needs_value, option
from megatron.config.layouts import COMMUNICATIONS, SCHEDULES


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
