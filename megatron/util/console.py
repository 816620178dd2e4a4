"""Standard output, standard error and Ctrl-C of a program: what happens where they fail, as on a
full disk, or where the reader of a pipe has ended."""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType
from typing import Any, TextIO

READER_GONE = 141
"""Exit status of a program that ends because nothing reads its output: 128 + SIGPIPE, a shell's
status of a program that this signal kills."""


class ProgramOutput:
    """A standard stream that names itself where it cannot be written. At first a reader that is
    gone ends the program without a message, and any other failure is an OSError with the stream's
    name. After :func:`outlive_output` the text is dropped instead, and the other stream gets one
    line about it."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.outlived = False
        self.lost = ""
        """Why text was dropped; empty if none was."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text, or drops it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes texts, as :meth:`write`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Writes what is buffered, or drops it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        gone = isinstance(error, BrokenPipeError)
        if gone:
            self._discard()
        if not self.outlived:
            if gone:
                sys.exit(READER_GONE)
            raise OSError(error.errno, error.strerror, self._name) from None
        if not self.lost:
            why = "its reader has ended" if gone else error.strerror
            self.lost = f"{self._name} could not be written ({why})"
            other = sys.stderr if sys.stdout is self else sys.stdout
            other.write(f"warning: {self.lost}; the program continues without it\n")
            other.flush()

    def _discard(self) -> None:
        """Sends what follows, and what is buffered, to no reader: a pipe without one stays so."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def name_output() -> None:
    """Makes standard output and standard error of this program :class:`ProgramOutput`; a second
    call does nothing."""
    if not isinstance(sys.stdout, ProgramOutput):
        sys.stdout = ProgramOutput(sys.stdout, "standard output")  # type: ignore[assignment]
    if not isinstance(sys.stderr, ProgramOutput):
        sys.stderr = ProgramOutput(sys.stderr, "standard error")  # type: ignore[assignment]


def outlive_output() -> None:
    """Makes this program continue where its output cannot be written: a training is worth more
    than its log."""
    name_output()
    for stream in (sys.stdout, sys.stderr):
        stream.outlived = True  # type: ignore[union-attr]


def lost_output() -> list[str]:
    """Sentences about the standard streams whose text was dropped, or a part of it."""
    return [lost for stream in (sys.stdout, sys.stderr) if (lost := getattr(stream, "lost", ""))]


def shorten_interrupts() -> None:
    """Makes Ctrl-C end this program with one line instead of a traceback, also while it imports
    its libraries. The exit status remains that of the signal."""
    others = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            others(kind, error, trace)
            return
        with contextlib.suppress(OSError):
            print("interrupted", file=sys.stderr, flush=True)

    sys.excepthook = show
