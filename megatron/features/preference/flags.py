"""Flags for training on preferences, in which one answer is better than another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import KindConfig
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, Bounds, ConfigResolver, option

PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo", "reward")
COMPARING = ("dpo", "ipo", "kto")
"""Losses that need a reference model."""
_OF_SOME = {
    "reference_checkpoint": COMPARING,
    "preference_beta": tuple(name for name in PREFERENCES if name != "reward"),
    "preference_label_smoothing": ("dpo",),
    "preference_average_log_prob": ("dpo",),
    "preference_sft_weight": ("dpo", "ipo", "simpo"),
    "simpo_gamma": ("simpo",),
    "kto_desirable_weight": ("kto",),
    "kto_undesirable_weight": ("kto",),
}
"""Flags that affect only some losses, with those losses."""


@dataclass(frozen=True)
class PreferenceConfig(KindConfig):
    """Preferences: data and loss."""

    preference: str | None = option(None, choices=PREFERENCES, aliases=("--preference-loss",))
    """Train on preferences with this loss. The data paths are files of prompts with a better and a
    worse answer or, for kto, with answers that are labelled good or bad."""
    reference_checkpoint: str | None = option(
        None, derived="the checkpoint that training starts from", aliases=("--ref-model",)
    )
    """dpo, ipo, kto: checkpoint of the reference model, in any format, with the same architecture
    as the trained model. Its log-probabilities of the answers are computed once, before training,
    and stored in the index cache."""
    preference_beta: float | None = option(
        None,
        derived="0.1; 2.0 for simpo",
        bounds=POSITIVE,
        aliases=("--dpo-beta", "--pref-beta"),
    )
    """Scale of the rewards: the larger it is, the closer the model stays to its reference. For
    orpo, the weight of the odds ratio loss."""
    preference_label_smoothing: float = option(
        0.0, bounds=Bounds(lambda value: 0 <= value < 0.5, "must be in [0, 0.5)")
    )
    """dpo: probability that a label is wrong (conservative DPO, Mitchell 2023)."""
    preference_average_log_prob: bool = option(False)
    """dpo: compare mean log-probabilities per token of an answer instead of sums."""
    preference_sft_weight: float = option(0.0, bounds=NOT_NEGATIVE, aliases=("--rpo-alpha",))
    """dpo, ipo, simpo: weight of the cross entropy of the better answer, added to the loss."""
    simpo_gamma: float = option(1.0, bounds=NOT_NEGATIVE)
    """simpo: margin by which the better answer's reward should exceed the worse answer's."""
    kto_desirable_weight: float = option(1.0, bounds=NOT_NEGATIVE)
    """kto: weight of the loss of good answers."""
    kto_undesirable_weight: float = option(1.0, bounds=NOT_NEGATIVE)
    """kto: weight of the loss of bad answers."""

    files: ClassVar[str | None] = "preference"
    samples: ClassVar[str] = "pairs"
    shares: ClassVar[frozenset[str]] = frozenset(
        {
            *("prompt_format", "chat_template", "on_long_example", "split_by"),
            *("messages_column", "prompt_column", "context_column", "response_column"),
            *(
                "system_column",
                "chosen_column",
                "rejected_column",
                "label_column",
                "ignore_columns",
            ),
        }
    )
    idle: ClassVar[str] = "this run has no preference data (--preference)"

    def check(self, resolver: ConfigResolver) -> None:
        """Raise ConfigError if a flag is set that does not affect the chosen loss."""
        for name, losses in _OF_SOME.items():
            if self.preference is not None and self.preference not in losses:
                resolver.check_unused(name, f"--preference {' or '.join(losses)}")

    @property
    def reads_all(self) -> bool:
        return self.preference is not None

    @property
    def acts(self) -> bool:
        return self.preference is not None

    @property
    def head(self) -> tuple[str, str] | None:
        return ("reward", "--preference reward") if self.preference == "reward" else None

    @property
    def beta(self) -> float:
        """Value of ``--preference-beta``, or its default."""
        if self.preference_beta is not None:
            return self.preference_beta
        return 2.0 if self.preference == "simpo" else 0.1

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the model with a frozen reference model."""
        return self.preference in COMPARING
