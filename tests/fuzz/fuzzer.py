"""What a fuzzer is, and the rule that every reader of files keeps.

An edited input is either read or refused: by an error that programs report in one line with the
name of the file. Nothing else may happen: no other exception, no crash, no more time or memory than
the limits, no file opened outside the input's folder, no command, no connection, no question asked
on the standard input.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fuzz.edits import Edit

from megatron.util.errors import one_line

ROOT = Path(__file__).resolve().parents[2]
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EXDEV)


@dataclass(frozen=True)
class Fuzzer:
    """A reader of files.

    Attributes:
        name: of the fuzzer.
        make: writes a valid input into an empty folder.
        read: reads the input as a program does, all of it.
        repair: makes checksums true again after the edits, for every other input.
        refusals: the errors that programs report in one line.
        names_file: whether messages must name a file, or the input's folder.
        may: events of Python's audit hooks that the reader needs.
        seconds: of one input's CPU time.
        memory: bytes that one input may take.
        heavy: whether it loads packages for seconds, so that `make test` leaves it out.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], object]
    repair: Callable[[Path], None] | None = None
    refusals: tuple[type[Exception], ...] = (ValueError, OSError)
    names_file: bool = True
    may: frozenset[str] = field(default_factory=frozenset)
    seconds: float = 5.0
    memory: int = 1 << 30
    heavy: bool = False


class Finding(NamedTuple):
    """What broke the rule.

    Attributes:
        rule: kind and place, the same for findings of one cause.
        detail: for people.
    """

    rule: str
    detail: str


class Broken(AssertionError):
    """Edits that break the rule."""

    def __init__(self, fuzzer: str, edits: Sequence[Edit], finding: Finding) -> None:
        numbers = " ".join(f"{edit.file}:{edit.seed}" for edit in edits)
        super().__init__(
            f"{finding.rule}\n{finding.detail}\n"
            f"again: python tests/fuzz/run.py {fuzzer} --edits {numbers}"
        )
        self.edits, self.finding = tuple(edits), finding


def judged(fuzzer: Fuzzer, folder: Path, names: Sequence[str]) -> tuple[bool, Finding | None]:
    """Reads an edited input.

    Args:
        fuzzer: the reader.
        folder: the input.
        names: of its files before the edits.

    Returns:
        Whether it was read, and what broke the rule.
    """
    try:
        fuzzer.read(folder)
    except fuzzer.refusals as error:
        return False, _message_fault(error, folder, names, fuzzer.names_file)
    except BaseException as error:  # Rust's panics are no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return False, Finding(f"{type(error).__name__} {_place(error)}", _trace(error))
    return True, None


def _message_fault(
    error: Exception, folder: Path, names: Sequence[str], named: bool
) -> Finding | None:
    """What is wrong with a message as programs print it."""
    text, place = one_line(error), _place(error)
    fault = None
    if not text:
        fault = "an empty message"
    elif _denied(error):
        fault = "a library opens what it must not"
    elif named and not any(name in text for name in (str(folder), *names)):
        fault = "a message without a file's name"
    if fault is None:
        return None
    return Finding(f"{fault}, {type(error).__name__} {place}", _trace(error))


def _denied(error: BaseException | None) -> bool:
    """Whether the system has refused something, although the input is readable: see landlock.py."""
    while error is not None:
        if getattr(error, "errno", None) in _REFUSALS or "Permission denied" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _trace(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error, limit=-8)).splitlines()
    return "\n".join(line[:200] for line in lines)


def _place(error: BaseException) -> str:
    """The innermost place of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(f"{ROOT}/") and "/.venv/" not in f.filename]
    frame = ours[-1] if ours else frames[-1]
    return f"in {frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno} {frame.name}"
