"""Optimizer, learning-rate and weight-decay schedules, number formats."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import option


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate and weight decay."""

    optimizer: str = option("adam", choices=("adam", "sgd"))
    """Optimizer; adam is AdamW (decoupled weight decay), as in Megatron."""
    lr: float | None = option(None)
    """Peak learning rate."""
    min_lr: float = option(0.0)
    """Learning rate at the end of the decay."""
    lr_decay_style: str = option(
        "linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    """Shape of the decay; WSD is warm-up, stable, decay."""
    lr_decay_iters: int | None = option(None, derived="train-iters")
    """Iterations until min-lr."""
    lr_decay_samples: int | None = option(None, derived="train-samples")
    """Samples until min-lr."""
    lr_decay_tokens: int | None = option(None, derived="train-tokens")
    """Tokens until min-lr."""
    lr_warmup_fraction: float | None = option(None)
    """Warm-up as a share of the decay length."""
    lr_warmup_iters: int = option(0)
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = option(0)
    """Samples of linear warm-up."""
    lr_warmup_tokens: int = option(0)
    """Tokens of linear warm-up."""
    lr_warmup_init: float = option(0.0)
    """Learning rate at which warm-up starts."""
    lr_wsd_decay_style: str = option(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    """Shape of the last part of WSD."""
    lr_wsd_decay_iters: int | None = option(None)
    """Iterations of the last part of WSD."""
    lr_wsd_decay_samples: int | None = option(None)
    """Samples of the last part of WSD."""
    lr_wsd_decay_tokens: int | None = option(None)
    """Tokens of the last part of WSD."""
    weight_decay: float = option(0.01)
    """Decoupled weight decay of matrices; biases and norms have none."""
    start_weight_decay: float | None = option(None)
    """Weight decay at the start of its schedule."""
    end_weight_decay: float | None = option(None)
    """Weight decay at the end of its schedule."""
    weight_decay_incr_style: str = option("constant", choices=("constant", "linear", "cosine"))
    """Shape of the weight-decay schedule."""
    clip_grad: float = option(1.0)
    """Largest global gradient norm (2-norm); 0 does not clip."""
    adam_beta1: float = option(0.9)
    """Decay of the first moment."""
    adam_beta2: float = option(0.999)
    """Decay of the second moment."""
    adam_eps: float = option(1e-8)
    """Added to the root of the second moment."""
    sgd_momentum: float = option(0.9)
    """Momentum of SGD."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision: number formats and loss scaling."""

    fp16: bool = option(False)
    """Train in float16 with loss scaling, float32 main weights."""
    bf16: bool = option(False)
    """Train in bfloat16, float32 main weights."""
    loss_scale: float | None = option(None, derived="dynamic")
    """Fixed loss scale for fp16."""
    initial_loss_scale: float = option(2.0**32)
    """First value of the dynamic loss scale, a power of two."""
    min_loss_scale: float = option(1.0)
    """Lowest dynamic loss scale."""
    loss_scale_window: int = option(1000)
    """Steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = option(2)
    """Overflows that are let pass before the dynamic loss scale halves."""
    accumulate_allreduce_grads_in_fp32: bool = option(False)
    """Accumulate and reduce gradients in float32 (JSON: data_types.grad_accum_dtype)."""
