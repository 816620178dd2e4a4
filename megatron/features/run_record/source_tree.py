"""State of the git working tree that a run uses, with its changes as a patch. In the patch, values
of names that look secret are hidden, such as ``password = ...`` in a settings file."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.util.secrets import HIDDEN, is_secret

_SECONDS = 10.0
"""Timeout for a git command, in seconds, so that a run does not wait for a slow file system."""
_MOST_PATCH = 4 << 20
_CODE = tuple(".py .pyi .pyx .c .cc .cpp .cu .cuh .h .hpp .js .rs".split())
_DATA = tuple(".arrow .bin .csv .idx .jsonl .npy .npz .parquet .pt .safetensors .tsv".split())
_MOST_CODE, _MOST_TEXT = 1 << 20, 64 << 10
"""Maximum size in bytes of one file's patch, for code and for other files. Files with larger ones
are treated as data, and left out."""


@dataclass(frozen=True)
class SourceTree:
    """State of a git working tree.

    Attributes:
        patch: input for ``git apply`` that turns the commit into the code of this tree: changes of
            tracked files, and new modules that this process has imported. Empty if nothing changed,
            or if all changes are left out.
        left_out: changed files that are not in the patch.
    """

    commit: str
    branch: str
    remote: str
    patch: bytes
    left_out: tuple[str, ...]

    def state(self) -> dict[str, Any]:
        """Return the state without the patch, as JSON values for the record."""
        return {
            "commit": self.commit,
            "branch": self.branch,
            "remote": self.remote,
            "changed": bool(self.patch or self.left_out),
            "left_out": list(self.left_out),
        }


def source_tree(folder: Path, private: Collection[Path] = ()) -> SourceTree | None:
    """Return the state of the working tree that contains a folder, or None without a working tree
    or git. The patch leaves out files in a ``private`` folder, and files named like a private path
    with a suffix."""
    try:
        told = _git(folder, "rev-parse", "--show-toplevel", "HEAD", "--abbrev-ref", "HEAD")
        # split from the right, since the folder's name may contain line breaks
        place, commit, branch = told.decode().rstrip("\n").rsplit("\n", 2)
        root = Path(place)
        # Files that are edited during these calls have no effect on this process any more.
        pieces, left_out = {}, list[str]()
        for name, piece in (*_changes(root), *_new_modules(root)):
            if _is_source(name, piece) and not _is_private(root / name, root, private):
                pieces[name] = piece
            else:
                left_out.append(name)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    try:
        remote = _git(root, "config", "--get", "remote.origin.url").decode().strip()
    except (OSError, subprocess.SubprocessError, UnicodeError):
        remote = ""
    patch = b"".join(pieces.values())
    if len(patch) > _MOST_PATCH:
        left_out, patch = [*pieces, *left_out], b""
    return SourceTree(commit, branch, remote, patch, tuple(left_out))


def _changes(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, patch) for each changed file that git tracks. Raises ValueError if files are
    changed at the same time."""
    options = ("--no-renames", "--no-ext-diff", "--no-textconv", "--ignore-submodules")
    names = _git(root, "diff", "HEAD", "--name-only", "-z", *options).split(b"\0")[:-1]
    patch = _git(root, "diff", "HEAD", *options) if names else b""
    # Only headers match, since the lines of a change begin with "+", "-" or a space.
    pieces = re.split(rb"^(?=diff --git )", patch, flags=re.M)[1:]
    yield from zip(map(os.fsdecode, names), pieces, strict=True)


