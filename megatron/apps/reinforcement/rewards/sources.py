"""Reward sources of ``--reward-funcs``: Python functions, programs and built-in verifiers.

Each source scores episodes by sending requests to reward processes.
"""

from __future__ import annotations

import base64
import json
import math
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.apps.reinforcement.episodes import Episode
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.rewards import verifiers
from megatron.apps.reinforcement.rewards.keepers import Answer, Keepers
from megatron.config import ConfigError
from megatron.util.digests import digest

Reward = float | None | str
"""A reward: a number, None if the record has nothing to compare with, or a string with the message
of a failure."""
_AT_ONCE = 8
"""Number of completions per call of a function. If a call fails, its completions are retried one by
one, each with a separate time limit."""
_COMMAND = "command:"
_ANSWERS = ("answer", "solution", "ground_truth", "target")
_TESTS = ("tests", "test_code", "unit_tests")
_SCHEMAS = ("schema", "json_schema")
_OF_COLUMNS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "number": ("answer", _ANSWERS, "answer_column"),
    "exact": ("answer", _ANSWERS, "answer_column"),
    "accuracy_reward": ("solution", ("solution", *_ANSWERS), "answer_column"),
    "json_schema": ("schema", _SCHEMAS, "schema_column"),
    "code": ("tests", _TESTS, "tests_column"),
}
"""For each verifier that reads a column: the name of its argument, the default column names, and
the flag that sets another column."""
VERIFIERS = (*_OF_COLUMNS, "think_format_reward", "repetition_penalty_reward")


@dataclass(frozen=True)
class RewardSource(ABC):
    """Source of rewards.

    Attributes:
        name: name for logs and messages.
        identity: string that changes whenever the rewards of equal completions may change. None if
            it cannot be determined; rewards are then not cached.
    """

    name: str
    identity: str | None

    @abstractmethod
    def score(
        self, episodes: Sequence[Episode], keepers: Keepers, state: Mapping[str, Any]
    ) -> list[Reward]:
        """Return the rewards of episodes. ``state`` is the training progress, trl's
        ``trainer_state``."""

    def check(self, keepers: Keepers) -> str | None:
        """Return the reason why the source cannot be used, or None if it can."""
        return None


@dataclass(frozen=True)
class FunctionSource(RewardSource):
    """Reward source that calls a function in a Python file."""

    file: str
    function: str
    column: tuple[str, tuple[str, ...], str] | None = None
    """Column that a verifier reads: an entry of ``_OF_COLUMNS``, with the column name from a flag
    if given. None for functions that get all columns."""

    def check(self, keepers: Keepers) -> str | None:
        answer = keepers.ask(self._request())
        return answer.get("failure")

    def _request(self, **more: Any) -> dict[str, Any]:
        return {"kind": "call", "file": self.file, "function": self.function, **more}

    def score(
        self, episodes: Sequence[Episode], keepers: Keepers, state: Mapping[str, Any]
    ) -> list[Reward]:
        def ask(part: Sequence[Episode]) -> Answer:
            try:
                arguments = self._arguments(part, state)
            except ValueError as error:
                return {"failure": str(error)}
            return keepers.ask(self._request(arguments=arguments))

        parts = [episodes[n : n + _AT_ONCE] for n in range(0, len(episodes), _AT_ONCE)]
        answers = keepers.map(ask, parts)
        # Retry failed parts one completion at a time, so that a failing completion does not affect
        # the others.
        bad = [
            part
            for part, answer in zip(parts, answers, strict=True)
            if not self._is_answer(part, answer)
        ]
        single = [[episode] for part in bad if len(part) > 1 for episode in part]
        again = iter(keepers.map(ask, single))
        rewards: list[Reward] = []
        for part, answer in zip(parts, answers, strict=True):
            if self._is_answer(part, answer):
                rewards += [_number(value) for value in answer["values"]]
            elif len(part) == 1:
                rewards += _rewards(answer)
            else:
                rewards += [reward for _ in part for reward in _rewards(next(again))]
        return rewards

    @staticmethod
    def _is_answer(part: Sequence[Episode], answer: Answer) -> bool:
        values = answer.get("values")
        return isinstance(values, list) and len(values) == len(part)

    def _arguments(self, part: Sequence[Episode], state: Mapping[str, Any]) -> dict[str, Any]:
        if self.column is None:
            names = {name for episode in part for name in episode.prompt.columns}
            columns = {name: [e.prompt.columns.get(name) for e in part] for name in sorted(names)}
        else:
            columns = {self.column[0]: [_column(episode, self.column) for episode in part]}
        return {
            "prompts": [_prompt(episode) for episode in part],
            "completions": [_completion(episode) for episode in part],
            "completion_ids": [episode.tokens_L.tolist() for episode in part],
            "columns": columns,
            "state": dict(state),
        }


@dataclass(frozen=True)
class CodeSource(RewardSource):
    """Source that returns the fraction of a record's tests that the code in the completion
    passes."""

    column: tuple[str, tuple[str, ...], str]

    def score(
        self, episodes: Sequence[Episode], keepers: Keepers, state: Mapping[str, Any]
    ) -> list[Reward]:
        def ask(episode: Episode) -> Answer:
            try:
                value = _column(episode, self.column)
                if value is None:
                    return {"values": [None]}
                tests = verifiers.tests_of(value)
            except ValueError as error:
                return {"failure": str(error)}
            code = verifiers.code_of(verifiers.text_of(_completion(episode)))
            answer = keepers.ask({"kind": "code", "code": code, "tests": tests})
            passed = answer.get("passed")
            if not isinstance(passed, list) or not passed:
                return {"failure": answer.get("failure", "there are no tests")}
            return {"values": [sum(map(bool, passed)) / len(passed)]}

        return [reward for answer in keepers.map(ask, episodes) for reward in _rewards(answer)]


