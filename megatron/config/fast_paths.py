"""Ways to compute the same training faster."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, option
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.resolver import ConfigResolver

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Of ``--torch-compile-mode`` those that start kernels by CUDA graphs."""
RECIPES = ("tensorwise", "rowwise")
_MULTIPLE = 16
"""What 8-bit products on GPUs need every width to be a multiple of."""


@dataclass(frozen=True)
class FastPathsConfig:
    """Fast paths: 8-bit products and compilation."""

    fp8_format: str | None = option(None, choices=("e4m3", "hybrid"))
    """Multiply in 8-bit floating point in the linear layers of the blocks: everything in E4M3, or
    gradients in E5M2 (hybrid). Needs --bf16 and compute capability 8.9 (slow on a CPU)."""
    fp8_recipe: str = option("tensorwise")
    """Scales of the 8-bit values, from the values at hand: one per tensor (tensorwise), or one per
    row and column of each product (rowwise)."""
    first_last_layers_bf16: bool = option(False)
    """Leave the first and the last blocks out of --fp8-format."""
    num_layers_at_start_in_bf16: int = option(1, bounds=NOT_NEGATIVE)
    """How many first blocks --first-last-layers-bf16 leaves out."""
    num_layers_at_end_in_bf16: int = option(1, bounds=NOT_NEGATIVE)
    """How many last blocks --first-last-layers-bf16 leaves out."""
    torch_compile: bool = option(False)
    """Compile the blocks with torch.compile; needs a compiler, goes on eagerly without one."""
    torch_compile_mode: str = option(
        "default",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    """What --torch-compile optimises: reduce-overhead starts kernels by CUDA graphs, max-autotune
    also measures several kernels for each product, max-autotune-no-cudagraphs does that alone.
    Graphs go without a pipeline and with ZeRO stages 0 to 2."""

    def float8_blocks(self, blocks: int) -> range:
        """The blocks, of so many, whose linear layers multiply in 8 bits."""
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
    """Checks the fast paths against the rest of a configuration.

    Raises:
        ConfigError: naming flags, values and what would be right.
    """
    resolver.check(
        paths.torch_compile or not resolver.given("torch_compile_mode"),
        f"{resolver.show('torch_compile_mode')} has an effect with --torch-compile only",
    )
    if paths.torch_compile_mode in GRAPH_MODES:
        _check_graphs(parallel, zero_stage, resolver)
    resolver.check(
        paths.fp8_recipe in RECIPES,
        f"{resolver.show('fp8_recipe')}: scales come from the values at hand, one per tensor or "
        "per "
        f"row; it must be one of {', '.join(RECIPES)}",
    )
    _check_kept_in_bf16(paths, model, resolver)
    if paths.fp8_format is None:
        resolver.check(
            not resolver.given("fp8_recipe"),
            f"{resolver.show('fp8_recipe')} has an effect with --fp8-format only",
        )
        return
    resolver.check(
        bf16,
        f"{resolver.show('fp8_format')} needs --bf16: what is not multiplied in 8 bits is bfloat16",
    )
    _check_widths(model, parallel.tensor_model_parallel_size, micro_batch_size, resolver)


def _check_graphs(parallel: ParallelConfig, zero_stage: int, resolver: ConfigResolver) -> None:
    """Refuses CUDA graphs, which work at fixed places in memory, where places change or are in use
    for longer than one pass through the model."""
    instead = "choose default or max-autotune-no-cudagraphs"
    resolver.check(
        parallel.pipeline_model_parallel_size == 1,
        f"{resolver.show('torch_compile_mode')}, {resolver.show('pipeline_model_parallel_size')}: "
        "a CUDA graph would overwrite the activations of a micro batch by those of the next, and a "
        f"pipeline keeps those of several; {instead}",
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
    for name in (first, last):
        resolver.check(
            kept or not resolver.given(name),
            f"{resolver.show(name)} has an effect with --first-last-layers-bf16 only",
        )
    count = paths.num_layers_at_start_in_bf16 + paths.num_layers_at_end_in_bf16
    resolver.check(
        not kept or count < model.num_layers,
        f"{resolver.show(first)} and {resolver.show(last)} leave none of "
        f"{resolver.show('num_layers')} for {resolver.show('fp8_format')}",
    )


def _check_widths(
    model: ModelConfig, ranks: int, micro_batch_size: int, resolver: ConfigResolver
) -> None:
    """Refuses widths of a rank's share of a layer, and tokens, that 8-bit products cannot have."""
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
