"""Hooks by which a feature adds to a training and to its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class TrainingHooks:
    """Hooks of a :class:`~megatron.config.features.Feature`, called when a training is built, and
    when it saves. By default they add nothing."""

    def check_run(self, run: Any, mesh: Any, device: Any) -> None:
        """Raise ConfigError for a run, of training or evaluation, before its data are read."""

    def check_source(self, config: Any, source: Any) -> None:
        """Raise ConfigError where a run cannot start from the
        :class:`~megatron.training.resume.ResumeSource` that its flags name, or None."""

    def check_weights(self, before: Any, now: Any, where: str) -> None:
        """Raise ConfigError where a model ``now`` cannot have the weights of the one ``before`` in
        the checkpoint ``where``, each a :class:`~megatron.config.ModelConfig`."""

    def checkpoint_instead(self, options: Any, found: Any, error: Any) -> Any:
        """The folder of the checkpoint of ``--load`` that could not be ``found`` or opened, for
        ``error``, and a :class:`~megatron.checkpoint.source.FoundCheckpoint` to take instead; None
        for none. Raises CheckpointError with what could be taken."""
        return None

    def load_instead(self, engine: Any, origin: Any, error: Any) -> Any:
        """Load another checkpoint than ``origin``, which is damaged: return its source and its
        :class:`~megatron.training.resume.ResumeSource`; None for none. Every rank calls it. Raises
        DamagedError with what could be taken."""
        return None

    def peak_of_processor(self, config: Any) -> tuple[float, str] | None:
        """The peak rate of a CPU in FLOP/s, and its source in words; None if it is not known."""
        return None

    def batch_sizes(self, config: Any) -> Any:
        """The :class:`~megatron.training.schedules.BatchSizeSchedule` of a run; None for batches of
        one size."""
        return None

    def fresh_parts(self, engine: Any, source: Any, weights_only: bool) -> tuple[str, ...] | None:
        """The canonical names of the parameters of an engine's model that ``source``, a checkpoint
        of a model with other parts, lacks; None where they have the same. Raises CheckpointError if
        its weights cannot be used."""
        return None

    def changed_data(self, config: Any, source: Any, files: Sequence[Any]) -> Sequence[str]:
        """Return the differences between ``files``, each a
        :class:`~megatron.data.build.DataFile`, and those of the run that ``source`` is of, a line
        each. Raises CheckpointError if it cannot be continued with these."""
        return ()

    def loaded(self, engine: Any, origin: Any, source: Any) -> Sequence[str]:
        """Called on every rank when training can continue from ``source``. Return lines about it
        for the user."""
        return ()

    def saved(self, options: Any, iteration: int) -> Sequence[str]:
        """Called on the main process after a checkpoint of ``options``, a ``CheckpointConfig``, is
        published, perhaps in another thread. Return lines about problems."""
        return ()

    def begin(self, context: Any) -> None:
        """Called with the :class:`~megatron.training.context.RunContext` before data are read."""

    def data_opened(self, context: Any) -> None:
        """Called when data of the context exist, before processes compare them."""

    def before_engine(self, context: Any) -> None:
        """Called when data, plan and source of the context exist."""

    def before_load(self, context: Any) -> None:
        """Called when its engine exists; may replace ``context.source``."""

    def ready(self, context: Any) -> None:
        """Called when everything in the context exists, to add callbacks to it."""

    def tokenizer_folder(self, run: Any, data: Any, origin: Any) -> Callable[[Path], object] | None:
        """A function that adds to the folder of the tokenizer in a checkpoint of a run on a
        :class:`~megatron.data.loader.TrainingData`; None for none."""
        return None

    def answer_ends(self, train: Any, tokenizer: Any, of_base: Sequence[int]) -> Any:
        """The tokens at which the examples of a data set end answers, a frozenset; ``of_base``:
        those of the model that training starts from. None if the feature does not know."""
        return None

    def extent(self, config: Any, plan: Any, sizes: Callable[[], Sequence[Any]]) -> Sequence[str]:
        """Return lines at the start of a run about its size; ``sizes``: of its data files."""
        return ()

    def missing_evaluation(self, config: Any, kinds: Sequence[str]) -> str | None:
        """An evaluation after the last step that is not among the ``kinds`` of rows in the metrics;
        None if all are there."""
        return None

    def writers(
        self, logging: Any, configuration: Mapping[str, Any], iteration: int, samples: int
    ) -> Sequence[Any]:
        """Each :class:`~megatron.training.writers.RunWriter` of the main process for metrics, next
        to the JSON lines; ``iteration`` and ``samples`` are those before its first row."""
        return ()
