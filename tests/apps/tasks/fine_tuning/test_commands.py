"""Command lines of fine-tuning that are refused before anything is built."""

from __future__ import annotations

import pytest

from megatron.apps.tasks.command import run_task
from megatron.config import ConfigError

MODEL = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16".split()
HEADER = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text(HEADER + "0\t1\t2\ta\tb\t1\n")
    return path


@pytest.mark.parametrize(
    "words, message",
    [
        ("--valid-data TABLE", "--epochs is missing: how often to train on all samples, 0 to"),
        ("--epochs 2", "--train-data is missing: the files of QQP to fine-tune on; --epochs 0"),
        ("--epochs 0", "--valid-data is missing: the files of QQP to evaluate on"),
        ("--epochs 2 --train-data no.tsv", r"no\.tsv does not exist"),
        ("--epochs -1 --train-data TABLE", "--epochs -1"),
        (
            "--epochs 2 --train-data TABLE --train-iters 5",
            "--train-iters 5: a fine-tuning is --epochs 2 long; leave it out, or stop earlier with",
        ),
        (
            "--epochs 2 --train-data TABLE --train-samples 5",
            "--train-samples 5: a fine-tuning is --epochs 2 long",
        ),
    ],
)
def test_refused(words, message, table):
    argv = ["--task", "QQP", *MODEL, *words.replace("TABLE", str(table)).split()]
    with pytest.raises(ConfigError, match=message):
        run_task(None, argv)
