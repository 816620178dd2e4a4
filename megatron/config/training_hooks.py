"""Hooks through which a feature extends training and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class TrainingHooks:
    """Hooks through which a feature takes part in setting up training and saving checkpoints. The
    default implementations add nothing."""

    def check_run(self, run: Any, mesh: Any, device: Any) -> None:
        """Check a training or evaluation run before its data are read. Raises ConfigError."""

    def check_source(self, config: Any, source: Any) -> None:
        """Check that a run can start from ``source``, a
        :class:`~megatron.training.resume.ResumeSource` or None. Raises ConfigError if it cannot."""

    def check_weights(self, before: Any, now: Any, where: str) -> None:
        """Check that a model configured as ``now`` can load the weights of a model configured as
        ``before``, saved in the checkpoint ``where``. Raises ConfigError if it cannot."""

    def checkpoint_instead(self, options: Any, found: Any, error: Any) -> Any:
        """Called with the ``error`` if the ``--load`` checkpoint cannot be found or opened. Return
        the folder and the :class:`~megatron.checkpoint.source.FoundCheckpoint` to load instead, or
        None. Raises CheckpointError that tells the user which checkpoints could be loaded."""
        return None

    def load_instead(self, engine: Any, origin: Any, error: Any) -> Any:
        """Load another checkpoint because ``origin`` is damaged. Return its source and its
        :class:`~megatron.training.resume.ResumeSource`, or None. Called on every rank. Raises
        DamagedError that tells the user which checkpoints could be loaded."""
        return None

    def peak(self, config: Any, device: Any) -> tuple[float, str] | None:
        """Return the device's peak throughput in FLOP/s and a description of where the value is
        from; None if it is unknown."""
        return None

    def batch_sizes(self, config: Any) -> Any:
        """Return the :class:`~megatron.training.schedules.BatchSizeSchedule` of a run, or None for
        a constant batch size."""
        return None

    def fresh_parts(self, engine: Any, source: Any, weights_only: bool) -> tuple[str, ...] | None:
        """Return the canonical names of the model's parameters that ``source``, a checkpoint of a
        model with other feature parts, lacks; None if the parts are the same. Raises
        CheckpointError if the weights of ``source`` cannot be used."""
        return None

    def changed_data(self, config: Any, source: Any, files: Sequence[Any]) -> Sequence[str]:
        """Return a line for each difference between ``files``, each a
        :class:`~megatron.data.build.DataFile`, and the data of the run that wrote ``source``.
        Raises CheckpointError if that run cannot be continued with ``files``."""
        return ()

    def loaded(self, engine: Any, origin: Any, source: Any) -> Sequence[str]:
        """Called on every rank once training can continue from ``source``. Return notes."""
        return ()

    def saver(self, options: Any) -> Any:
        """Return the :class:`~megatron.engine.saving.CheckpointWriter` subclass for this project's
        checkpoint format, or None for the base class. ``options`` is a ``CheckpointConfig``."""
        return None

    def saved(self, options: Any, iteration: int) -> Sequence[str]:
        """Called on the main process, possibly in a background thread, after a checkpoint is
        published. ``options`` is the ``CheckpointConfig``. Return lines about problems."""
        return ()

    def begin(self, context: Any) -> None:
        """Called with the :class:`~megatron.training.context.RunContext` before data are read."""

    def data_opened(self, context: Any) -> None:
        """Called when the context has its data, before processes compare them."""

    def before_engine(self, context: Any) -> None:
        """Called when the context has its data, plan and source."""

    def before_load(self, context: Any) -> None:
        """Called when the context has its engine. May replace ``context.source``."""

    def ready(self, context: Any) -> None:
        """Called when the context is complete. May add callbacks to it."""

    def tokenizer_folder(self, run: Any, data: Any, origin: Any) -> Callable[[Path], object] | None:
        """Return a function that adds files to the tokenizer folder of a checkpoint, or None.
        ``data`` is the run's :class:`~megatron.data.loader.TrainingData`."""
        return None

    def answer_ends(self, train: Any, tokenizer: Any, of_base: Sequence[int]) -> Any:
        """Return the frozenset of tokens that end answers in a data set's examples, or None if the
        feature cannot tell. ``of_base`` are those of the model before training."""
        return None

    def extent(self, config: Any, plan: Any, sizes: Callable[[], Sequence[Any]]) -> Sequence[str]:
        """Return lines about the run's size, printed at its start. ``sizes`` returns file sizes."""
        return ()

    def missing_evaluation(self, config: Any, kinds: Sequence[str]) -> str | None:
        """Return the name of an evaluation that is due after the last step but missing from
        ``kinds``, the kinds of rows in the metrics, or None."""
        return None

    def writers(
        self, logging: Any, configuration: Mapping[str, Any], iteration: int, samples: int
    ) -> Sequence[Any]:
        """Return additional metric writers for the main process, each a
        :class:`~megatron.training.writers.RunWriter`. ``iteration`` and ``samples`` count the steps
        and samples before the first row."""
        return ()
