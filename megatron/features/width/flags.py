"""Flags for maximal update parametrisation, and the multipliers that it sets in a network."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import FlagSection
from megatron.config.flags import POSITIVE, ConfigResolver, Need, option

_MUP = Need("--use-mup", lambda values: values["use_mup"])
RULES = frozenset({"adam", "sgd", "muon", "lion"})
"""Values of --optimizer for which rules.py has an update rule."""


@dataclass(frozen=True)
class WidthConfig(FlagSection):
    """Maximal update parametrisation (muP)."""

    after: ClassVar[str] = "optimizer"

    use_mup: bool = option(False)
    """Scale initial weights, learning rates and multipliers with the network's width relative to a
    base model (muP). The --lr and --init-method-std that are best for the base model are then best
    for this one."""
    mup_base_hidden_size: int | None = option(
        None, derived="hidden-size", bounds=POSITIVE, needs=_MUP
    )
    """Hidden size of the base model, for which nothing is scaled."""
    mup_base_ffn_hidden_size: int | None = option(
        None, derived="as wide relative to ffn-hidden-size", bounds=POSITIVE, needs=_MUP
    )
    """MLP width of the base model. The width of experts is scaled by the same ratio."""
    mup_base_num_attention_heads: int | None = option(
        None, derived="as wide as the hidden size is", bounds=POSITIVE, needs=_MUP
    )
    """Number of attention heads in the base model, with --mup-base-head-dim channels each."""
    mup_base_head_dim: float | None = option(None, bounds=POSITIVE, needs=_MUP)
    """Head size of the base model. Attention scores are multiplied by its square root, so that
    heads of this size are unaffected."""
    mup_base_num_layers: int | None = option(
        None, derived="num-layers", bounds=POSITIVE, needs=_MUP
    )
    """Number of layers in the base model. Residual branches are multiplied by its ratio to
    --num-layers, and initial weights are scaled accordingly (CompleteP, Dey et al. 2025,
    arXiv:2505.01618, alpha 1)."""
    mup_embedding_mult: float = option(1.0, bounds=POSITIVE, needs=_MUP)
    """Factor by which token embeddings are multiplied."""
    mup_output_mult: float = option(1.0, bounds=POSITIVE, needs=_MUP)
    """Factor by which logits are multiplied. 1 selects the base model's hidden size divided by
    --hidden-size; other values are used as given, as in Megatron-LM."""
    mup_attn_scale_power: float = option(1.0, bounds=POSITIVE, needs=_MUP)
    """Exponent p: attention scores are divided by the head size to the power p."""
    mup_scale_weight_decay: bool = option(False, needs=_MUP)
    """Multiply the weight decay of matrices by the ratio of widths, so that the product of learning
    rate and weight decay stays constant, as in the authors' package and CompleteP but not in
    Megatron-LM."""

    def ratio(self, model: Any) -> float:
        """Return the hidden size divided by the base model's."""
        return model.hidden_size / (self.mup_base_hidden_size or model.hidden_size)

    def depth(self, model: Any) -> float:
        """Return the number of layers divided by the base model's."""
        return model.num_layers / (self.mup_base_num_layers or model.num_layers)

    def multipliers(self, model: Any) -> dict[str, float | None]:
        """Return the network's multipliers, by the names of the model flags that set them."""
        width, power = model.attention.kv_channels, self.mup_attn_scale_power
        logits = self.ratio(model) if self.mup_output_mult == 1.0 else 1 / self.mup_output_mult
        factors = {
            "embedding_multiplier": self.mup_embedding_mult,
            "logits_scaling": logits,
            "residual_multiplier": 1 / self.depth(model),
        }
        return {
            **{name: None if value == 1.0 else value for name, value in factors.items()},
            # Attention divides scores by the root of this, which is width**power / sqrt(base).
            "query_pre_attn_scalar": width ** (2 * power) / (self.mup_base_head_dim or 1),
        }

    def of_network(self, model: Any, resolver: ConfigResolver) -> Any:
        """Return the model configuration with muP's multipliers. Contradictory flags are reported
        to ``resolver``."""
        for name, instead in self._contradictions(model):
            given = resolver.values[name] and resolver.origins[name].startswith("flag ")
            resolver.check(
                not given, f"{resolver.show(name)} contradicts --use-mup, which {instead}"
            )
        factors = self.multipliers(model)
        for name, value in factors.items():
            resolver.put(name, value, "use-mup")
        scalar, depth = factors.pop("query_pre_attn_scalar"), factors.pop("residual_multiplier")
        return dataclasses.replace(
            model,
            embedding=dataclasses.replace(model.embedding, **factors),  # type: ignore[arg-type]
            attention=dataclasses.replace(model.attention, query_pre_attn_scalar=scalar),
            residual_multiplier=depth,
        )

    def _contradictions(self, model: Any) -> Iterator[tuple[str, str]]:
        """Yield (flag, reason or flag to use instead) for given flags that muP would override."""
        yield "embedding_multiplier", "has --mup-embedding-mult"
        yield "logits_scaling", "has --mup-output-mult"
        yield "query_pre_attn_scalar", "has --mup-attn-scale-power and --mup-base-head-dim"
        if self.mup_base_num_layers:
            yield "residual_multiplier", "has --mup-base-num-layers"
        for name in ("scale_embeddings", "scale_head_input", "init_method_xavier_uniform"):
            yield name, "says how values depend on the width; leave one of them out"

    def check(self, config: Any, resolver: ConfigResolver) -> None:
        """Report runs for which muP has no rule, and note values that differ from the
        publications."""
        model, optimizer = config.model, config.optimizer
        resolver.check(
            not resolver.values.get("lora"),
            "--use-mup contradicts --lora: it scales initial weights and rates of a model that is "
            "trained, and --lora freezes it; leave one of them out",
        )
        resolver.check(
            model.family == "gpt" and model.head == "lm",
            f"--use-mup has rules for GPT and its token losses, not for the family {model.family} "
            f"with {model.head_shown}; leave it out",
        )
        resolver.check(
            optimizer.optimizer in RULES,
            f"--optimizer {optimizer.optimizer}: --use-mup has rules for "
            f"{', '.join(sorted(RULES))}; give one of these",
        )
        ratio = self.ratio(model)
        if ratio != 1.0 and optimizer.weight_decay and not self.mup_scale_weight_decay:
            resolver.notes.append(
                "--use-mup without --mup-scale-weight-decay, as in Megatron-LM: learning rate x "
                f"weight decay of matrices is {1 / ratio:g} of the base's"
            )
        scale = resolver.values.get("muon_scale_mode")
        if optimizer.optimizer == "muon" and scale == "spectral" and ratio != 1.0:
            resolver.notes.append(
                "--use-mup with --muon-scale-mode spectral, as in Megatron-LM: updates are "
                f"{ratio**0.5:g} times too large relative to the base's; --muon-scale-mode "
                "unit_rms_norm keeps the learning rate"
            )


def base_ratios(flags: WidthConfig, model: Any) -> Mapping[str, float]:
    """Return the ratios of the network's widths to the base model's, by their names in rules.py."""
    attention, hidden = model.attention, flags.ratio(model)
    ffn = flags.mup_base_ffn_hidden_size
    heads, channels = flags.mup_base_num_attention_heads, attention.kv_channels
    base = None if heads is None else heads * (flags.mup_base_head_dim or channels)
    return {
        "fixed": 1.0,
        "hidden": hidden,
        "ffn": hidden if ffn is None else model.mlp.ffn_hidden_size / ffn,
        "heads": hidden if base is None else attention.num_attention_heads * channels / base,
    }
