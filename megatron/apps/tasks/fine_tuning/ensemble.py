"""Predictions of several models as one: the mean of their probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.serialization import safe_globals

from megatron.config import ConfigError
from megatron.config.flags import SHARE, option
from megatron.config.output import check_output
from megatron.util.errors import one_line
from megatron.util.files import write_whole
from megatron.util.json_text import parse_json
from megatron.util.progress import say

_ARRAYS: list[Any] = [
    *(np.ndarray, np.dtype, np.dtypes.Float64DType, np.dtypes.Float32DType, np.dtypes.Int64DType),
    (np.empty(0).__reduce__()[0], "numpy._core.multiarray._reconstruct"),
    (np.empty(0).__reduce__()[0], "numpy.core.multiarray._reconstruct"),
]
"""Classes and functions that make NumPy's arrays of a file, by NumPy 2 and 1."""


class PredictedSet(NamedTuple):
    """Class probabilities of the N examples of a dataset, [N, C], which sum to 1 per model; the
    right classes, -1 if unknown, [N]; and the names of the classes."""

    probabilities_NC: npt.NDArray[np.float64]
    labels_N: npt.NDArray[np.int64]
    identities: list[str]
    words: list[str]


@dataclass(frozen=True)
class EnsembleConfig:
    """Ensemble: predictions of several models, averaged."""

    paths: tuple[str, ...] = option(())
    """Folders, each with the file of predictions of a model."""
    outdir: str | None = option(None)
    """Folder for the results: NAME/FILE.tsv for each data set, with columns id and label."""
    prediction_name: str = option("test_predictions.pt")
    """Name of the files: .pt of Megatron-LM, or .jsonl, the --predictions of tasks/main.py."""
    eval: bool = option(False)
    """Print the accuracy of each data set and of all."""
    calc_threshold: bool = option(False)
    """Predict the last of two classes from the threshold, out of 100, with the best accuracy."""
    one_threshold: bool = option(False)
    """One threshold of --calc-threshold for all data sets."""
    threshold: tuple[float, ...] = option((), bounds=SHARE)
    """Probability from which on the last of two classes is predicted: of each data set, or one."""
    labels: tuple[str, ...] = option((), derived="the numbers or words in the files")
    """Words for the classes."""

    def __post_init__(self) -> None:
        """Raises ConfigError if flags are missing or contradict each other."""
        if not self.paths:
            raise ConfigError("--paths is missing: folders with predictions")
        if self.outdir is None:
            raise ConfigError("--outdir is missing: the folder for the results")
        if self.calc_threshold and self.threshold:
            raise ConfigError("--calc-threshold and --threshold: give one of them")
        if self.one_threshold and not self.calc_threshold:
            raise ConfigError("--one-threshold needs --calc-threshold")
        if any(not 0 <= value <= 1 for value in self.threshold):
            shown = " ".join(f"{value:g}" for value in self.threshold)
            raise ConfigError(f"--threshold {shown}: each must be in [0, 1]")


def run_ensemble(config: EnsembleConfig) -> None:
    """Writes the predictions. Raises ConfigError or ValueError if a file is missing, damaged
    or of other examples, or a flag does not fit the files."""
    sets = averaged(config)
    thresholds = _thresholds(config, sets)
    right = count = 0
    for name, threshold in zip(sets, thresholds, strict=True):
        predicted = sets[name]
        chosen_N = choices(predicted.probabilities_NC, threshold)
        if config.eval:
            known = _with_labels(predicted, name, "--eval")
            equal = int((chosen_N == known).sum())
            right, count = right + equal, count + len(known)
            say(f"{name}: {equal} / {len(known)} = {equal / max(len(known), 1):.6f}")
        pairs = zip(predicted.identities, chosen_N, strict=True)
        lines = [f"{identity}\t{predicted.words[c]}" for identity, c in pairs]
        path = Path(str(config.outdir)) / name / f"{Path(config.prediction_name).stem}.tsv"
        check_output("--outdir", path)
        write_whole(path, "\n".join(["id\tlabel", *lines, ""]).encode())
        say(f"{path}: {len(lines)} predictions of {len(config.paths)} models")
    if config.eval:
        say(f"all: {right} / {count} = {right / max(count, 1):.6f}")


def averaged(config: EnsembleConfig) -> dict[str, PredictedSet]:
    """The mean of the models' probabilities, by data set."""
    paths = [Path(folder) / config.prediction_name for folder in config.paths]
    models = [_read(path) for path in paths]
    sets = models[0]
    for path, others in zip(paths, models, strict=True):
        if others.keys() != sets.keys():
            raise ConfigError(
                f"{path} has the data sets {', '.join(others)}; that of {config.paths[0]} has "
                f"{', '.join(sets)}"
            )
        for name, other in others.items():
            if (other.identities, other.words) != (sets[name].identities, sets[name].words):
                raise ConfigError(f"{path}: {name} has other examples than in {config.paths[0]}")
    means = {}
    for name, each in sets.items():
        if len(config.labels) not in (0, len(each.words)):
            shown = " ".join(config.labels)
            raise ConfigError(f"--labels {shown}: {name} has {len(each.words)} classes")
        shares = [model[name].probabilities_NC / len(models) for model in models]
        words = list(config.labels) or each.words
        means[name] = each._replace(probabilities_NC=sum(shares[1:], shares[0]), words=words)
    return means


