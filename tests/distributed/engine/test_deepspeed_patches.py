"""Replacements inside DeepSpeed against its own path, where a pool's processes cannot go it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from training_jobs import TINY

ROOT = Path(__file__).parents[3]

OWN_PATH = """
from megatron.engine import deepspeed_patches as patches
made, own = patches.made, {own}
patches.made = lambda replacement: replacement not in own and made(replacement)
import pretrain_gpt
pretrain_gpt.main()
"""


def losses_and_norms(tmp_path: Path, own: str) -> list[tuple[float, float]]:
    """Of a run on two processes.

    Args:
        own: the replacements that are not made, as Python.
    """
    folder = tmp_path / ("own" if own else "ours")
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(OWN_PATH.format(own=f"({own})"))
    launch = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2".split()]
    flags = [*TINY, "--train-iters", "4", "--zero-stage", "1", "--save", str(folder)]
    flags += ["--log-interval", "1"]
    places = {"PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path / "operators")}
    environment = {**os.environ, **places, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(script), *flags], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["loss"], row["grad_norm"]) for row in rows if row["kind"] == "train"]


@pytest.mark.proof
@pytest.mark.skipif(not all(map(shutil.which, ("c++", "ninja"))), reason="needs a compiler")
def test_against_collectives_that_are_compiled(tmp_path):
    """A minute: DeepSpeed compiles its operator. Sums of two are the same in any order."""
    ours = losses_and_norms(tmp_path, "")
    own = losses_and_norms(tmp_path, "patches.NO_OPERATORS,")
    assert list((tmp_path / "operators").glob("**/*.so")), "its operator was built"
    assert len(ours) == 4 and own == ours
