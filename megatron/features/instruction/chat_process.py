"""Rendering of chat templates in a separate process, because templates are untrusted programs."""

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
"""Maximum size of a template file in bytes."""


class TemplateRefusalError(ValueError):
    """Raised if a template rejects a conversation with raise_exception."""


class Rendered(NamedTuple):
    """Output of a template.

    Attributes:
        text: the conversation as text.
        marks: range (start, end) of each {% generation %} block, in characters of ``text``.
    """

    text: str
    marks: list[tuple[int, int]]


def read_template(path: str | Path, where: str) -> str:
    """Return the template in a file. ``where`` identifies the file in error messages. Raises
    ValueError if it is too long or not UTF-8 text, and FileNotFoundError if it is not a file."""
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
    """Return the special tokens of a `transformers` tokenizer as template variables."""
    return {
        name: list(map(str, token)) if isinstance(token, list | tuple) else str(token)
        for name, token in tokenizer.special_tokens_map.items()
    }


class TemplateProcess:
    """Renderer that runs templates in a process with limited memory, which is killed if it takes
    too long. Thread-safe. A forked or unpickled copy starts its own process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()
        self._answers: SimpleQueue[str] = SimpleQueue()

    def __reduce__(self) -> tuple[type[TemplateProcess], tuple[()]]:
        return TemplateProcess, ()

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return the rendered text. Raises TemplateRefusalError if the template rejects the
        conversation, and ValueError if the template or the variables are invalid."""
        return self.render_marked(template, variables).text

    def render_marked(self, template: str, variables: Mapping[str, Any]) -> Rendered:
        """Return the text and the ranges that the template marks. Raises like :meth:`render`."""
        try:
            task = json.dumps(
                {"template": template, "variables": variables, "most": _MOST_CHARACTERS}
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"a message is not made of JSON values: {error}") from None
        if self._owner != os.getpid():  # in a fork, the lock and the pipes belong to the parent
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
        """End the process. The next call of :meth:`render` starts another one."""
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
    """Put the process's output lines into ``answers``, followed by "" when the process ends."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put("")


def _kill(process: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() != owner:  # in a fork: the parent still uses the process
        return
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # flushing unwritten input may fail
            process.stdin.close()
