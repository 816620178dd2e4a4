"""Tool calls in the model's text, for environments. Only the standard library is needed, because
environments run in processes that import no other module of the trainer.

A call has the format of Hermes and Qwen:

    <tool_call>
    {"name": "calculate", "arguments": {"expression": "2 + 3"}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_LONGEST = 4000
Message = dict[str, Any]


class ToolCall(NamedTuple):
    """Tool call in a text.

    Attributes:
        problem: error message if the call is malformed, else empty.
    """

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


def tool_calls(text: str) -> list[ToolCall]:
    """Return the tool calls of a text, in order."""
    return [_call(source) for source in _CALL.findall(text)]


def _call(source: str) -> ToolCall:
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is not JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'a call is an object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], {}, '"arguments" must be an object')
    return ToolCall(value["name"], arguments)


class ToolEnvironment:
    """Environment that answers tool calls by calling methods of its class, and ends with the first
    turn without a call. Subclasses list the methods in ``tools``, and may override :meth:`reward`.

    Attributes:
        prompt: the prompt, with its ``text`` and ``columns``.
    """

    tools: Sequence[str] = ()
    prompt: Any = None

    def reset(self, prompt: Any) -> list[Message] | None:
        """Begin an episode. Return messages to append to the prompt, or None."""
        self.prompt = prompt
        return None

    def step(self, text: str) -> tuple[list[Message], float | None, bool]:
        """Return the messages that respond to a turn of the model, the reward or None, and whether
        the episode ends."""
        calls = tool_calls(text)
        if not calls:
            return [], self.reward(text), True
        return [self._answer(call) for call in calls], None, False

    def reward(self, text: str) -> float | None:
        """Return the reward of an episode, given its last turn. None gives no reward."""
        return None

    def _answer(self, call: ToolCall) -> Message:
        if call.problem:
            content = f"error: {call.problem}"
        elif call.name not in self.tools:
            content = f"error: no tool {call.name!r}; there are {', '.join(self.tools)}"
        else:
            try:
                content = str(getattr(self, call.name)(**call.arguments))
            except Exception as error:  # the model's arguments may be anything
                content = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "name": call.name or "unknown", "content": content[:_LONGEST]}
