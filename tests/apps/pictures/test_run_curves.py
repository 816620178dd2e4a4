"""Tables and pictures of runs, from the events that a run and Megatron-DeepSpeed write."""

import csv
import json

import pytest
from matplotlib.image import imread
from torch.utils.tensorboard import SummaryWriter

from megatron.apps.pictures.run_curves import (
    RunCurve,
    plot_curves,
    read_curves,
    read_evaluations,
    read_tables,
    write_csv,
)
from megatron.config.output import LoggingConfig
from megatron.features.trackers.tensorboard import TensorBoardWriter
from tools import plot_runs

SAVED, RESUMED = "bf16/tp2_pp2_dp2_sp1_toy_save", "bf16/tp2_pp2_dp1_sp1_toy_uni_load2_2_2_1"


def loss(step):
    return 10 - step / 16  # exact in the events' float32


@pytest.fixture
def runs(tmp_path):
    """A run of 20 steps that stopped after 12 once, and one that continues after step 10."""
    for name, first, last in ((SAVED, 1, 12), (SAVED, 9, 20), (RESUMED, 11, 20)):
        logging = LoggingConfig(tensorboard_dir=str(tmp_path / name))
        writer = TensorBoardWriter(logging, resume_iteration=first - 1)
        for step in range(first, last + 1):
            value = loss(step) + (0.5 if last == 12 and step > 8 else 0)
            writer.scalars("train", step, {"loss": value}, samples=step, tokens=step)
        writer.scalars("validation", last, {"loss": 1.0}, samples=last, tokens=last)
        writer.close()
    return tmp_path


def test_curves_are_those_of_the_runs(runs):
    saved, resumed = read_curves(runs, "lm loss")
    assert (saved.name, resumed.name) == ("tp2_pp2_dp2_sp1", "tp2_pp2_dp1_sp1")
    assert saved.by_step() == {step: loss(step) for step in range(1, 21)}
    assert resumed.by_step() == {step: loss(step) for step in range(11, 21)}
    assert [curve.steps[-1] for curve in read_curves(runs, "lm loss validation")] == [20, 20]


def test_names_of_megatron_deepspeed_and_of_equal_layouts(tmp_path):
    for folder in ("tp1_pp1_dp4_sp1_save", "tp_1_pp_1_dp_4_sp_1_again", "other"):
        with SummaryWriter(str(tmp_path / folder)) as writer:
            writer.add_scalar("lm-loss-training/lm loss", 2.5, 1)
            writer.add_scalar("lm-loss-training/lm loss vs tokens", 3.5, 1)
    for tag in ("lm loss", "lm-loss-training/lm loss"):
        curves = read_curves(tmp_path, tag)
        names = {curve.name: curve.values for curve in curves}
        assert names == {"other": [2.5], "tp1_pp1_dp4_sp1": [2.5], "tp1_pp1_dp4_sp1-2": [2.5]}


