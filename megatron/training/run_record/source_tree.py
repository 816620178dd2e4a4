"""The state of the source tree that a run computes with, as git sees it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 10.0
"""For a command of git: a run must not wait longer for a slow file system."""
_MOST_PATCH = 32 << 20
_MOST_NEW_FILES = 500
_LARGEST_NEW_FILE = 1 << 20
_SOURCES = "*.py *.pyi *.cu *.cpp *.h *.sh *.sbatch *.json *.yaml *.yml *.toml *.cfg *.ini".split()
"""Kinds of files that a commit would have: not data and what runs write."""


@dataclass(frozen=True)
class SourceTree:
    """A working tree of git.

    Attributes:
        patch: what ``git apply`` makes of the commit to have this tree, new source files included;
            empty if nothing has changed.
        left_out: files or pieces that the patch does not have.
    """

    commit: str
    branch: str
    remote: str
    patch: bytes
    left_out: tuple[str, ...]


def source_tree(folder: Path) -> SourceTree | None:
    """The working tree that a folder belongs to; None if git knows of none, or is not there."""
    try:
        root = Path(_git(folder, "rev-parse", "--show-toplevel").decode().rstrip("\n"))
        commit = _git(root, "rev-parse", "HEAD").decode().strip()
        branch = _git(root, "rev-parse", "--abbrev-ref", "HEAD").decode().strip()
        # Whoever edits files meanwhile changes a later start.
        patch = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
        new, left_out = _new_files(root)
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    try:
        remote = _git(root, "config", "--get", "remote.origin.url").decode().strip()
    except (OSError, subprocess.SubprocessError, UnicodeError):
        remote = ""
    if len(patch) + len(new) > _MOST_PATCH:
        left_out.append(f"the whole patch, of {len(patch) + len(new):,} bytes")
        patch = new = b""
    return SourceTree(commit, branch, remote, patch + new, tuple(left_out))


def _new_files(root: Path) -> tuple[bytes, list[str]]:
    """Source files that are not in git, as a patch; and the names of those that are too many or too
    large."""
    listed = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *_SOURCES)
    names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
    left_out, patch = names[_MOST_NEW_FILES:], b""
    for name in names[:_MOST_NEW_FILES]:
        path = root / name
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST_NEW_FILE:
            left_out.append(name)
        else:
            patch += _git(root, "diff", "--binary", "--no-index", "--", os.devnull, name, ends=1)
    return patch, left_out


def _git(folder: Path, *arguments: str, ends: int = 0) -> bytes:
    """What a command prints. It takes no lock, so that another git in the folder is not disturbed,
    and starts no program that the folder's settings name. ``ends``: its exit status, if not 0."""
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
