"""Flags of LoRA adapters: low-rank additions to the linear layers of a frozen model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import FlagPart, FlagSection
from megatron.config.flags import FRACTION, POSITIVE, ConfigResolver, needs_value, option

ALL_LINEAR = "all-linear"


def is_adapter(name: str) -> bool:
    """Return whether a canonical name is that of an adapter's parameter."""
    return name.rpartition(".")[2].startswith("lora_")


@dataclass(frozen=True, kw_only=True)
class LoadedAdapterFlags(FlagPart):
    """Adapters with which a run starts."""

    before: ClassVar[str] = "finetune"

    load_adapter: str | None = option(None, needs=needs_value("lora"))
    """Adapters to start from with --lora, if --load contains none: a folder in peft's format, or a
    checkpoint of a run with --lora."""


@dataclass(frozen=True)
class AdapterConfig(FlagSection):
    """Adapters: low-rank additions to the linear layers of a frozen model (LoRA)."""

    lora: bool = option(False)
    """Freeze the model of --pretrained-checkpoint, and train low-rank additions to its linear
    layers (Hu et al. 2021)."""
    lora_rank: int = option(8, bounds=POSITIVE, role="weights")
    """Rank of the low-rank matrices."""
    lora_alpha: float | None = option(
        None, derived="2 x lora-rank", bounds=POSITIVE, role="results"
    )
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    lora_targets: tuple[str, ...] = option(
        (ALL_LINEAR,), aliases=("--lora-target",), role="weights"
    )
    """Linear layers to adapt, by their names in the model's Hugging Face architecture (q_proj,
    v_proj, down_proj), or all-linear for all linear layers of all blocks."""
    lora_dropout: float = option(0.0, bounds=FRACTION)
    """Dropout probability of the adapters' input."""
    use_rslora: bool = option(False, role="results")
    """Divide --lora-alpha by the square root of the rank, not the rank (Kalajdzievski 2023)."""
    use_dora: bool = option(False, role="weights")
    """Train the norm of each row of a weight separately from its direction, which the adapter
    changes (DoRA, Liu et al. 2024)."""
    qlora: bool = option(False, role="results")
    """Store the frozen weights of linear layers in 4 bits (NF4, Dettmers et al. 2023). Needs
    --lora."""
    qlora_double_quant: bool = option(
        True, off="--no-qlora-double-quant", flag="--qlora-double-quant", role="results"
    )
    """Store the scales of --qlora in 8 bits: 0.516 bytes per weight instead of 0.5625."""

    @property
    def trains(self) -> bool:
        return True

    def check(self, in_8_bits: bool, resolver: ConfigResolver) -> None:
        """Raise ConfigError if adapter flags are given without --lora, --lora with FP8, --qlora
        with DoRA, or a dropout of 1."""
        for field in dataclasses.fields(self):
            if not self.lora and field.name != "lora":
                resolver.check_unused(field.name, "--lora")
        resolver.check(
            not (self.lora and in_8_bits),
            "--fp8-format contradicts --lora: the products of frozen weights and of additions are "
            "in the dtype of --bf16 or --fp16; leave one out",
        )
        resolver.check(
            not (self.qlora and self.use_dora),
            "--use-dora needs the lengths of the base's rows in every step, which --qlora keeps in "
            "4 bits only: leave one out",
        )
        resolver.check(
            self.lora_dropout < 1,
            f"{resolver.show('lora_dropout')} drops everything: it must be less than 1",
        )

    @property
    def alpha(self) -> float:
        """Value of --lora-alpha, given or derived."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def scale(self) -> float:
        """Scaling factor of the adapters' output: alpha / rank, or alpha / sqrt(rank)."""
        return self.scale_of(self.lora_rank, self.alpha)

    def scale_of(self, rank: int, alpha: float) -> float:
        """Return the scaling factor of an adapter with this rank and alpha."""
        return alpha / (rank**0.5 if self.use_rslora else rank)
