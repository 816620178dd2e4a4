"""Chat templates are programs that come with a tokenizer: they run in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from megatron.features.instruction import chat_render

_SECONDS, _MEMORY, _MOST_CHARACTERS = 10.0, 1 << 30, 1 << 22
_LONGEST_TEMPLATE = 1 << 20
"""Bytes of a file."""


class TemplateRefusalError(ValueError):
    """A template says by raise_exception that it has no form for a conversation."""


class Rendered(NamedTuple):
    """Attributes:
    text: what a template made of a conversation.
    marks: start and end, in characters of the text, of what it marks by {% generation %}.
    """

    text: str
    marks: list[tuple[int, int]]


def read_template(path: str | Path, where: str) -> str:
    """The template of a file, which ``where`` names in messages. Raises ValueError if it is not
    UTF-8 text, or too long for a template; FileNotFoundError."""
    path = Path(path)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "is not a file"
        raise FileNotFoundError(f"{where} {problem}; it must be a chat template")
    with path.open("rb") as file:
        content = file.read(_LONGEST_TEMPLATE + 1)
    if len(content) > _LONGEST_TEMPLATE:
        raise ValueError(f"{where} has more than {_LONGEST_TEMPLATE:,} bytes: no chat template has")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from None


def special_variables(tokenizer: Any) -> dict[str, Any]:
    """The special tokens that templates may write, of a tokenizer of `transformers`."""
    return {
        name: list(map(str, token)) if isinstance(token, list | tuple) else str(token)
        for name, token in tokenizer.special_tokens_map.items()
    }


class TemplateProcess:
    """Renders templates in a process with little memory, which is ended if it takes too long. May
    be used by several threads; a forked or unpickled copy starts its own process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()
        self._answers: SimpleQueue[str] = SimpleQueue()

    def __reduce__(self) -> tuple[type[TemplateProcess], tuple[()]]:
        return TemplateProcess, ()

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return the text. Raises TemplateRefusalError, or ValueError if the template or the
        variables are wrong."""
        return self.render_marked(template, variables).text

    def render_marked(self, template: str, variables: Mapping[str, Any]) -> Rendered:
        """The text, and what the template marks in it; raises as :meth:`render`."""
        try:
            task = json.dumps(
                {"template": template, "variables": variables, "most": _MOST_CHARACTERS}
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"a message is not made of JSON values: {error}") from None
        if self._owner != os.getpid():  # its lock and pipes belong to the parent
            self.__init__()  # type: ignore[misc]
        with self._lock:
            line = self._answer(task)
        if line is None:
            raise ValueError(
                f"the chat template takes too much time or memory (more than {_SECONDS:g} s, or "
                f"{_MEMORY >> 30} GiB): use one that ends, --chat-template FILE"
            )
        answer = json.loads(line)
        if "refusal" in answer:
            raise TemplateRefusalError(
                f"the chat template refuses the conversation: {answer['refusal']}"
            )
        if "syntax" in answer:
            raise ValueError(
                f"the chat template is not valid Jinja: {answer['syntax']}; mend it, or give "
                "another by --chat-template FILE"
            )
        if "error" in answer:
            raise ValueError(f"the chat template cannot write this conversation: {answer['error']}")
        return Rendered(answer["text"], [(start, end) for start, end in answer["marks"]])

    def close(self) -> None:
        """Ends the process; the next text starts another."""
        if self._owner == os.getpid():
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
        weakref.finalize(self, _kill, process, os.getpid())
        return process

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process, self._owner)
            self._process = None


def _read(process: subprocess.Popen[str], answers: SimpleQueue[str]) -> None:
    """Passes on the process's lines, and "" once it has ended."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put("")


def _kill(process: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() != owner:  # a fork, whose parent still uses it
        return
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # what was not written
            process.stdin.close()
