"""Flags of the optimizers in addition to the core's."""

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

_MUON = needs_value("optimizer", "muon", "adaptive_muon", refused=False)
_MATRICES = needs_value("optimizer", "muon", "adaptive_muon", "soap", refused=False)
_LION = needs_value("optimizer", "lion", "muon", "adaptive_muon", refused=False)
_ADAPTIVE = needs_value("optimizer", "adaptive_muon", refused=False)
_SOAP = needs_value("optimizer", "soap", refused=False)
_ADEMAMIX = needs_value("optimizer", "ademamix", refused=False)
_OF_CORE = ("adam", "sgd")
OF_ADAM = 0.2
"""Approximate root mean square of AdamW's updates, divided by the learning rate."""


@dataclass(frozen=True)
class OptimizersConfig(FlagSection):
    """Muon, SOAP, Lion and others."""

    after: ClassVar[str] = "optimizer"

    muon_momentum: float = option(0.9, bounds=FRACTION, needs=_MUON)
    """Muon: decay rate of the momentum (0.95 in most publications)."""
    muon_nesterov: bool = option(False, needs=_MUON)
    """Muon: use Nesterov momentum, as in most publications."""
    muon_coefficient_type: str = option("quintic", choices=tuple(COEFFICIENTS), needs=_MUON)
    """Muon: coefficients of the Newton-Schulz steps. Muon's authors and torch use simple."""
    muon_num_ns_steps: int = option(5, bounds=POSITIVE, needs=_MUON)
    """Muon: number of Newton-Schulz steps."""
    muon_scale_mode: str = option("spectral", choices=SCALES, needs=_MUON)
    """Muon: rule that scales an update with m outputs and n inputs, by sqrt(max(m, n)) for
    spectral, sqrt(m / n) for unit_rms_norm, and sqrt(max(1, m / n)) for shape_scaling."""
    muon_extra_scale_factor: float = option(1.0, bounds=POSITIVE, needs=_MUON)
    """Muon: additional factor of updates. With spectral, 0.2 makes updates as large as AdamW's, so
    that AdamW's learning rate and weight decay can be used."""
    muon_fp32_matmul_prec: str = option(
        "medium", choices=("low", "medium", "high", "highest"), needs=_MUON
    )
    """Muon: precision of the matrix products in Newton-Schulz steps of float32 matrices: bfloat16
    for low and medium, float32 for high and highest."""
    muon_split_qkv: bool = option(True, off="--muon-no-split-qkv", needs=_MATRICES)
    """Muon, SOAP: treat the fused projection of queries, keys and values as one matrix."""
    muon_split_mlp: bool = option(True, off="--muon-no-split-mlp", needs=_MATRICES)
    """Muon, SOAP: treat the fused gate and up projections as one matrix, as in Megatron-LM."""
    muon_scalar_optimizer: str = option("adam", choices=("adam", "lion"), needs=_MUON)
    """Muon: optimizer for embeddings, the output layer, norms and biases."""
    muon_scalar_lr_factor: float = option(1.0, bounds=NOT_NEGATIVE, needs=_MATRICES)
    """Muon, SOAP: factor of the learning rate of embeddings, the output layer, norms and biases."""
    muon_tp_mode: str = option(
        "duplicated", choices=("duplicated", "distributed", "blockwise"), needs=_MUON
    )
    """Muon: accepted for compatibility with Megatron-LM. Each matrix is always orthogonalised as a
    whole, on one rank. blockwise is refused, because its result depends on the layout."""
    lion_beta1: float = option(0.95, bounds=FRACTION, needs=_LION)
    """Lion: weight of the momentum in an update."""
    lion_beta2: float = option(0.98, bounds=FRACTION, needs=_LION)
    """Lion: decay rate of the momentum."""
    adaptive_muon_moment2_method: str = option(
        "adamuon", choices=("adamuon", "normuon"), needs=_ADAPTIVE
    )
    """adaptive_muon: keep a second moment of every element of the orthogonalised matrices
    (adamuon), or one for each row of a tall matrix and each column of a wide one (normuon)."""
    adaptive_muon_beta2: float = option(0.95, bounds=FRACTION, needs=_ADAPTIVE)
    """adaptive_muon: decay rate of the second moments."""
    adaptive_muon_eps: float = option(1e-8, bounds=POSITIVE, needs=_ADAPTIVE)
    """adaptive_muon: epsilon added to the second moments."""
    soap_shampoo_beta: float = option(0.95, bounds=FRACTION, needs=_SOAP)
    """SOAP: decay rate of Shampoo's factors, whose eigenvectors are the basis for Adam."""
    soap_precondition_frequency: int = option(10, bounds=POSITIVE, needs=_SOAP)
    """SOAP: number of updates between changes of the basis."""
    soap_use_kl_shampoo: bool = option(True, off="--no-soap-use-kl-shampoo", needs=_SOAP)
    """SOAP: use Shampoo's factors as in the publication. By default, as in Megatron-LM, each factor
    excludes what the other one explains (KL-Shampoo)."""
    ademamix_beta3: float = option(0.9999, bounds=FRACTION, needs=_ADEMAMIX)
    """AdEMAMix: decay rate of the slow moving average."""
    ademamix_alpha: float = option(5.0, bounds=NOT_NEGATIVE, needs=_ADEMAMIX)
    """AdEMAMix: factor of the slow moving average."""
    ademamix_warmup_iters: int = option(0, bounds=NOT_NEGATIVE, needs=_ADEMAMIX)
    """AdEMAMix: number of updates over which the slow average's factor and half-life grow."""
    cautious_update: bool = option(False)
    """AdamW: zero elements of an update whose sign differs from the gradient's, and divide the
    others by the fraction of the parameter's elements that remains (C-AdamW)."""
    cautious_weight_decay: bool = option(False)
    """Apply weight decay only to weights that the update shrinks."""
    weight_decay_follows_lr: bool = option(False)
    """Multiply the weight decay by the current learning rate divided by --lr (AdamC)."""

    @property
    def _own_decay(self) -> bool:
        return self.cautious_weight_decay or self.weight_decay_follows_lr

    def updates(self, optimizer: str) -> bool:
        """Return whether this feature's rules apply to a run with this ``--optimizer``."""
        own = self._own_decay or self.cautious_update
        return optimizer not in _OF_CORE or (optimizer == "adam" and own)

    def check(self, config: Any, resolver: ConfigResolver) -> None:
        """Raise ConfigError if flags contradict each other, and add notes about values that differ
        from published ones."""
        optimizer, precision = config.optimizer.optimizer, config.precision
        signs = ("muon", "lion", "adaptive_muon")
        resolver.check(
            optimizer not in signs or not precision.fp16,
            f"--optimizer {optimizer} contradicts --fp16: its updates have the same size whatever "
            "the gradients, so that those that underflow become noise; use --bf16",
        )
        resolver.check(
            self.muon_tp_mode != "blockwise" or optimizer not in ("muon", "adaptive_muon"),
            "--muon-tp-mode blockwise orthogonalises the shard of each tensor-parallel rank, so "
            "that the result depends on the layout; leave the flag out",
        )
        self._check_states(config, resolver)
        if optimizer not in ("muon", "adaptive_muon") or config.training.skip_train:
            return
        if self.muon_scale_mode == "spectral" and self.muon_extra_scale_factor == 1.0:
            resolver.notes.append(
                "--muon-scale-mode spectral without --muon-extra-scale-factor: updates have a root "
                f"mean square of 1 x the learning rate, and AdamW's about {OF_ADAM}; a learning "
                f"rate of AdamW needs --muon-extra-scale-factor {OF_ADAM}"
            )
        if not self.muon_nesterov:
            resolver.notes.append(
                f"--optimizer {optimizer} without --muon-nesterov, as in Megatron-LM; Muon's "
                "authors and Moonlight use it, with --muon-momentum 0.95"
            )

    def _check_states(self, config: Any, resolver: ConfigResolver) -> None:
        """Raise ConfigError if other flags are incompatible with the optimizer's states."""
        optimizer, checkpoint = config.optimizer, config.checkpoint
        name = optimizer.optimizer
        resolver.check(
            not self._own_decay or name != "sgd",
            "--cautious-weight-decay and --weight-decay-follows-lr are options of the other values "
            "of --optimizer, not of sgd: leave them out, or give --optimizer adam",
        )
        resolver.check(
            not self._own_decay or config.precision.states is None,
            "--use-precision-aware-optimizer updates by a kernel of its own, without "
            "--cautious-weight-decay and --weight-decay-follows-lr: leave one of them out",
        )
        resolver.check(
            not self.cautious_update or (name == "adam" and config.precision.states is None),
            "--cautious-update is an option of --optimizer adam without "
            "--use-precision-aware-optimizer: leave it out",
        )
        known = name in ("adam", "sgd", "lion", "muon")
        resolver.check(
            known or (checkpoint.checkpoint_format == "safetensors"
                      and not checkpoint.save_universal),
            f"--optimizer {name} has states that folders of DeepSpeed have no place for: leave out "
            "--checkpoint-format deepspeed and --save-universal",
        )  # fmt: skip
        if name != "schedule_free" or config.training.skip_train:
            return
        resolver.check(
            optimizer.adam_beta1 > 0 and not config.precision.fp16,
            "--optimizer schedule_free needs --adam-beta1 above 0, the share of the mean at which "
            "gradients are taken, and --bf16 or float32, not --fp16",
        )
        if optimizer.lr_decay_style != "constant":
            resolver.notes.append(
                f"--optimizer schedule_free with --lr-decay-style {optimizer.lr_decay_style}: it "
                "replaces the decay by a mean; its authors use constant after a warm-up"
            )
