"""DeepSpeed and fast paths."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.features import flag_parts
from megatron.config.flags import POSITIVE, SHARE, ConfigResolver, needs_value, option, shared
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.sections import with_parts
from megatron.config.training import PrecisionConfig

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Values of ``--torch-compile-mode`` that use CUDA graphs."""
NO_GRAPHS = "choose default or max-autotune-no-cudagraphs"
"""The remedy where these are refused."""

LEAST_BUCKET, MOST_BUCKET = 25_000_000, 200_000_000
"""Elements of a bucket of gradients: small ones cost time to start, large ones overlap with little
and take memory."""


def bucket_size(count: int) -> int:
    """Return the default number of elements reduced at a time, of ``count`` in a process."""
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


@with_parts(flag_parts("fast_paths"))
@dataclass(frozen=True, kw_only=True)
class FastPathsConfig:
    """Fast paths: 8-bit matrix products and compilation."""

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

    @property
    def one_length(self) -> bool:
        """True if all batches need the shape of the longest one, as CUDA graphs do."""
        return self.torch_compile_mode in GRAPH_MODES

    @property
    def in_8_bits(self) -> bool:
        """True if a feature multiplies the matrices of blocks in 8 bits."""
        return False


def check_fast_paths(
    paths: FastPathsConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
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
