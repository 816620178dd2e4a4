"""Trackers read back: events through TensorBoard's own accumulator; and trackers that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import sys
import types

import pytest
from metric_rows import interval, rows, warnings, write_train
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from megatron.config.output import LoggingConfig
from megatron.features.trackers.background import LastingWriter
from megatron.features.trackers.services import WandbWriter
from megatron.features.trackers.tags import TAGS, tagged
from megatron.features.trackers.tensorboard import TensorBoardWriter
from megatron.training.metrics import Evaluation
from megatron.training.writers import STEP, JsonLinesWriter, TeeWriter, build_writers


def test_what_a_run_reports_next_to_its_losses_has_tags():
    values = {"loss": 1.0, "dpo loss": 1.0, "rewards/margins": 2.0, "lm loss PPL": 3.0, "mfu": 0.5}
    assert dict(tagged("train", values)) == {
        "loss": 1.0, "dpo loss": 1.0, "rewards/margins": 2.0, "mfu": 0.5,
    }  # fmt: skip
    assert dict(tagged("train", {"queue_seconds": 1.5, "nan_steps": 0})) == {"queue-seconds": 1.5}
    assert dict(tagged("validation more", values)) == {
        "loss validation more": 1.0,
        "dpo loss validation more": 1.0,
        "rewards/margins validation more": 2.0,
    }


def events(folder) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.tensor_proto.float_val[0]) for event in accumulator.Tensors(tag)]
        for tag in accumulator.Tags()["tensors"]
    }


def tensorboard_config(tmp_path, **changes) -> LoggingConfig:
    return dataclasses.replace(LoggingConfig(), tensorboard_dir=str(tmp_path / "tb"), **changes)


def test_resumed_curves_are_not_doubled(tmp_path, monkeypatch):
    # Files of one second are ordered by this count as text; runs of one process go past 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    logging = tensorboard_config(tmp_path)
    for first, last, loss in ((1, 8, 1.0), (6, 9, 2.0), (8, 10, 3.0)):
        writer = TensorBoardWriter(logging, first - 1, 16 * (first - 1))
        write_train(writer, range(first, last + 1), loss)
        writer.close()
    losses = [1.0] * 5 + [2.0] * 2 + [3.0] * 3
    assert events(tmp_path / "tb")["lm loss"] == list(zip(range(1, 11), losses, strict=True))
    assert events(tmp_path / "tb" / "vs_samples")["lm loss vs samples"] == list(
        zip(range(16, 176, 16), losses, strict=True)
    )


def test_tags_are_megatrons_and_follow_the_flags(tmp_path):
    def tags(name, **flags):
        logging = tensorboard_config(tmp_path / name, **flags)
        writer = TensorBoardWriter(logging)
        write_train(writer, [1])
        writer.scalars("validation", 1, Evaluation(1, {"lm loss": 1.0}).row(), samples=16, tokens=1)
        writer.scalars("resume", 1, {}, samples=16, tokens=1)
        writer.close()
        return set(events(tmp_path / name / "tb"))

    throughput = {"samples-per-second", "tokens-per-second-per-device", "throughput"}
    ranks = {
        "slowest-rank",
        *(f"own-time-{name}-rank" for name in ("slowest", "median", "fastest")),
    }
    spent = {"energy-joules", "co2-grams", "cost", "cost-left", "seconds-left"}
    experts = {f"experts-{n}" for n in ("max-over-mean", "entropy", "dropped-share", "idle")}
    always = {"lm loss", "lm loss validation", "weight-decay", "num-zeros", "params-norm"}
    always |= {"lm-loss-validation/lm loss validation"} | throughput | ranks | spent | experts
    assert tags("default") == always | {"learning-rate", "loss-scale"}
    assert tags(
        "other",
        log_learning_rate_to_tensorboard=False,
        log_loss_scale_to_tensorboard=False,
        log_batch_size_to_tensorboard=True,
        log_timers_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
        log_memory_to_tensorboard=True,
    ) == always | {
        "batch-size",
        "iteration-time",
        "iteration-time/iteration-time",
        "lm loss validation ppl",
        "lm-loss-validation/lm loss validation ppl",
        "mem-max-allocated-bytes",
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [("file/x", "cannot write to it"), ("t\udce9", "TensorBoard writes below names in UTF-8 only")],
)
def test_a_folder_that_tensorboard_cannot_use(name, message, tmp_path):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / name / "tb"
    with pytest.raises(ValueError, match=f"--tensorboard-dir {re.escape(str(folder))}: {message}"):
        TensorBoardWriter(tensorboard_config(tmp_path / name))


def test_points_of_steps_over_three_axes(tmp_path):
    """As Megatron-DeepSpeed writes them; a resume drops later ones over each axis."""
    values = {
        "lm-loss-training/lm loss": 2.0,
        "optimizer/weight_l2": 3.0,
        "mem-reserved-bytes": 4.0,
    }
    for first in (0, 1):
        writer = TensorBoardWriter(tensorboard_config(tmp_path), first, 16 * first)
        if first:
            writer.scalars("resume", first, {}, samples=16 * first, tokens=256 * first)
        for step in range(first + 1, 4):
            writer.scalars(STEP, step, values, samples=16 * step, tokens=256 * step)
        writer.close()
    tensorboard = tmp_path / "tb"
    written = (
        events(tensorboard),
        events(tensorboard / "vs_samples"),
        events(tensorboard / "vs_tokens"),
    )
    axes = [(1, 2, 3), (16, 32, 48), (256, 512, 768)]
    steps, samples, tokens = ([float(at) for at in axis] for axis in axes)
    expected = (
        {
            "steps-vs-samples/y=samples,x=steps": samples,
            "steps-vs-tokens/y=tokens,x=steps": tokens,
            **{tag: [value] * 3 for tag, value in values.items()},
        },
        {
            "steps-vs-samples/y=steps,x=samples": steps,
            "lm-loss-training/lm loss vs samples": [2.0] * 3,
        },
        {
            "steps-vs-tokens/y=steps,x=tokens": steps,
            "lm-loss-training/lm loss vs tokens": [2.0] * 3,
            "optimizer/weight_l2 vs tokens": [3.0] * 3,
        },
    )
    for axis, tags, there in zip(axes, expected, written, strict=True):
        assert there == {tag: list(zip(axis, y, strict=True)) for tag, y in tags.items()}


def test_other_writers_take_no_points(tmp_path):
    writer = JsonLinesWriter(tmp_path / "m.jsonl")
    writer.scalars(STEP, 1, {"lm-loss-training/lm loss": 2.0}, samples=1, tokens=1)
    writer.close()
    assert rows(tmp_path / "m.jsonl") == [] == list(tagged(STEP, {"lm-loss-training/lm loss": 2.0}))


def test_tensorboard_interval_thins_training_and_not_validation(tmp_path):
    writer = TensorBoardWriter(tensorboard_config(tmp_path, tensorboard_log_interval=3))
    write_train(writer, range(1, 8))
    writer.scalars("validation", 7, {"loss": 1.0}, samples=1, tokens=1)
    writer.close()
    found = events(tmp_path / "tb")
    assert [step for step, _ in found["lm loss"]] == [3, 6]
    assert [step for step, _ in found["lm loss validation"]] == [7]


def test_losses_of_their_own_name_have_tags_of_it(tmp_path):
    writer = TensorBoardWriter(tensorboard_config(tmp_path))
    values = {"loss": 5.0, "lm loss": 4.0, "sop loss": 1.0}
    for kind in ("train", "validation"):
        writer.scalars(kind, 1, values, samples=1, tokens=1)
    writer.close()
    found = {tag: points[0][1] for tag, points in events(tmp_path / "tb").items()}
    expected = {"loss": 5.0, "lm loss": 4.0, "sop loss": 1.0}
    expected |= {f"{tag} validation": value for tag, value in expected.items()}
    assert found.items() >= expected.items()


def test_tasks_have_a_group_of_tags(tmp_path):
    """And what is left out of validation is not left out of them."""
    logging = tensorboard_config(tmp_path)
    writers = TeeWriter([JsonLinesWriter(tmp_path / "m.jsonl"), TensorBoardWriter(logging)])
    values = {"perplexity": 2.0, "bits_per_byte": 0.5, "other": None}
    writers.scalars("task wikitext", 3, values, samples=6, tokens=12)
    writers.close()
    clock = {"iteration": 3, "consumed_samples": 6, "consumed_tokens": 12}
    assert rows(tmp_path / "m.jsonl") == [{"kind": "task wikitext", **clock, **values}]
    assert events(tmp_path / "tb") == {
        "tasks/wikitext perplexity": [(3, 2.0)],
        "tasks/wikitext bits per byte": [(3, 0.5)],
    }


def test_every_tag_belongs_to_a_value_that_is_reported():
    assert set(TAGS["train"]) <= set(interval(1).row())
    for kind in ("validation", "test"):
        assert set(TAGS[kind]) == set(Evaluation(1, {"lm loss": 1.0}).row())


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict]] = []
        self.finished = False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_gets_flags_configuration_and_tags(monkeypatch, tmp_path):
    run, given = FakeRun(), {}

    def init(**arguments):
        given.update(arguments)
        return run

    fake = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = tmp_path / "wandb files"
    config = dataclasses.replace(
        LoggingConfig(),
        wandb_project="gpt",
        wandb_exp_name="first",
        wandb_save_dir=str(folder),
        wandb_entity="us",
    )
    writer = build_writers(config, configuration={"lr": 1.0})
    writer.scalars("train", 4, {"loss": 2.0, "grad_norm": None}, samples=8, tokens=9)
    writer.scalars("resume", 4, {}, samples=8, tokens=9)
    writer.close()
    assert given == {
        "project": "gpt",
        "entity": "us",
        "name": "first",
        "group": "first",
        "dir": str(folder),
        "config": {"lr": 1.0},
    }
    assert folder.is_dir()
    axes = {"samples": 8, "tokens": 9}
    assert run.logged == [(4, {"lm loss": 2.0, "loss/lm loss": 2.0, **axes})]
    assert run.finished


def test_wandb_gets_megatron_deepspeeds_keys(monkeypatch):
    """Rates over all devices, of a device, and divided by the number of replicas."""
    run, fake = FakeRun(), types.ModuleType("wandb")
    fake.init = lambda **_: run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    parallel = {"world_size": 8, "data_parallel_size": 4}
    write_train(WandbWriter(LoggingConfig(), {"parallel": parallel}), [1])
    (_, logged), *_ = run.logged
    keys = {
        name.partition("/")[2]: value for name, value in logged.items() if "throughput/" in name
    }
    assert keys == {
        "samples_per_sec": 32.0, "samples_per_sec_per_replica": 8.0,
        "tokens_per_sec": 32768.0, "tokens_per_sec_per_replica": 8192.0,
        "tokens_per_gpu_per_sec": 4096.0, "tokens_per_gpu_per_sec_per_replica": 1024.0,
        "iteration-time": 0.5, "elapsed_ms_per_iteration": 500.0, "tflops": 1.0,
    }  # fmt: skip
    assert logged["loss/lm loss"] == 2.0


def test_missing_wandb_names_package_and_flags(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = dataclasses.replace(LoggingConfig(), wandb_project="gpt")
    with pytest.raises(ValueError, match=r"--wandb-project gpt .*pip install wandb"):
        WandbWriter(config, {})


def test_all_that_is_asked_for_gets_the_values(tmp_path):
    config = tensorboard_config(tmp_path, metrics_file=str(tmp_path / "metrics.jsonl"))
    writer = build_writers(config, resume_iteration=0)
    write_train(writer, [1, 2])
    writer.close()
    assert len(rows(tmp_path / "metrics.jsonl")) == 2
    assert len(events(tmp_path / "tb")["lm loss"]) == 2


class Lines:
    """A tracker's writer, which may fail."""

    def __init__(self, lines: list, fails_to_close: bool = False) -> None:
        self.lines, self.fails_to_close = lines, fails_to_close

    def scalars(self, kind, step, values, *, samples, tokens):
        self.lines.append(step)

    def close(self):
        if self.fails_to_close:
            raise TimeoutError("it did not take the last rows")


