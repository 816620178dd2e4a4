"""Mean probabilities of several models, against NumPy's own."""

import numpy as np
import pytest
import torch
from tool_modules import load_program

from megatron.apps.tasks.fine_tuning.ensemble import EnsembleConfig, run_ensemble
from megatron.apps.tasks.fine_tuning.examples import LabelledExample
from megatron.apps.tasks.fine_tuning.scores import chosen, write_predictions
from megatron.config import ConfigError

SETS = {"dev": 40, "other": 25}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of two models, their probabilities and the labels by data set."""
    draw, folders = np.random.default_rng(0), []
    labels = {name: (draw.random(count) > 0.4).astype(int) for name, count in SETS.items()}
    each = [{n: draw.dirichlet([1, 1], count) for n, count in SETS.items()} for _ in range(2)]
    for number, probabilities in enumerate(each):
        folder = tmp_path_factory.mktemp(f"model-{number}")
        rows = [
            (name, (values.tolist(), labels[name].tolist(), list(range(len(values)))))
            for name, values in probabilities.items()
        ]
        torch.save(rows, folder / "test_predictions.pt")
        lines = {
            name: chosen(
                [LabelledExample((), int(label), str(n)) for n, label in enumerate(labels[name])],
                ["0", "1"], np.log(values),
            )
            for name, values in probabilities.items()
        }  # fmt: skip
        write_predictions(folder / "predictions.jsonl", lines)
        folders.append(str(folder))
    return folders, each, labels


def ensemble(models, out, **others):
    run_ensemble(EnsembleConfig(paths=tuple(models[0]), outdir=str(out), **others))


def labels_of(out, name, file="test_predictions"):
    first, *lines = (out / name / f"{file}.tsv").read_text().splitlines()
    assert first == "id\tlabel"
    ids, words = zip(*(line.split("\t") for line in lines), strict=True)
    assert ids == tuple(map(str, range(SETS[name])))
    return np.array(words)


@pytest.mark.parametrize("file", ["test_predictions.pt", "predictions.jsonl"])
def test_the_mean_decides(file, models, tmp_path, capsys):
    ensemble(models, tmp_path, eval=True, prediction_name=file)
    out, right = capsys.readouterr().out, 0
    _, (first, second), labels = models
    for name in SETS:
        best = ((first[name] + second[name]) / 2).argmax(1)
        assert (labels_of(tmp_path, name, file.split(".")[0]) == best.astype(str)).all()
        right += (best == labels[name]).sum()
        assert f"{name}: {(best == labels[name]).sum()} / {SETS[name]} = " in out
    assert f"all: {right} / 65 = {right / 65:.6f}" in out


@pytest.mark.parametrize("one", [True, False])
def test_the_threshold_with_the_best_accuracy(one, models, tmp_path, capsys):
    ensemble(models, tmp_path, calc_threshold=True, one_threshold=one, labels=("no", "yes"))
    _, (first, second), labels = models
    last = {name: (first[name] + second[name])[:, 1] / 2 for name in SETS}
    out = capsys.readouterr().out
    groups = [list(SETS)] if one else [[name] for name in SETS]
    for names in groups:
        values = np.concatenate([last[name] for name in names])
        known = np.concatenate([labels[name] for name in names])
        accuracies = [((values >= step / 100) == known).mean() for step in range(100)]
        best = int(np.argmax(accuracies)) / 100
        for name in names:
            assert f"{name} {best:g}" in out
            assert ((labels_of(tmp_path, name) == "yes") == (last[name] >= best)).all()


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"prediction_name": "x.pt"}, "x.pt: there is no such file"),
        ({"labels": ("a",)}, "--labels a: dev has 2 classes"),
        ({"threshold": (0.1, 0.2, 0.3)}, "there are 2 data sets"),
        ({"threshold": (1.5,)}, r"--threshold 1.5: each must be in \[0, 1\]"),
        ({"one_threshold": True}, "--one-threshold needs --calc-threshold"),
        ({"outdir": None}, "--outdir is missing"),
        ({"paths": ()}, "--paths is missing"),
    ],
)
def test_what_does_not_fit_is_named(others, said, models, tmp_path):
    values = {"paths": tuple(models[0]), "outdir": str(tmp_path)} | others
    with pytest.raises(ConfigError, match=said):
        run_ensemble(EnsembleConfig(**values))


def test_other_examples_and_other_content_are_named(models, tmp_path):
    rows = torch.load(f"{models[0][1]}/test_predictions.pt")
    (name, (values, labels, ids)), second = rows
    for content, said in (
        ([(name, (values, labels, ids[::-1])), second], "dev has other examples"),
        ([second], "has the data sets other; that of"),
        ([(name, (values[1:], labels, ids)), second], "expected a list of"),
        ({"a": 1}, "expected a list of"),
        ([], "there are no data sets"),
        ([(name, ([], [], []))], "expected a list of"),
        ([second, second], "two data sets have the same name"),
        ([("../x", second[1])], "data set '../x': its name cannot be that of a folder"),
        ([(name, ([[0.5, float("nan")]], [1], [0]))], "dev has a probability that is not finite"),
    ):
        torch.save(content, tmp_path / "test_predictions.pt")
        with pytest.raises(ConfigError, match=said):
            run_ensemble(EnsembleConfig(paths=(models[0][0], str(tmp_path)), outdir=str(tmp_path)))


def test_a_file_that_is_not_of_torch_is_named(tmp_path):
    (tmp_path / "test_predictions.pt").write_bytes(b"no pickle")
    with pytest.raises(ConfigError, match=r"test_predictions\.pt is not a file of torch\.save"):
        run_ensemble(EnsembleConfig(paths=(str(tmp_path),), outdir=str(tmp_path)))


def test_the_program_ends_with_status_2(tmp_path, monkeypatch, capsys):
    program = load_program("tasks/ensemble_classifier.py")
    monkeypatch.setattr("sys.argv", ["ensemble_classifier.py", "--paths", "no", "--outdir", "o"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2 and "no/test_predictions.pt" in capsys.readouterr().err


def test_arrays_are_read_as_lists_are(models, tmp_path, capsys):
    rows = torch.load(f"{models[0][0]}/test_predictions.pt")
    arrays = [(name, tuple(map(np.asarray, lists))) for name, lists in rows]
    torch.save(arrays, tmp_path / "test_predictions.pt")
    for number, folder in enumerate((models[0][0], tmp_path)):
        run_ensemble(EnsembleConfig(paths=(str(folder),), outdir=str(tmp_path / f"{number}")))
    for name in SETS:
        first, second = (labels_of(tmp_path / f"{number}", name) for number in range(2))
        assert (first == second).all()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"\xff", "line 1 is not valid JSON: byte 0 is not UTF-8"),
        (b'{"set": "dev", "id": 1, "log_probabilities": {}}', "line 1 has no log_probabilities"),
        (b'{"set": "dev", "id": 1, "log_probabilities": {"a": null}}', "must be a number"),
        (b'{"set": "dev", "log_probabilities": {"a": -1}}', 'line 1 has no "id"'),
        (b'{"id": 1, "log_probabilities": {"a": -1}}', 'line 1 has no "set"'),
        (b"", "there are no data sets"),
    ],
)
def test_damaged_lines_are_named(line, said, tmp_path):
    (tmp_path / "p.jsonl").write_bytes(line)
    config = EnsembleConfig(paths=(str(tmp_path),), outdir="out", prediction_name="p.jsonl")
    with pytest.raises(ValueError, match=f"p.jsonl.*{said}"):
        run_ensemble(config)
