"""The wheel and the source archive: what belongs to them, what they are refused for, and both as
they are built (a long test)."""

import email
import importlib.util
import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "release" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


check = load("check")

OUTPUTS = """
import contextlib, json, sys, setuptools, distutils.core as core
with contextlib.redirect_stdout(sys.stderr):
    build = core.run_setup("setup.py", stop_after="init").get_command_obj("build_py")
    build.build_lib = "BUILD"
    build.ensure_finalized()
    outputs = [path.removeprefix("BUILD/") for path in build.get_outputs(include_bytecode=0)]
print(json.dumps(outputs))
"""
"""Prints the files that setuptools would put into a wheel; nothing is built."""


@pytest.fixture(scope="module")
def manifest():
    return check.in_wheel(check.tracked(), check.MANIFEST.read_text())


def test_setup_installs_what_the_manifest_has(manifest):
    """Each file of megatron/, pages and lists as well, and each program."""
    done = subprocess.run([sys.executable, "-c", OUTPUTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check.compare("setup.py", json.loads(done.stdout), manifest)
    assert "megatron/py.typed" in manifest and "pretrain_gpt.py" in manifest
    assert manifest["megatron/tools/plan.py"] == "tools/plan.py"
    assert manifest["megatron/tasks/msdp/main.py"] == "tasks/msdp/main.py"
    assert manifest["data_utils/corpora.py"] == "compat/data_utils/corpora.py"
    assert not [name for name in manifest if name.startswith(("tests", "docs", "benchmarks"))]


def test_every_program_is_a_command_or_a_module(manifest):
    """Each file with a main() is started without the checkout, or is named here with the reason."""
    from setup_arguments import setup_arguments

    from megatron.util.errors import path_of

    scripts = setup_arguments()["entry_points"]["console_scripts"]
    commands = {path_of(script.split(" = ")[1].removesuffix(":main")) for script in scripts}
    programs = {
        name
        for name in check.tracked()
        if re.fullmatch(r"\w+\.py|(tools|tasks)/.*\.py", name)
        and '__name__ == "__main__"' in (ROOT / name).read_text()
    }
    left = {name for name in programs - commands if not name.startswith("tools/openwebtext/")}
    assert (
        left
        == {
            "pretrain_gpt2.py",  # old names of other programs
            "tools/checkpoint_util.py",
            "tools/convert_megatron_gpt2_checkpoint.py",
            "tools/retro/main.py",
            "tasks/eval_harness/download.py",
            "tasks/eval_harness/evaluate.py",
            "tasks/eval_harness/report-to-csv.py",
        }
        - commands
    )


METADATA = email.message_from_string(
    "Name: megatron-deepspeed\nVersion: 1.2\nRequires-Python: >=3.10\n"
    "License-Expression: Apache-2.0 AND MIT\n\n# A description\n"
)


def wheel(folder, manifest, changes=None, without=()):
    """A wheel with the files of the manifest, but for changes."""
    path = folder / "megatron_deepspeed-1.2-py3-none-any.whl"
    top = "megatron_deepspeed-1.2.dist-info"
    contents = {name: (ROOT / source).read_bytes() for name, source in manifest.items()}
    contents[f"{top}/METADATA"] = METADATA.as_bytes()
    for name in check.LICENSES:
        contents[f"{top}/licenses/{name}"] = (ROOT / name).read_bytes()
    contents |= changes or {}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in contents.items():
            if name not in without:
                file.writestr(name, data)
    return path


@pytest.mark.parametrize(
    "changes, without, message",
    [
        ({}, (), None),
        ({}, ["megatron/apps/dashboard/page/style.css"], "lacks megatron/apps/dashboard/page/st"),
        ({"tests/conftest.py": b""}, (), "has tests/conftest.py, which does not belong to it"),
        ({"megatron/__init__.py": b"old"}, (), "megatron/__init__.py is not megatron/__init__.py"),
        ({}, ["megatron_deepspeed-1.2.dist-info/licenses/LICENSE"], "lacks the licence LICENSE"),
        (
            {"megatron_deepspeed-1.2.dist-info/METADATA": b"Name: megatron-deepspeed\n\nText"},
            (),
            "Version is None, not 1.2",
        ),
    ],
    ids=["right", "missing", "extra", "stale", "licence", "metadata"],
)
def test_a_wheel_is_compared(tmp_path, manifest, monkeypatch, changes, without, message):
    """Missing, surplus and foreign files are named."""
    few = {n: s for n, s in manifest.items() if n.count("/") < 2 or "dashboard/page/st" in n}
    monkeypatch.setattr(check, "in_wheel", lambda files, text: few)
    path = wheel(tmp_path, few, changes, without)
    if message is None:
        check.check_wheel(path, [], "1.2")
        return
    with pytest.raises(check.WrongContents, match=re.escape(message)):
        check.check_wheel(path, [], "1.2")


def test_a_manifest_is_checked():
    files = ["a/b.py", "a/c/d.py", "e/b.py"]
    assert check.in_wheel(files, "a/**/*.py -> x\n") == {"x/b.py": "a/b.py", "x/c/d.py": "a/c/d.py"}
    with pytest.raises(check.WrongContents, match="none/\\*.py names no file"):
        check.in_wheel(files, "none/*.py")
    with pytest.raises(check.WrongContents, match="x/b.py would be a/b.py and e/b.py"):
        check.in_wheel(files, "a/*.py -> x\ne/*.py -> x")


def test_a_tag_is_that_of_the_version(monkeypatch, tmp_path):
    with pytest.raises(check.WrongContents, match=f"has {re.escape(check.version())}"):
        check.check_tag("v9.9.9")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "version", lambda: "1.2.0")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 - unreleased\n")
    with pytest.raises(check.WrongContents, match="1.2.0 - YYYY-MM-DD"):
        check.check_tag("v1.2.0")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 - 2026-12-01\n")
    check.check_tag("v1.2.0")


def test_descriptions_have_every_extra():
    """The page of a package index lists them, and the changelog has the version."""
    from setup_arguments import setup_arguments

    text = (ROOT / "release" / "description.md").read_text()
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.+?) \|", text, re.MULTILINE))))
    assert named == set(setup_arguments()["extras_require"])
    assert f"megatron_deepspeed-{check.version()}-py3-none-any.whl" in text
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(check.version())} - ", changelog, re.MULTILINE)


@pytest.mark.proof
def test_built_and_used_without_the_checkout(tmp_path):
    """`make dist`, and the wheel in an empty environment with the packages of this one: commands,
    modules, completion, types, the quickstart, a fine-tuning of its model."""
    for package in ("build", "twine"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (the extra release)")
    run = [sys.executable, str(ROOT / "release" / "check.py"), "--output", str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.whl")
    program = str(ROOT / "release" / "try_wheel.py")
    packages = ["--packages", sysconfig.get_path("purelib"), "--train-iters", "4"]
    done = subprocess.run([sys.executable, program, str(path), *packages],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fine-tuned: one process and two" in done.stdout
