"""DeepSpeed and fast paths."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Bounds,
    ConfigResolver,
    needs_value,
    option,
    shared,
)
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import PrecisionConfig

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Values of ``--torch-compile-mode`` that use CUDA graphs."""
NO_GRAPHS = "choose default or max-autotune-no-cudagraphs"
"""The remedy where these are refused."""
RECIPES = ("tensorwise", "rowwise", "delayed", "blockwise")
_MARGIN = Bounds(
    lambda value: 0 <= value <= 16,
    "must be in [0, 16]: E4M3 has 18 powers of two, of which it leaves that many unused",
)

LEAST_BUCKET, MOST_BUCKET = 25_000_000, 200_000_000
"""Elements of a bucket of gradients: small ones cost time to start, large ones overlap with little
and take memory."""


def bucket_size(count: int) -> int:
    """Elements that are reduced at once, by default, of ``count`` in a process."""
    return min(max(count // 8, LEAST_BUCKET), MOST_BUCKET)


_ZERO = needs_value("zero_stage", 1, 2, 3, refused=False)


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """Values that need no resolving."""

    deepspeed: bool = option(False, aliases=("--deepscale",))
    """Train with DeepSpeed. Not needed: this is always the case."""
    deepspeed_config: str | None = option(
        None, flag="--deepspeed_config", aliases=("--deepspeed-config", "--deepscale_config")
    )
    """DeepSpeed's JSON configuration; its "auto" values are filled in from the flags. A value that
    contradicts a flag is an error."""
    zero_reduce_scatter: bool | None = option(None, needs=_ZERO)
    """ZeRO 1 and 2: each rank receives only its share of the reduced gradients (reduce_scatter of
    zero_optimization in the DeepSpeed JSON, which is DeepSpeed's default)."""
    zero_contiguous_gradients: bool | None = option(
        None, aliases=("--zero-contigious-gradients",), needs=_ZERO
    )
    """ZeRO 2 and 3: copy gradients to one buffer as they are computed (contiguous_gradients in the
    DeepSpeed JSON, which is DeepSpeed's default)."""
    zero_reduce_bucket_size: int | None = option(None, bounds=POSITIVE, needs=_ZERO)
    """ZeRO: number of elements that are reduced at once (reduce_bucket_size in the DeepSpeed
    JSON); by default an eighth of a rank's, at least 25e6 and at most 2e8."""
    zero_allgather_bucket_size: int | None = option(None, bounds=POSITIVE, needs=_ZERO)
    """ZeRO 1 and 2: number of elements that are gathered at once (allgather_bucket_size in the
    DeepSpeed JSON)."""
    overlap_grad_reduce: bool = option(
        True,
        flag="--overlap-grad-reduce",
        off="--no-overlap-grad-reduce",
        role="layout",
        needs=_ZERO,
    )
    """ZeRO 1 to 3: reduce gradients within the backward pass (overlap_comm of
    zero_optimization in the DeepSpeed JSON)."""
    remote_device: str | None = option(None, choices=("none", "cpu", "nvme"), role="layout")
    """ZeRO 3: where the weights are kept between uses (device of offload_param in the DeepSpeed
    JSON)."""
    use_pin_memory: bool | None = option(None)
    """Keep the weights of --remote-device cpu in pinned memory (pin_memory of offload_param in the
    DeepSpeed JSON)."""
    cpu_optimizer: bool = option(False)
    """Run Adam on the CPU. Needs "offload_optimizer": {"device": "cpu"} of zero_optimization in the
    DeepSpeed JSON, which alone does the same."""


@dataclass(frozen=True, kw_only=True)
class EngineFlags(_Engine):
    """DeepSpeed: its configuration file and ZeRO."""

    zero_stage: int | None = option(
        None,
        choices=(0, 1, 2, 3),
        derived="1 with --fp16, and with --bf16 without a DeepSpeed JSON, else 0",
        role="layout",
    )
    """ZeRO stage. Partitioned over data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients
    too, 3 parameters too."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(_Engine):
    """DeepSpeed: its configuration file and ZeRO."""

    zero_stage: int = 0


def resolve_engine(
    flags: EngineFlags, precision: PrecisionConfig, resolver: ConfigResolver
) -> EngineConfig:
    """Completes ZeRO's stage. Training in half precision keeps float32 main weights, which need
    stage 1; a DeepSpeed JSON that leaves the stage out for bf16 means DeepSpeed's default, 0."""
    half = "fp16" if precision.fp16 else "bf16"
    main_weights = precision.fp16 or (precision.bf16 and flags.deepspeed_config is None)
    how = f"--{half} without a stage" if main_weights else "float32 weights"
    stage = resolver.fill("zero_stage", flags.zero_stage, int(main_weights), how)
    if main_weights and flags.zero_stage is None:
        resolver.notes.append(
            f"--{half} trains at ZeRO stage 1, since neither --zero-stage nor a DeepSpeed JSON "
            "names a stage"
        )
    return EngineConfig(**shared(flags, _Engine), zero_stage=stage)


@dataclass(frozen=True)
class FastPathsConfig:
    """Fast paths: 8-bit matrix products and compilation."""

    fp8_format: str | None = option(None, choices=("e4m3", "hybrid"))
    """Compute the matrix products of the blocks' linear layers in FP8: e4m3 for all tensors, hybrid
    with gradients in E5M2. Needs --bf16 and a GPU of compute capability 8.9 (slow on a CPU)."""
    fp8_recipe: str = option("tensorwise")
    """FP8 scales. From the current values: one per tensor (tensorwise), per row and column of each
    matrix product (rowwise), or per 1 x 128 activations and 128 x 128 weights (blockwise: Hopper
    only, sizes are multiples of 128). From the values of earlier steps: per tensor (delayed)."""
    fp8_margin: int = option(0, bounds=_MARGIN)
    """With --fp8-recipe delayed: powers of two that scales leave free above the largest values,
    0 to 16."""
    fp8_amax_history_len: int = option(1, bounds=POSITIVE)
    """With --fp8-recipe delayed: number of steps whose largest values are kept."""
    fp8_amax_compute_algo: str = option("most_recent", choices=("most_recent", "max"))
    """With --fp8-recipe delayed: scale by the largest values of the last step (most_recent), or of
    all steps that are kept (max)."""
    first_last_layers_bf16: bool = option(False)
    """Keep the first and the last blocks in bfloat16 with --fp8-format."""
    num_layers_at_start_in_bf16: int = option(1, bounds=NOT_NEGATIVE)
    """Number of first blocks that --first-last-layers-bf16 keeps in bfloat16."""
    num_layers_at_end_in_bf16: int = option(1, bounds=NOT_NEGATIVE)
    """Number of last blocks that --first-last-layers-bf16 keeps in bfloat16."""
    torch_compile: str = option("auto", choices=("auto", "on", "off"), bare="on")
    """Compile the blocks with torch.compile: on (also without a value), off, or auto: on a GPU in
    runs of at least 200 iterations. Needs a C++ compiler (CPU) or a C compiler and Python.h (GPU);
    without them the run continues eagerly."""
    torch_compile_mode: str = option(
        "default",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    """Mode of --torch-compile: reduce-overhead uses CUDA graphs, max-autotune also benchmarks
    several kernels for each matrix product, max-autotune-no-cudagraphs does only that. CUDA graphs
    need ZeRO stage 0 to 2, or one data-parallel rank, and no pipeline."""
    activation_memory_budget: float | None = option(None, bounds=SHARE)
    """Share of the activations that compiled blocks keep for the backward pass, which computes the
    rest again, cheapest first: 1 is all that torch.compile would keep, 0 the inputs of each block
    only. For blocks that --torch-compile compiles, with dropout 0, and without full
    recomputation."""

    deterministic_mode: bool = option(False)
    """Use only GPU kernels that add in the same order at every start, so that a resumed run has the
    bits of one that was not stopped. Slower; an operation without such a kernel is an error. On a
    CPU all kernels are of this kind."""

    def __post_init__(self) -> None:
        if isinstance(self.torch_compile, bool):  # saved by an earlier version
            object.__setattr__(self, "torch_compile", "on" if self.torch_compile else "off")

    def float8_blocks(self, blocks: int) -> range:
        """Return the numbers, of ``blocks`` blocks, whose linear layers compute in FP8."""
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
    bf16: bool,
    resolver: ConfigResolver,
) -> None:
    """Checks the fast paths against the rest of a configuration."""
    if paths.torch_compile == "off":
        for name in ("torch_compile_mode", "activation_memory_budget"):
            resolver.check_unused(name, "--torch-compile on or auto")
    if paths.activation_memory_budget is not None:
        _check_budget(model, parallel, resolver)
    if paths.torch_compile_mode in GRAPH_MODES:
        _check_graphs(parallel, resolver)
    resolver.check(
        not (paths.deterministic_mode and paths.torch_compile_mode.startswith("max-autotune")),
        f"--deterministic-mode, {resolver.show('torch_compile_mode')}: the fastest kernel of a "
        "benchmark may be another one at the next start; give one of the two",
    )
    if parallel.tensor_model_parallel_size > 1 and paths.torch_compile_mode.startswith("max-auto"):
        shown = resolver.show("torch_compile_mode"), resolver.show("tensor_model_parallel_size")
        resolver.notes.append(
            f"{', '.join(shown)}: no kernel is chosen by a benchmark, which may differ between "
            "ranks that share layers"
        )
    tensor = parallel.tensor_model_parallel_size
    if tensor > 1 and paths.torch_compile_mode.startswith("max-autotune"):
        resolver.notes.append(
            f"{resolver.show('torch_compile_mode')}, --tensor-model-parallel-size {tensor}: no "
            "kernel is chosen by a benchmark, of which ranks that share layers may find others"
        )
    nearest = "; blockwise is the nearest (only Blackwell GPUs multiply with mxfp8's scales per 32)"
    resolver.check(
        paths.fp8_recipe in RECIPES,
        f"{resolver.show('fp8_recipe')} must be one of {', '.join(RECIPES)}"
        f"{nearest if paths.fp8_recipe == 'mxfp8' else ''}",
    )
    _note_unused(paths, resolver)
    _check_kept_in_bf16(paths, model, resolver)
    if paths.fp8_format is None:
        return
    resolver.check(
        bf16,
        f"{resolver.show('fp8_format')} needs --bf16: everything else is computed in bfloat16",
    )
    _check_widths(model, parallel.tensor_model_parallel_size, micro_batch_size, paths, resolver)


def _note_unused(paths: FastPathsConfig, resolver: ConfigResolver) -> None:
    """Says which flags of a pasted command do nothing without 8-bit products, or with this
    recipe."""
    history = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
    if paths.fp8_format is None:
        given = [resolver.show(n) for n in ("fp8_recipe", *history) if resolver.given(n)]
        if given:
            resolver.notes.append(
                f"{', '.join(given)}: not used without --fp8-format e4m3 or hybrid, which computes "
                "matrix products in 8 bits"
            )
        return
    given = [resolver.show(name) for name in history if resolver.given(name)]
    if given and paths.fp8_recipe != "delayed":
        resolver.notes.append(
            f"{', '.join(given)}: not used with {resolver.show('fp8_recipe')}, whose scales come "
            "from the current values; --fp8-recipe delayed, Megatron's default, uses them"
        )


def _check_graphs(parallel: ParallelConfig, resolver: ConfigResolver) -> None:
    """Refuses CUDA graphs where addresses stay in use for longer than one forward and backward
    pass."""
    resolver.check(
        parallel.pipeline_model_parallel_size == 1,
        f"{resolver.show('torch_compile_mode')}, {resolver.show('pipeline_model_parallel_size')}: "
        "a CUDA graph would overwrite the activations of a micro batch with those of the next, and "
        f"a pipeline keeps those of several; {NO_GRAPHS}",
    )


def _check_budget(model: ModelConfig, parallel: ParallelConfig, resolver: ConfigResolver) -> None:
    budget = resolver.show("activation_memory_budget")
    resolver.check(
        parallel.recompute_granularity != "full",
        f"{budget}, {resolver.show('recompute_granularity')}: full recomputation keeps the inputs "
        "of blocks only, and what the budget leaves out would be computed a third time; give one "
        "of the two",
    )
    resolver.check(
        not (model.hidden_dropout or model.attention.attention_dropout),
        f"{budget}, {resolver.show('hidden_dropout')}, {resolver.show('attention_dropout')}: "
        "torch.compile draws other dropout masks where it computes activations again, which makes "
        "gradients wrong; set both to 0, or recompute with --recompute-granularity",
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
    model: ModelConfig,
    ranks: int,
    micro_batch_size: int,
    paths: FastPathsConfig,
    resolver: ConfigResolver,
) -> None:
    """Refuses sizes of shards, and numbers of tokens, that FP8 matrix products cannot have."""
    blocks = paths.fp8_recipe == "blockwise"
    multiple, named = (128, f" {resolver.show('fp8_recipe')}") if blocks else (16, "")
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
            size % multiple == 0,
            f"{resolver.show('fp8_format')}{named} needs sizes that are multiples of {multiple}: "
            f"{shown} is {size}",
        )
