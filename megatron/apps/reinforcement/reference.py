"""Reference model: the model from which the policy must not diverge too far.

It is the model at the start of training. Its trainable weights are stored with the optimizer state,
sharded in the same way, and are swapped in for a forward pass before each step. With adapters, only
the adapters are stored. They add nothing at the start, so the reference is the base model. The
reference weights are part of checkpoints, so that a resumed run has the same reference. With
``--reference-checkpoint``, that checkpoint is loaded as a second model instead.
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
"""Name of a weight's reference copy in checkpoints."""


def keep_reference(engine: TrainEngine) -> None:
    """Reserve space for reference weights in a new engine. Must be called before a checkpoint is
    loaded."""
    options = engine.config.section(ReinforcementConfig)
    if options.needs_reference and _checkpoint(engine.config) is None:
        engine.kept[REFERENCE] = KeptState()


def _checkpoint(config: RunConfig) -> str | None:
    return config.section(PreferenceConfig).reference_checkpoint


class ReferenceModel(Callback):
    """Reference model of a run, optionally updated towards the policy at intervals. Collective:
    every rank must create it, after a checkpoint is loaded, and call it. Raises CheckpointError if
    ``--reference-checkpoint`` does not exist."""

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
        """Return the log-probabilities of the tokens of micro batches at the run's temperature,
        float64 [B, S] each. Positions without a target are 0. Pipeline stages without the output
        head return an empty list."""
        temperature, other = self._options.temperature, self._other
        if other is not None:
            records = token_records(other, batches, temperature, numbers=numbers)
        else:
            with computing_with(self._engine, REFERENCE):
                records = token_records(self._engine, batches, temperature, numbers=numbers)
        return [record.log_probs_BS for record in records]

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Update the reference model if ``--sync-ref-model`` is set and an update is due
        (Gorbatovski et al. 2024, arXiv:2404.09656, equation 3)."""
        if (
            self._options.sync_ref_model
            and step.iteration % self._options.ref_model_sync_steps == 0
        ):
            kept = 1 - self._options.ref_model_mixup_alpha
            add_weights(trainer.engine, REFERENCE, kept, step.result.skipped)


def _loaded(config: RunConfig, path: str, mesh: Mesh) -> Evaluator:
    """Load the model of a checkpoint, in the layout of the run."""
    checkpoint = locate_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"--reference-checkpoint {path}: {nothing_at(path)}")
    spec = of_texts(spec_of(config.model, config.parallel))
    engine = build_evaluator(config, spec, mesh, training_device())
    load_checkpoint(engine, checkpoint, weights_only=True)
    return engine
