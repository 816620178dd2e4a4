"""Environments, which respond to the model's turns within an episode.

An environment is a user-defined class with two methods:

    reset(prompt) -> messages or None              prompt.text, prompt.columns
    step(text) -> (messages, reward or None, done)

It runs in a confined process, like reward functions. Messages are tokenized in the prompts' format:
with a chat template, or as plain text. The model reads them, but does not train on them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.apps.reinforcement.episodes import Message, Prompt
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.rewards.keepers import Keepers, limits_of
from megatron.config import ConfigError, RunConfig
from megatron.features.instruction.columns import RecordFields
from megatron.features.instruction.conversations import ANSWER, Example, Turn, template_variables
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.flags import InstructionConfig
from megatron.tokenizer import Tokenizer


class Environments:
    """Environments of one rank, and the process that runs them.

    Attributes:
        failures: error messages of episodes that failed since the last scoring.
    """

    def __init__(
        self,
        options: ReinforcementConfig,
        encoder: ExampleEncoder,
        tokenizer: Tokenizer,
        ends: frozenset[int],
        keepers: Keepers,
    ) -> None:
        """Create the environments. Raises ConfigError if ``--environment`` is not a class in an
        existing Python file, FILE.py:CLASS."""
        assert options.environment is not None
        self.options, self._encoder, self._tokenizer = options, encoder, tokenizer
        self._ends, self._keepers = ends, keepers
        self.longest: int | None = None
        """Maximum number of tokens of a prompt with the environment's first messages; None if
        unlimited."""
        self.file, self.name = _named(options.environment)
        self.failures: list[str] = []
        self._numbers = itertools.count()

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer, ends: frozenset[int]) -> Environments:
        """Create the environments of a run. ``ends`` contains the tokens that end a turn. Raises
        ConfigError if the class cannot be loaded."""
        options = config.section(ReinforcementConfig)
        encoder = ExampleEncoder(config.section(InstructionConfig), tokenizer, config.tokenizer)
        keepers = Keepers(1, limits_of(options))
        environments = cls(options, encoder, tokenizer, ends, keepers)
        environments.longest = config.model.seq_length - options.max_completion_length
        answer = environments.ask()
        if problem := answer.get("failure"):
            raise ConfigError(f"--environment {options.environment} {problem}")
        return environments

    def ask(self, **arguments: Any) -> dict[str, Any]:
        """Send a request to the confined process and return its answer. Without arguments, only
        check that the class can be loaded."""
        request = {"kind": "call", "file": self.file, "function": self.name}
        return self._keepers.ask(request | ({"arguments": arguments} if arguments else {}))

    def begin(self, prompt: Prompt) -> Conversation:
        """Begin a new episode for a prompt."""
        return Conversation(self, prompt, f"{next(self._numbers)}")

    def first_tokens(self, prompt: Prompt, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a prompt followed by the environment's first messages. Raises
        ValueError if the prompt format cannot express these messages."""
        if isinstance(prompt.text, str):
            text = "".join(f"{message['content']}\n" for message in messages)
            return [*prompt.tokens.tolist(), *self._tokenizer.tokenize(text)]
        turns = (*_turns(prompt), *map(_turn, messages))
        (tokens,) = self._encoder.prompts([("environment", self._example(prompt, turns))])
        return tokens.tolist()

    def tokens(self, prompt: Prompt, turns: Sequence[Message]) -> list[int]:
        """Return the tokens that follow the model's last turn in ``turns``, up to the point
        where the model continues. Raises ValueError if the prompt format cannot express these
        messages."""
        whole = (*_turns(prompt), *map(_turn, turns))
        tokens = self._encoder.following(self._example(prompt, whole))
        return tokens[tokens[0] in self._ends :] if tokens else tokens

    @staticmethod
    def _example(prompt: Prompt, turns: Sequence[Turn]) -> Example:
        variables = template_variables(RecordFields(prompt.columns))
        is_text = isinstance(prompt.text, str) and not variables
        return Example(tuple(turns), is_text, variables)

    def close(self) -> None:
        """End the confined process."""
        self._keepers.close()


class Conversation:
    """Running episode; see :class:`~megatron.apps.reinforcement.rollout.Dialogue`.

    Attributes:
        prompt: the prompt, including the tokens of the environment's first messages.
        turns: messages after the prompt so far.
        reward: sum of the environment's rewards so far; NaN if the episode failed.
    """

    def __init__(self, environments: Environments, prompt: Prompt, name: str) -> None:
        self._environments, self._name = environments, name
        self.prompt, self._data = prompt, prompt
        self.turns: list[Message] = []
        self.reward = 0.0
        self._texts: list[str] = []
        self._first: list[Message] = []
        answer = self._step()
        if answer is not None and answer[0]:
            self._first = answer[0]
            self._begin_with(answer[0])

    def answered(self, text: str, room: int) -> Sequence[int] | None:
        """Send the model's turn to the environment. Return the tokens of its response, after which
        the model continues, or None at the end of the episode."""
        self._texts.append(text)
        self.turns.append({"role": ANSWER, "content": text})
        answer = self._step()
        if answer is None:
            return None
        messages, reward, done = answer
        self.reward += reward or 0.0
        self.turns += messages
        if done or not messages or len(self._texts) >= self._environments.options.max_turns:
            return None
        try:
            return self._environments.tokens(self._data, [*self._first, *self.turns])
        except ValueError as error:
            self._fail(str(error))
            return None

    def _begin_with(self, messages: list[Message]) -> None:
        """Append the environment's first messages to the prompt."""
        try:
            tokens = self._environments.first_tokens(self._data, messages)
        except ValueError as error:
            self._fail(str(error))
            return
        longest = self._environments.longest
        if longest is not None and len(tokens) > longest:
            self._fail(f"began with more than the {longest} tokens before --max-completion-length")
            return
        self.prompt = dataclasses.replace(self._data, tokens=np.array(tokens, np.int64))

    def _step(self) -> tuple[list[Message], float | None, bool] | None:
        prompt = self._data
        answer = self._environments.ask(
            episode=self._name,
            prompt=prompt.text if isinstance(prompt.text, str) else list(prompt.text),
            columns=dict(prompt.columns),
            texts=self._texts,
        )
        values = answer.get("values")
        if not isinstance(values, list) or len(values) != 3 or isinstance(values[1], str):
            wrong = f"returned {values[1]} instead of a number" if values else "no answer"
            self._fail(str(answer.get("failure", wrong)))
            return None
        return values[0], values[1], values[2]

    def _fail(self, message: str) -> None:
        self.reward = math.nan
        self._environments.failures.append(message)


def _named(text: str) -> tuple[str, str]:
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"--environment {text} must be FILE.py:CLASS")
    if not Path(file).is_file():
        raise ConfigError(f"--environment {text}: {file} is not a file")
    return str(Path(file).absolute()), name


def _turn(message: Message) -> Turn:
    known = ("role", "content")
    more = tuple((key, value) for key, value in message.items() if key not in known)
    return Turn(str(message.get("role", "user")), str(message["content"]), fields=more)


def _turns(prompt: Prompt) -> list[Turn]:
    if isinstance(prompt.text, str):
        return [Turn("user", prompt.text)]
    return [_turn(message) for message in prompt.text]
