"""Small fine-tunings: their data, the command that trains, and what it wrote."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WORDS = [f"w{n}" for n in range(40)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 "
    "--max-position-embeddings 24 --tokenizer-type BertWordPieceLowerCase --num-workers 0 "
    "--micro-batch-size 2 --log-interval 1 --peak-tflops 1"
).split()
STEADY = ["--hidden-dropout", "0", "--attention-dropout", "0"]


def data(folder: Path) -> None:
    """A vocabulary, and files of three tasks, whose labels follow from the texts."""
    (folder / "vocab.txt").write_text("\n".join(SPECIAL + WORDS) + "\n")
    draw = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(draw.choice(WORDS, count))

    def table(name: str, header: str, rows: int, row) -> None:
        lines = [header.replace(" ", "\t"), *("\t".join(map(str, row(n))) for n in range(rows))]
        (folder / name).write_text("\n".join(lines) + "\n")

    def pair(n: int) -> tuple[str, str, int]:
        first, label = words(int(draw.integers(2, 9))), n % 2
        second = " ".join(reversed(first.split())) if label else words(int(draw.integers(2, 14)))
        return first, second, label

    def paraphrase(n: int):
        first, second, label = pair(n)
        return n, 2 * n, 2 * n + 1, first, second, label

    def similarity(n: int):
        first, second, label = pair(n)
        return *"ngfyoab", first, second, 5 * label - 0.25 * (n % 3) * label

    header = "id qid1 qid2 question1 question2 is_duplicate"
    table("train.tsv", header, 19, paraphrase)
    table("dev.tsv", header, 11, paraphrase)
    table("dev_other.tsv", header, 5, paraphrase)
    table("test.tsv", "id question1 question2", 3, lambda n: (n, words(3), words(4)))
    header = "index genre file year old source1 source2 sentence1 sentence2 score"
    table("similar.tsv", header, 17, similarity)
    for part, count in (("train", 11), ("dev", 3)):
        (folder / "RACE" / part / "middle").mkdir(parents=True)
        for n in range(count):
            options = [[words(2) for _ in range(4)] for _ in range(n % 2 + 1)]
            passage = {
                "article": words(12),
                "questions": [f"{words(2)} _ {words(1)}", words(3)][: len(options)],
                "options": options,
                "answers": ["ABCD"[int(draw.integers(4))] for _ in options],
            }
            path = folder / "RACE" / part / "middle" / f"{n}.txt"
            path.write_text(json.dumps(passage) + "\n")


def flags(folder: Path, *more: str, task: str = "QQP") -> list[str]:
    """The command line of a fine-tuning."""
    files = {
        "QQP": (["train.tsv"], ["dev.tsv", "dev_other.tsv"]),
        "STS-B": (["similar.tsv"], ["similar.tsv"]),
        "RACE": (["RACE/train/middle"], ["RACE/dev/middle"]),
    }
    train, valid = ([str(folder / name) for name in part] for part in files[task])
    given = ["--task", task, "--train-data", *train, "--valid-data", *valid]
    return [*given, "--vocab-file", str(folder / "vocab.txt"), *SIZES, *more]


@dataclass(frozen=True)
class Run:
    """What a run on rank 0 printed and wrote; ``losses`` are those of its steps."""

    printed: str
    losses: list[float]
    results: dict


def run(argv: Sequence[str], folder: Path, name: str = "run") -> Run:
    """Runs a command in this process, or in each of a pool's."""
    from megatron.apps.tasks.command import run_task

    metrics, output = folder / f"{name}.metrics.jsonl", folder / f"{name}.json"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_task(None, [*argv, "--metrics-file", str(metrics), "--output", str(output)])
    rows = [json.loads(line) for line in metrics.open()] if metrics.exists() else []
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    results = json.loads(output.read_text()) if output.exists() else {}
    return Run(printed.getvalue(), losses, results)
