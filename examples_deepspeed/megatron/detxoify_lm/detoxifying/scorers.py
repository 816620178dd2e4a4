"""Scorers of texts: Google's Perspective API, a classifier, a command, a function."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pkgutil import resolve_name
from typing import Any

from megatron.config import ConfigError
from megatron.config.flags import POSITIVE, option

ATTRIBUTES = (
    "toxicity",
    "severe_toxicity",
    "sexually_explicit",
    "threat",
    "profanity",
    "identity_attack",
)
URL = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
KEY, SCORER = "PERSPECTIVE_API_KEY", "DETOXIFY_SCORER"
"""Environment variables."""
LONGEST = 20480
"""Bytes of a text for Perspective API; more are refused."""
_TIMEOUT_SECONDS = 60.0
_ABOUT_THE_TEXT = {"LANGUAGE_NOT_SUPPORTED_BY_ATTRIBUTE", "COMMENT_TOO_LONG", "COMMENT_EMPTY"}
_TRIED_AGAIN = {408, 429, 500, 502, 503, 504}

Scores = Mapping[str, float]
"""From 0 to 1, by attribute."""


@dataclass(frozen=True)
class ScorerConfig:
    """Scorer: what says how toxic a text is."""

    scorer: str | None = option(None, derived=f"the environment variable {SCORER}, or perspective")
    """perspective (Google's Perspective API), profanity-check (the package alt-profanity-check,
    here), or MODULE:FUNCTION, which gets a list of texts and returns a score for each: a number
    from 0 to 1, or attributes with their scores, toxicity among them."""
    scorer_command: str | None = option(None)
    """Instead of --scorer a command that reads a text from each line of its input (line breaks in
    texts are spaces) and prints a line for each: a number from 0 to 1, or a JSON object of
    attributes."""
    workers: int = option(1, bounds=POSITIVE)
    """Requests to Perspective API under way at a time, or processes of --scorer-command."""
    api_key: str | None = option(None, derived=f"the environment variable {KEY}")
    """Key of Perspective API."""
    api_url: str = option(URL)
    """Address of Perspective API, or of a service that answers as it does."""
    attributes: tuple[str, ...] = option(ATTRIBUTES)
    """Attributes that are asked of Perspective API; toxicity must be among them."""
    queries_per_second: float = option(1.0)
    """Most requests a second; Google gives 1, and more on request."""
    retries: int = option(8, bounds=POSITIVE)
    """How often a request is made again that fails for reasons that may pass, such as too many
    requests; with pauses of 1, 2, 4 ... seconds, or those that the answer asks for."""


class ScorerError(ValueError):
    """A scorer failed or refused, or what it said is not a score for each text; the message names
    it and its reason."""


def is_score(value: Any) -> bool:
    """True for a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


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
        scores = list(self.score(texts))
        if len(scores) != len(texts):
            raise ScorerError(f"{self.name} gave {len(scores)} scores for {len(texts)} texts")
        return [self._checked(score, text) for score, text in zip(scores, texts, strict=True)]

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
    scorer = config.scorer or os.environ.get(SCORER) or "perspective"
    name = f"--scorer {scorer}"
    if scorer == "perspective":
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
            "run pip install -e '.[detoxify]' in the checkout"
        ) from None
    # Distances from the boundary become probabilities, which may leave the interval by rounding.
    return [min(max(float(value), 0.0), 1.0) for value in predict_prob(list(texts))]


def run_lines(name: str, words: Sequence[str], texts: Sequence[str]) -> list[Any]:
    """Runs a command on lines of text; what it prints, a value a line. Raises ScorerError if it
    cannot start, fails, or prints anything but numbers and JSON objects."""
    lines = "".join(" ".join(text.split()) + "\n" for text in texts)
    try:
        done = subprocess.run(
            words, input=lines, capture_output=True, text=True, encoding="utf-8", check=False
        )
    except OSError as error:
        raise ScorerError(f"{name} does not start: {error}") from None
    except UnicodeDecodeError as error:
        raise ScorerError(f"{name} printed what is not UTF-8: {error}") from None
    if done.returncode:
        *_, said = ["no message", *done.stderr.strip().splitlines()]
        raise ScorerError(f"{name} failed with exit status {done.returncode}: {said}")
    scores = []
    for number, line in enumerate(done.stdout.splitlines(), 1):
        try:
            scores.append(json.loads(line))
        except ValueError:
            raise ScorerError(
                f"{name} printed {line!r:.60} in line {number}, not a number or a JSON object; "
                "messages belong on standard error"
            ) from None
    return scores


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


