"""Metrics against scikit-learn and scipy, printed lines, the order of epochs, the best of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from megatron.apps.tasks.fine_tuning.evaluation import EpochRecord, EpochRecords
from megatron.apps.tasks.fine_tuning.examples import LabelledExample
from megatron.apps.tasks.fine_tuning.scores import (
    SCORERS,
    Prediction,
    chosen,
    estimated,
    matthews,
    mean_loss,
    overall_line,
    pearson,
    set_line,
    spearman,
    write_predictions,
)
from megatron.apps.tasks.fine_tuning.task import ShuffledEpochs
from megatron.checkpoint.folder import tag
from megatron.config import ConfigError
from megatron.data.samples import RepeatedSamples
from megatron.features.older_checkpoints.retention import superseded


@pytest.mark.parametrize("labels", [2, 3])
def test_metrics_of_labels(labels):
    theirs = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    rng = np.random.default_rng(labels)
    for size in (1, 7, 300):
        wanted, found = rng.integers(labels, size=(2, size))
        predictions = [Prediction("", *pair) for pair in zip(found, wanted, strict=True)]
        accuracy = SCORERS["accuracy"](predictions).values["accuracy"]
        assert accuracy == theirs.accuracy_score(wanted, found)
        expected = theirs.matthews_corrcoef(wanted, found)
        assert matthews(found, wanted) == pytest.approx(expected, abs=1e-14)
        assert matthews(wanted, wanted) in (0.0, pytest.approx(1.0))
    assert matthews(np.array(["b", "a"]), np.array(["b", "b"])) == 0.0


def test_correlations():
    theirs = pytest.importorskip("scipy.stats", reason="needs scipy")
    rng = np.random.default_rng(0)
    found = rng.normal(size=400)
    wanted = np.round(found + rng.normal(size=400), 1)  # with equal values
    assert pearson(found, wanted) == pytest.approx(theirs.pearsonr(found, wanted)[0], abs=1e-14)
    assert spearman(found, wanted) == pytest.approx(theirs.spearmanr(found, wanted)[0], abs=1e-14)
    assert pearson(found, 2 * found + 1) == pytest.approx(1.0)
    assert math.isnan(pearson(found, np.ones(400))) and math.isnan(pearson(found[:1], found[:1]))


def test_predictions_and_their_losses(tmp_path):
    logits = np.array([[1.0, 3.0, 3.0], [1e4, 0.0, -1e4]])
    examples = [LabelledExample((), 2, "a"), LabelledExample((), None, "b")]
    found = chosen(examples, ("x", "y", "z"), logits)
    assert [(each.predicted, each.label) for each in found] == [("y", "z"), ("x", None)]
    expected = torch.nn.functional.cross_entropy(torch.tensor(logits[:1]), torch.tensor([2]))
    assert found[0].loss == pytest.approx(float(expected), rel=1e-14) and found[1].loss is None
    assert mean_loss(found) is None and mean_loss(found[:1]) == found[0].loss
    examples = [LabelledExample((), 2.5, "a"), LabelledExample((), 1.0, "b")]
    numbers = estimated(examples, np.array([[2.0], [0.5]]))
    assert [(each.predicted, each.loss) for each in numbers] == [(2.0, 0.25), (0.5, 0.25)]
    write_predictions(tmp_path / "new" / "p.jsonl", {"dev": found[:1], "test": numbers[:1]})
    rows = [json.loads(line) for line in (tmp_path / "new" / "p.jsonl").open()]
    assert rows[1] == {"set": "test", "id": "a", "prediction": 2.0, "label": 2.5}
    assert rows[0]["set"] == "dev" and math.fsum(
        map(math.exp, rows[0]["log_probabilities"].values())
    ) == pytest.approx(1)


def test_printed_lines():
    """The words that scripts look for, and where they count from them."""
    right, wrong = Prediction("1", "x", "x"), Prediction("2", "x", "y")
    scores = SCORERS["accuracy"]([right, right, wrong])
    line = set_line(0, "dev-matched", scores, 1.5)
    assert line == (
        " > |epoch: 0| metrics for dev-matched: correct / total = 2 / 3 = 66.6667 %, "
        "elapsed time (sec): 1.500"
    )
    words = line.split()
    assert words[words.index("dev-matched:") + 9] == "66.6667"
    line = overall_line(-1, scores)
    assert line == " >> |epoch: -1| overall: correct / total = 2 / 3 = 66.6667 %"
    assert line.split()[line.split().index("overall:") + 9] == "66.6667"
    both = [right, Prediction("2", "y", "y"), wrong]
    words = set_line(2, "dev", SCORERS["matthews"](both), 1.0).split()
    assert float(words[words.index("mcc") + 2]) == pytest.approx(0.5)
    numbers = [Prediction(str(n), float(n * n), float(n)) for n in range(4)]
    line = set_line(0, "dev", SCORERS["correlation"](numbers), 0.25)
    words = line.split()
    assert words[words.index("spearmanr") + 2] == "1.0" and words[-3:] == [
        "time",
        "(sec):",
        "0.250",
    ]
    scores = SCORERS["correlation"](numbers).values
    assert scores["correlation"] == (scores["pearson"] + scores["spearman"]) / 2


def test_the_order_of_epochs_is_that_of_torchs_sampler():
    samples = ShuffledEpochs(range(7), seed=11, count=25)
    found = [samples[number] for number in range(25)]
    for epoch in range(3):
        theirs = DistributedSampler(range(7), num_replicas=1, rank=0, seed=0)
        theirs.set_epoch(11 + epoch)
        assert found[7 * epoch : 7 * epoch + 7] == list(theirs)
    # Whatever was read before, such as after a restart or by another worker.
    assert [ShuffledEpochs(range(7), 11, 25)[n] for n in (24, 3, 13)] == [
        found[n] for n in (24, 3, 13)
    ]
    with pytest.raises(IndexError):
        samples[25]
    repeated = RepeatedSamples(range(3), 7)
    assert [repeated[number] for number in range(len(repeated))] == [0, 1, 2, 0, 1, 2, 0]


def records(path, *values):
    epochs = EpochRecords(path, writes=True)
    for epoch, value in enumerate(values):
        epochs.add(EpochRecord(epoch, 10 * epoch + 10, "accuracy", value, {"dev": {"loss": value}}))
    return epochs


def test_the_best_epoch_is_recorded_and_its_checkpoint_kept(tmp_path):
    epochs = records(tmp_path, 0.5, 0.7, 0.7, math.nan)
    assert epochs.best.epoch == 1
    content = json.loads((tmp_path / "best_epoch.json").read_text())
    assert (content["checkpoint"], content["value"]) == ("global_step20", 0.7)
    assert content["epochs"][3]["value"] is None
    for iteration in (10, 20, 30, 40):
        (tmp_path / tag(iteration)).mkdir()
        (tmp_path / tag(iteration) / "manifest.json").touch()
    names = [path.name for path in superseded(tmp_path, 40, 1, None)]
    assert names == ["global_step10", "global_step30"]


def test_a_restart_continues_the_record(tmp_path):
    records(tmp_path, 0.5, 0.7, 0.6)
    again = EpochRecords(tmp_path, writes=False)
    again.forget_after(20)
    assert [record.epoch for record in again.records] == [0, 1] and not again.has(2)
    assert again.best.value == 0.7
    (tmp_path / "best_epoch.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"best_epoch\.json cannot be read; delete it"):
        EpochRecords(tmp_path, writes=False)
    assert EpochRecords(None, writes=True).best is None


def test_a_restart_reads_correlations_that_are_not_numbers(tmp_path):
    records(tmp_path, math.nan, math.nan)
    again = EpochRecords(tmp_path, writes=True)
    assert math.isnan(again.best.value) and math.isnan(again.records[1].sets["dev"]["loss"])
    again.add(EpochRecord(2, 30, "accuracy", -0.5, {"dev": {"loss": 1.0}}))
    assert again.best.epoch == 2
    content = json.loads((tmp_path / "best_epoch.json").read_text())
    assert [each["value"] for each in content["epochs"]] == [None, None, -0.5]
