"""DeepSpeed, fast paths, and flags that are accepted and not used."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, ConfigResolver, option
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Values of ``--torch-compile-mode`` that use CUDA graphs."""
RECIPES = ("tensorwise", "rowwise")
_MULTIPLE = 16
"""Matrix products in 8 bits need sizes that are multiples of this."""


@dataclass(frozen=True)
class EngineConfig:
    """DeepSpeed: its configuration file and ZeRO."""

    deepspeed: bool = option(False)
    """Train with DeepSpeed, which is always the case."""
    deepspeed_config: str | None = option(
        None, flag="--deepspeed_config", aliases=("--deepspeed-config",)
    )
    """DeepSpeed's JSON configuration; its "auto" values are filled in from the flags. A value that
    contradicts a flag is an error."""
    zero_stage: int = option(0, choices=(0, 1, 2, 3), role="layout")
    """ZeRO stage. Partitioned over data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients
    too, 3 parameters too."""


@dataclass(frozen=True)
class FastPathsConfig:
    """Fast paths: 8-bit matrix products and compilation."""

    fp8_format: str | None = option(None, choices=("e4m3", "hybrid"))
    """Compute the matrix products of the blocks' linear layers in FP8: e4m3 for all tensors, hybrid
    with gradients in E5M2. Needs --bf16 and a GPU of compute capability 8.9 (slow on a CPU)."""
    fp8_recipe: str = option("tensorwise")
    """FP8 scales, computed from the current values: one per tensor (tensorwise), or one per row and
    column of each matrix product (rowwise)."""
    first_last_layers_bf16: bool = option(False)
    """Keep the first and the last blocks in bfloat16 with --fp8-format."""
    num_layers_at_start_in_bf16: int = option(1, bounds=NOT_NEGATIVE)
    """Number of first blocks that --first-last-layers-bf16 keeps in bfloat16."""
    num_layers_at_end_in_bf16: int = option(1, bounds=NOT_NEGATIVE)
    """Number of last blocks that --first-last-layers-bf16 keeps in bfloat16."""
    torch_compile: bool = option(False)
    """Compile the blocks with torch.compile. Needs a C++ compiler; without one the run continues
    eagerly."""
    torch_compile_mode: str = option(
        "default",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    """Mode of --torch-compile: reduce-overhead uses CUDA graphs, max-autotune also benchmarks
    several kernels for each matrix product, max-autotune-no-cudagraphs does only that. CUDA graphs
    need ZeRO stage 0 to 2 and no pipeline."""

    def float8_blocks(self, blocks: int) -> range:
        """Those of ``blocks`` blocks whose linear layers compute in FP8."""
        if self.fp8_format is None:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(blocks)
        return range(self.num_layers_at_start_in_bf16, blocks - self.num_layers_at_end_in_bf16)


def check_fast_paths(
    paths: FastPathsConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    micro_batch_size: int,
    zero_stage: int,
    bf16: bool,
    resolver: ConfigResolver,
) -> None:
    """Checks the fast paths against the rest of a configuration."""
    if not paths.torch_compile:
        resolver.check_unused("torch_compile_mode", "--torch-compile")
    if paths.torch_compile_mode in GRAPH_MODES:
        _check_graphs(parallel, zero_stage, resolver)
    resolver.check(
        paths.fp8_recipe in RECIPES,
        f"{resolver.show('fp8_recipe')}: scales are computed from the current values, one per "
        f"tensor or per row; it must be one of {', '.join(RECIPES)}",
    )
    _check_kept_in_bf16(paths, model, resolver)
    if paths.fp8_format is None:
        resolver.check_unused("fp8_recipe", "--fp8-format")
        return
    resolver.check(
        bf16,
        f"{resolver.show('fp8_format')} needs --bf16: everything else is computed in bfloat16",
    )
    _check_widths(model, parallel.tensor_model_parallel_size, micro_batch_size, resolver)


def _check_graphs(parallel: ParallelConfig, zero_stage: int, resolver: ConfigResolver) -> None:
    """Refuses CUDA graphs, which use fixed addresses, where addresses change or stay in use for
    longer than one forward and backward pass."""
    instead = "choose default or max-autotune-no-cudagraphs"
    resolver.check(
        parallel.pipeline_model_parallel_size == 1,
        f"{resolver.show('torch_compile_mode')}, {resolver.show('pipeline_model_parallel_size')}: "
        "a CUDA graph would overwrite the activations of a micro batch with those of the next, and "
        f"a pipeline keeps those of several; {instead}",
    )
    resolver.check(
        zero_stage < 3,
        f"{resolver.show('torch_compile_mode')}, {resolver.show('zero_stage')}: a CUDA graph reads "
        "weights where they were when it was recorded, and stage 3 gathers them again each time; "
        f"{instead}",
    )


def _check_kept_in_bf16(
    paths: FastPathsConfig, model: ModelConfig, resolver: ConfigResolver
) -> None:
    first, last = "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"
    kept = paths.first_last_layers_bf16
    resolver.check(
        not kept or paths.fp8_format is not None,
        "--first-last-layers-bf16 has an effect with --fp8-format only",
    )
    for name in (first, last) if not kept else ():
        resolver.check_unused(name, "--first-last-layers-bf16")
    count = paths.num_layers_at_start_in_bf16 + paths.num_layers_at_end_in_bf16
    resolver.check(
        not kept or count < model.num_layers,
        f"{resolver.show(first)} and {resolver.show(last)} leave none of "
        f"{resolver.show('num_layers')} for {resolver.show('fp8_format')}",
    )


def _check_widths(
    model: ModelConfig, ranks: int, micro_batch_size: int, resolver: ConfigResolver
) -> None:
    """Refuses sizes of shards, and numbers of tokens, that FP8 matrix products cannot have."""
    attention = model.attention
    width, groups = attention.kv_channels, attention.num_query_groups
    query, key = attention.num_attention_heads * width // ranks, max(1, groups // ranks) * width
    fused = query + 2 * key if groups >= ranks else 2 * key
    cut = "" if ranks == 1 else f" / {resolver.show('tensor_model_parallel_size')}"
    heads, width_shown = resolver.show("num_attention_heads"), resolver.show("kv_channels")
    sizes = {
        resolver.show("hidden_size"): model.hidden_size,
        f"{heads} x {width_shown}{cut}": query,
        f"queries, keys, values of {resolver.show('num_query_groups')} x {width_shown}{cut}": fused,
        f"{resolver.show('ffn_hidden_size')}{cut}": model.mlp.ffn_hidden_size // ranks,
        f"{resolver.show('micro_batch_size')} x {resolver.show('seq_length')}": (
            micro_batch_size * model.seq_length
        ),
    }
    for shown, size in sizes.items():
        resolver.check(
            size % _MULTIPLE == 0,
            f"{resolver.show('fp8_format')} needs sizes that are multiples of {_MULTIPLE}: "
            f"{shown} is {size}",
        )


@dataclass(frozen=True)
class LegacyFlags:
    """Accepted from older scripts; each says what happens instead."""

    use_distributed_optimizer: bool = option(
        False, note="DeepSpeed's ZeRO does this; set --zero-stage 1"
    )
    ddp_impl: str | None = option(
        None,
        flag="--DDP-impl",
        choices=("local", "torch", "FSDP"),
        note="DeepSpeed's engine reduces the gradients",
    )
    use_flash_attn: bool = option(
        False,
        aliases=("--use-flash-attn-v2",),
        note="--attention-backend chooses the kernel",
    )
    exit_signal_handler: bool = option(
        False, note="a run always saves and exits on SIGTERM, SIGINT and SIGUSR1"
    )
    masked_softmax_fusion: bool = option(
        True, off="--no-masked-softmax-fusion", note="there is no separate softmax kernel"
    )
    bias_dropout_fusion: bool = option(
        True, off="--no-bias-dropout-fusion", note="fusion comes from --torch-compile"
    )
    gradient_accumulation_fusion: bool = option(
        True, off="--no-gradient-accumulation-fusion", note="DeepSpeed's engine accumulates"
    )
    attention_softmax_in_fp32: bool = option(
        False, note="the attention kernels accumulate their softmax in float32"
    )
    query_key_layer_scaling: bool = option(
        True,
        off="--no-query-key-layer-scaling",
        note="attention scores are never scaled by the layer number",
    )
    contiguous_checkpointing: bool = option(
        False, flag="--contiguous-checkpointing", note="recomputed activations are not copied"
    )
    use_cpu_initialization: bool = option(
        False, note="weights are always initialised on the CPU, equal for every layout"
    )
    data_impl: str | None = option(
        None, choices=("mmap", "infer"), note="the memory-mapped .bin/.idx format is the only one"
    )
    loose_json: bool = option(False, note="JSON files have one object per line in any case")
    data_efficiency_curriculum_learning: bool = option(
        False, note='"data_efficiency" in the DeepSpeed JSON is enough'
    )
    return_data_index: bool = option(
        False, note="tools/show_batch.py says which samples a step had"
    )
    train_idx_path: str | None = option(None, note="sample indices are in --data-cache-path")
    train_doc_idx_path: str | None = option(None, note="sample indices are in --data-cache-path")
    train_sample_idx_path: str | None = option(None, note="sample indices are in --data-cache-path")
    train_shuffle_idx_path: str | None = option(
        None, note="sample indices are in --data-cache-path"
    )
    log_params_norm: bool = option(False, note="only the gradient norm is logged, always")
    log_num_zeros_in_grad: bool = option(False, note="zeros in gradients are not counted")
    log_throughput: bool = option(False, note="throughput is always logged")
    log_progress: bool = option(False, note="--metrics-file records the progress of a run")
    log_world_size_to_tensorboard: bool = option(
        False, note="the number of processes is in the configuration that checkpoints contain"
    )
    log_optimizer_states_to_tensorboard: bool = option(
        False, note="optimizer state is in the checkpoints only"
    )
    timing_log_level: int | None = option(
        None, note='"wall_clock_breakdown" in the DeepSpeed JSON times the parts of a step'
    )
    timing_log_option: str | None = option(
        None,
        choices=("max", "minmax", "all"),
        note='"wall_clock_breakdown" in the DeepSpeed JSON times the parts of a step',
    )
    override_opt_param_scheduler: bool = option(
        False,
        flag="--override-opt_param-scheduler",
        aliases=("--override-lr-scheduler",),
        note="the schedules always follow the flags, also after a resume",
    )
    partition_activations: bool = option(False, note="use --recompute-granularity")
    checkpoint_in_cpu: bool = option(False, note="activation checkpoints stay on the device")
    synchronize_each_layer: bool = option(False, note="the CPU never synchronizes after a layer")
    profile_backward: bool = option(
        False, note='"flops_profiler" in the DeepSpeed JSON profiles a step'
    )
    async_tensor_model_parallel_allreduce: bool = option(
        True,
        off="--no-async-tensor-model-parallel-allreduce",
        note="collectives of the backward pass always overlap its matrix products",
    )
    overlap_grad_reduce: bool = option(
        False, note='"overlap_comm" of zero_optimization in the DeepSpeed JSON does this'
    )
    overlap_param_gather: bool = option(
        False, note='"overlap_comm" of zero_optimization in the DeepSpeed JSON does this'
    )
    persist_layer_norm: bool = option(
        True, off="--no-persist-layer-norm", note="the norms are torch's"
    )
    rope_fusion: bool = option(
        True, off="--no-rope-fusion", note="fusion comes from --torch-compile"
    )
    fp8_margin: int | None = option(None, note="scales come from the current values")
    fp8_amax_history_len: int | None = option(
        None, note="scales are computed from the current values"
    )
    fp8_amax_compute_algo: str | None = option(
        None, choices=("most_recent", "max"), note="scales are computed from the current values"
    )
    use_mcore_models: bool = option(False, note="there is one implementation of each model")
    transformer_impl: str | None = option(
        None, choices=("local", "transformer_engine"), note="there is one implementation"
    )
    dataloader_type: str | None = option(
        None, choices=("single",), note="samples are read in one pass, in Megatron's order"
    )
    mmap_warmup: bool = option(False, note="data files are read as they are needed")
    manual_gc: bool = option(False, note="Python collects garbage by itself")
