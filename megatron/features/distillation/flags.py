"""Flags of distillation, which trains a student on the probabilities of a teacher."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config.features import FlagSection
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, ConfigResolver, option

TOP_TOKENS = 64


@dataclass(frozen=True)
class DistillationConfig(FlagSection):
    """Distillation: train a student on the probabilities of a teacher."""

    kd: bool = option(False, aliases=("--mos",))
    """Train the model as the student of --load-teacher."""
    load_teacher: str | None = option(None)
    """Checkpoint of the teacher, in any format."""
    kd_alpha_ce: float = option(1.0, bounds=NOT_NEGATIVE)
    """Weight of the cross entropy of the labels."""
    kd_beta_ce: float = option(1.0, bounds=NOT_NEGATIVE)
    """Weight of the Kullback-Leibler divergence between teacher and student."""
    kd_temp: float = option(1.0, bounds=POSITIVE)
    """Temperature of both distributions. Their divergence is multiplied by its square (Hinton et
    al. 2015)."""
    kd_iters: int | None = option(None, bounds=POSITIVE)
    """Number of iterations with the teacher. Later iterations only use the labels."""
    kd_cache: str | None = option(None)
    """Folder for the teacher's most probable tokens at every position of the samples. Missing
    samples are computed before training, which then runs without the teacher in memory."""
    kd_top_k: int | None = option(None, derived=str(TOP_TOKENS), bounds=POSITIVE)
    """Number of tokens per position in --kd-cache. All others count as one token."""
    num_layers_teacher: int | None = option(None, bounds=POSITIVE)
    """Number of layers of the teacher. It must match the checkpoint, and has no other effect."""
    hidden_size_teacher: int | None = option(None, bounds=POSITIVE)
    """Hidden size of the teacher. It must match the checkpoint, and has no other effect."""
    num_attention_heads_teacher: int | None = option(None, bounds=POSITIVE)
    """Number of heads of the teacher. It must match the checkpoint, and has no other effect."""
    num_experts_teacher: tuple[int, ...] = option(())
    """Number of experts of the teacher's layers, 1 if dense. It must match the checkpoint, and has
    no other effect."""

    @property
    def top_tokens(self) -> int:
        """Value of --kd-top-k, or its default."""
        return TOP_TOKENS if self.kd_top_k is None else self.kd_top_k

    @property
    def replaces_losses(self) -> str | None:
        return "--kd" if self.kd else None

    @property
    def identifies_samples(self) -> bool:
        return self.kd_cache is not None

    def check(self, resolver: ConfigResolver) -> None:
        """Raise ConfigError if flags contradict each other, or others replace the loss."""
        if not self.kd:
            for field in dataclasses.fields(self):
                # Scripts pass --num-experts-teacher 1 for dense models, even without a teacher.
                dense = field.name == "num_experts_teacher" and set(self.num_experts_teacher) <= {1}
                # Reinforcement learning can use a teacher on the student's own completions.
                other = field.name == "load_teacher" and resolver.values.get("rl") == "distill"
                if field.name != "kd" and not dense and not other:
                    resolver.check_unused(field.name, "--kd")
            return
        resolver.check(
            self.load_teacher is not None,
            "--kd needs --load-teacher, the checkpoint of the teacher",
        )
        resolver.check(
            self.kd_alpha_ce > 0 or self.kd_beta_ce > 0,
            f"{resolver.show('kd_alpha_ce')} and {resolver.show('kd_beta_ce')}: nothing would be "
            "minimised; give one of them a value above 0",
        )
        resolver.check(
            resolver.values.get("preference") is None,
            "--kd contradicts --preference: a run has one of these losses; leave one of them out",
        )
        if self.kd_cache is None:
            resolver.check_unused("kd_top_k", "--kd-cache")
