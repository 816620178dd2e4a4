"""TensorBoard event files, and the per-step values that they contain.

Some values are computed over all trained parameters: norms of weights and optimizer states, and
zeros in gradients. Every element counts once, whatever the layout: a tensor that is replicated
across tensor-parallel ranks, pipeline stages or data-parallel ranks is counted on one of them.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config import ConfigError, RunConfig
from megatron.engine.saving import check_writable
from megatron.engine.state import OwnedSlice, owned_gradients, owned_slices
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.optimizer import owned
from megatron.features.trackers.flags import TrackerFlags
from megatron.features.trackers.tags import as_markdown, evaluation_tagged, tagged
from megatron.parallel.mesh import AXES, MODEL
from megatron.training.intervals import numbers
from megatron.training.plan import TrainingPlan
from megatron.training.registry import WrittenTexts
from megatron.training.report import Reporter
from megatron.training.trainer import Callback, Step, Trainer
from megatron.training.writers import STEP, RunWriter, Values

KINDS = ("variance", "variance_sqrt", "momentum", "weight")
"""Kinds of tensors whose norms are computed; see :func:`state_norms`."""

MEASURES = ("l2", "l1", "abs_max")
"""Measures of a tensor: root of the sum of squares, sum of magnitudes, largest magnitude."""

_NAMES = {"exp_avg": "momentum", "momentum_buffer": "momentum", "exp_avg_sq": "variance"}
"""Kind of each optimizer state, by its name in torch.optim."""

_MOST_ON_CPU, _MOST_ON_DEVICE = 2**15, 2**24
"""Number of elements converted to float64 at a time. On a CPU the copy fits into the cache."""


@torch.no_grad()
def state_norms(engine: TrainEngine, kinds: Sequence[str] = KINDS) -> dict[str, Tensor]:
    """Return ``KIND_MEASURE`` for each of ``kinds``: ``weight`` (in float32), ``momentum`` (Adam's
    first moment or SGD's momentum buffer), ``variance`` (Adam's second moment) and its square root.
    Values are float64 scalars on the device, 0 for missing states. Collective: every rank must call
    it. It does not synchronize with the device."""
    totals = torch.zeros(len(kinds), 3, dtype=torch.float64, device=engine.device)
    for piece in owned_slices(engine):
        if not _counts(engine, piece):
            continue
        for state in piece.kinds:
            kind = _NAMES.get(state, state)
            if piece.slice.numel and {kind, f"{kind}_sqrt"}.intersection(kinds):
                for name, numbers in _measured(kind, piece.get(state)[: piece.slice.numel]):
                    if name in kinds:
                        row, more = totals[kinds.index(name)], numbers.to(totals.device)
                        row[:2] += more[:2]
                        torch.maximum(row[2], more[2], out=row[2])
    sums, maxima = totals[:, :2].contiguous(), totals[:, 2].contiguous()
    world = engine.mesh.world
    if world.size > 1:
        dist.all_reduce(sums, group=world.handle)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=world.handle)
    norms = torch.stack([sums[:, 0].sqrt(), sums[:, 1], maxima], dim=1)
    names = [f"{kind}_{measure}" for kind in kinds for measure in MEASURES]
    return dict(zip(names, norms.view(-1), strict=True))


@torch.no_grad()
def zeros_in_gradients(engine: TrainEngine) -> Tensor:
    """Return the number of zeros in the gradients, averaged over data-parallel ranks, as a float64
    scalar on the device. Padding rows of the vocabulary do not count. Collective: every rank must
    call it, between the backward pass and the update."""
    zeros = torch.zeros((), dtype=torch.float64, device=engine.device)
    for piece, grad in owned_gradients(engine):
        if _counts(engine, piece):
            zeros += (grad.numel() - grad.count_nonzero()).to(zeros.device)
    if engine.mesh.world.size > 1:
        dist.all_reduce(zeros, group=engine.mesh.world.handle)
    return zeros


def _counts(engine: TrainEngine, piece: OwnedSlice) -> bool:
    """Return whether this rank counts a slice. From ZeRO stage 1 on, data-parallel ranks have
    different slices, which all count."""
    return owned(piece.param, engine.mesh, MODEL if engine.stage else AXES)


def _measured(kind: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (kind, [sum of squares, sum of absolute values, largest absolute value]), float64 [3],
    for each chunk of ``values``. For a variance, also yield ``variance_sqrt``."""
    for part in values.split(_MOST_ON_CPU if values.device.type == "cpu" else _MOST_ON_DEVICE):
        wide = part.double()
        squares, absolute = torch.dot(wide, wide), wide.abs_()
        total, largest = absolute.sum(), absolute.max()
        yield kind, torch.stack([squares, total, largest])
        if kind == "variance":
            yield "variance_sqrt", torch.stack([total, absolute.sqrt_().sum(), largest.sqrt()])