@dataclass(frozen=True)
class CommandSource(RewardSource):
    """Program that reads a JSON object with prompt, completion, completion_ids and the record's
    columns from its standard input, and prints a number, or a JSON object with the number as
    "reward"."""

    words: tuple[str, ...]

    def check(self, keepers: Keepers) -> str | None:
        if shutil.which(self.words[0]) is None:
            return f"{self.words[0]} is not a program"
        return None

    def score(
        self, episodes: Sequence[Episode], keepers: Keepers, state: Mapping[str, Any]
    ) -> list[Reward]:
        def ask(episode: Episode) -> Answer:
            task = {
                **episode.prompt.columns,
                "prompt": _prompt(episode),
                "completion": _completion(episode),
                "completion_ids": episode.tokens_L.tolist(),
            }
            request = {"kind": "run", "words": list(self.words), "input": json.dumps(task)}
            answer = keepers.ask(request)
            if "output" not in answer:
                return answer
            printed = base64.b64decode(answer["output"]).decode("utf-8", "replace").strip()
            try:
                value = json.loads(printed)
            except (ValueError, RecursionError):
                value = printed
            if isinstance(value, dict) and "reward" in value:
                value = value["reward"]
            if value is None or (isinstance(value, int | float)):
                return {"values": [value]}
            return {"failure": f"printed {printed[:60]!r} instead of a number"}

        return [reward for answer in keepers.map(ask, episodes) for reward in _rewards(answer)]


def _rewards(answer: Answer) -> list[Reward]:
    """Return a list with the reward, or failure message, in an answer about one completion."""
    values = answer.get("values")
    if isinstance(values, list) and len(values) == 1:
        return [_number(values[0])]
    return [str(answer.get("failure", "answered with something else than rewards"))]


def _number(value: Any) -> Reward:
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return number if math.isfinite(number) else f"returned {number} instead of a number"
    return f"returned {value} instead of a number"


def _prompt(episode: Episode) -> Any:
    text = episode.prompt.text
    return text if isinstance(text, str) else [dict(message) for message in text]


def _completion(episode: Episode) -> Any:
    """Return the completion as text or, for a conversation, as messages, as in trl."""
    if episode.turns:
        return [dict(message) for message in episode.turns]
    if isinstance(episode.prompt.text, str):
        return episode.text
    return [{"role": "assistant", "content": episode.text}]


def _column(episode: Episode, column: tuple[str, tuple[str, ...], str]) -> Any:
    """Return the value of a record's column. Raises ValueError if the record lacks the column."""
    _, names, flag = column
    columns = episode.prompt.columns
    name = next((name for name in names if name in columns), None)
    if name is None:
        raise ValueError(
            f"record {episode.prompt.number + 1} has no column {' or '.join(names)} (its columns: "
            f"{', '.join(columns) or 'none'}); --{flag.replace('_', '-')} names another"
        )
    return columns[name]


def sources_of(options: ReinforcementConfig) -> list[RewardSource]:
    """Return the sources of ``--reward-funcs``. Raises ConfigError if a source does not exist or is
    given twice."""
    sources = [_source(text, options) for text in options.reward_funcs]
    names = [source.name for source in sources]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ConfigError(f"--reward-funcs {' '.join(options.reward_funcs)}: {double} comes twice")
    return sources


def _source(text: str, options: ReinforcementConfig) -> RewardSource:
    flag = f"--reward-funcs {text}"
    if text.startswith(_COMMAND):
        try:
            words = tuple(shlex.split(text.removeprefix(_COMMAND)))
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}") from None
        if not words:
            raise ConfigError(f"{flag}: name a program, as in {_COMMAND}'python score.py'")
        return CommandSource(Path(words[0]).name, _identity(text, words), _absolute(words))
    if text in VERIFIERS:
        column = None
        if text in _OF_COLUMNS:
            argument, names, option = _OF_COLUMNS[text]
            named = getattr(options, option)
            column = argument, (names if named is None else (named,)), option
        identity = f"{text} {column} 1"
        if text == "code":
            assert column is not None
            return CodeSource(text, identity, column)
        return FunctionSource(text, identity, verifiers.__file__, text, column)
    file, _, function = text.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise ConfigError(
            f"{flag} must be FILE.py:FUNCTION, {_COMMAND}WORDS, or one of {', '.join(VERIFIERS)}"
        )
    path = Path(file).absolute()
    if not path.is_file():
        raise ConfigError(f"{flag}: {file} is not a file")
    identity = f"{path.name} {function} {digest(path.read_bytes())}"
    return FunctionSource(function, identity, str(path), function)


def _absolute(words: tuple[str, ...]) -> tuple[str, ...]:
    """Make paths to existing files in a command absolute, because the program runs in another
    folder."""
    return tuple(str(Path(word).absolute()) if Path(word).is_file() else word for word in words)


def _identity(text: str, words: tuple[str, ...]) -> str:
    """Return a string that identifies a command by its text and the contents of the files in it."""
    files = [Path(word) for word in words if Path(word).is_file()]
    return f"{text} {[digest(file.read_bytes()) for file in files]}"
