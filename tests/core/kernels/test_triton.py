"""Kernels by Triton's interpreter, and their code for sm_90; neither needs a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from import_statements import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


def output_of(program: Path, *args: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, str(program), *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "check", ["magnitudes", "far_rows", "odd_places", "rope",
              pytest.param("swiglu", marks=pytest.mark.proof)]
)  # fmt: skip
def test_kernels_against_their_formulas(check):
    program = Path(__file__).with_name("interpreted.py")
    assert output_of(program, check, TRITON_INTERPRET="1") == f"{check}: done\n"


def test_kernels_for_gpus_move_whole_vectors():
    """16 bytes a load and store, no register in memory, fewer instructions than memory allows."""
    table = output_of(ROOT / "benchmarks/kernel_instructions.py", "--check")
    assert table.count("|") > 20