@dataclass
class Pace:
    """Lets requests of all threads begin at most at a rate."""

    per_second: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _next: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self) -> None:
        """Returns when the next request may begin."""
        with self._lock:
            now = self.clock()
            begin = max(now, self._next)
            self._next = begin + 1 / self.per_second
        if begin > now:
            self.sleep(begin - now)


@dataclass(frozen=True)
class Perspective:
    """Perspective API, or a service like it, at an address; threads may share it."""

    url: str
    key: str
    attributes: Sequence[str]
    retries: int
    pace: Pace

    @classmethod
    def of(cls, config: ScorerConfig) -> Perspective:
        """Raises ConfigError if the key is missing, or a flag is wrong."""
        key = config.api_key or os.environ.get(KEY)
        if not key:
            raise ConfigError(
                f"--scorer perspective needs a key: set {KEY} or give --api-key; --scorer "
                "profanity-check needs none"
            )
        if "toxicity" not in config.attributes:
            raise ConfigError(
                f"--attributes {' '.join(config.attributes)}: toxicity must be among them"
            )
        if not config.queries_per_second > 0:
            raise ConfigError(f"--queries-per-second {config.queries_per_second} must be positive")
        if not config.api_url.startswith(("http://", "https://")):
            raise ConfigError(f"--api-url {config.api_url} must begin with https:// or http://")
        pace = Pace(config.queries_per_second)
        return cls(config.api_url, key, config.attributes, config.retries, pace)

    def scores(self, texts: Sequence[str]) -> list[dict[str, float] | None]:
        """Scores of each text by attribute; None for one that the service does not score. Raises
        ScorerError if it refuses the request, or fails again and again."""
        return [self._score(text) for text in texts]

    def _score(self, text: str) -> dict[str, float] | None:
        request = {
            "comment": {"text": shortened(text)},
            "requestedAttributes": {name.upper(): {} for name in self.attributes},
            "spanAnnotations": False,
            "languages": ["en"],
        }
        answer = self._answer(json.dumps(request).encode())
        if answer is None:
            return None
        try:
            attributes = answer["attributeScores"]
            return {n: attributes[n.upper()]["summaryScore"]["value"] for n in self.attributes}
        except (KeyError, TypeError):
            raise ScorerError(
                f"--api-url {self.url} answered without a score of each attribute: "
                f"{json.dumps(answer)[:200]}"
            ) from None

    def _answer(self, body: bytes) -> Any:
        # The key is no part of the address, which messages show.
        headers = {"Content-Type": "application/json", "X-Goog-Api-Key": self.key}
        request = urllib.request.Request(self.url, body, headers)
        for attempt in range(self.retries + 1):
            self.pace.wait()
            pause = 2.0**attempt
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                message, reasons = _refusal(error)
                if error.code == 400 and reasons & _ABOUT_THE_TEXT:
                    return None
                problem = f"{error.code} {message or error.reason}"
                if error.code not in _TRIED_AGAIN:
                    raise ScorerError(
                        f"--api-url {self.url} refused a request: {problem}; check --api-key "
                        f"({KEY}) and --attributes"
                    ) from None
                seconds = error.headers.get("Retry-After")
                pause = float(seconds) if seconds is not None and seconds.isdigit() else pause
            except (OSError, HTTPException, ValueError) as error:
                problem = str(error) or type(error).__name__
            if attempt < self.retries:
                self.pace.sleep(pause)
        raise ScorerError(
            f"--api-url {self.url} failed {self.retries + 1} times, the last with: {problem}; what "
            "was scored is kept, and the same command continues"
        )


def shortened(text: str) -> str:
    """The beginning of a text that the service takes, in whole characters."""
    return text.encode("utf-8", "replace")[:LONGEST].decode("utf-8", "ignore")


def _refusal(error: urllib.error.HTTPError) -> tuple[str, set[str]]:
    """The message of an answer, and the kinds of its errors."""
    with error:
        said = error.read().decode("utf-8", "replace")
    try:
        content = json.loads(said)["error"]
    except (ValueError, KeyError, TypeError):
        content = None
    if not isinstance(content, dict):
        return "", set()
    details = [each for each in content.get("details", []) if isinstance(each, dict)]
    return str(content.get("message", "")), {str(each.get("errorType")) for each in details}
