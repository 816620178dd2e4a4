"""Flags for GEMMs in 8-bit floating point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, Bounds, ConfigResolver, option

if TYPE_CHECKING:
    from megatron.config.model import ModelConfig
    from megatron.config.parallel import ParallelConfig

RECIPES = ("tensorwise", "rowwise", "delayed", "blockwise")
_MARGIN = Bounds(
    lambda value: 0 <= value <= 16,
    "must be in [0, 16]: E4M3 has 18 powers of two, of which it leaves that many unused",
)


@dataclass(frozen=True, kw_only=True)
class Float8Flags(FlagPart):
    """GEMMs of the blocks' linear layers in FP8."""

    before: ClassVar[str] = "torch_compile"

    fp8_format: str | None = option(None, choices=("e4m3", "hybrid"))
    """Compute the GEMMs of the blocks' linear layers in FP8. e4m3 uses E4M3 for all tensors, hybrid
    uses E5M2 for gradients. Needs --bf16 and a GPU of compute capability 8.9 (slow on a CPU)."""
    fp8_recipe: str = option("tensorwise")
    """How FP8 scales are computed. tensorwise, rowwise and blockwise use current values, with one
    scale per tensor, per row and column of each GEMM, or per 1 x 128 activations and 128 x 128
    weights (Hopper only; sizes must be multiples of 128). delayed uses one scale per tensor, from
    the values of earlier steps."""
    fp8_margin: int = option(0, bounds=_MARGIN)
    """With --fp8-recipe delayed: headroom above amax, in powers of two (0 to 16)."""
    fp8_amax_history_len: int = option(1, bounds=POSITIVE)
    """With --fp8-recipe delayed: number of steps whose amax values are kept."""
    fp8_amax_compute_algo: str = option("most_recent", choices=("most_recent", "max"))
    """With --fp8-recipe delayed: compute scales from the amax of the last step (most_recent), or
    from the largest amax in the history (max)."""
    first_last_layers_bf16: bool = option(False)
    """Keep the first and the last blocks in bfloat16 with --fp8-format."""
    num_layers_at_start_in_bf16: int = option(1, bounds=NOT_NEGATIVE)
    """Number of first blocks that --first-last-layers-bf16 keeps in bfloat16."""
    num_layers_at_end_in_bf16: int = option(1, bounds=NOT_NEGATIVE)
    """Number of last blocks that --first-last-layers-bf16 keeps in bfloat16."""

    @property
    def one_length(self) -> bool:
        """True if all batches must have one shape, that of the longest sequence length."""
        return self.in_8_bits or super().one_length  # type: ignore[misc]

    @property
    def in_8_bits(self) -> bool:
        """True if the blocks' linear layers compute in FP8."""
        return self.fp8_format is not None

    def float8_blocks(self, blocks: int) -> range:
        """Return the indices, out of ``blocks`` blocks, whose linear layers compute in FP8."""
        if self.fp8_format is None:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(blocks)
        return range(self.num_layers_at_start_in_bf16, blocks - self.num_layers_at_end_in_bf16)


def check_float8_flags(
    paths: Float8Flags,
    model: ModelConfig,
    parallel: ParallelConfig,
    micro_batch_size: int,
    bf16: bool,
    resolver: ConfigResolver,
) -> None:
    """Report contradictory flags, and models and layouts that FP8 does not support. ``bf16`` is
    True if everything else is computed in bfloat16."""
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
    _check_widths(model, parallel, micro_batch_size, paths, resolver)


def _note_unused(paths: Float8Flags, resolver: ConfigResolver) -> None:
    """Report flags that have no effect without FP8 or with the chosen recipe. They are not errors,
    since users paste commands."""
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


def _check_kept_in_bf16(paths: Float8Flags, model: ModelConfig, resolver: ConfigResolver) -> None:
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
    parallel: ParallelConfig,
    micro_batch_size: int,
    paths: Float8Flags,
    resolver: ConfigResolver,
) -> None:
    """Report shard widths and numbers of tokens that FP8 GEMMs do not support."""
    blocks = paths.fp8_recipe == "blockwise"
    multiple, named = (128, f" {resolver.show('fp8_recipe')}") if blocks else (16, "")
    ranks, sharers = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    attention = model.attention
    width, groups = attention.kv_channels, attention.num_query_groups
    query, key = attention.num_attention_heads * width // ranks, max(1, groups // ranks) * width
    fused = query + 2 * key if groups >= ranks else 2 * key
    cut = "" if ranks == 1 else f" / {resolver.show('tensor_model_parallel_size')}"
    heads, width_shown = resolver.show("num_attention_heads"), resolver.show("kv_channels")
    share = "" if sharers == 1 else f" / {resolver.show('context_parallel_size')}"
    sizes = {
        resolver.show("hidden_size"): model.hidden_size,
        f"{heads} x {width_shown}{cut}": query,
        f"queries, keys, values of {resolver.show('num_query_groups')} x {width_shown}{cut}": fused,
        f"{resolver.show('ffn_hidden_size')}{cut}": model.mlp.ffn_hidden_size // ranks,
        f"{resolver.show('micro_batch_size')} x {resolver.show('seq_length')}{share}": (
            micro_batch_size * model.seq_length // sharers
        ),
    }
    for shown, size in sizes.items():
        resolver.check(
            size % multiple == 0,
            f"{resolver.show('fp8_format')}{named} needs sizes that are multiples of {multiple}: "
            f"{shown} is {size}",
        )
