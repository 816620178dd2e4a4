"""Ensembles: average the predicted probabilities of several models."""

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
"""Classes and functions that unpickling NumPy arrays needs, for files of NumPy 2 and NumPy 1."""


class PredictedSet(NamedTuple):
    """Predictions for one dataset of N examples: class probabilities [N, C], which sum to 1 per
    example; the correct classes [N], -1 if unknown; the ids of the examples; and the names of the C
    classes."""

    probabilities_NC: npt.NDArray[np.float64]
    labels_N: npt.NDArray[np.int64]
    identities: list[str]
    words: list[str]


@dataclass(frozen=True)
class EnsembleConfig:
    """Ensemble: averaged predictions of several models."""

    paths: tuple[str, ...] = option(())
    """Folders, each containing one model's file of predictions."""
    outdir: str | None = option(None)
    """Folder to write the results to: NAME/FILE.tsv for each dataset, with the columns id and
    label."""
    prediction_name: str = option("test_predictions.pt")
    """Name of the prediction files, which are .pt files of Megatron-LM or .jsonl files that
    tasks/main.py wrote with --predictions."""
    eval: bool = option(False)
    """Print the accuracy on each dataset and over all datasets."""
    calc_threshold: bool = option(False)
    """For two classes: use the threshold on the probability of the last class, among 0, 0.01, ...,
    0.99, that gives the best accuracy."""
    one_threshold: bool = option(False)
    """With --calc-threshold: use one threshold for all datasets."""
    threshold: tuple[float, ...] = option((), bounds=SHARE)
    """For two classes: minimum probability at which the last class is predicted. Give one value per
    dataset, or one for all."""
    labels: tuple[str, ...] = option((), derived="the numbers or words in the files")
    """Names under which the classes are written."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a flag is missing or two flags contradict each other."""
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
    """Write the ensemble's predictions. Raises ConfigError or ValueError if a file is missing or
    damaged, if the files contain different examples, or if a flag does not fit the files."""
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
    """Return the models' averaged predictions for each dataset, by name. Raises ConfigError if the
    models' files differ in datasets, examples or classes."""
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
    """Return the predicted class of each example: the most probable one or, with a threshold for
    two classes, the last class if its probability is at least the threshold and the first
    otherwise."""
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
    """Return the threshold with the highest accuracy, the lowest one in case of a tie."""
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
    """Return the datasets by name. Raises ValueError if the list is empty, a name occurs twice or
    cannot be the name of a folder, or a probability is not finite."""
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
    """Return the datasets of a JSON lines file written by tasks/main.py."""
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
