"""Metrics in TensorBoard and in Weights & Biases; each is imported where a run uses it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.config.output import LoggingConfig
from megatron.training.written import WrittenText, WrittenTexts

Values = Mapping[str, float | None]
"""Values by the names of the ``row`` of ``IntervalMetrics`` and of what is ``Reported``."""

TAGS: dict[str, dict[str, str]] = {
    "train": {
        "loss": "lm loss",
        "grad_norm": "grad-norm",
        "learning_rate": "learning-rate",
        "weight_decay": "weight-decay",
        "global_batch_size": "batch-size",
        "loss_scale": "loss-scale",
        "seconds_per_iteration": "iteration-time",
        "samples_per_second": "samples-per-second",
        "tokens_per_second_per_device": "tokens-per-second-per-device",
        "tflops_per_device": "throughput",
        "mfu": "mfu",
        "hfu": "hfu",
        "memory_allocated_bytes": "mem-max-allocated-bytes",
        "memory_reserved_bytes": "mem-max-reserved-bytes",
        "slowest_rank": "slowest-rank",
        "own_seconds_slowest": "own-time-slowest-rank",
        "own_seconds_median": "own-time-median-rank",
        "own_seconds_fastest": "own-time-fastest-rank",
    },
    "validation": {"loss": "lm loss validation", "perplexity": "lm loss validation ppl"},
    "test": {"loss": "lm loss test", "perplexity": "lm loss test ppl"},
}
"""Tags of TensorBoard and Weights & Biases by kind and value; Megatron's, where it has one."""


class TensorBoardWriter:
    """TensorBoard events under Megatron's tags, over iterations and over samples. The tags ``... vs
    samples`` go to the run ``vs_samples`` inside the folder, as a resume purges a whole run from
    one step on."""

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

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        if kind == "train" and step % self._interval:
            return
        left_out = frozenset[str]() if kind.startswith("task ") else self._left_out
        shown = {name: value for name, value in values.items() if name not in left_out}
        for tag, value in _tagged(kind, shown):
            self._by_iteration.add_scalar(tag, value, step)
            self._by_samples.add_scalar(f"{tag} vs samples", value, samples)

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        for number, text in enumerate(written.texts, 1):
            self._by_iteration.add_text(f"sample {number}", _as_markdown(text), written.iteration)

    def close(self) -> None:
        try:
            self._by_iteration.close()
        finally:
            self._by_samples.close()


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


class WandbWriter:
    """Weights & Biases, under the tags of TensorBoard; a ValueError if it is not installed. A
    resumed process is a new run in the same group, so that no curve has a step twice. Weights &
    Biases' environment variables apply, such as ``WANDB_MODE=offline``."""

    def __init__(
        self, logging: LoggingConfig, configuration: Mapping[str, Any] | None = None
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"--wandb-project {logging.wandb_project} needs the package wandb, which is not "
                "installed: run `pip install wandb`, or leave out --wandb-project and the other "
                "--wandb-* flags"
            ) from error
        if logging.wandb_save_dir is not None:
            # Without the folder wandb would only warn and use a temporary one.
            Path(logging.wandb_save_dir).mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=logging.wandb_project,
                entity=logging.wandb_entity,
                name=logging.wandb_exp_name,
                group=logging.wandb_exp_name,
                dir=logging.wandb_save_dir,
                config=dict(configuration or {}),
            )
        except Exception as error:  # it has many classes
            raise ValueError(
                f"--wandb-project {logging.wandb_project}: Weights & Biases does not start ("
                f"{' '.join(str(error).split())}); run `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        tagged = dict(_tagged(kind, values))
        if tagged:
            self._run.log(tagged | {"samples": samples, "tokens": tokens}, step=step)

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        import wandb

        rows = [list(text) for text in written.texts]
        table = wandb.Table(columns=list(WrittenText._fields), data=rows)
        self._run.log({"samples of text": table}, step=written.iteration)

    def close(self) -> None:
        self._run.finish()


def _as_markdown(text: WrittenText) -> str:
    """As blocks of code, in which nothing is markup."""

    def block(content: str) -> str:
        return "".join(f"    {line}\n" for line in content.splitlines() or [""])

    end = "" if text.ended else " (not ended)"
    parts = [f"**prompt**\n\n{block(text.prompt)}", f"**answer**{end}\n\n{block(text.answer)}"]
    if text.reference:
        parts.append(f"**in the data**\n\n{block(text.reference)}")
    return "\n".join(parts)


def _tagged(kind: str, values: Values) -> Iterator[tuple[str, float]]:
    kind, _, dataset = kind.partition(" ")  # one of several validation sets, or a task
    if kind == "task":
        # The part before the slash is a group in both programs.
        for name, value in values.items():
            if value is not None:
                yield f"tasks/{dataset} {name.replace('_', ' ')}", value
        return
    tags = TAGS.get(kind, {})
    after = "" if kind == "train" else f" {kind}"
    if any(name.endswith(" loss") for name in values):
        # A run with several losses: their sum is not its "lm loss".
        tags = tags | {"loss": f"loss{after}"}
    # What a run reports under names of its own, with spaces or a group before a slash.
    named = (name for name in values if set(name) & set(" /") and not name.endswith(" PPL"))
    tags = tags | {name: f"{name}{after}" for name in named}
    for name, tag in tags.items():
        value = values.get(name)
        if value is not None:
            yield f"{tag} {dataset}".rstrip(), value


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
