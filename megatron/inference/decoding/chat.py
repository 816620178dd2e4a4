"""Conversations to prompts, by the chat template that a tokenizer comes with."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from megatron.inference.decoding import chat_render
from megatron.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""With "role", "content", and what else a template reads; JSON values only."""

_SECONDS, _MEMORY, _MOST_CHARACTERS = 10.0, 1 << 30, 1 << 22
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names for what a model has thought before it answered; the first is that of templates."""


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation becomes a prompt.

    Attributes:
        templates: in jinja's language, by name: "default", and "tool_use" where there is another
            for tools. Without any, a turn is a paragraph that begins with its role.
        variables: of the templates, such as "bos_token".
        stops: texts that end an answer, which templates do by special tokens.
    """

    templates: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    _process: TemplateProcess = field(default_factory=lambda: TemplateProcess(), repr=False)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, folder: Path | None = None, template: str | None = None
    ) -> ChatFormat:
        """``template``, or that of the tokenizer, or of its files in ``folder``
        (chat_template.jinja, tokenizer_config.json); the plain format without any."""
        own = getattr(tokenizer, "transformers_tokenizer", None)
        found: object = None
        if own is not None:
            found, variables = own.chat_template, dict(own.special_tokens_map)
        else:
            found, variables = _of_folder(folder)
        templates = _by_name(template or found)
        return cls(templates, variables) if templates else cls(stops=("\nUser:",))

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, as `transformers` renders it; ``add_generation_prompt`` ends
        it with the beginning of the model's answer. Raises ValueError if there are no messages, or
        the template refuses them, does what it must not, or takes too much time, memory or text."""
        if not messages:
            raise ValueError("a conversation needs a message at least")
        # Templates write None as text, or fail.
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if not self.templates:
            return _plain(given, add_generation_prompt)
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            known = ", ".join(sorted(self.templates))
            raise ValueError(f"the tokenizer has no default chat template; it has {known}")
        values = {
            **self.variables,
            "documents": None,
            **variables,
            "messages": [_with_reasoning(message) for message in given],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._process.render(self.templates[name], values)

    def tokens(
        self, tokenizer: Tokenizer, messages: Sequence[Message], **options: Any
    ) -> list[int]:
        """The ids of a conversation; see :meth:`render`. Templates write the token at the beginning
        of a text themselves."""
        text = self.render(messages, **options)
        if self.templates:
            return tokenizer.tokenize_sentences([text])[0].tolist()
        return tokenizer.tokenize(text)

    def close(self) -> None:
        """Ends the process that renders templates; the next one starts another."""
        self._process.close()


class TemplateProcess:
    """Renders templates in a process with little memory, which is ended if it takes too long. May
    be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._answers: SimpleQueue[str] = SimpleQueue()

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text; ValueError says what is wrong with the template or the variables."""
        try:
            task = json.dumps(
                {"template": template, "variables": variables, "most": _MOST_CHARACTERS}
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"a message is not made of JSON values: {error}") from None
        with self._lock:
            line = self._answer(task)
        if line is None:
            raise ValueError("the chat template takes too much time or memory")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(f"the chat template cannot write this conversation: {answer['error']}")
        return answer["text"]

    def close(self) -> None:
        with self._lock:
            self._end()

    def _answer(self, task: str) -> str | None:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(task + "\n")
            process.stdin.flush()
            line = self._answers.get(timeout=_SECONDS)
        except (OSError, Empty):
            line = ""
        if not line:
            self._end()
        return line or None

    def _start(self) -> subprocess.Popen[str]:
        import jinja2
        import markupsafe

        files = (jinja2.__file__, markupsafe.__file__)
        folders = {str(Path(file).parent.parent) for file in files if file}
        process = subprocess.Popen(
            [sys.executable, "-I", chat_render.__file__, str(_MEMORY), *sorted(folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        self._process, self._answers = process, SimpleQueue()
        threading.Thread(target=_read, args=(process, self._answers), daemon=True).start()
        weakref.finalize(self, _kill, process)
        return process

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process = None


def _read(process: subprocess.Popen[str], answers: SimpleQueue[str]) -> None:
    """Passes on the process's lines, and "" once it has ended."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put("")


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # what was not written
            process.stdin.close()


def _by_name(template: object) -> dict[str, str]:
    """Templates as tokenizer_config.json has them: one, or a list, or several by name."""
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, Mapping):
        return {str(name): str(text) for name, text in template.items()}
    if isinstance(template, list):
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    return {}


def _of_folder(folder: Path | None) -> tuple[object, dict[str, str]]:
    """Template and special tokens of the files of a tokenizer."""
    if folder is None:
        return None, {}
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    settings = json.loads(config.read_text("utf-8")) if config.is_file() else {}
    template = file.read_text("utf-8") if file.is_file() else settings.get("chat_template")
    variables = {}
    for name, token in settings.items():
        token = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(token, str):
            variables[name] = token
    return template, variables


def _with_reasoning(message: Message) -> Message:
    thought = next((message[name] for name in _REASONING if name in message), None)
    if thought is None:
        return message
    return {"thinking": thought, **message, "reasoning_content": thought}


def _plain(messages: Sequence[Message], add_generation_prompt: bool) -> str:
    turns = []
    for message in messages:
        role, content = str(message.get("role", "user")), _text(message.get("content", ""))
        turns.append(content if role == "system" else f"{role.capitalize()}: {content}")
    if add_generation_prompt:
        turns.append("Assistant:")
    return "\n".join(turns) + ("" if add_generation_prompt else "\n")


def _text(content: object) -> str:
    """A content is a text, or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("this model reads text only; a message has content of another kind")
    return "".join(map(str, texts))
