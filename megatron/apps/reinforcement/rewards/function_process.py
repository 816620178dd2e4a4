"""Confined process of a reward function or environment class in a Python file. It loads the file
once, and calls the function or class for each request."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any


def serve(file: str, name: str) -> None:
    """Read requests from standard input and write answers to descriptor 3, until the input ends.
    Messages are JSON objects, each preceded by its length in 8 bytes. A request with only a token
    asks whether the function was loaded."""
    # Keep the function's own input and output separate from the protocol.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(3)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number in (0, 3):
        os.dup2(nothing, number)
    sys.stdin = os.fdopen(0)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", errors="replace") for number in (1, 2))
    function: Callable[..., Any] | None = None
    answering: Callable[[Mapping[str, Any]], list[Any]] | None = None
    problem = ""
    try:
        function = load(file, name)
    except BaseException as error:
        problem = _said(error)
    while len(head := requests.read(8)) == 8:
        request = json.loads(requests.read(struct.unpack("<Q", head)[0]))
        token = request.pop("token")
        answer: dict[str, Any] = {"failure": problem} if problem else {}
        if function is not None and request:
            try:
                if answering is None:
                    answering = answering_of(function)
                answer = {"values": answering(request)}
            except BaseException as error:
                answer = {"failure": _said(error)}
        try:
            content = json.dumps({"token": token, **answer}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            content = json.dumps({"token": token, "failure": _said(error)}).encode()
        sys.stdout.flush()
        _write(answers, struct.pack("<Q", len(content)) + content)


def load(file: str, name: str) -> Callable[..., Any]:
    """Load a function from a Python file. Raises ImportError if the file does not define it."""
    sys.path.insert(0, os.path.dirname(file))
    spec = importlib.util.spec_from_file_location("reward_functions", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules["reward_functions"] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ImportError(f"{file} has no function {name}")
    result: Callable[..., Any] = function
    return result


class WrongAnswerError(Exception):
    """Raised if a function returned a value of the wrong form."""


def answering_of(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], list[Any]]:
    """Return a function that answers requests: with rewards or, if ``function`` is a class, with
    the responses of its environments."""
    return Episodes(function).step if isinstance(function, type) else partial(_called, function)


class Episodes:
    """Instances of an environment class, one for each running episode."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        self._kind = kind
        self._running: dict[str, tuple[Any, int]] = {}

    def step(self, request: Mapping[str, Any]) -> list[Any]:
        """Return messages, reward and end flag after the last of an episode's ``texts``, or the
        messages before the first turn if ``texts`` is empty. In a process that replaces a lost one,
        the environment replays the earlier texts."""
        texts, name = request["texts"], request["episode"]
        environment, known = self._running.get(name, (None, -1))
        answer: Any = None
        if known < 0:
            environment = self._kind()
            prompt = SimpleNamespace(text=request["prompt"], columns=request["columns"])
            answer, known = (environment.reset(prompt), None, False), 0
        while known < len(texts):
            answer = environment.step(texts[known])
            known += 1
        self._running[name] = environment, known
        if not isinstance(answer, tuple | list) or len(answer) != 3:
            raise WrongAnswerError(f"returned {_shown(answer)} instead of (messages, reward, done)")
        messages, reward, done = answer
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        for message in messages or ():
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                raise WrongAnswerError(f"returned the message {_shown(message)} without a content")
        if done:
            del self._running[name]
        return [list(messages or ()), _number(reward), bool(done)]


def _called(function: Callable[..., Any], request: Mapping[str, Any]) -> list[Any]:
    """Call a reward function. Return its rewards as numbers or None. Any other reward is replaced
    by a string that describes it."""
    count = len(request["completions"])
    arguments = {
        **request["columns"],
        **{name: request[name] for name in ("prompts", "completions", "completion_ids")},
        "trainer_state": SimpleNamespace(**request["state"]),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    accepted = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        names = {parameter.name for parameter in accepted}
        arguments = {name: value for name, value in arguments.items() if name in names}
    rewards = function(**arguments)
    if inspect.isawaitable(rewards):
        rewards = asyncio.run(_awaited(rewards))
    if isinstance(rewards, str | bytes | dict) or not hasattr(rewards, "__len__"):
        raise WrongAnswerError(f"returned {_shown(rewards)} instead of a list of {count} rewards")
    if len(rewards) != count:
        raise WrongAnswerError(f"returned {len(rewards)} rewards for {count} texts")
    return [_number(reward) for reward in rewards]


async def _awaited(rewards: Any) -> Any:
    return await rewards


def _number(reward: Any) -> float | str | None:
    if reward is None:
        return None
    if hasattr(reward, "item") and not isinstance(reward, str):
        reward = reward.item()
    if isinstance(reward, bool | int | float):
        number = float(reward)
        return number if math.isfinite(number) else repr(number)
    return _shown(reward)


def _shown(value: Any) -> str:
    return f"{repr(value)[:80]} ({type(value).__name__})"


def _said(error: BaseException) -> str:
    try:
        text = " ".join(str(error)[:2000].split())[:300]
    except BaseException:  # the message of a user-defined exception may itself raise
        text = ""
    if isinstance(error, WrongAnswerError):
        return text
    if isinstance(error, MemoryError):
        return "needed more memory than --reward-memory-mib"
    return f"raised {type(error).__name__}{': ' if text else ''}{text}"


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