@pytest.mark.parametrize("back_to", [0, 3])
def test_a_tracker_begins_again_after_going_back(caplog, back_to):
    opened, lines = [], []

    def open_one(iteration, samples):
        opened.append((iteration, samples))
        return Lines(lines)

    writer = LastingWriter("--report-to some", open_one)
    write_train(writer, [1, 2, 3, 4])
    writer.went_back(back_to, 16 * back_to)
    write_train(writer, [back_to + 1])
    writer.close()
    assert opened == [(0, 0), (back_to, 16 * back_to)]
    assert lines == [1, 2, 3, 4, back_to + 1] and warnings(caplog) == []


@pytest.mark.parametrize("back_to", [0, 3])
@pytest.mark.parametrize("broken", ["open", "close"])
def test_a_tracker_that_fails_at_going_back_does_not_end_a_run(caplog, back_to, broken):
    opened, lines, seconds = [], [], [0.0]

    def open_one(iteration, samples):
        opened.append((iteration, samples))
        if broken == "open" and len(opened) == 2:
            raise ValueError("the server does not answer")
        return Lines(lines, fails_to_close=broken == "close" and len(opened) == 1)

    writer = LastingWriter("--report-to some", open_one, clock=lambda: seconds[0])
    write_train(writer, [1, 2, 3, 4])
    writer.went_back(back_to, 16 * back_to)
    write_train(writer, [back_to + 1])
    seconds[0] = 61.0
    write_train(writer, [back_to + 2])
    writer.close()
    kept = [back_to + 2] if broken == "open" else [back_to + 1, back_to + 2]
    assert lines == [1, 2, 3, 4, *kept]
    failed, again, missing = warnings(caplog)
    assert failed.startswith("--report-to some cannot be written (")
    assert again == (
        "--report-to some is written again from iteration "
        f"{back_to + 2 if broken == 'open' else back_to} on"
    )
    assert "is missing there" in missing


