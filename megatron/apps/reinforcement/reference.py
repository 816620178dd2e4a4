"""The reference model: what the policy must stay near.

It is the model that training began with. The weights that are trained are kept as they were then,
next to the optimizer's states and divided over ranks as these are, and the model computes with them
for a pass before each step. With adapters these are the adapters alone, which add nothing at the
start: the reference is the base. Checkpoints have them, so that a continued run has the same
reference. A checkpoint of ``--reference-checkpoint`` is a second model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.apps.reinforcement.episodes import EpisodeBatch
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.objective import (
    HeadNumbers,
    of_texts,
    token_numbers,
    token_records,
)
from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import locate_checkpoint, nothing_at
from megatron.config import RunConfig
from megatron.engine.environment import training_device
from megatron.engine.loading import load_checkpoint
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.adam import KeptState
from megatron.families import spec_of
from megatron.features.averages.callback import add_weights, computing_with
from megatron.features.evaluation.evaluator import Evaluator, build_evaluator
from megatron.features.preference.flags import PreferenceConfig
from megatron.parallel.mesh import Mesh
from megatron.training.trainer import Callback, Step, Trainer

REFERENCE = "reference_weight"
"""State of a weight in checkpoints."""


def keep_reference(engine: TrainEngine) -> None:
    """Give an engine that was just built a place for the reference, before a checkpoint is
    loaded."""
    options = engine.config.section(ReinforcementConfig)
    if options.needs_reference and _checkpoint(engine.config) is None:
        engine.kept[REFERENCE] = KeptState()


def _checkpoint(config: RunConfig) -> str | None:
    return config.section(PreferenceConfig).reference_checkpoint


class ReferenceModel(Callback):
    """The reference model of a run, optionally moved towards the policy after steps. Every rank
    must create it, after a checkpoint is loaded, and call it. Raises CheckpointError if there is no
    such checkpoint."""

    def __init__(self, engine: TrainEngine, mesh: Mesh) -> None:
        self._engine, self._options = engine, engine.config.section(ReinforcementConfig)
        self._other: Evaluator | None = None
        path = _checkpoint(engine.config)
        if path is not None:
            self._other = _loaded(engine.config, path, mesh)
        elif not engine.kept[REFERENCE].tensors:
            add_weights(engine, REFERENCE, None, False)

    def log_probs(
        self, batches: Sequence[EpisodeBatch], numbers: HeadNumbers = token_numbers
    ) -> list[Tensor]:
        """Log-probabilities of the tokens of micro batches, at the temperature of the run, float64
        [B, S] each, 0 where none counts; nothing on pipeline stages without the output head."""
        temperature, other = self._options.temperature, self._other
        if other is not None:
            records = token_records(other, batches, temperature, numbers=numbers)
        else:
            with computing_with(self._engine, REFERENCE):
                records = token_records(self._engine, batches, temperature, numbers=numbers)
        return [record.log_probs_BS for record in records]

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Move the reference (Gorbatovski et al. 2024, arXiv:2404.09656, equation 3)."""
        if (
            self._options.sync_ref_model
            and step.iteration % self._options.ref_model_sync_steps == 0
        ):
            kept = 1 - self._options.ref_model_mixup_alpha
            add_weights(trainer.engine, REFERENCE, kept, step.result.skipped)


def _loaded(config: RunConfig, path: str, mesh: Mesh) -> Evaluator:
    """The model of a checkpoint at the layout of a run."""
    checkpoint = locate_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"--reference-checkpoint {path}: {nothing_at(path)}")
    spec = of_texts(spec_of(config.model, config.parallel))
    engine = build_evaluator(config, spec, mesh, training_device())
    load_checkpoint(engine, checkpoint, weights_only=True)
    return engine
