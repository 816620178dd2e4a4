"""Every file of deepspeed_configs/ trains, and like the others."""

import json
import re
from pathlib import Path

import pytest
from samples import sampled
from training_jobs import TINY, train, train_plainly

FOLDER = Path(__file__).parents[2] / "deepspeed_configs"
FILES = sorted(FOLDER.glob("*.json"))
LAYOUT = {"ds_pipeline": ["--pipeline-model-parallel-size", "2"]}
FLAGS = [*TINY, "--train-iters", "3", "--clip-grad", "0.1"]


@pytest.fixture(scope="module")
def plain():
    return train_plainly(FLAGS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_against_plain_torch(pool, plain, path):
    """Fp32, clipped: losses and gradient norms of a loop without DeepSpeed."""
    layout = LAYOUT.get(path.stem, [])
    records = pool.run(2, train, [*FLAGS, *layout, "--deepspeed_config", str(path)])
    for record in records:
        assert record.losses == pytest.approx(plain.losses, rel=1e-5)
        assert record.norms == pytest.approx(plain.norms, rel=1e-4)


HALF = [(precision, path) for path in FILES for precision in ("--bf16", "--fp16")]


@pytest.mark.parametrize(
    ("precision", "path"), sampled(HALF, {*HALF[1::8], *HALF[2::8]}.__contains__)
)
def test_half_precision(pool, plain, path, precision):
    """The flag alone turns half precision on."""
    flags = [*FLAGS, precision, "--initial-loss-scale", "1024"]
    flags += ["--deepspeed_config", str(path), *LAYOUT.get(path.stem, [])]
    for record in pool.run(2, train, flags):
        assert not any(record.skipped)
        assert record.losses == pytest.approx(plain.losses, rel=1e-2)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_name_and_readme(path):
    """The stage is the one in the name, and the README says what the file is for."""
    content = json.loads(path.read_text())
    stage = re.fullmatch(r"ds_(?:zero(\d)(_offload)?|pipeline)", path.stem)
    assert stage and content["zero_optimization"]["stage"] == int(stage[1] or 1)
    assert ("offload_param" in content["zero_optimization"]) == bool(stage[2])
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text()
