"""Without the folder of a feature the rest trains a GPT, and lacks that feature's flags alone. So
does the core without any, and passes its own tests."""

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from import_statements import ROOT

from megatron.config import FLAG_CLASSES, FlagParser
from megatron.config.features import features

FOLDERS = {path.parent.name: path.parent for path in (ROOT / "megatron").glob("*/*/feature.py")}
SAMPLE = ("adapters", "resilience")
"""Those of `make test`; `make proof` removes each feature."""

PROGRAM = """
import contextlib, io, json, sys
import pretrain_gpt
from megatron.config import FLAG_CLASSES, FlagParser

print("FLAGS", json.dumps(sorted(FlagParser(*FLAG_CLASSES)._option_string_actions)))
sys.argv = ["pretrain_gpt.py", *sys.argv[1:]]
pretrain_gpt.main()
"""

TRAIN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 --mock-data "
    "--micro-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 9 --num-workers 0 "
    "--eval-iters 1 --eval-interval 2 --train-iters 4 --save saved --save-interval 2"
).split()


@cache
def needs(name: str) -> frozenset[str]:
    """Features that one says it needs, and those that these need."""
    feature = features().get(name)
    direct = frozenset(getattr(feature, "needs", ()))
    return direct.union(*map(needs, direct))


def removed_with(name: str) -> set[str]:
    """A feature and those that need it."""
    return {name} | {other for other in FOLDERS if name in needs(other)}


def options(*classes: type) -> set[str]:
    return set(FlagParser(*classes)._option_string_actions) - {"-h", "--help", "--version"}


TESTED = (
    *("tests", "docs", "tools", "benchmarks", "compat", "docker", "requirements", "scripts"),
    *("deepspeed_configs", "examples_deepspeed", "tasks", ".ci", ".github"),
)
ROOT_FILES = ("*.md", "*.toml", "*.txt", "Dockerfile", "LICENSE", "Makefile")
"""What the tests of the core need next to the package."""


def without(names: set[str], folder: Path, parts: tuple[str, ...] = ()) -> Path:
    """Copy the project without some features, and without their tests: their folders, their flags
    in the golden list, tests of the core that import them, and lines of the ledger about these
    tests. Compiled modules come along."""
    for part in ("megatron", *parts):
        if (ROOT / part).exists():
            shutil.copytree(ROOT / part, folder / part, symlinks=True)
    for pattern in ("*.py", *ROOT_FILES):
        for file in ROOT.glob(pattern):
            shutil.copy(file, folder)
    modules = [f"megatron.{FOLDERS[name].parent.name}.{name}" for name in names]
    for each in names:
        shutil.rmtree(folder / FOLDERS[each].relative_to(ROOT))
        tests = folder / "tests" / FOLDERS[each].parent.name / each
        shutil.rmtree(tests, ignore_errors=True)
    for test in (folder / "tests" / "core").rglob("*.py"):
        if any(re.search(rf"\b{name}\b", test.read_text()) for name in modules):
            test.unlink()
    golden, lost = folder / "tests" / "golden" / "flags.json", lost_options(names)
    if golden.exists():
        flags = json.loads(golden.read_text())
        kept = {each: flag for each, flag in flags.items() if not lost & set(each.split())}
        golden.write_text(json.dumps(kept))
    ledger = folder / "tests" / "ledger.jsonl"
    if ledger.exists():
        lines = ledger.read_text().splitlines(keepends=True)
        files = [folder / json.loads(line)["test"].partition("::")[0] for line in lines]
        ledger.write_text(
            "".join(each for each, file in zip(lines, files, strict=True) if file.is_file())
        )
    return folder


def lost_options(names: set[str]) -> set[str]:
    """The flags of some features."""
    removed = [features()[each] for each in names]
    classes = ((*f.sections.values(), *f.flag_parts.values(), *f.model_parts) for f in removed)
    return options(*itertools.chain.from_iterable(classes))


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def trains_without(names: set[str], folder: Path) -> None:
    told = run(without(names, folder), "-c", PROGRAM, *TRAIN)
    assert "iteration        4/       4" in told, told
    line = next(line for line in told.splitlines() if line.startswith("FLAGS "))
    left = set(ast.literal_eval(line.removeprefix("FLAGS "))) - {"-h", "--help", "--version"}
    assert left == options(*FLAG_CLASSES) - lost_options(names)


@pytest.mark.parametrize(
    "name",
    [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.proof) for n in sorted(FOLDERS)],
)
def test_a_gpt_is_trained_without(name, tmp_path):
    trains_without(removed_with(name), tmp_path)


def test_a_gpt_is_trained_by_the_core_alone(tmp_path):
    trains_without(set(FOLDERS), tmp_path)


@pytest.mark.proof
def test_the_core_alone_passes_its_tests(tmp_path):
    folder = without(set(FOLDERS), tmp_path, TESTED)
    chosen = ("-m", "not proof and not features", "-p", "no:cacheprovider", "tests/core")
    run(folder, "-m", "pytest", "-q", *chosen)