class TensorBoardWriter:
    """Writer for TensorBoard events, with the tags of Megatron and Megatron-DeepSpeed. A resume
    purges everything after a step from a TensorBoard run. Tags ``... vs samples`` and ``... vs
    tokens`` count other steps, so they are in separate runs, ``vs_samples`` and ``vs_tokens`` in
    the folder."""

    def __init__(
        self, logging: TrackerFlags, resume_iteration: int = 0, resume_samples: int = 0
    ) -> None:
        assert logging.tensorboard_dir is not None
        # Importing takes seconds, and only one process needs it.
        from torch.utils.tensorboard import SummaryWriter

        _say_no_more_of_threads()
        check_writable(logging.tensorboard_dir, "--tensorboard-dir")
        # surrogates: the path has bytes that are not UTF-8
        if re.search("[\ud800-\udfff]", logging.tensorboard_dir):
            raise ConfigError(
                f"--tensorboard-dir {logging.tensorboard_dir}: TensorBoard writes below names in "
                "UTF-8 only; give another folder"
            )
        self._interval = logging.tensorboard_log_interval
        self._left_out = _values_left_out(logging)
        folder, queue = Path(logging.tensorboard_dir), logging.tensorboard_queue_size
        # Set purge_step in new runs too: TensorBoard takes the first session start in a folder as
        # the
        # beginning, and purges only at later ones.
        self._by_iteration: Any = SummaryWriter(
            str(folder), purge_step=resume_iteration + 1, max_queue=queue
        )
        self._by_samples: Any = SummaryWriter(
            str(folder / "vs_samples"), purge_step=resume_samples + 1, max_queue=queue
        )
        # The number of tokens before a resume is only known from the first row after it.
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
        """Write a step's values by iteration, and by samples and tokens those that
        Megatron-DeepSpeed also shows by them."""
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
    """Suppress the traceback that Python prints for an error in a TensorBoard thread. The next
    write raises the error again."""
    before = threading.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            before(args)

    threading.excepthook = hook


def _values_left_out(logging: TrackerFlags) -> frozenset[str]:
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


class _Point(NamedTuple):
    iteration: int
    samples: int
    tokens: int
    values: Mapping[str, Tensor | float]
    marks: Sequence[Any]


