"""DeepSpeed's own flags, and flags of other trainers that people's scripts still pass."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import option


@dataclass(frozen=True)
class EngineConfig:
    """DeepSpeed: its configuration file and ZeRO."""

    deepspeed: bool = option(False)
    """State that DeepSpeed runs the training; it always does."""
    deepspeed_config: str | None = option(
        None, flag="--deepspeed_config", aliases=("--deepspeed-config",)
    )
    """DeepSpeed's JSON file; its "auto" values are filled from the flags."""
    zero_stage: int = option(0, choices=(0, 1, 2, 3), role="layout")
    """What ZeRO partitions over data-parallel processes: 1 optimizer state, 2 gradients too,
    3 parameters too."""


@dataclass(frozen=True)
class LegacyFlags:
    """Accepted from older scripts; each says what happens instead."""

    use_distributed_optimizer: bool = option(
        False, note="DeepSpeed's ZeRO does this; set --zero-stage 1"
    )
    """Partition optimizer state."""
    ddp_impl: str | None = option(
        None,
        flag="--DDP-impl",
        choices=("local", "torch", "FSDP"),
        note="DeepSpeed's engine reduces the gradients",
    )
    """Implementation of data parallelism."""
    use_flash_attn: bool = option(
        False,
        aliases=("--use-flash-attn-v2",),
        note="scaled_dot_product_attention picks the flash kernel by itself",
    )
    """Flash attention."""
    exit_signal_handler: bool = option(
        False, note="a run always saves and exits on SIGTERM, SIGINT and SIGUSR1"
    )
    """Save and exit on SIGTERM."""
    masked_softmax_fusion: bool = option(
        True, off="--no-masked-softmax-fusion", note="there is no separate softmax kernel"
    )
    """Turn off the fused softmax."""
    bias_dropout_fusion: bool = option(
        True, off="--no-bias-dropout-fusion", note="fusion comes from --torch-compile"
    )
    """Turn off the fused bias and dropout."""
    gradient_accumulation_fusion: bool = option(
        True, off="--no-gradient-accumulation-fusion", note="DeepSpeed's engine accumulates"
    )
    """Turn off the fused gradient accumulation."""
    attention_softmax_in_fp32: bool = option(
        False, note="the attention kernels accumulate their softmax in float32"
    )
    """Softmax in float32."""
    query_key_layer_scaling: bool = option(
        True,
        off="--no-query-key-layer-scaling",
        note="scores are never scaled by the layer number",
    )
    """Turn off scaling of scores by the layer number."""
    contiguous_checkpointing: bool = option(
        False, flag="--contiguous-checkpointing", note="recomputed activations are not copied"
    )
    """Contiguous activation checkpoints."""
    use_cpu_initialization: bool = option(
        False, note="weights are always drawn on the CPU, equal for every layout"
    )
    """Initialise weights on the CPU."""
    data_impl: str | None = option(
        None, choices=("mmap", "infer"), note="the memory-mapped .bin/.idx format is the only one"
    )
    """Format of the data files."""
    loose_json: bool = option(False, note="JSON files hold one object a line in any case")
    """JSON files hold one object a line."""
    data_efficiency_curriculum_learning: bool = option(
        False, note='"data_efficiency" in the DeepSpeed JSON is enough'
    )
    """Draw samples by their difficulty."""
    return_data_index: bool = option(
        False, note="tools/show_batch.py says which samples a step had"
    )
    """Have batches say which samples they hold."""
    train_idx_path: str | None = option(None, note="sample indices are in --data-cache-path")
    """File of a sample index."""
    train_doc_idx_path: str | None = option(None, note="sample indices are in --data-cache-path")
    """File of a document index."""
    train_sample_idx_path: str | None = option(None, note="sample indices are in --data-cache-path")
    """File of a sample index."""
    train_shuffle_idx_path: str | None = option(
        None, note="sample indices are in --data-cache-path"
    )
    """File of a shuffle index."""
    log_params_norm: bool = option(False, note="of the norms the gradients' is logged, always")
    """Log the norm of the parameters."""
    log_num_zeros_in_grad: bool = option(False, note="zeros in gradients are not counted")
    """Log how many gradient values are zero."""
    log_throughput: bool = option(False, note="throughput is always logged")
    """Log tokens per second and TFLOP/s."""
    log_progress: bool = option(False, note="--metrics-file records the progress of a run")
    """Keep a progress file beside the checkpoints."""
    log_world_size_to_tensorboard: bool = option(
        False, note="the number of processes is in the configuration that a checkpoint holds"
    )
    """Write the number of processes to TensorBoard."""
    log_optimizer_states_to_tensorboard: bool = option(
        False, note="optimizer state is in the checkpoints only"
    )
    """Write norms of the optimizer state to TensorBoard."""
    timing_log_level: int | None = option(
        None, note='"wall_clock_breakdown" in the DeepSpeed JSON times the parts of a step'
    )
    """Detail of the timers."""
    timing_log_option: str | None = option(
        None,
        choices=("max", "minmax", "all"),
        note='"wall_clock_breakdown" in the DeepSpeed JSON times the parts of a step',
    )
    """How times are combined over ranks."""
    override_opt_param_scheduler: bool = option(
        False,
        flag="--override-opt_param-scheduler",
        aliases=("--override-lr-scheduler",),
        note="the schedules always follow the flags, also after a resume",
    )
    """Take the schedules' values from the flags and not from the checkpoint."""
    partition_activations: bool = option(
        False, note="what is recomputed is set by --recompute-granularity"
    )
    """Partition activation checkpoints over tensor-parallel ranks."""
    checkpoint_in_cpu: bool = option(False, note="activation checkpoints stay on the device")
    """Keep activation checkpoints in main memory."""
    synchronize_each_layer: bool = option(False, note="layers do not wait for the device")
    """Wait for the device after each layer."""
    profile_backward: bool = option(
        False, note='"flops_profiler" in the DeepSpeed JSON profiles a step'
    )
    """Profile the backward pass."""
    async_tensor_model_parallel_allreduce: bool = option(
        True,
        off="--no-async-tensor-model-parallel-allreduce",
        note="collectives of the backward pass always run beside its products",
    )
    """Turn off asynchronous tensor-parallel collectives."""
    overlap_grad_reduce: bool = option(
        False, note='"overlap_comm" of zero_optimization in the DeepSpeed JSON does this'
    )
    """Overlap the reduction of gradients with the backward pass."""
    overlap_param_gather: bool = option(
        False, note='"overlap_comm" of zero_optimization in the DeepSpeed JSON does this'
    )
    """Overlap the gathering of parameters."""
    persist_layer_norm: bool = option(
        True, off="--no-persist-layer-norm", note="the norms are torch's"
    )
    """Turn off the persistent norm kernel."""
    rope_fusion: bool = option(
        True, off="--no-rope-fusion", note="fusion comes from --torch-compile"
    )
    """Turn off the fused rotary kernel."""
    fp8_margin: int | None = option(None, note="scales come from the values at hand")
    """Powers of two between the largest 8-bit value and the format's largest number."""
    fp8_amax_history_len: int | None = option(None, note="scales come from the values at hand")
    """Steps that scales are derived from."""
    fp8_amax_compute_algo: str | None = option(
        None, choices=("most_recent", "max"), note="scales come from the values at hand"
    )
    """How scales are derived from earlier steps."""
    use_mcore_models: bool = option(False, note="there is one implementation of each model")
    """Choose Megatron-Core's model classes."""
    transformer_impl: str | None = option(
        None, choices=("local", "transformer_engine"), note="there is one implementation"
    )
    """Choose the implementation of the layers."""
    dataloader_type: str | None = option(
        None, choices=("single",), note="samples are read in one pass, in Megatron's order"
    )
    """Order in which samples are read."""
    mmap_warmup: bool = option(False, note="data files are read as they are needed")
    """Read the data files once beforehand."""
    manual_gc: bool = option(False, note="Python collects garbage by itself")
    """Collect garbage at fixed steps."""
