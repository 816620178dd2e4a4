"""What scores texts here: a classifier, a command, a function."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

from megatron.apps.tasks.detoxify.config import SCORER, ScorerConfig
from megatron.apps.tasks.detoxify.perspective import Perspective
from megatron.apps.tasks.detoxify.rows import is_score
from megatron.config import ConfigError

Scores = Mapping[str, float]
"""From 0 to 1, by attribute."""
EXTRA, PERSPECTIVE = "detoxify", "perspective"


class ScorerError(ValueError):
    """A scorer failed, or what it said is not a score for each text; the message names it."""


@dataclass(frozen=True)
class Scorer:
    """A scorer of texts.

    Attributes:
        name: how flags name it, for messages and for what is kept of an interrupted run.
        score: gives a score for each text, or None for one that cannot be scored.
        batch: how many texts it gets at a time.
        workers: how many such calls there may be at a time.
    """

    name: str
    score: Callable[[Sequence[str]], Sequence[Any]]
    batch: int
    workers: int = 1

    def __call__(self, texts: Sequence[str]) -> list[Scores | None]:
        """The scores of texts, in their order. Raises ScorerError if there are others than one for
        each text, or one is not from 0 to 1; what else it raises are its own errors."""
        found = list(self.score(texts))
        if len(found) != len(texts):
            raise ScorerError(f"{self.name} gave {len(found)} scores for {len(texts)} texts")
        return [self._checked(score, text) for score, text in zip(found, texts, strict=True)]

    def _checked(self, score: Any, text: str) -> Scores | None:
        if score is None:
            return None
        by_name = score if isinstance(score, Mapping) else {"toxicity": score}
        if "toxicity" not in by_name or not all(map(is_score, by_name.values())):
            raise ScorerError(
                f"{self.name} gave {score!r:.80} for {text!r:.60}: a score is a number from 0 to "
                '1, or attributes with such numbers, "toxicity" among them'
            )
        return {name: float(value) for name, value in by_name.items()}


def open_scorer(config: ScorerConfig) -> Scorer:
    """The scorer that flags name. Raises ConfigError if it cannot be used."""
    if config.scorer_command is not None:
        if config.scorer is not None:
            raise ConfigError("--scorer and --scorer-command: give one of them")
        words = shlex.split(config.scorer_command)
        if not words:
            raise ConfigError("--scorer-command is empty; name a program")
        name = f"--scorer-command {config.scorer_command}"
        return Scorer(name, partial(run_lines, name, words), 1000, config.workers)
    scorer = config.scorer or os.environ.get(SCORER) or PERSPECTIVE
    name = f"--scorer {scorer}"
    if scorer == PERSPECTIVE:
        if config.attributes != ScorerConfig.attributes:
            name += f" --attributes {' '.join(config.attributes)}"
        return Scorer(name, Perspective.of(config).scores, 1, config.workers)
    if scorer == "profanity-check":
        return Scorer(name, profanity, 1000)
    if ":" not in scorer:
        raise ConfigError(f"{name}: perspective, profanity-check or MODULE:FUNCTION")
    try:
        function = resolve_name(scorer)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be imported: {error}; its folder must be in PYTHONPATH"
        ) from None
    return Scorer(name, partial(_called, name, function), 1000)


def profanity(texts: Sequence[str]) -> list[float]:
    """The probability that a text is profane, by alt-profanity-check's linear model. Raises
    ConfigError if that is not installed."""
    try:
        from profanity_check import predict_prob
    except ImportError:
        raise ConfigError(
            "--scorer profanity-check needs alt-profanity-check: "
            f"run pip install -e '.[{EXTRA}]' in the checkout"
        ) from None
    # Distances from the boundary become probabilities, which may leave the interval by rounding.
    return [min(max(float(value), 0.0), 1.0) for value in predict_prob(list(texts))]


def run_lines(name: str, words: Sequence[str], texts: Sequence[str]) -> list[Any]:
    """Runs a command on lines of text; what it prints, a value a line. Raises ScorerError if it
    cannot start, fails, or prints anything but numbers and JSON objects."""
    given = "".join(" ".join(text.split()) + "\n" for text in texts)
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, encoding="utf-8", check=False
        )
    except OSError as error:
        raise ScorerError(f"{name} does not start: {error}") from None
    except UnicodeDecodeError as error:
        raise ScorerError(f"{name} printed what is not UTF-8: {error}") from None
    if done.returncode:
        *_, said = ["no message", *done.stderr.strip().splitlines()]
        raise ScorerError(f"{name} failed with exit status {done.returncode}: {said}")
    found = []
    for number, line in enumerate(done.stdout.splitlines(), 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            raise ScorerError(
                f"{name} printed {line!r:.60} in line {number}, not a number or a JSON object; "
                "messages belong on standard error"
            ) from None
    return found


def _called(name: str, function: Callable[[list[str]], Sequence[Any]], texts: Sequence[str]) -> Any:
    try:
        return [_plain(score) for score in function(list(texts))]
    except Exception as error:  # whatever a user's function raises
        raise ScorerError(f"{name} failed: {type(error).__name__}: {error}") from error


def _plain(score: Any) -> Any:
    """numpy's and torch's numbers as Python's."""
    if isinstance(score, Mapping):
        return {name: _plain(value) for name, value in score.items()}
    return score.item() if hasattr(score, "item") else score
