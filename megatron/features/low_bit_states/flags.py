"""Flags for the dtypes of stored optimizer states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.features import FlagPart
from megatron.config.flags import ConfigResolver, option
from megatron.config.layouts import StateDtypes


@dataclass(frozen=True, kw_only=True)
class StoredStatesFlags(FlagPart):
    """Dtypes in which main weights and moments are stored."""

    use_precision_aware_optimizer: bool = option(False)
    """Store Adam's main weights and moments in the dtypes of --main-params-dtype,
    --exp-avg-dtype and --exp-avg-sq-dtype. Needs --bf16 and ZeRO stage 1 or 2. Checkpoints
    contain float32 values."""
    main_params_dtype: str = option("fp32", choices=("fp32", "bf16"))
    """Dtype of the main weights with --use-precision-aware-optimizer. fp32 is exact: the bf16
    weights and the 16 bits that they lack. bf16 stores only the model's weights, rounded
    stochastically."""
    exp_avg_dtype: str = option("fp32", choices=("fp32", "bf16", "int8"))
    """Dtype of the first moments with --use-precision-aware-optimizer. int8 has a scale per 256
    elements. bf16 and int8 are rounded stochastically."""
    exp_avg_sq_dtype: str = option("fp32", choices=("fp32", "bf16", "int8"))
    """Dtype of the second moments with --use-precision-aware-optimizer. The choices mean the same
    as for
    --exp-avg-dtype."""

    @property
    def states(self) -> StateDtypes | None:
        """Dtypes of the stored optimizer states; None without --use-precision-aware-optimizer."""
        if not self.use_precision_aware_optimizer:
            return None
        return StateDtypes(self.main_params_dtype, self.exp_avg_dtype, self.exp_avg_sq_dtype)

    def check_states(self, config: Any, resolver: ConfigResolver) -> None:
        """Report flags that have no effect, or that contradict the run's other settings."""
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            resolver.check(
                self.use_precision_aware_optimizer or getattr(self, name) == "fp32",
                f"{resolver.show(name)} has an effect with --use-precision-aware-optimizer only",
            )
        resolver.check(
            not self.use_precision_aware_optimizer or config.optimizer.optimizer == "adam",
            f"--use-precision-aware-optimizer stores the moments of Adam, not of "
            f"{resolver.show('optimizer')}: leave it out, or use --optimizer adam",
        )
        form = resolver.show("checkpoint_format")
        own = config.checkpoint.checkpoint_format == "safetensors"
        resolver.check(
            own or self.states is None,
            f"--use-precision-aware-optimizer contradicts {form}: DeepSpeed writes main weights "
            "and moments that it has in float32; leave --checkpoint-format out, and add "
            "--save-universal for other programs",
        )