def _new_modules(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, patch) for each module that this process has imported and that git neither
    tracks nor ignores. Installed packages are left out, wherever their environment is."""
    files = {getattr(module, "__file__", None) for module in tuple(sys.modules.values())}
    installed = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib"))
    named = (
        file
        for file in files
        if isinstance(file, str) and file.endswith(".py") and not file.startswith(installed)
    )
    start = os.path.join(root, "")
    own = [path.removeprefix(start) for path in _real_paths(named) if path.startswith(start)]
    listed = b""
    for first in range(0, len(own), 500):  # limits the length of the command line
        some = (f":(literal){name}" for name in own[first : first + 500])
        listed += _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *some)
    for name in sorted({os.fsdecode(name) for name in listed.split(b"\0") if name}):
        if (root / name).stat().st_size > _MOST_CODE:
            yield name, b"Binary files differ"
        else:
            yield name, _git(root, "diff", "--no-index", "--", os.devnull, name, ends=1)


def _real_paths(files: Iterable[str]) -> Iterator[str]:
    """Yield the real paths of files. Resolved folders are cached, since few are distinct."""
    real_folder = functools.cache(os.path.realpath)
    for file in files:
        folder, name = os.path.split(file)
        yield os.path.realpath(file) if os.path.islink(file) else f"{real_folder(folder)}/{name}"


def _is_source(name: str, piece: bytes) -> bool:
    most = _MOST_CODE if name.endswith(_CODE) else _MOST_TEXT
    binary = re.search(rb"^Binary files ", piece, re.M)
    return len(piece) <= most and not name.endswith(_DATA) and not binary


def _is_private(path: Path, root: Path, private: Collection[Path]) -> bool:
    """Return whether a path is in or equal to a private path, or is one plus a suffix, as data
    files are. Private paths that contain the whole tree, or that are Python packages, are
    ignored."""
    for each in private:
        if root.is_relative_to(each) or (each / "__init__.py").is_file():
            continue
        with_ending = not path.name.endswith(_CODE) and str(path).startswith(f"{each}.")
        if path.is_relative_to(each) or with_ending:
            return True
    return False


def _git(folder: Path, *arguments: str, ends: int = 0) -> bytes:
    """Return the output of a git command. It takes no optional locks, which could disturb other git
    processes, and does not run a file system monitor from the repository's settings. ``ends`` is an
    exit code that is accepted in addition to 0."""
    done = subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_SECONDS,
        env=os.environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
    )
    if done.returncode not in (0, ends):
        raise subprocess.CalledProcessError(done.returncode, "git")
    return done.stdout


_EXPRESSIONS = tuple(".c .cc .cpp .cu .cuh .go .h .hpp .java .js .py .pyi .pyx .rs .ts".split())
"""Suffixes of code files, in which an unquoted word is an expression and not a secret."""
_JSON = (".ipynb", ".json", ".jsonl")
_WORDS = tuple(".bash .md .rst .sbatch .sh .txt .zsh Dockerfile Makefile".split())
"""Suffixes of files in which an unquoted value ends with the word. In others it extends to the end
of the line."""

_HINT = r"(?=[\w.-]*(?:auth|cookie|cred|jwt|key|pass|pat|pwd|secret|sig|token))"
"""Lookahead for a substring that every secret name contains, to skip other names quickly."""
_NAME = rf"(?<![\w$.-])(?P<opened>[\"']?){_HINT}(?P<name>-{{0,3}}[a-z_][\w.-]{{0,100}})(?P=opened)"
_ANNOTATION = r"(?::[\w.\[\]| \t]{1,60}(?==))?"
_QUOTED = r"""(?P<quote>"{3}|'{3}|["'])(?P<quoted>(?:\\.|(?!(?P=quote))[^\\\n])*)"""
_SCHEME = r"(?:(?:basic|bearer|digest|token)[ \t]+)?"

_CODE_NAME, _ANY_NAME = (
    re.compile(rf"{_NAME}\]?[ \t]*{pattern}[ \t]*", re.IGNORECASE)
    for pattern in (
        rf"{_ANNOTATION}(?:=>|:=|[:=])(?!=)[ \t]*[bru]{{0,2}}",
        r"(?:=>|:=|:[-=]|:(?!\?)|=(?!=)|(?<=[ \t])(?![-=:]))",
    )
)
"""Patterns that match from a name to the start of its value, in code and in other files. In the
latter, a space instead of "=" is enough, as after a flag."""
_CODE_VALUE, _JSON_VALUE, _WORD, _LINE = (
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        _QUOTED,
        rf"{_QUOTED}|(?P<bare>[^\s,\"'}}\]]+)",
        rf"{_QUOTED}|(?P<bare>{_SCHEME}[^\s\"'`$;&|(){{}}<>]+)",
        rf"{_QUOTED}|(?P<bare>[^\s\"'][^\n]*)",
    )
)
_NO_SECRET = re.compile(
    r"(?:true|false|null|none|yes|no|on|off|~|-?\d{1,4}|\\|[|>][-+\d]*)?,?|\*{3}.*"
    r"|\$(?:\w+|[{(].*)|[{\[](?:.*[}\],])?|\{[\w.]+\}|<\w+>|%\(\w+\)s",
    re.IGNORECASE,
)
"""Values that are not secret, or that only refer to a secret stored elsewhere."""
_KEY_OF_CODE = re.compile(r"(?=.*\d)[\w+/=.-]{16,}")
"""Values that count as secret after the names key, pat and token in code, where most such values
are dictionary keys or the like."""


def without_values(patch: str) -> str:
    """Return a git patch with the values of secret names replaced by ``***``. In code only quoted
    values are replaced, and in other files also unquoted ones."""
    return "".join(map(_section, re.split(r"^(?=diff --git )", patch, flags=re.M)))


def _section(section: str) -> str:
    """Return one file's section of the patch, from its ``diff --git`` line on, without secrets."""
    title = section.partition("\n")[0].rstrip('"')
    text, binary, rest = section.partition("\nGIT binary patch\n")
    code = title.endswith(_EXPRESSIONS)
    names = _CODE_NAME if code else _ANY_NAME
    plain = ((_JSON, _JSON_VALUE), (_WORDS, _WORD))
    values = next((value for ends, value in plain if title.endswith(ends)), _LINE)
    values = _CODE_VALUE if code else values
    pieces, done = [], 0
    match = names.search(text)
    while match is not None:
        end = match.end()
        value = values.match(text, end) if _has_value(match) else None
        if value is not None and not _is_known(match["name"], value, code):
            pieces += [text[done:end], value["quote"] or "", HIDDEN]
            done = end = value.end()
        match = names.search(text, max(end, match.start() + 1))
    return "".join(pieces) + text[done:] + binary + rest


def _has_value(match: re.Match[str]) -> bool:
    assigned = match[0].rstrip()[-1] in ":=>-"
    return is_secret(match["name"]) and (assigned or match["name"].startswith("--"))


def _is_known(name: str, value: re.Match[str], code: bool) -> bool:
    """Return whether a value is harmless and need not be hidden."""
    quoted = value["quote"] is not None
    text = value["quoted"] if quoted else value["bare"]
    if code and name.lower() in ("key", "pat", "token") and not _KEY_OF_CODE.fullmatch(text):
        return True
    return bool(_NO_SECRET.fullmatch(text.strip()))
