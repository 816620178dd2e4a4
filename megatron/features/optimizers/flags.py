"""Flags of Muon and Lion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import FlagSection
from megatron.config.flags import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    ConfigResolver,
    needs_value,
    option,
)
from megatron.features.optimizers.coefficients import COEFFICIENTS, SCALES

_MUON = needs_value("optimizer", "muon", refused=False)
_LION = needs_value("optimizer", "lion", "muon", refused=False)
OF_ADAM = 0.2
"""Root mean square of AdamW's updates, about, relative to the learning rate."""


@dataclass(frozen=True)
class OptimizersConfig(FlagSection):
    """Muon and Lion."""

    after: ClassVar[str] = "optimizer"

    muon_momentum: float = option(0.9, bounds=FRACTION, needs=_MUON)
    """Muon: decay rate of the momentum (0.95 in most publications)."""
    muon_nesterov: bool = option(False, needs=_MUON)
    """Muon: Nesterov's momentum, as in most publications."""
    muon_coefficient_type: str = option("quintic", choices=tuple(COEFFICIENTS), needs=_MUON)
    """Muon: coefficients of the Newton-Schulz steps; simple are those of its authors, of Moonlight
    and of torch."""
    muon_num_ns_steps: int = option(5, bounds=POSITIVE, needs=_MUON)
    """Muon: number of Newton-Schulz steps."""
    muon_scale_mode: str = option("spectral", choices=SCALES, needs=_MUON)
    """Muon: factor of an update of m outputs and n inputs: spectral is sqrt(max(m, n)),
    unit_rms_norm sqrt(m / n), shape_scaling sqrt(max(1, m / n))."""
    muon_extra_scale_factor: float = option(1.0, bounds=POSITIVE, needs=_MUON)
    """Muon: further factor of updates; with spectral 0.2 makes them as large as AdamW's, whose
    learning rate and weight decay then fit."""
    muon_fp32_matmul_prec: str = option(
        "medium", choices=("low", "medium", "high", "highest"), needs=_MUON
    )
    """Muon: precision of the Newton-Schulz products of float32 matrices: bfloat16 with low and
    medium, float32 with high and highest."""
    muon_split_qkv: bool = option(True, off="--muon-no-split-qkv", needs=_MUON)
    """Muon: treat the fused projection of queries, keys and values as one matrix, not three."""
    muon_split_mlp: bool = option(True, off="--muon-no-split-mlp", needs=_MUON)
    """Muon: treat gate and up projection as one matrix, as Megatron-LM, not two."""
    muon_scalar_optimizer: str = option("adam", choices=("adam", "lion"), needs=_MUON)
    """Muon: optimizer of embeddings, output layer, norms and biases."""
    muon_scalar_lr_factor: float = option(1.0, bounds=NOT_NEGATIVE, needs=_MUON)
    """Muon: factor of the learning rate of embeddings, output layer, norms and biases."""
    muon_tp_mode: str = option(
        "duplicated", choices=("duplicated", "distributed", "blockwise"), needs=_MUON
    )
    """Muon: accepted for Megatron's sake; whole matrices are orthogonalised, each on one of the
    ranks that divide it. blockwise, which changes the result with the layout, is refused."""
    lion_beta1: float = option(0.95, bounds=FRACTION, needs=_LION)
    """Lion: share of the momentum in an update."""
    lion_beta2: float = option(0.98, bounds=FRACTION, needs=_LION)
    """Lion: decay rate of the momentum."""

    def check(self, config: Any, resolver: ConfigResolver) -> None:
        """Refuse combinations that have no meaning, and note values that differ from the
        publications. Raises ConfigError."""
        optimizer, precision = config.optimizer.optimizer, config.precision
        resolver.check(
            optimizer not in ("muon", "lion") or not precision.fp16,
            f"--optimizer {optimizer} contradicts --fp16: its updates have the same size whatever "
            "the gradients, so that those that underflow become noise; use --bf16",
        )
        resolver.check(
            self.muon_tp_mode != "blockwise" or optimizer != "muon",
            "--muon-tp-mode blockwise orthogonalises the shard of each tensor-parallel rank, so "
            "that the result depends on the layout; leave the flag out",
        )
        if optimizer != "muon" or config.training.skip_train:
            return
        if self.muon_scale_mode == "spectral" and self.muon_extra_scale_factor == 1.0:
            resolver.notes.append(
                "--muon-scale-mode spectral without --muon-extra-scale-factor: updates have a root "
                f"mean square of 1 x the learning rate, and AdamW's about {OF_ADAM}; a learning "
                f"rate of AdamW needs --muon-extra-scale-factor {OF_ADAM}"
            )
        if not self.muon_nesterov:
            resolver.notes.append(
                "--optimizer muon without --muon-nesterov, as in Megatron-LM; its authors and "
                "Moonlight use it, with --muon-momentum 0.95"
            )
