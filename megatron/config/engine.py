"""Flags of DeepSpeed and of fast paths such as compilation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.features import flag_parts
from megatron.config.flags import POSITIVE, SHARE, ConfigResolver, needs_value, option, shared
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.sections import with_parts
from megatron.config.training import PrecisionConfig

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Values of ``--torch-compile-mode`` that record CUDA graphs."""
NO_GRAPHS = "choose default or max-autotune-no-cudagraphs"
"""Advice that ends error messages about CUDA graphs."""

LEAST_BUCKET, MOST_BUCKET = 25_000_000, 200_000_000
"""Bounds of the gradient bucket size in elements. Small buckets cost launch time; large ones
overlap with little computation and use memory."""


def bucket_size(count: int) -> int:
    """Return the default bucket size in elements for a rank with ``count`` gradient elements."""
    return min(max(count // 8, LEAST_BUCKET), MOST_BUCKET)


_ZERO = needs_value("zero_stage", 1, 2, 3, refused=False)


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """Fields shared by the flags and the resolved configuration."""

    deepspeed: bool = option(False, aliases=("--deepscale",))
    """Train with DeepSpeed. Not needed: every run does."""
    deepspeed_config: str | None = option(
        None, flag="--deepspeed_config", aliases=("--deepspeed-config", "--deepscale_config")
    )
    """JSON configuration file of DeepSpeed. The flags fill in its "auto" values. A value that
    contradicts a flag is an error."""
    zero_reduce_scatter: bool | None = option(None, needs=_ZERO)
    """ZeRO 1 and 2: reduce-scatter gradients, so that each rank receives only its shard
    (reduce_scatter of zero_optimization in the DeepSpeed JSON, DeepSpeed's default)."""
    zero_contiguous_gradients: bool | None = option(
        None, aliases=("--zero-contigious-gradients",), needs=_ZERO
    )
    """ZeRO 2 and 3: copy gradients to one buffer as they are computed (contiguous_gradients in the
    DeepSpeed JSON, DeepSpeed's default)."""
    zero_reduce_bucket_size: int | None = option(None, bounds=POSITIVE, needs=_ZERO)
    """ZeRO: number of elements to reduce at a time (reduce_bucket_size in the DeepSpeed JSON). The
    default is an eighth of a rank's elements, at least 25e6 and at most 2e8."""
    zero_allgather_bucket_size: int | None = option(None, bounds=POSITIVE, needs=_ZERO)
    """ZeRO 1 and 2: number of elements to all-gather at a time (allgather_bucket_size in the
    DeepSpeed JSON)."""
    overlap_grad_reduce: bool = option(
        True,
        flag="--overlap-grad-reduce",
        off="--no-overlap-grad-reduce",
        role="layout",
        needs=_ZERO,
    )
    """ZeRO 1 to 3: overlap the gradient reduction with the backward pass (overlap_comm of
    zero_optimization in the DeepSpeed JSON)."""
    remote_device: str | None = option(None, choices=("none", "cpu", "nvme"), role="layout")
    """ZeRO 3: device on which weights are kept between uses (device of offload_param in the
    DeepSpeed JSON)."""
    use_pin_memory: bool | None = option(None)
    """Keep the weights of --remote-device cpu in pinned memory (pin_memory of offload_param in the
    DeepSpeed JSON)."""
    cpu_optimizer: bool = option(False)
    """Run Adam on the CPU. Needs "offload_optimizer": {"device": "cpu"} in zero_optimization of the
    DeepSpeed JSON, which has the same effect without this flag."""


@dataclass(frozen=True, kw_only=True)
class EngineFlags(_Engine):
    """DeepSpeed: its configuration file and ZeRO."""

    zero_stage: int | None = option(
        None,
        choices=(0, 1, 2, 3),
        derived="1 with --fp16, and with --bf16 without a DeepSpeed JSON, else 0",
        role="layout",
    )
    """ZeRO stage: the state that is partitioned over data-parallel ranks. 0: nothing; 1: optimizer
    state; 2: gradients too; 3: parameters too."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(_Engine):
    """DeepSpeed: its configuration file and ZeRO."""

    zero_stage: int = 0


def resolve_engine(
    flags: EngineFlags, precision: PrecisionConfig, resolver: ConfigResolver
) -> EngineConfig:
    """Resolve the ZeRO stage. Main weights in float32, which 16-bit training keeps, need stage 1.
    If a DeepSpeed JSON is given, bf16 defaults to DeepSpeed's own default, stage 0."""
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
    """Compile the blocks with torch.compile: on (also if no value is given), off, or auto, which
    compiles on a GPU in runs of at least 200 iterations. Requires a C++ compiler (CPU), or a C
    compiler and Python.h (GPU); without them the run continues eagerly."""
    torch_compile_mode: str = option(
        "default",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    """Mode of --torch-compile. reduce-overhead uses CUDA graphs; max-autotune also benchmarks
    several kernels for each matrix product; max-autotune-no-cudagraphs only benchmarks. CUDA graphs
    require ZeRO stage 0 to 2, or one data-parallel rank, and no pipeline."""
    activation_memory_budget: float | None = option(None, bounds=SHARE)
    """Fraction of the activations that compiled blocks keep for the backward pass. The others are
    recomputed, cheapest first: 1 keeps all that torch.compile would keep, 0 only each block's
    inputs. Requires blocks compiled by --torch-compile, dropout 0, and no full recomputation."""

    deterministic_mode: bool = option(False)
    """Use only GPU kernels that add in a fixed order, so that a resumed run is bitwise equal to an
    uninterrupted one. Slower. An operation without such a kernel is an error. All CPU kernels are
    deterministic."""

    def __post_init__(self) -> None:
        if isinstance(self.torch_compile, bool):  # Earlier versions saved a bool.
            object.__setattr__(self, "torch_compile", "on" if self.torch_compile else "off")

    @property
    def one_length(self) -> bool:
        """True if all batches must be padded to the same shape, as CUDA graphs require."""
        return self.torch_compile_mode in GRAPH_MODES

    @property
    def in_8_bits(self) -> bool:
        """True if a feature runs the blocks' matrix products in 8 bits."""
        return False


def check_fast_paths(
    paths: FastPathsConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    resolver: ConfigResolver,
) -> None:
    """Check the fast paths against the rest of the configuration."""
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
    """Raise ConfigError if CUDA graphs would be used with a pipeline."""
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