class StepPoints(Callback):
    """Callback on all ranks that measures single steps. Every ``--tensorboard-log-interval`` steps
    it collects a point for TensorBoard, with Megatron-DeepSpeed's tags. It also computes the values
    of ``--log-params-norm`` and ``--log-num-zeros-in-grad``, which log lines show too. Tensors stay
    on the device until the next log line, so that steps do not synchronize."""

    def __init__(self, config: RunConfig, plan: TrainingPlan, report: Reporter) -> None:
        self._config, self._plan, self._report = config, plan, report
        self._flags = TrackerFlags.of(config.logging)
        self._points: list[_Point] = []
        report.after_line.append(self.write)

    def before_step(self, trainer: Trainer) -> None:
        """Make the engine count zeros in gradients, and measure times, if the next step's values
        will be logged or written."""
        logging, following = self._flags, trainer.iteration + 1
        counted = logging.log_num_zeros_in_grad and self._shown(following)
        trainer.engine.count_zeros = zeros_in_gradients if counted else None
        timed = logging.log_timers_to_tensorboard and logging.timing_log_level > 0
        trainer.engine.timed = timed and self._is_point(following)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Measure the values to log or write for this step. Collective: norms are all-reduced."""
        logging, point = self._flags, self._is_point(step.iteration)
        norms: Mapping[str, Tensor] = {}
        if point and logging.log_optimizer_states_to_tensorboard:
            norms = state_norms(trainer.engine)
        elif logging.log_params_norm and self._shown(step.iteration):
            norms = state_norms(trainer.engine, ["weight"])
        params_norm = norms.get("weight_l2") if logging.log_params_norm else None
        if params_norm is not None:
            self._report.record("params_norm", params_norm)
        if not point:
            return
        values = dict(self._values(trainer, step, params_norm))
        if logging.log_optimizer_states_to_tensorboard:
            values |= {f"optimizer/{name}": value for name, value in norms.items()}
        samples = trainer.consumed_samples
        tokens = self._plan.lengths.tokens(samples)
        if trainer.engine.mesh.world.rank == 0:
            marks = trainer.engine.marks
            self._points.append(_Point(step.iteration, samples, tokens, values, marks))

    def write(self, writer: RunWriter) -> None:
        """Write the points collected since the last call."""
        points, self._points = self._points, []
        for iteration, samples, tokens, values, marks in points:
            read = dict(zip(values, numbers(list(values.values())), strict=True))
            # the device has synchronized by now, so that this does not wait
            between = map(_seconds, marks, marks[1:])
            read |= dict(zip(("forward-backward-time", "optimizer-time"), between, strict=False))
            writer.scalars(STEP, iteration, read, samples=samples, tokens=tokens)

    def went_back(self, trainer: Trainer) -> None:
        """Drop the points of steps that the run will repeat."""
        self._points = []

    def _is_point(self, iteration: int) -> bool:
        logging = self._flags
        return (
            "tensorboard" in logging.trackers and not iteration % logging.tensorboard_log_interval
        )

    def _shown(self, iteration: int) -> bool:
        logged = not iteration % self._config.logging.log_interval
        return logged or iteration >= self._plan.train_iters or self._is_point(iteration)

    def _values(
        self, trainer: Trainer, step: Step, params_norm: Tensor | None
    ) -> Iterator[tuple[str, Tensor | float]]:
        logging, result = self._flags, step.result
        for name, loss in result.losses.items():
            yield f"lm-loss-training/{name}", loss
        lengths = {"actual_seq_length": step.seq_length}
        for name, length in (lengths | self._plan.lengths.shown(step.iteration - 1)).items():
            yield f"seqlen/{name}", length
        if self._plan.lengths.grows:
            yield "seqlen/curriculum_seqlen", step.seq_length
        if logging.log_learning_rate_to_tensorboard:
            yield "learning-rate/learning-rate", step.learning_rate
        if logging.log_batch_size_to_tensorboard:
            yield "batch-size/batch-size", step.samples
        if logging.log_loss_scale_to_tensorboard and self._config.precision.fp16:
            yield "loss-scale/loss-scale", result.loss_scale
        if logging.log_world_size_to_tensorboard:
            yield "world-size/world-size", trainer.engine.mesh.world.size
        yield "grad-norm/grad-norm", result.grad_norm
        if result.zeros is not None:
            yield "num-zeros/num-zeros", result.zeros
        if params_norm is not None:
            yield "params-norm/params-norm", params_norm
        if logging.log_memory_to_tensorboard:
            yield from _memory(trainer.engine.device)


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _memory(device: torch.device) -> Iterator[tuple[str, float]]:
    """Yield the memory in use: by torch's allocator on a GPU, by the whole process on a CPU."""
    if device.type != "cuda":
        yield "mem-allocated-bytes", psutil.Process().memory_info().rss
        return
    stats = torch.cuda.memory_stats(device)
    yield "mem-reserved-bytes", stats["reserved_bytes.all.current"]
    yield "mem-allocated-bytes", stats["allocated_bytes.all.current"]
    yield "mem-allocated-count", stats["allocation.all.current"]