@pytest.mark.filterwarnings("error")
def test_tensorboard_continues_after_its_folder_was_deleted(tmp_path, caplog, capfd):
    """One line for the failure, without a traceback of its thread, one where it is written again,
    and one at the end."""
    seconds = [0.0]
    config = tensorboard_config(tmp_path, tensorboard_queue_size=1)
    writer = LastingWriter(
        "--tensorboard-dir tb",
        lambda iteration, samples: TensorBoardWriter(config, iteration, samples),
        clock=lambda: seconds[0],
    )
    shutil.rmtree(tmp_path / "tb")
    for iteration in range(1, 200):
        write_train(writer, [iteration])
        writer_failed = writer._writer is None
        if writer_failed:
            break
        for part in (writer._writer._by_iteration, writer._writer._by_samples):
            with contextlib.suppress(OSError):
                part.flush()
    assert writer_failed
    write_train(writer, [iteration + 1])  # too early for another attempt
    seconds[0] = 61.0
    write_train(writer, [iteration + 2, iteration + 3])
    writer.close()
    # The thread may have begun its file after the folder was deleted: what was first is there then.
    steps = [step for step, _ in events(tmp_path / "tb")["lm loss"]]
    assert steps[-2:] == [iteration + 2, iteration + 3]
    failed, again, missing = warnings(caplog)
    assert failed.startswith("--tensorboard-dir tb cannot be written (No such file or directory)")
    assert again == f"--tensorboard-dir tb is written again from iteration {iteration + 2} on"
    assert missing.startswith("--tensorboard-dir tb: what was reported from about iteration")
    # Not "Traceback": the log may go to the closed stream of another test, which logging reports.
    assert "Exception in thread" not in capfd.readouterr().err


def test_wandb_that_fails_is_said_once(monkeypatch, caplog):
    class Broken(FakeRun):
        def log(self, values, step):
            raise RuntimeError("the service is gone")

    fake = types.ModuleType("wandb")
    fake.init = lambda **arguments: Broken()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = build_writers(dataclasses.replace(LoggingConfig(), wandb_project="gpt"))
    write_train(writer, [1, 2, 3])
    writer.close()
    failed, missing = warnings(caplog)
    assert failed.startswith("--wandb-project gpt cannot be written (RuntimeError: the service is")
    assert "from about iteration 0 is missing" in missing


def test_wandb_that_does_not_start_is_a_line_for_users(monkeypatch):
    def init(**arguments):
        raise RuntimeError("api_key not configured")

    fake = types.ModuleType("wandb")
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ValueError, match="--wandb-project gpt: .*api_key.*WANDB_MODE=offline"):
        WandbWriter(dataclasses.replace(LoggingConfig(), wandb_project="gpt"), {})
