"""A client of Google's Perspective API."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from megatron.apps.tasks.detoxify.config import KEY, ScorerConfig
from megatron.config import ConfigError

LONGEST = 20480
"""Bytes of a text; more are refused."""
TIMEOUT = 60.0
_ABOUT_THE_TEXT = frozenset(
    {"LANGUAGE_NOT_SUPPORTED_BY_ATTRIBUTE", "COMMENT_TOO_LONG", "COMMENT_EMPTY"}
)
_PASSING = frozenset({408, 429, 500, 502, 503, 504})


class PerspectiveError(ValueError):
    """The service refused a request, or could not be reached; the message has its reason."""


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
    """The service at an address; threads may share it."""

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
        PerspectiveError if it refuses the request, or fails again and again."""
        return [self._score(text) for text in texts]

    def _score(self, text: str) -> dict[str, float] | None:
        asked = {
            "comment": {"text": shortened(text)},
            "requestedAttributes": {name.upper(): {} for name in self.attributes},
            "spanAnnotations": False,
            "languages": ["en"],
        }
        answer = self._answer(json.dumps(asked).encode())
        if answer is None:
            return None
        try:
            found = answer["attributeScores"]
            return {n: found[n.upper()]["summaryScore"]["value"] for n in self.attributes}
        except (KeyError, TypeError):
            raise PerspectiveError(
                f"--api-url {self.url} answered without a score of each attribute: "
                f"{json.dumps(answer)[:200]}"
            ) from None

    def _answer(self, body: bytes) -> Any:
        for attempt in range(self.retries + 1):
            self.pace.wait()
            pause = 2.0**attempt
            try:
                return json.loads(self._sent(body))
            except urllib.error.HTTPError as error:
                with error:
                    said = error.read().decode("utf-8", "replace")
                if error.code == 400 and _reasons(said) & _ABOUT_THE_TEXT:
                    return None
                problem = f"{error.code} {_message(said) or error.reason}"
                if error.code not in _PASSING:
                    raise PerspectiveError(
                        f"--api-url {self.url} refused a request: {problem}; check --api-key "
                        f"({KEY}) and --attributes"
                    ) from None
                pause = _seconds(error.headers.get("Retry-After"), pause)
            except (OSError, HTTPException, ValueError) as error:
                problem = str(error) or type(error).__name__
            if attempt < self.retries:
                self.pace.sleep(pause)
        raise PerspectiveError(
            f"--api-url {self.url} failed {self.retries + 1} times, the last with: {problem}; what "
            "was scored is kept, and the same command continues"
        )

    def _sent(self, body: bytes) -> bytes:
        # The key is no part of the address, which messages show.
        headers = {"Content-Type": "application/json", "X-Goog-Api-Key": self.key}
        request = urllib.request.Request(self.url, body, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return bytes(answer.read())


def shortened(text: str) -> str:
    """The beginning of a text that the service takes, in whole characters."""
    return text.encode("utf-8", "replace")[:LONGEST].decode("utf-8", "ignore")


def _error(said: str) -> dict[str, Any]:
    try:
        found = json.loads(said)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _message(said: str) -> str:
    return str(_error(said).get("message", ""))


def _reasons(said: str) -> set[str]:
    details = _error(said).get("details", [])
    return {str(each.get("errorType")) for each in details if isinstance(each, dict)}


def _seconds(text: str | None, otherwise: float) -> float:
    return float(text) if text is not None and text.isdigit() else otherwise
