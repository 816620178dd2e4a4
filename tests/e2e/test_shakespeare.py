"""examples_deepspeed/pretrain_shakespeare_char.sh: a short run on made-up text, whose losses are
those of plain PyTorch, and the published validation loss on the real one."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from math import log
from pathlib import Path

import numpy as np
import pytest

from megatron.config import FLAG_CLASSES, FlagParser, resolve
from megatron.data.indexed import IndexedDataset
from megatron.engine import deepspeed_json
from megatron.engine.deepspeed_file import read_json

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples_deepspeed" / "pretrain_shakespeare_char.sh"
GOLDEN = ROOT / "tests" / "golden" / "loss"
STEPS = 50
LAST_LINE = r"validation loss (\d\.\d{4}) \(nanoGPT: (1\.88|1\.4697)\), step (\d+)"


def run(text: Path | str, runs: Path, *flags: str, **settings: str):
    """Runs the script on one thread."""
    kept = {
        name: os.environ[name] for name in ("HOME", "TORCH_EXTENSIONS_DIR") if name in os.environ
    }
    kept["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept |= {"SHAKESPEARE": str(text), "RUNS": str(runs), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", str(SCRIPT), *flags],
        env=kept | settings,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """Folder of a run of 50 steps, and what it printed."""
    folder = tmp_path_factory.mktemp("shakespeare")
    short = f"--train-iters {STEPS} --lr-warmup-iters 10 --log-interval 1".split()
    done = run(GOLDEN / "input.txt", folder, *short)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "shakespeare-cpu", done.stdout


def rows(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.proof
def test_prints_the_validation_loss(trained):
    folder, output = trained
    last = re.fullmatch(LAST_LINE, output.splitlines()[-1])
    assert last and last[2] == "1.88" and int(last[3]) == STEPS
    (row,) = rows(folder, "validation")
    assert float(last[1]) == pytest.approx(row["loss"], abs=5e-5)
    counts = Counter((GOLDEN / "input.txt").read_text())
    unigram = -sum(n * log(n / counts.total()) for n in counts.values()) / counts.total()
    assert float(last[1]) < unigram, "in nats per character, better than without any context"


@pytest.mark.proof
def test_data_are_nanogpts(trained):
    """Against its data/shakespeare_char/prepare.py: ids in the characters' order, cut at 90 %."""
    folder, _ = trained
    text = (GOLDEN / "input.txt").read_text()
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    expected = np.array([ids[character] for character in text])
    train, validation = IndexedDataset(folder / "text" / "char_text_document")
    cut = int(len(text) * 0.9)
    np.testing.assert_array_equal(train, expected[:cut])
    np.testing.assert_array_equal(validation, expected[cut:])


@pytest.mark.proof
def test_against_plain_pytorch(trained):
    """Golden losses, written by make.py next to them: 50 steps in float32 on one thread, and the
    evaluation after them. Whatever is made faster trains as before."""
    folder, _ = trained
    golden = [float(line) for line in (GOLDEN / "shakespeare_char.txt").read_text().split()]
    assert len(golden) == STEPS + 1
    losses = [row["loss"] for row in rows(folder, "train") + rows(folder, "validation")]
    assert losses == pytest.approx(golden, abs=1e-5, rel=0)


@pytest.mark.parametrize(
    "size, batch, batches, tokens",
    # 111,540 characters validate: 1,742 windows of 64, 435 of 256.
    [("cpu", 12, 146, 2000 * 12 * 64), ("gpu", 64, 34, 5000 * 64 * 256)],
)
def test_command_resolves(size, batch, batches, tokens, tmp_path):
    """Flags and JSON go together on one process; an evaluation reads at least the whole text."""
    (tmp_path / "input.txt").write_bytes(bytes(1_115_394))
    done = run(tmp_path / "input.txt", tmp_path, DRY_RUN="1", MODEL=size)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[:2] == ["python", "pretrain_gpt.py"]
    settings = FlagParser(*FLAG_CLASSES).settings(words[2:])
    file = ROOT / settings["deepspeed_config"].value
    settings = deepspeed_json.merge(settings, read_json(str(file)), str(file), 1)
    config = resolve(settings, world_size=1).config
    training, model = config.training, config.model
    assert (training.global_batch_size, training.eval_iters) == (batch, batches)
    assert training.train_iters * batch * model.seq_length == tokens
    assert not (tmp_path / f"shakespeare-{size}").exists(), "a dry run writes nothing"


@pytest.mark.parametrize(
    "text, settings, message",
    [
        (None, {}, "set SHAKESPEARE to the text"),
        ("x" * 1000, {"MODEL": "tpu"}, "MODEL tpu: cpu or gpu"),
        ("x" * 600, {}, "600 characters are too few"),
        ("é" * 1000, {}, "is not ASCII"),
    ],
)
def test_bad_input(text, settings, message, tmp_path):
    file = tmp_path / "input.txt"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    done = run(file, tmp_path, **settings)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.proof
@pytest.mark.realdata
def test_against_published_loss(realdata, tmp_path):
    """nanoGPT's README: 1.88."""
    done = run(realdata / "tinyshakespeare" / "input.txt", tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = re.fullmatch(LAST_LINE, done.stdout.splitlines()[-1])
    assert last and float(last[1]) <= 1.88
