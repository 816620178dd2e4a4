"""Mixture-of-experts flags with derived values and checks, and the upcycling flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.config.features import FlagSection
from megatron.config.flags import POSITIVE, ConfigError, ConfigResolver, needs_value, option
from megatron.features.experts.fields import LOSSES, ExpertsFlags
from megatron.features.experts.resolve import resolve_experts

if TYPE_CHECKING:
    from megatron.config.parallel import ParallelConfig

Z_LOSS = "z_loss"


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ExpertsFlags):
    """Experts of a network. ``layer_experts`` is empty in a model without experts."""

    models: ClassVar[tuple[str, ...]] = ("gpt",)
    """Model families whose layers can have experts. Other families accept the flags only with
    values for a dense model, because scripts for dense models pass them."""

    @property
    def idle(self) -> bool:
        return not any(self.layer_experts)

    def experts_of(self, layer: int) -> int:
        """Return the number of experts of a layer, counted from 0; 0 for a dense layer."""
        return self.layer_experts[layer] if self.layer_experts else 0

    @property
    def layers(self) -> int:
        """Number of layers with experts."""
        return sum(count > 0 for count in self.layer_experts)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of each auxiliary loss of a layer in the training loss, by its name in the log."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=False)
        weights = {LOSSES[name]: weight for name, weight in pairs if name in LOSSES}
        return weights | {Z_LOSS: self.moe_z_loss_coeff or 0.0}

    @property
    def draws(self) -> bool:
        """True if the router draws random numbers during training."""
        if self.idle:
            return False
        sampled = self.moe_gate == "sparsemixer" or bool(self.moe_input_jitter_eps)
        if self.moe_gate != "deepspeed" or self.moe_router_topk > 2:
            return sampled
        one = self.moe_router_topk == 1
        return sampled or (self.moe_token_dropping if one else self.moe_top2_2nd_expert_sampling)

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> ExpertsConfig:
        return resolve_experts(self, layers, resolver)

    def check_run(self, family: str, parallel: ParallelConfig, resolver: ConfigResolver) -> None:
        """Raise ConfigError if the model family cannot have experts, or if the expert or
        tensor-parallel size does not divide the experts evenly."""
        ranks = parallel.expert_model_parallel_size
        shown = resolver.show("expert_model_parallel_size")
        if self.idle:
            resolver.check(
                ranks == 1,
                f"{shown} divides experts, and the model has none; give --num-experts above 1, or "
                "leave it out",
            )
            return
        resolver.check(
            family in self.models,
            f"{resolver.show('num_experts')}: models of the family {family} have no experts; leave "
            "it out, or train a GPT",
        )
        for experts in self.counts:
            resolver.check(
                experts % ranks == 0,
                f"{shown} must divide the experts of every layer, and one has {experts}; choose a "
                "divisor",
            )
        cut = parallel.experts_over_tensor == "cut"
        for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
            if getattr(self, name) is not None and (cut or name != "moe_ffn_hidden_size"):
                resolver.check_divides("tensor_model_parallel_size", name)

    def check_batch(self, tokens: int, resolver: ConfigResolver) -> None:
        """Raise ConfigError if quantile balancing cannot divide the choices of a micro batch
        equally among the experts. ``tokens`` is the number of tokens in the micro batch."""
        if "quantile_balancing" not in self.moe_router_load_balancing_type:
            return
        k = self.moe_router_topk
        wrong = [count for count in self.counts if k >= count or tokens * k % count]
        resolver.check(
            not wrong,
            "--moe-router-load-balancing-type quantile_balancing gives every expert the same "
            f"number of the {tokens} x {k} choices of a micro batch, of which {(wrong or [0])[0]} "
            "experts cannot have equal shares: choose --micro-batch-size, --seq-length and "
            "--moe-router-topk so that they divide them, and fewer choices than experts",
        )


@dataclass(frozen=True)
class UpcyclingConfig(FlagSection):
    """Upcycling: initialisation of experts from the MLPs of a dense model."""

    after: ClassVar[str] = "model"

    moe_use_upcycling: bool = option(False, needs=needs_value("num_experts"))
    """Start from the dense model of --load: every expert is a copy of its MLP, or of a slice of it.
    The new model is saved in --save before the first step. Only weights are loaded."""
    moe_upcycling_granularity: int = option(
        1, bounds=POSITIVE, needs=needs_value("moe_use_upcycling")
    )
    """Number of slices into which an MLP is cut, each of which becomes an expert of width
    --moe-ffn-hidden-size."""

    def check(self, config: Any) -> None:
        """Raise ConfigError if upcycling lacks a model to start from or a folder to save in."""
        if not self.moe_use_upcycling:
            return
        options = config.checkpoint
        if not (options.load or options.pretrained_checkpoint):
            raise ConfigError("--moe-use-upcycling needs --load, the dense model to start from")
        if not options.save:
            raise ConfigError("--moe-use-upcycling needs --save, where the new model is saved")