def test_of_two_scalars_with_the_same_last_part_the_named_one_counts(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("lm-loss-training/lm loss", 2.5, 1)
        writer.add_scalar("lm loss", 3.5, 1)
    for tag, value in (("lm loss", 3.5), ("lm-loss-training/lm loss", 2.5)):
        assert [curve.values for curve in read_curves(tmp_path, tag)] == [[value]]


def test_table_and_picture(runs, tmp_path):
    curves = read_curves(runs, "lm loss")
    write_csv(curves[1], tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[:2] == [["", "step", "value"], ["0", "11", str(loss(11))]]
    assert rows[-1] == ["9", "20", str(loss(20))]
    plot_curves(curves, tmp_path / "loss.png", "a title", "step", "loss")
    assert imread(tmp_path / "loss.png")[..., :3].std() > 0.05


def test_the_tool_writes_the_names_of_megatron_deepspeed(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plot_runs.main(["--tb_dir", str(runs), "--plot_name", "a.png", "--csv_name", "val_"])
    written = {path.name for path in tmp_path.iterdir() if path.is_file()}
    tables = {f"val_uc_out_tp2_pp2_dp{size}_sp1.csv" for size in (1, 2)}
    assert written == {"a.png", *tables}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lm loss of tp2_pp2_dp2_sp1: steps 1 to 20"
    assert lines[1].startswith("tp2_pp2_dp1_sp1: steps 11 to 20; step 11: 9.312500, in tp2_")
    assert lines[1].endswith("largest difference 0.00e+00 at step 11")


def test_a_folder_without_the_scalar(runs, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        plot_runs.main(["--tb-dir", str(runs), "--tb-event-key", "accuracy"])
    assert stopped.value.code == 2
    assert "no run has the scalar 'accuracy'; there are " in capsys.readouterr().err
    with pytest.raises(ValueError, match="no TensorBoard events"):
        read_curves(tmp_path / "none", "lm loss")


def metrics_of(path, factor):
    clock = {"consumed_samples": 1}
    rows = [
        row
        for n in (1, 2)
        for row in (
            {"kind": "train", "iteration": n, **clock, "consumed_tokens": n, "loss": 1.0},
            {"kind": "validation", "iteration": n, **clock, "consumed_tokens": n, "loss": factor},
            {"kind": "task lambada", "iteration": n, **clock, "consumed_tokens": n}
            | {"accuracy": factor / n, "seconds": 1.0},
        )
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_evaluations_of_several_runs(tmp_path, monkeypatch, capsys):
    for name, factor in (("a", 2.0), ("b", 4.0)):
        metrics_of(tmp_path / f"{name}.jsonl", factor)
    validation, lambada = read_evaluations({n: tmp_path / f"{n}.jsonl" for n in "ab"})
    assert (validation.y, lambada.y) == ("validation loss", "lambada\naccuracy")
    assert lambada.curves == [RunCurve("a", [1, 2], [2, 1]), RunCurve("b", [1, 2], [4, 2])]
    monkeypatch.chdir(tmp_path)
    plot_runs.main("--metrics a=a.jsonl b=b.jsonl --plot-name p.png".split())
    assert capsys.readouterr().out == "p.png: validation loss, lambada accuracy\n"
    assert imread(tmp_path / "p.png").std() > 0.05


@pytest.mark.parametrize(
    "words, message",
    [
        (["a.jsonl"], "give NAME=FILE"),
        (["a=a.jsonl", "a=a.jsonl"], "each NAME once"),
        (["a=none.jsonl"], "none.jsonl"),
        (["a=empty.jsonl"], "empty.jsonl: no evaluations"),
    ],
)
def test_metrics_that_cannot_be_drawn(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    metrics_of(tmp_path / "a.jsonl", 1.0)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SystemExit):
        plot_runs.main(["--metrics", *words])
    assert message in capsys.readouterr().err


def test_tables_are_drawn_again(runs, tmp_path, monkeypatch, capsys):
    """By the tool, where only the tables are left, and with equal differences."""
    monkeypatch.chdir(tmp_path)
    plot_runs.main(["--tb_dir", str(runs), "--csv_name", "val_"])
    first = capsys.readouterr().out.splitlines()[1:]
    (tmp_path / "uc_out_other.csv").write_text(",step,value\n0,1,2.0\n")
    saved, resumed = read_tables(tmp_path, "val_uc_out_")
    assert saved == RunCurve("tp2_pp2_dp2_sp1", list(range(1, 21)), list(map(loss, range(1, 21))))
    assert resumed.name == "tp2_pp2_dp1_sp1" and resumed.steps[0] == 11
    plot_runs.main(["--csv_dir", ".", "--csv_name", "val_", "--plot_name", "again.png"])
    assert capsys.readouterr().out.splitlines()[1:] == first
    assert imread(tmp_path / "again.png")[..., :3].std() > 0.05


@pytest.mark.parametrize(
    "text, message",
    [
        (",step,value\n0,1,x\n", "bad.csv: line 2: expected columns step and value"),
        ("a,b\n0,1\n", "bad.csv: line 2: expected columns step and value"),
        (",step,value\n", "bad.csv: has no rows"),
        (None, "no table uc_out_*.csv"),
    ],
)
def test_a_table_that_is_none(tmp_path, text, message):
    if text is not None:
        (tmp_path / "uc_out_bad.csv").write_text(text)
    with pytest.raises(ValueError) as caught:
        read_tables(tmp_path, "uc_out_")
    assert message in str(caught.value)
