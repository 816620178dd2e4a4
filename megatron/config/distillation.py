"""Distillation: a student learns from the probabilities of a teacher."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, POSITIVE, option


@dataclass(frozen=True)
class DistillationConfig:
    """Distillation: a student learns from the probabilities of a teacher."""

    kd: bool = option(False, aliases=("--mos",))
    """Train the model as a student of --load-teacher."""
    load_teacher: str | None = option(None)
    """Checkpoint of the teacher, in any format."""
    kd_alpha_ce: float = option(1.0, bounds=NOT_NEGATIVE)
    """Weight of the cross entropy of the labels."""
    kd_beta_ce: float = option(1.0, bounds=NOT_NEGATIVE)
    """Weight of the Kullback-Leibler divergence of the student from the teacher."""
    kd_temp: float = option(1.0, bounds=POSITIVE)
    """Temperature of both distributions; their divergence is multiplied by its square (Hinton et
    al. 2015)."""
