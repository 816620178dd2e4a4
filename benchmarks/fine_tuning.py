#!/usr/bin/env python
"""Fine-tunes a small BERT that was pretrained here, and the same without pretraining.

    python benchmarks/fine_tuning.py --text data/RACE/train web.jsonl --glue glue --folder runs
    python benchmarks/fine_tuning.py --text ... --glue glue --folder runs --tasks QQP -- --lr 5e-4

--glue has the folders QQP and MNLI with train.tsv and dev.tsv, dev_matched.tsv. The encoder is
pretrained on the text, and then on the same text and the sentences of the training rows, without
their labels, where neighbours are alike; --similar-steps 0 leaves that out, which needs
scikit-learn. Vocabulary, data, encoders and finished runs are kept in --folder, and used again.
Both starts have the same flags; what follows "--" is appended to those of the fine-tuning. Printed
are the accuracies on the validation rows after the last epoch, over the seeds.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from masked_language import ROOT, prepare, tool
from similar_sentences import grouped, reordered
from trainings import new_parser

from megatron.apps.tasks.command import run_task
from megatron.run.process import ending_process, errors_for_users

MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --position-embedding-type rope "
    "--sliding-window 2 --window-attn-skip-freq 2 --init-method-std 0.05 --bf16 "
    "--tokenizer-type BertWordPieceLowerCase"
).split()
"""Every other block sees a token on either side, the rest all: that is learned sooner."""
COMMON = (
    "--adam-beta2 0.98 --weight-decay 0.01 --num-workers 0 --zero-stage 0 --peak-tflops 1 "
    "--micro-batch-size 32"
).split()
PRETRAINING = (
    "--seq-length 64 --bert-pair-task next-sentence --mask-prob 0.2 --attention-dropout 0 "
    "--hidden-dropout 0 --lr 3e-3 --min-lr 1e-5 --lr-warmup-iters 150 --lr-decay-style WSD "
    "--lr-wsd-decay-style linear --lr-wsd-decay-iters 1000 --eval-interval 1000 --eval-iters 20 "
    "--log-interval 50 --save-interval 500 --keep-last 2"
).split()
SIMILAR = (
    "--seq-length 48 --short-seq-prob 0 --no-whole-word-masking --bert-pair-task next-sentence "
    "--mask-prob 0.2 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 64 --lr 1e-3 "
    "--min-lr 1e-5 --lr-warmup-iters 40 --lr-decay-style linear --eval-interval 400 "
    "--eval-iters 10 --log-interval 25"
).split()
"""Share of the steps on similar sentences."""
FINE_TUNING = (
    "--seq-length 48 --lr 1e-3 --lr-decay-style linear --lr-warmup-fraction 0.1 --log-interval 100"
).split()
FILES = {"QQP": "dev.tsv", "MNLI": "dev_matched.tsv"}
"""Files on which each task is evaluated."""
TEXTS = {"QQP": (3, 4), "MNLI": (8, 9)}
"""The columns of the two texts of a row."""
STARTS = ("pretrained", "random")
ACCURACY = re.compile(r">> \|epoch: (\d+)\| overall: correct / total = (\d+) / (\d+)")


@dataclass(frozen=True)
class Run:
    """Accuracies of a fine-tuning, in percent, after each epoch."""

    task: str
    start: str
    seed: int
    accuracies: Sequence[float]


def main() -> int:
    options = parser().parse_args()
    folder = Path(options.folder)
    data = prepare(folder, options.text, options.vocab_size)
    vocabulary = data[:2]
    encoder = folder / "pretrained"
    if "pretrained" in options.starts:
        pretrain(encoder, options.steps, [*PRETRAINING, *data])
        if options.similar_steps:
            start, encoder = encoder, folder / "similar"
            words = [*SIMILAR, *similar_data(folder, Path(options.glue), data)]
            words += ["--load", str(start), "--finetune"]
            pretrain(encoder, options.similar_steps, words)
    record = Path(options.json or folder / "fine-tunings.json")
    runs = [Run(**row) for row in json.loads(record.read_text())] if record.exists() else []
    for task, seed, start in product(options.tasks, options.seeds, options.starts):
        if (task, start, seed) in {(run.task, run.start, run.seed) for run in runs}:
            continue
        begins = ["--pretrained-checkpoint", str(encoder)] if start == "pretrained" else []
        words = [*vocabulary, *begins, *options.flags, "--epochs", str(options.epochs)]
        runs.append(fine_tuned(Path(options.glue), task, start, seed, words))
        print(runs[-1], flush=True)
        record.write_text(json.dumps([asdict(run) for run in runs], indent=1))
    print(table(runs))
    if options.plot:
        plot(runs, Path(options.plot))
    return 0


def pretrain(encoder: Path, steps: int, words: Sequence[str]) -> None:
    """Runs ``pretrain_bert.py`` unless the folder has a checkpoint."""
    if not (encoder / "latest").exists():
        words = [*MODEL, *COMMON, *words, "--train-iters", str(steps), "--save", str(encoder)]
        subprocess.run([sys.executable, str(ROOT / "pretrain_bert.py"), *words], check=True)


def similar_data(folder: Path, glue: Path, data: Sequence[str]) -> list[str]:
    """Writes the data of similar sentences unless they exist; their flags, the vocabulary and the
    held-out data of ``data``."""
    parts = {name: folder / f"similar-{name}.jsonl" for name in ("text", "rows")}
    if not parts["rows"].exists():
        lines = (folder / "train.jsonl").read_text().splitlines()
        texts = reordered(json.loads(line)["text"] for line in lines)
        vocabulary = ["--tokenizer-type", "BertWordPieceLowerCase", *data[:2]]
        for path, found in zip(parts.values(), (texts, grouped(row_texts(glue))), strict=True):
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in found))
            output = ["--output-prefix", str(path.with_suffix("")), "--split-sentences"]
            tool("preprocess_data", "--input", str(path), *output, *vocabulary)
    blend = [word for name in parts for word in ("0.5", f"{folder}/similar-{name}_text_sentence")]
    return [*data[:2], "--train-data-path", *blend, *data[4:]]


def row_texts(glue: Path) -> Iterable[str]:
    """Both texts of all training rows."""
    for task, columns in TEXTS.items():
        for line in (glue / task / "train.tsv").read_text().splitlines()[1:]:
            row = line.split("\t")
            yield from (row[column].strip() for column in columns)


def fine_tuned(glue: Path, task: str, start: str, seed: int, words: Sequence[str]) -> Run:
    """Runs ``tasks/main.py``, in a process that has imported everything."""
    files = ["--train-data", str(glue / task / "train.tsv")]
    files += ["--valid-data", str(glue / task / FILES[task]), "--seed", str(seed)]
    words = ["--task", task, *MODEL, *COMMON, *FINE_TUNING, *files, *words]
    with tempfile.TemporaryFile() as printed:
        process = get_context("fork").Process(target=run_printed, args=(words, printed.fileno()))
        process.start()
        process.join()
        printed.seek(0)
        text = printed.read().decode()
    found = [100 * int(right) / int(total) for _, right, total in ACCURACY.findall(text)]
    if process.exitcode or not found:
        raise SystemExit(f"tasks/main.py {' '.join(words)}\n{text}")
    return Run(task, start, seed, tuple(found))


def run_printed(words: Sequence[str], file: int) -> None:
    """Runs a task; what it prints goes to a file."""
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(file, stream)
    with ending_process(), errors_for_users():
        run_task(None, words)


def table(runs: Sequence[Run]) -> str:
    """Median, smallest and largest last accuracy of each task and start."""
    lines = ["| task | start | median | smallest | largest |", "|---|---|---|---|---|"]
    for task, start in dict.fromkeys((run.task, run.start) for run in runs):
        found = [run.accuracies[-1] for run in runs if (run.task, run.start) == (task, start)]
        cells = (statistics.median(found), min(found), max(found))
        lines.append(f"| {task} | {start} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Writes a panel for each task: medians over the seeds, and their range."""
    from pictures import FIRST, SECOND, new_figure, save

    tasks = list(dict.fromkeys(run.task for run in runs))
    figure = new_figure(3.2)
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        for start, color in zip(STARTS, (FIRST, SECOND), strict=True):
            epochs = list(by_epoch(runs, task, start))
            numbers = range(1, len(epochs) + 1)
            axes.plot(numbers, [statistics.median(each) for each in epochs], "o-", color=color,
                      label=start)  # fmt: skip
            axes.fill_between(numbers, [min(each) for each in epochs],
                              [max(each) for each in epochs], color=color, alpha=0.2)  # fmt: skip
        axes.set_title(task, loc="left")
        axes.set_xlabel("epoch")
        axes.set_xticks(numbers)
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("validation accuracy, %")
    panels[0].legend(frameon=False)
    save(figure, path)


def by_epoch(runs: Iterable[Run], task: str, start: str) -> Iterable[tuple[float, ...]]:
    """The accuracies of all seeds after each epoch."""
    kept = [run.accuracies for run in runs if (run.task, run.start) == (task, start)]
    return zip(*kept, strict=True)


def parser() -> argparse.ArgumentParser:
    result = new_parser(__doc__, steps=6000)
    result.add_argument("--text", nargs="+", required=True, metavar="FILE", help="to pretrain on")
    result.add_argument("--glue", required=True, metavar="FOLDER")
    result.add_argument("--folder", required=True, help="keeps vocabulary, data and encoder")
    result.add_argument("--similar-steps", type=int, default=800)
    result.add_argument("--vocab-size", type=int, default=4000)
    result.add_argument("--tasks", nargs="+", choices=FILES, default=list(FILES))
    result.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    result.add_argument("--seeds", nargs="+", type=int, default=list(range(1234, 1239)))
    result.add_argument("--epochs", type=int, default=2)
    result.add_argument("--plot", help="a PNG file of the accuracies")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
