"""Flags of the optimizers."""

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
"""Root mean square of AdamW's updates, about, relative to the learning rate."""


@dataclass(frozen=True)
class OptimizersConfig(FlagSection):
    """Muon, SOAP, Lion and others."""

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
    muon_split_qkv: bool = option(True, off="--muon-no-split-qkv", needs=_MATRICES)
    """Muon, SOAP: treat the fused projection of queries, keys and values as one matrix."""
    muon_split_mlp: bool = option(True, off="--muon-no-split-mlp", needs=_MATRICES)
    """Muon, SOAP: treat gate and up projection as one matrix, as Megatron-LM, not two."""
    muon_scalar_optimizer: str = option("adam", choices=("adam", "lion"), needs=_MUON)
    """Muon: optimizer of embeddings, output layer, norms and biases."""
    muon_scalar_lr_factor: float = option(1.0, bounds=NOT_NEGATIVE, needs=_MATRICES)
    """Muon, SOAP: factor of the learning rate of embeddings, output layer, norms and biases."""
    muon_tp_mode: str = option(
        "duplicated", choices=("duplicated", "distributed", "blockwise"), needs=_MUON
    )
    """Muon: accepted for Megatron's sake; whole matrices are orthogonalised, each on one of the
    ranks that divide it. blockwise, which changes the result with the layout, is refused."""
    lion_beta1: float = option(0.95, bounds=FRACTION, needs=_LION)
    """Lion: share of the momentum in an update."""
    lion_beta2: float = option(0.98, bounds=FRACTION, needs=_LION)
    """Lion: decay rate of the momentum."""
    adaptive_muon_moment2_method: str = option(
        "adamuon", choices=("adamuon", "normuon"), needs=_ADAPTIVE
    )
    """adaptive_muon: second moment of every element of the orthogonal matrices (adamuon), or
    its mean over each row of tall and each column of wide ones (normuon)."""
    adaptive_muon_beta2: float = option(0.95, bounds=FRACTION, needs=_ADAPTIVE)
    """adaptive_muon: decay rate of the second moment."""
    adaptive_muon_eps: float = option(1e-8, bounds=POSITIVE, needs=_ADAPTIVE)
    """adaptive_muon: epsilon of the second moment."""
    soap_shampoo_beta: float = option(0.95, bounds=FRACTION, needs=_SOAP)
    """SOAP: decay rate of the factors whose eigenvectors are the basis of Adam."""
    soap_precondition_frequency: int = option(10, bounds=POSITIVE, needs=_SOAP)
    """SOAP: updates from one change of the basis to the next."""
    soap_use_kl_shampoo: bool = option(True, off="--no-soap-use-kl-shampoo", needs=_SOAP)
    """SOAP: use the factors of Shampoo, as its publication, not those that leave out what the
    other factor explains, as Megatron-LM."""
    ademamix_beta3: float = option(0.9999, bounds=FRACTION, needs=_ADEMAMIX)
    """AdEMAMix: decay rate of the slow mean."""
    ademamix_alpha: float = option(5.0, bounds=NOT_NEGATIVE, needs=_ADEMAMIX)
    """AdEMAMix: factor of the slow mean."""
    ademamix_warmup_iters: int = option(0, bounds=NOT_NEGATIVE, needs=_ADEMAMIX)
    """AdEMAMix: updates over which the slow mean's factor and half-life grow to their values."""
    cautious_update: bool = option(False)
    """AdamW: leave out the elements of an update that the gradient opposes, and divide the others
    of each parameter by their share (C-AdamW)."""
    cautious_weight_decay: bool = option(False)
    """Decay only those weights that the update makes smaller."""
    weight_decay_follows_lr: bool = option(False)
    """Multiply the weight decay by the learning rate over --lr (AdamC)."""

    @property
    def _own_decay(self) -> bool:
        return self.cautious_weight_decay or self.weight_decay_follows_lr

    def updates(self, optimizer: str) -> bool:
        """True if a run with this ``--optimizer`` is updated by rules of the feature."""
        own = self._own_decay or self.cautious_update
        return optimizer not in _OF_CORE or (optimizer == "adam" and own)

    def check(self, config: Any, resolver: ConfigResolver) -> None:
        """Refuse combinations that have no meaning, and note values that differ from the
        publications. Raises ConfigError."""
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
        """Refuse what cannot have the states of an optimizer."""
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
