"""Tables, JSON and pictures of results, and which checkpoints are evaluated."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from configs import run_config
from matplotlib.axes import Axes

from megatron.apps.tasks import config as task_config
from megatron.apps.tasks.config import checkpoints_in, wanted_checkpoints
from megatron.apps.tasks.fine_tuning.command import _finish
from megatron.apps.tasks.report import (
    EvaluatedModel,
    ModelResults,
    TaskResult,
    bits_per_byte,
    finish,
)
from megatron.checkpoint.files import CheckpointError
from megatron.config import CheckpointConfig

MODEL = EvaluatedModel.of(run_config(), Path("runs/global_step20"), 20)


def result(name: str, **metrics: float) -> TaskResult:
    return TaskResult(name, metrics, 1234, 4000, 0.5, details={"words": 99})


def test_bits_per_byte():
    """Those of a model that gives every byte the probability 1 / 8."""
    assert bits_per_byte(10 * math.log(1 / 8), 10) == pytest.approx(3, rel=1e-15)


def test_table_and_file_of_one_checkpoint(tmp_path, capsys):
    output = tmp_path / "new" / "results.json"
    results = [
        result("wikitext", perplexity=31.25, bits_per_byte=math.nan),
        result("lambada", accuracy=0.5),
    ]
    finish([ModelResults(MODEL, results)], str(output), tmp_path / "unused.png")
    assert capsys.readouterr().out.splitlines() == [
        "task      metric         value  examples  tokens/s",
        "--------  -------------  -----  --------  --------",
        "wikitext  perplexity     31.25     1,234     8,000",
        "          bits per byte    nan",
        "lambada   accuracy         0.5     1,234     8,000",
        "8,000 tokens in 1.0 s: 8,000 tokens/s",
    ]
    written = json.loads(output.read_text())
    assert written["versions"].keys() >= {"megatron-deepspeed", "python", "torch", "deepspeed"}
    (evaluation,) = written["evaluations"]
    layout = {"tensor": 1, "pipeline": 1, "data": 1, "sequence_parallel": False}
    assert evaluation["model"] == {
        "checkpoint": "runs/global_step20",
        "iteration": 20,
        "layout": layout | {"precision": "fp32"},
        "tokenizer": None,
    }
    assert evaluation["tasks"]["wikitext"] == {
        "metrics": {"perplexity": 31.25, "bits_per_byte": None},
        "examples": 1234,
        "tokens": 4000,
        "seconds": 0.5,
        "tokens_per_second": 8000.0,
        "words": 99,
    }
    assert list(output.parent.iterdir()) == [output]


def test_a_task_without_probabilities_has_no_speed(capsys):
    finish([ModelResults(MODEL, [TaskResult("NQ", {"top1": 0.5}, 8, 0, 0.5)])], None, None)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[2:] == [["NQ", "top1", "0.5", "8"]]


def test_table_and_picture_of_several_checkpoints(tmp_path, capsys, monkeypatch):
    drawn = []
    original = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda *a, **kw: drawn.append(a[1:]) or original(*a, **kw))
    evaluations = [
        ModelResults(
            EvaluatedModel.of(run_config(), Path(f"global_step{n}"), n),
            [result("wikitext", perplexity=90 / n, bits_per_byte=9 / n, token_ratio=1.5)],
        )
        for n in (5, 20)
    ]
    finish(evaluations, None, tmp_path / "plot.png")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:4]] == [
        ["5", "18", "1.8", "1.5"],
        ["20", "4.5", "0.45", "1.5"],
    ]
    assert drawn == [([5, 20], [1.8, 0.45])]
    assert (tmp_path / "plot.png").stat().st_size > 5000
    finish(evaluations, None, None)
    assert "curves" not in capsys.readouterr().out


@pytest.mark.parametrize("save", ["runs", None])
def test_a_fine_tuning_draws_next_to_its_checkpoints_alone(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = SimpleNamespace(config=run_config(checkpoint=CheckpointConfig(save=save)))
    epochs = [
        SimpleNamespace(iteration=n, sets=[SimpleNamespace(result=result("dev", accuracy=n / 9))])
        for n in (1, 2)
    ]
    (tmp_path / "runs").mkdir()
    _finish(SimpleNamespace(task="QQP", output=None), run, epochs, [None, None])
    found = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png")]
    assert found == (["runs/QQP.png"] if save else [])


def test_all_checkpoints_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(
        task_config, "locate_checkpoint", lambda path: None if "7" in path.name else path
    )
    for name in (
        "global_step10",
        "global_step9",
        "iter_0000100",
        "global_step7",
        "global_step8_universal",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "latest").write_text("global_step10")
    options = CheckpointConfig(load=str(tmp_path))
    found = [path.name for path in wanted_checkpoints(options, True)]
    assert found == ["global_step9", "global_step10", "iter_0000100"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ({}, "--all-iterations needs --load"),
        ({"load": "absent"}, "--load absent: no such folder; it must be the folder of a run"),
        ({"load": "x", "load_tag": "5"}, "--load-tag 5 contradicts --all-iterations"),
    ],
)
def test_no_checkpoints(flags, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints_in(CheckpointConfig(**flags))


def test_one_checkpoint():
    assert wanted_checkpoints(CheckpointConfig(), False) == [None]
    with pytest.raises(CheckpointError, match="--load absent: no such folder"):
        wanted_checkpoints(CheckpointConfig(load="absent"), False)