def choices(
    probabilities_NC: npt.NDArray[np.float64], threshold: float | None
) -> npt.NDArray[np.int64]:
    """The most probable class of each example, or the last of two where its probability is at least
    the threshold."""
    if threshold is None:
        return probabilities_NC.argmax(axis=1)
    return (probabilities_NC[:, -1] >= threshold).astype(np.int64)


def _thresholds(config: EnsembleConfig, sets: dict[str, PredictedSet]) -> list[float | None]:
    if not config.calc_threshold and not config.threshold:
        return [None] * len(sets)
    for name, each in sets.items():
        if len(each.words) != 2:
            raise ConfigError(f"{name} has {len(each.words)} classes; a threshold is for two")
    if config.threshold:
        if len(config.threshold) not in (1, len(sets)):
            shown = " ".join(f"{value:g}" for value in config.threshold)
            raise ConfigError(f"--threshold {shown}: there are {len(sets)} data sets; give as many")
        return [*config.threshold] * (len(sets) // len(config.threshold))
    known = [_with_labels(each, name, "--calc-threshold") for name, each in sets.items()]
    values = [each.probabilities_NC for each in sets.values()]
    if config.one_threshold:
        known, values = [np.concatenate(known)] * len(sets), [np.concatenate(values)] * len(sets)
    best = [_best(*pair) for pair in zip(values, known, strict=True)]
    say("thresholds: " + ", ".join(f"{n} {b:g}" for n, b in zip(sets, best, strict=True)))
    return [*best]


def _best(probabilities_NC: npt.NDArray[np.float64], labels_N: npt.NDArray[np.int64]) -> float:
    """The threshold of the best accuracy, the first of equal ones."""
    trials = [step / 100 for step in range(100)]
    return max(trials, key=lambda t: (choices(probabilities_NC, t) == labels_N).mean())


def _with_labels(predicted: PredictedSet, name: str, flag: str) -> npt.NDArray[np.int64]:
    if (predicted.labels_N < 0).any():
        raise ConfigError(f"{flag}: {name} has examples without a label; leave the flag out")
    return predicted.labels_N


def _read(path: Path) -> dict[str, PredictedSet]:
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; --prediction-name is its name")
    if path.suffix == ".jsonl":
        return _of_lines(path)
    try:
        with safe_globals(_ARRAYS):
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        first = one_line(error).partition(". ")[0] or "it ends too early"
        raise ConfigError(f"{path} is not a file of torch.save with numbers: {first}") from None
    try:
        return _by_name([(str(name), _of_lists(*lists)) for name, lists in content])
    except (TypeError, ValueError) as error:
        form = "a list of (name, (probabilities, labels, ids))"
        raise ConfigError(f"{path}: expected {form} ({error})") from None


def _by_name(pairs: Sequence[tuple[str, PredictedSet]]) -> dict[str, PredictedSet]:
    """The sets by their names, which are names of folders. Raises ValueError if there are no sets,
    or a name is not such or occurs twice."""
    if not pairs:
        raise ValueError("there are no data sets")
    for name, each in pairs:
        if not set(Path(name).parts).isdisjoint({"..", "/", "."}) or not Path(name).parts:
            raise ValueError(f"data set {name!r}: its name cannot be that of a folder")
        if not np.isfinite(each.probabilities_NC).all():
            raise ValueError(f"data set {name} has a probability that is not finite")
    if len(sets := dict(pairs)) < len(pairs):
        raise ValueError("two data sets have the same name")
    return sets


def _of_lists(probabilities: Any, labels: Any, identities: Any) -> PredictedSet:
    values_NC, labels_N = np.asarray(probabilities, np.float64), np.asarray(labels, np.int64)
    names = [str(int(each)) for each in np.asarray(identities).tolist()]
    if values_NC.ndim != 2 or not values_NC.size or labels_N.shape != (len(values_NC),):
        raise ValueError(f"probabilities {values_NC.shape} and labels {labels_N.shape}")
    if len(names) != len(values_NC):
        raise ValueError(f"{values_NC.shape} probabilities for {len(names)} examples")
    return PredictedSet(values_NC, labels_N, names, [str(c) for c in range(values_NC.shape[1])])


def _of_lines(path: Path) -> dict[str, PredictedSet]:
    """The sets of a file that tasks/main.py has written."""
    rows: dict[str, list[Any]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        where = f"{path}, line {number}"
        row = parse_json(line, where)
        logs = row.get("log_probabilities") if isinstance(row, dict) else None
        if not isinstance(logs, dict) or not logs:
            raise ConfigError(f"{where} has no log_probabilities of classes")
        if not all(type(value) in (int, float) for value in logs.values()):
            raise ConfigError(f"{where}: each of log_probabilities must be a number")
        for key in ("set", "id"):
            if not isinstance(row.get(key), str | int):
                raise ConfigError(f'{where} has no "{key}", a text or a number')
        rows.setdefault(str(row["set"]), []).append(row)
    try:
        return _by_name([(name, _of_rows(each)) for name, each in rows.items()])
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _of_rows(rows: Sequence[dict[str, Any]]) -> PredictedSet:
    words = list(rows[0]["log_probabilities"])
    logs = [[row["log_probabilities"].get(word, -np.inf) for word in words] for row in rows]
    numbers = {word: number for number, word in enumerate(words)}
    labels_N = np.array([numbers.get(str(row.get("label")), -1) for row in rows], np.int64)
    return PredictedSet(np.exp(np.array(logs)), labels_N, [str(row["id"]) for row in rows], words)
