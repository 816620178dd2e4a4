"""TensorBoard's files of events."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.output import LoggingConfig
from megatron.features.trackers.tags import (
    as_markdown,
    evaluation_tagged,
    tagged,
)
from megatron.training.metrics import WrittenTexts
from megatron.training.writers import STEP, Values


def open_writer(
    logging: LoggingConfig, configuration: Mapping[str, Any], iteration: int, samples: int
) -> TensorBoardWriter:
    """The writer of what follows an iteration and a number of samples."""
    return TensorBoardWriter(logging, iteration, samples)


class TensorBoardWriter:
    """TensorBoard events under Megatron's and Megatron-DeepSpeed's tags, over iterations, samples
    and tokens. The tags ``... vs samples`` go to the run ``vs_samples`` inside the folder, those
    ``... vs tokens`` to ``vs_tokens``, as a resume purges a whole run from one step on."""

    def __init__(
        self, logging: LoggingConfig, resume_iteration: int = 0, resume_samples: int = 0
    ) -> None:
        assert logging.tensorboard_dir is not None
        # Imported late: it takes seconds, and only one process of a run needs it.
        from torch.utils.tensorboard import SummaryWriter

        _say_no_more_of_threads()
        self._interval = logging.tensorboard_log_interval
        self._left_out = _values_left_out(logging)
        folder, queue = Path(logging.tensorboard_dir), logging.tensorboard_queue_size
        # For new runs too: TensorBoard takes the first session start in a folder for the beginning,
        # and purges only at later ones.
        self._by_iteration: Any = SummaryWriter(
            str(folder), purge_step=resume_iteration + 1, max_queue=queue
        )
        self._by_samples: Any = SummaryWriter(
            str(folder / "vs_samples"), purge_step=resume_samples + 1, max_queue=queue
        )
        # A resume is the first that is written, and says how many tokens were before it.
        self._open_by_tokens = lambda tokens: SummaryWriter(
            str(folder / "vs_tokens"),
            purge_step=tokens + 1 if resume_iteration else 1,
            max_queue=queue,
        )
        self._by_tokens: Any = None

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        if self._by_tokens is None:
            self._by_tokens = self._open_by_tokens(tokens)
        if kind == STEP:
            self._point(step, values, samples, tokens)
            return
        if kind == "train" and step % self._interval:
            return
        left_out = frozenset[str]() if kind.startswith("task ") else self._left_out
        shown = {name: value for name, value in values.items() if name not in left_out}
        for tag, value in tagged(kind, shown):
            self._by_iteration.add_scalar(tag, value, step)
            self._by_samples.add_scalar(f"{tag} vs samples", value, samples)
        if kind.partition(" ")[0] in ("validation", "test"):
            ppl = "perplexity" not in self._left_out
            for tag, value in evaluation_tagged(kind, values):
                if ppl or " ppl" not in tag:
                    self._over_all(tag, value, step, samples, tokens)
        elif kind == "train" and "seconds_per_iteration" in shown:
            seconds = shown["seconds_per_iteration"]
            self._over_all("iteration-time/iteration-time", seconds, step, samples, tokens)

    def _point(self, step: int, values: Values, samples: int, tokens: int) -> None:
        """Writes a step's values; those without an axis of samples and tokens where
        Megatron-DeepSpeed's have none."""
        for axis, place, writer in (
            ("samples", samples, self._by_samples),
            ("tokens", tokens, self._by_tokens),
        ):
            self._by_iteration.add_scalar(f"steps-vs-{axis}/y={axis},x=steps", place, step)
            writer.add_scalar(f"steps-vs-{axis}/y=steps,x={axis}", step, place)
        for tag, value in values.items():
            group, _, name = tag.partition("/")
            if name and group != "optimizer":
                self._over_all(tag, value, step, samples, tokens)
                continue
            self._by_iteration.add_scalar(tag, value, step)
            if name:
                self._by_tokens.add_scalar(f"{tag} vs tokens", value, tokens)

    def _over_all(
        self, tag: str, value: float | None, step: int, samples: int, tokens: int
    ) -> None:
        self._by_iteration.add_scalar(tag, value, step)
        self._by_samples.add_scalar(f"{tag} vs samples", value, samples)
        self._by_tokens.add_scalar(f"{tag} vs tokens", value, tokens)

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        for number, text in enumerate(written.texts, 1):
            self._by_iteration.add_text(f"sample {number}", as_markdown(text), written.iteration)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for writer in (self._by_iteration, self._by_samples, self._by_tokens):
                if writer is not None:
                    stack.callback(writer.close)


def _say_no_more_of_threads() -> None:
    """Leaves out Python's traceback of an error in a thread of TensorBoard's, which raises it again
    where the next value is written."""
    before = threading.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            before(args)

    threading.excepthook = hook


def _values_left_out(logging: LoggingConfig) -> frozenset[str]:
    switches = {
        "global_batch_size": logging.log_batch_size_to_tensorboard,
        "learning_rate": logging.log_learning_rate_to_tensorboard,
        "loss_scale": logging.log_loss_scale_to_tensorboard,
        "memory_allocated_bytes": logging.log_memory_to_tensorboard,
        "memory_reserved_bytes": logging.log_memory_to_tensorboard,
        "perplexity": logging.log_validation_ppl_to_tensorboard,
        "seconds_per_iteration": logging.log_timers_to_tensorboard,
    }
    return frozenset(name for name, on in switches.items() if not on)
