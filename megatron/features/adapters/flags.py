"""Adapters: low-rank additions to the linear layers of a frozen model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import FlagPart, FlagSection
from megatron.config.flags import FRACTION, POSITIVE, ConfigResolver, needs_value, option

ALL_LINEAR = "all-linear"


def is_adapter(name: str) -> bool:
    """True if a canonical name belongs to a parameter of an adapter."""
    return name.rpartition(".")[2].startswith("lora_")


@dataclass(frozen=True, kw_only=True)
class LoadedAdapterFlags(FlagPart):
    """The adapters that a run begins with."""

    before: ClassVar[str] = "finetune"

    load_adapter: str | None = option(None, needs=needs_value("lora"))
    """Adapters for --lora to begin with when --load has none: a folder of peft, or a checkpoint of
    a run with --lora."""


@dataclass(frozen=True)
class AdapterConfig(FlagSection):
    """Adapters: low-rank additions to the linear layers of a frozen model (LoRA)."""

    lora: bool = option(False)
    """Freeze the model of --pretrained-checkpoint and train a low-rank addition to its linear
    layers (Hu et al. 2021)."""
    lora_rank: int = option(8, bounds=POSITIVE, role="weights")
    """Rank of the additions."""
    lora_alpha: float | None = option(
        None, derived="2 x lora-rank", bounds=POSITIVE, role="results"
    )
    """The additions are multiplied by this over the rank."""
    lora_targets: tuple[str, ...] = option(
        (ALL_LINEAR,), aliases=("--lora-target",), role="weights"
    )
    """Linear layers with additions, by the names of the model's Hugging Face architecture (q_proj,
    v_proj, down_proj), or all-linear for those of all blocks."""
    lora_dropout: float = option(0.0, bounds=FRACTION)
    """Dropout probability of the additions' input."""
    use_rslora: bool = option(False, role="results")
    """Divide --lora-alpha by the square root of the rank instead of the rank (Kalajdzievski
    2023)."""
    use_dora: bool = option(False, role="weights")
    """Train the length of each row of a weight apart from its direction, which the addition changes
    (DoRA, Liu et al. 2024)."""
    qlora: bool = option(False, role="results")
    """Keep the frozen weights of linear layers in 4 bits (NF4, Dettmers et al. 2023); needs
    --lora."""
    qlora_double_quant: bool = option(
        True, off="--no-qlora-double-quant", flag="--qlora-double-quant", role="results"
    )
    """Store the scales of --qlora in 8 bits: 0.516 bytes a weight instead of 0.5625."""

    @property
    def trains(self) -> bool:
        return True

    def check(self, in_8_bits: bool, resolver: ConfigResolver) -> None:
        """Refuses flags of adapters without --lora, and 8-bit matrix products with it."""
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
        """--lora-alpha, given or derived."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def scale(self) -> float:
        """Factor of the additions."""
        return self.scale_of(self.lora_rank, self.alpha)

    def scale_of(self, rank: int, alpha: float) -> float:
        """Return the factor of an addition of this rank and alpha."""
        return alpha / (rank**0.5 if self.use_rslora else rank)
