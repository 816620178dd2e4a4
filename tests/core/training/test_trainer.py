"""What the training loop does when, and what it tells its callbacks."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from configs import model_config, run_config

from megatron.config import OptimizerConfig, TrainingConfig
from megatron.data.build import Datasets
from megatron.data.loader import TrainingData
from megatron.engine.train_engine import StepResult
from megatron.parallel.mesh import Mesh
from megatron.training.plan import Epochs, TrainingPlan
from megatron.training.trainer import Callback, Position, Trainer


class Samples:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Engine:
    """Notes the samples of its batches."""

    def __init__(self) -> None:
        self.mesh, self.device = Mesh(), torch.device("cpu")
        self.spec = SimpleNamespace(no_perplexity=frozenset())
        self.steps: list[list[int]] = []
        self.evaluated: list[list[int]] = []

    def train_step(self, batches, micro_batches, consumed, lr, weight_decay) -> StepResult:
        self.steps.append([n for _ in range(micro_batches) for n in next(batches)])
        loss = torch.tensor(float(len(self.steps)))
        return StepResult(loss, {"lm loss": loss}, 1.0, False, 1.0)

    def evaluate(self, batches, count, measure=None) -> dict[str, float]:
        self.evaluated.append([n for _ in range(count) for n in next(batches)])
        return {"lm loss": 2.0}


class Notes(Callback):
    """Writes down what it is told, and asks for a stop at an iteration."""

    def __init__(self, name: str, told: list[str], stop_at: int | None = None) -> None:
        self.name, self.told, self.stop_at = name, told, stop_at

    def note(self, what: object) -> None:
        self.told.append(f"{self.name}: {what}")

    def __enter__(self) -> Notes:
        self.note("enter")
        return self

    def __exit__(self, error_type, *_) -> None:
        self.note("exit" if error_type is None else error_type.__name__)

    def before_step(self, trainer) -> None:
        self.note("before")

    def after_step(self, trainer, step) -> None:
        self.note(f"step {step.iteration}")

    def settle(self, trainer) -> None:
        self.note("settle")

    @contextlib.contextmanager
    def paused(self, trainer):
        self.note("pause")
        yield
        self.note("resume")

    def between_steps(self, trainer) -> None:
        self.note("between")

    def reason_to_stop(self, trainer) -> str | None:
        return "a test" if trainer.iteration == self.stop_at else None

    def epoch_ended(self, trainer, epoch) -> None:
        self.note(f"epoch {epoch}")

    def training_ended(self, trainer, reason) -> None:
        self.note(f"ended by {reason}")

    def evaluated(self, trainer, evaluation) -> None:
        self.note(f"{evaluation.kind} {dict(evaluation.losses)}")


def plan(epochs: Epochs | None = None, **changes) -> TrainingPlan:
    values = {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 3, "eval_interval": 2}
    config = run_config(
        model=model_config(seq_length=8),
        training=TrainingConfig(**(values | {"eval_iters": 1} | changes)),
        optimizer=OptimizerConfig(lr=1e-3, start_weight_decay=0.1, end_weight_decay=0.1),
        parallel=replace(run_config().parallel, data_parallel_size=1),
    )
    return TrainingPlan(config, epochs)


def trainer(engine: Engine, course: TrainingPlan, *callbacks: Callback, at: int = 0) -> Trainer:
    datasets = Datasets(Samples(100), {"valid": Samples(100)}, {"test": Samples(100)})
    position = Position(at, 4 * at)
    return Trainer(engine, TrainingData(datasets, list), course, callbacks, position)


def test_the_order_of_events():
    told: list[str] = []
    engine = Engine()
    first, second = Notes("a", told), Notes("b", told)
    assert trainer(engine, plan(train_iters=2, eval_interval=1), first, second).fit() is None
    pause = ["a: pause", "b: pause", "a: between", "b: between"]
    resume = ["b: resume", "a: resume"]
    loss = "{'lm loss': 2.0}"

    def both(what: str) -> list[str]:
        return [f"a: {what}", f"b: {what}"]

    assert told == [
        *both("enter"),
        *both("before"), *both("step 1"), *pause,
        *both("settle"), *both(f"validation {loss}"), *resume,
        *both("before"), *both("step 2"), *pause, *resume, *both("settle"),
        *reversed(both("ended by None")),
        *both("settle"), *both(f"validation {loss}"), *both(f"test {loss}"),
        *reversed(both("exit")),
    ]  # fmt: skip
    assert engine.steps == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert engine.evaluated == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]  # reads on; then tests


class Evaluates(Callback):
    """Reports every second iteration, and the last."""

    def evaluate(self, trainer, last) -> None:
        if last or trainer.iteration % 2 == 0:
            trainer.report(SimpleNamespace(kind=f"task, last {last}", losses={}))


@pytest.mark.parametrize(
    "changes, at, evaluated",
    [
        ({"train_iters": 4}, 0, ["2: task, last False", "4: task, last True"]),
        ({"train_iters": 5}, 2, ["4: task, last False", "5: task, last True"]),
        ({"train_iters": 4}, 4, ["4: task, last True"]),
        ({"skip_train": True}, 1, ["1: task, last True"]),
    ],
)
def test_evaluations_of_callbacks(changes, at, evaluated):
    """After the validation of the same moment, before the test; again on the same schedule."""
    told: list[str] = []
    engine = Engine()
    notes = Notes("a", told)
    course = trainer(engine, plan(**changes), Evaluates(), notes, at=at)
    notes.note = lambda what: told.append(f"{course.iteration}: {what}")  # type: ignore
    course.fit()
    found = [line.removesuffix(" {}") for line in told if "task" in line]
    assert found == evaluated
    kinds = [line.split()[1].strip(",") for line in told if "loss" in line or "task" in line]
    assert kinds[-3:] == ["validation", "task", "test"]
    assert all(kinds[n - 1] == "validation" for n, kind in enumerate(kinds) if kind == "task")


def test_a_callback_can_stop_it():
    told: list[str] = []
    engine = Engine()
    assert trainer(engine, plan(), Notes("a", told, stop_at=1)).fit() == "a test"
    assert engine.steps == [[0, 1, 2, 3]] and not engine.evaluated
    assert told[-2:] == ["a: ended by a test", "a: exit"]


def test_an_error_leaves_every_callback():
    told: list[str] = []
    engine = Engine()
    engine.train_step = lambda *_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        trainer(engine, plan(), Notes("a", told)).fit()
    assert told[-1] == "a: ZeroDivisionError"


def test_it_continues_from_its_position():
    engine = Engine()
    trainer(engine, plan(), at=2).fit()
    assert engine.steps == [[8, 9, 10, 11]]
    assert engine.evaluated[0] == [4, 5, 6, 7]  # one evaluation was before


@pytest.mark.parametrize(
    "samples, count, steps, ended",
    [
        (8, 2, 4, {2: [1], 4: [2]}),
        (6, 3, 5, {2: [1], 3: [2], 5: [3]}),  # 18 samples: half of the last batch is of a fourth
        (2, 4, 2, {1: [1, 2], 2: [3, 4]}),
    ],
)
def test_epochs(samples, count, steps, ended):
    course = plan(Epochs(count, samples))
    assert course.train_iters == steps
    told: list[str] = []
    engine = Engine()
    trainer(engine, course, Notes("a", told)).fit()
    found: dict[int, list[int]] = {}
    step = 0
    for line in told:
        step += line.startswith("a: step")
        if line.startswith("a: epoch"):
            found.setdefault(step, []).append(int(line.split()[-1]))
    assert found == ended
    assert course.learning_rate(0) == 1e-3


def test_without_training_it_only_tests():
    engine = SimpleNamespace(**vars(Engine()), train_step=None, evaluate=lambda *_: {})
    told: list[str] = []
    trainer(engine, plan(skip_train=True), Notes("a", told)).fit()
    assert [line for line in told if "validation" in line or "test" in line]
    assert "a: before" not in told
