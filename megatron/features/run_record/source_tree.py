"""The state of the source tree that a run computes with, as git sees it, and its patch without the
values of secret names, such as ``password = ...`` in a file of settings."""

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
"""For a command of git: a run must not wait longer for a slow file system."""
_MOST_PATCH = 4 << 20
_CODE = tuple(".py .pyi .pyx .c .cc .cpp .cu .cuh .h .hpp .js .rs".split())
_DATA = tuple(".arrow .bin .csv .idx .jsonl .npy .npz .parquet .pt .safetensors .tsv".split())
_MOST_CODE, _MOST_TEXT = 1 << 20, 64 << 10
"""Bytes of the change of a file: a larger one is data."""


@dataclass(frozen=True)
class SourceTree:
    """A working tree of git.

    Attributes:
        patch: the input with which ``git apply`` gives the commit to have the code of this tree:
        changes of
            files that git has, and new modules that this process has imported; empty without any.
        left_out: changed files that the patch does not have.
    """

    commit: str
    branch: str
    remote: str
    patch: bytes
    left_out: tuple[str, ...]

    def state(self) -> dict[str, Any]:
        """JSON values for the record."""
        return {
            "commit": self.commit,
            "branch": self.branch,
            "remote": self.remote,
            "changed": bool(self.patch or self.left_out),
            "left_out": list(self.left_out),
        }


def source_tree(folder: Path, private: Collection[Path] = ()) -> SourceTree | None:
    """The working tree that contains a folder; None outside of one or without git. Files in
    ``private`` folders are not read, nor those whose names begin with such a path."""
    try:
        told = _git(folder, "rev-parse", "--show-toplevel", "HEAD", "--abbrev-ref", "HEAD")
        # A name of a folder may have line breaks.
        place, commit, branch = told.decode().rstrip("\n").rsplit("\n", 2)
        root = Path(place)
        # Whoever edits files meanwhile changes a later start.
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
    """Files of git that have changed, each with its part of a patch. ValueError if another program
    changes files meanwhile."""
    options = ("--no-renames", "--no-ext-diff", "--no-textconv", "--ignore-submodules")
    names = _git(root, "diff", "HEAD", "--name-only", "-z", *options).split(b"\0")[:-1]
    patch = _git(root, "diff", "HEAD", *options) if names else b""
    # Every line of a change begins with another character.
    pieces = re.split(rb"^(?=diff --git )", patch, flags=re.M)[1:]
    yield from zip(map(os.fsdecode, names), pieces, strict=True)


def _new_modules(root: Path) -> Iterator[tuple[str, bytes]]:
    """Modules that this process has imported and git does not have or ignore, as patches; installed
    packages are not source, wherever their environment is."""
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
    for first in range(0, len(own), 500):  # a command line has its limit
        some = (f":(literal){name}" for name in own[first : first + 500])
        listed += _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *some)
    for name in sorted({os.fsdecode(name) for name in listed.split(b"\0") if name}):
        if (root / name).stat().st_size > _MOST_CODE:
            yield name, b"Binary files differ"
        else:
            yield name, _git(root, "diff", "--no-index", "--", os.devnull, name, ends=1)


def _real_paths(files: Iterable[str]) -> Iterator[str]:
    """Paths without links. Modules are hundreds of files in few folders."""
    real_folder = functools.cache(os.path.realpath)
    for file in files:
        folder, name = os.path.split(file)
        yield os.path.realpath(file) if os.path.islink(file) else f"{real_folder(folder)}/{name}"


def _is_source(name: str, piece: bytes) -> bool:
    most = _MOST_CODE if name.endswith(_CODE) else _MOST_TEXT
    binary = re.search(rb"^Binary files ", piece, re.M)
    return len(piece) <= most and not name.endswith(_DATA) and not binary


def _is_private(path: Path, root: Path, private: Collection[Path]) -> bool:
    """True if a path is below one of the private ones, or has its name with an ending, as files of
    data have. Private paths that contain the whole tree, or packages of Python, are ignored."""
    for each in private:
        if root.is_relative_to(each) or (each / "__init__.py").is_file():
            continue
        with_ending = not path.name.endswith(_CODE) and str(path).startswith(f"{each}.")
        if path.is_relative_to(each) or with_ending:
            return True
    return False


def _git(folder: Path, *arguments: str, ends: int = 0) -> bytes:
    """Return the output of a command. It takes no lock, so that another git in the folder is not
    disturbed, and starts no program that the folder's settings name. ``ends``: its exit status, if
    not 0."""
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
"""Files in which a word without quotes is an expression, which is no secret."""
_JSON = (".ipynb", ".json", ".jsonl")
_WORDS = tuple(".bash .md .rst .sbatch .sh .txt .zsh Dockerfile Makefile".split())
"""Files in which a value without quotes is one word. In all others it is the rest of the line."""

_HINT = r"(?=[\w.-]*(?:auth|cookie|cred|jwt|key|pass|pat|pwd|secret|sig|token))"
"""Part of every secret name: no time is spent on others."""
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
"""Names up to their values. That of a flag may be without "="."""
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
"""Values that say nothing, or where the secret is."""
_KEY_OF_CODE = re.compile(r"(?=.*\d)[\w+/=.-]{16,}")
"""A secret in ``key = "..."`` of code, where most keys are names of something."""


def without_values(patch: str) -> str:
    """A patch of git with ``***`` instead of the values of secret names: quoted ones, and in files
    other than code unquoted ones too."""
    return "".join(map(_section, re.split(r"^(?=diff --git )", patch, flags=re.M)))


def _section(section: str) -> str:
    """The part for one file, which begins with its name."""
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
    """Return True for a value that may be seen."""
    quoted = value["quote"] is not None
    text = value["quoted"] if quoted else value["bare"]
    if code and name.lower() in ("key", "pat", "token") and not _KEY_OF_CODE.fullmatch(text):
        return True
    return bool(_NO_SECRET.fullmatch(text.strip()))
