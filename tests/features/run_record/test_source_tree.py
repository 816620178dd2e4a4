"""The patch of a working tree leads from its commit to the same tree."""

import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron.features.run_record import source_tree as module
from megatron.features.run_record.source_tree import source_tree

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder, *words):
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *settings, "-C", str(folder), *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "a.py").write_text("one = 1\n")
    (root / "b.py").write_text("gone\n")
    (root / ".gitignore").write_text("ignored.py\n")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return root


def test_a_clean_tree_has_no_patch(tree):
    git(tree, "remote", "add", "origin", "https://example.org/x.git")
    found = source_tree(tree / "inner")
    assert (found.commit, found.branch) == (git(tree, "rev-parse", "HEAD"), "main")
    assert (found.remote, found.patch, found.left_out) == ("https://example.org/x.git", b"", ())


def imported(monkeypatch, *paths):
    for number, path in enumerate(paths):
        found = SimpleNamespace(__file__=str(path))
        monkeypatch.setitem(sys.modules, f"imported_{number}", found)


def test_the_patch_makes_the_same_code(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_CODE", 500)
    (tree / "inner" / "a.py").write_text("one = 2\nlatin = '\xe9'\n", encoding="latin-1")
    (tree / "b.py").unlink()
    (tree / "new folder").mkdir()
    (tree / "new folder" / "c d.py").write_text("new\n")
    for name in ("ignored.py", "data.bin", "unused.py", "customers.json", "secret.yaml"):
        (tree / name).write_text("no source\n")
    (tree / "large.py").write_text("x" * 1000)
    names = ("new folder/c d.py", "ignored.py", "customers.json", "large.py", "missing.py")
    outside = tmp_path / "outside.py", tmp_path / "link.py"
    outside[1].symlink_to(tree / "new folder" / "linked.py")
    (tree / "new folder" / "linked.py").write_text("linked\n")
    (tmp_path / "linked").symlink_to(tree)
    imported(monkeypatch, *(tmp_path / "linked" / name for name in names), *outside)
    found = source_tree(tree)
    assert found.left_out == ("large.py",)
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(tree), str(again))
    (tmp_path / "changes.patch").write_bytes(found.patch)
    git(again, "apply", str(tmp_path / "changes.patch"))

    def files(root):
        paths = (path for path in root.rglob("*") if path.is_file() and ".git/" not in str(path))
        return {str(path.relative_to(root)): path.read_bytes() for path in paths}

    here = files(tree)
    kept = ("inner/a.py", "new folder/c d.py", "new folder/linked.py", ".gitignore")
    assert files(again) == {name: here[name] for name in kept}


def test_data_and_what_flags_name_are_not_read(tree, monkeypatch):
    """Though git has them, or the run imports them."""
    texts = {
        "notes.md": 40, "settings.json": 40, "large.json": 70_000, "rows.csv": 40, "nul.txt": 40,
        "saved/state.json": 40, "corpus/text.idx": 40, "corpus/text.json": 40, "m/__init__.py": 40,
    }  # fmt: skip
    for name in texts:
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("before\n")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "second")
    for name, size in texts.items():
        (tree / name).write_text("y" * size)
    (tree / "nul.txt").write_bytes(b"\0")
    (tree / "saved" / "plugin.py").write_text("z\n")
    imported(monkeypatch, tree / "saved" / "plugin.py")
    private = {tree / "saved", tree / "corpus" / "text", tree / "m", tree, tree.parent}
    found = source_tree(tree, private)
    given = re.findall(rb"^\+\+\+ b/(.*)$", found.patch, re.M)
    assert given == [b"m/__init__.py", b"notes.md", b"settings.json"]
    assert set(found.left_out) == {*texts, "saved/plugin.py"} - {each.decode() for each in given}
    monkeypatch.setattr(module, "_MOST_PATCH", 10)
    assert source_tree(tree, private).patch == b""


def test_installed_packages_are_no_source(tree, monkeypatch):
    """Also of an environment in the tree that git does not ignore."""
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tree / "env" / name))
    files = [tree / "env" / "purelib" / "package.py", tree / "env" / "own.py"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("new\n")
    imported(monkeypatch, *files)
    names = re.findall(rb"^\+\+\+ b/(.*)$", source_tree(tree).patch, re.M)
    assert names == [b"env/own.py"]


def test_settings_of_the_folder_start_no_program(tree, tmp_path):
    started = tmp_path / "started"
    program = tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    git(tree, "config", "core.fsmonitor", str(program))
    git(tree, "config", "diff.external", str(program))
    (tree / "b.py").write_text("changed\n")
    assert b"changed" in source_tree(tree).patch
    assert not started.exists()


def test_elsewhere_git_knows_of_no_tree(tmp_path, monkeypatch):
    assert source_tree(tmp_path) is None
    assert source_tree(tmp_path / "missing") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_tree(tmp_path) is None
