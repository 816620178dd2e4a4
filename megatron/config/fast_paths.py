"""Ways to compute the same training faster."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import option

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Of ``--torch-compile-mode`` those that start kernels by CUDA graphs."""


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
    num_layers_at_start_in_bf16: int = option(1)
    """How many first blocks --first-last-layers-bf16 leaves out."""
    num_layers_at_end_in_bf16: int = option(1)
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
