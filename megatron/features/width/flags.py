"""Flags of the maximal update parametrisation, and the multipliers of a network under it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.features import FlagSection
from megatron.config.flags import POSITIVE, ConfigResolver, Need, option

_MUP = Need("--use-mup", lambda values: values["use_mup"])
RULES = frozenset({"adam", "sgd", "muon", "lion"})
"""Values of --optimizer whose updates have a rule in rules.py."""


@dataclass(frozen=True)
class WidthConfig(FlagSection):
    """Maximal update parametrisation (muP)."""

    after: ClassVar[str] = "optimizer"

    use_mup: bool = option(False)
    """Scale initial weights, learning rates and the network's multipliers with its width relative
    to a base (muP), so that --lr and --init-method-std that are best there are best here."""
    mup_base_hidden_size: int | None = option(
        None, derived="hidden-size", bounds=POSITIVE, needs=_MUP
    )
    """Hidden size of the base, at which nothing is scaled."""
    mup_base_ffn_hidden_size: int | None = option(
        None, derived="as wide relative to ffn-hidden-size", bounds=POSITIVE, needs=_MUP
    )
    """MLP width of the base; that of experts has the same ratio."""
    mup_base_num_attention_heads: int | None = option(
        None, derived="as wide as the hidden size is", bounds=POSITIVE, needs=_MUP
    )
    """Number of attention heads of the base, of --mup-base-head-dim channels each."""
    mup_base_head_dim: float | None = option(None, bounds=POSITIVE, needs=_MUP)
    """Size of one attention head of the base; attention scores are multiplied by its square root,
    so that they are unscaled where heads have this size."""
    mup_base_num_layers: int | None = option(
        None, derived="num-layers", bounds=POSITIVE, needs=_MUP
    )
    """Number of layers of the base: residual branches are multiplied by its ratio to --num-layers,
    and initial weights follow it (CompleteP, Dey et al. 2025, arXiv:2505.01618, alpha 1)."""
    mup_embedding_mult: float = option(1.0, bounds=POSITIVE, needs=_MUP)
    """Factor of the token embeddings."""
    mup_output_mult: float = option(1.0, bounds=POSITIVE, needs=_MUP)
    """Factor of the logits; 1 is the base's hidden size divided by --hidden-size, and other values
    are used as they are, as in Megatron-LM."""
    mup_attn_scale_power: float = option(1.0, bounds=POSITIVE, needs=_MUP)
    """Attention scores are divided by the size of a head to this power."""
    mup_scale_weight_decay: bool = option(False, needs=_MUP)
    """Multiply the weight decay of matrices by their ratio of widths, so that learning rate times
    decay stays, as the authors' package and CompleteP do; Megatron-LM does not."""

    def ratio(self, model: Any) -> float:
        """Hidden size divided by that of the base."""
        return model.hidden_size / (self.mup_base_hidden_size or model.hidden_size)

    def depth(self, model: Any) -> float:
        """Number of layers divided by that of the base."""
        return model.num_layers / (self.mup_base_num_layers or model.num_layers)

    def multipliers(self, model: Any) -> dict[str, float | None]:
        """The network's multipliers, by the flags of a model that have them."""
        width, power = model.attention.kv_channels, self.mup_attn_scale_power
        logits = self.ratio(model) if self.mup_output_mult == 1.0 else 1 / self.mup_output_mult
        factors = {
            "embedding_multiplier": self.mup_embedding_mult,
            "logits_scaling": logits,
            "residual_multiplier": 1 / self.depth(model),
        }
        return {
            **{name: None if value == 1.0 else value for name, value in factors.items()},
            # The root of this divides the scores: sqrt(base) / width**power.
            "query_pre_attn_scalar": width ** (2 * power) / (self.mup_base_head_dim or 1),
        }

    def of_network(self, model: Any, resolver: ConfigResolver) -> Any:
        """Return the network with its multipliers. Raises ConfigError if a flag contradicts
        them."""
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
        """Flags that muP replaces, and what to do instead."""
        yield "embedding_multiplier", "has --mup-embedding-mult"
        yield "logits_scaling", "has --mup-output-mult"
        yield "query_pre_attn_scalar", "has --mup-attn-scale-power and --mup-base-head-dim"
        if self.mup_base_num_layers:
            yield "residual_multiplier", "has --mup-base-num-layers"
        for name in ("scale_embeddings", "scale_head_input", "init_method_xavier_uniform"):
            yield name, "says how values depend on the width; leave one of them out"

    def check(self, config: Any, resolver: ConfigResolver) -> None:
        """Refuse runs that muP has no rule for, and note values that differ from the publications.
        Raises ConfigError."""
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
    """Ratios of the network's widths to the base's, by their names in rules.py."""
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
