#!/usr/bin/env python
r"""Trains a GPT and the same GPT with Retro on the same tokens; what each neighbour is worth.

    python benchmarks/retro.py --web web.jsonl --folder runs/retro
    python benchmarks/retro.py --web web.jsonl --folder runs/retro --plot retro.png
    python benchmarks/retro.py --web web.jsonl --folder runs/retro --dry-run

The text is that of retro_text.py: pages and sources of the standard library of the Python that runs
it, whose facts recur in the database, and the web's, which do not. The commands are those of
docs/guides/retro.md, and are printed; what a command has made in --folder is used again. A fifth of
each text is held out. On the held-out samples the loss of the Retro is measured with its own
neighbours, without any, and with those of other chunks.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retro_text import NAMES, write_texts

ROOT = Path(__file__).resolve().parents[1]
TITLES = {
    "pages": "documentation,\nits source in the database",
    "sources": "source,\nits documentation in the database",
    "web": "web,\nnothing of it in the database",
}
VOCABULARY = 1024
WEIGHTS = {"pages": 0.5, "sources": 0.2, "web": 0.3}
"""Shares of the training samples."""
BATCH, LENGTH, CHUNK, STEPS, EVALUATED = 4, 256, 32, 1500, 75
"""Samples of a step, tokens of a sample and of a chunk; steps of training; batches that are
evaluated."""
TOKENIZER = """--tokenizer-type GPT2BPETokenizer
    --vocab-file {folder}/tokenizer/vocab.json --merge-file {folder}/tokenizer/merges.txt"""
PROJECT = f"""python tools/retro/preprocess_data.py
    --retro-project-dir {{folder}}/project-{{seed}} --retro-tasks build
    --data-path {{blend}} --split 80,20,0 {TOKENIZER}
    --seq-length {LENGTH} --retro-gpt-chunk-length {CHUNK}
    --seed {{seed}} --global-batch-size {BATCH} --train-samples {{samples}}
    --eval-interval {{steps}} --eval-iters {EVALUATED} --bert-embedder-type hashing"""
TRAINING = """python pretrain_retro.py --retro-project-dir {folder}/project-{seed}
    --num-layers 4 --hidden-size 96 --num-attention-heads 4 --position-embedding-type alibi
    --scale-embeddings --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.05
    --micro-batch-size {batch} --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine
    --lr-warmup-fraction 0.03 --weight-decay 0.1 --adam-beta2 0.98 --zero-stage 0
    --num-workers 0 --log-interval 50 --peak-tflops 1 --bf16 --save {checkpoint}"""
RETRO = """--retro-add-retriever --retro-num-neighbors 1
    --retro-encoder-hidden-dropout 0 --retro-encoder-attention-dropout 0"""
EVALUATION = """python tools/retro/evaluate.py --load {checkpoint}
    --retro-project-dir {folder}/project-{seed} --output {result}"""
MODELS = ("gpt", "retro")
WAYS = {
    "GPT": ("gpt", "no retrieval"),
    "Retro, its own neighbours": ("retro", "neighbours own"),
    "Retro, no neighbours": ("retro", "neighbours none"),
    "Retro, those of other chunks": ("retro", "neighbours shuffled"),
}
"""Compared ways: a model, and what the evaluation calls the way that it is evaluated."""


@dataclass(frozen=True)
class Command:
    """A command line, and what it leaves when it is complete."""

    words: Sequence[str]
    makes: Path


def main() -> int:
    options = parser().parse_args()
    folder = Path(options.folder)
    if not options.dry_run and not (folder / "web.jsonl").exists():
        write_texts(folder, Path(options.web))
    for command in commands(folder, options.steps, options.seeds, options.flags):
        if options.dry_run or not command.makes.exists():
            print("$", shlex.join(command.words), flush=True)
        if not options.dry_run and not command.makes.exists():
            words = [sys.executable, *command.words[1:]]
            if subprocess.run(words, cwd=ROOT).returncode or not command.makes.exists():
                raise SystemExit(f"{shlex.join(command.words)}: made no {command.makes}")
    if options.dry_run:
        return 0
    losses = [losses_of(folder, seed) for seed in options.seeds]
    print(table(losses))
    if options.plot:
        plot(losses, Path(options.plot))
    return 0


def commands(
    folder: Path, steps: int, seeds: Sequence[int], flags: Sequence[str]
) -> Iterator[Command]:
    """The commands that follow the text, in their order. ``flags`` are appended to those of the
    trainings."""

    def filled(template: str, **values: object) -> list[str]:
        return template.format(folder=folder, batch=BATCH, **values).split()

    texts = [str(folder / f"{name}.jsonl") for name in NAMES]
    output = ["--vocab-size", str(VOCABULARY), "--output", str(folder / "tokenizer")]
    words = ["python", "tools/train_tokenizer.py", "--input", *texts, *output]
    yield Command(words, folder / "tokenizer" / "vocab.json")
    for name, text in zip(NAMES, texts, strict=True):
        words = ["python", "tools/preprocess_data.py", "--input", text, "--append-eod"]
        words += ["--output-prefix", str(folder / name), *filled(TOKENIZER)]
        yield Command(words, folder / f"{name}_text_document.idx")
    blend = " ".join(f"{WEIGHTS[name]} {folder / name}_text_document" for name in NAMES)
    for seed in seeds:
        words = filled(PROJECT, blend=blend, seed=seed, samples=steps * BATCH, steps=steps)
        yield Command(words, folder / f"project-{seed}" / "query")
        for model in MODELS:
            checkpoint, result = folder / f"{model}-{seed}", result_of(folder, model, seed)
            words = filled(TRAINING, seed=seed, checkpoint=checkpoint)
            words += [*filled(RETRO if model == "retro" else ""), *flags]
            yield Command(words, checkpoint / "latest")
            yield Command(
                filled(EVALUATION, seed=seed, checkpoint=checkpoint, result=result), result
            )


def result_of(folder: Path, model: str, seed: int) -> Path:
    """Return the result that an evaluation writes."""
    return folder / f"{model}-{seed}.json"


def losses_of(folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """Losses of the ways of one seed on each held-out text, in nats per token."""
    found = {}
    for way, (model, name) in WAYS.items():
        content = json.loads(result_of(folder, model, seed).read_text())
        datasets = content["evaluations"][0]["tasks"][name]["datasets"]
        by_name = {Path(prefix).name.removesuffix("_text_document"): values
                   for prefix, values in datasets.items()}  # fmt: skip
        found[way] = {name: by_name[name]["loss"] for name in NAMES}
    return found


def table(seeds: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """Perplexities over the seeds, and how much lower the loss is than the GPT's: of each text the
    mean, and the smallest and largest."""
    lines = [
        f"| | {' | '.join(f'{name}: perplexity | below the GPT, nats' for name in NAMES)} |",
        f"|---|{'---|---|' * len(NAMES)}",
    ]
    for way in WAYS:
        cells = []
        for name in NAMES:
            losses = [seed[way][name] for seed in seeds]
            gains = [seed["GPT"][name] - seed[way][name] for seed in seeds]
            cells.append(f"{math.exp(statistics.fmean(losses)):.2f}")
            several = f" ({min(gains):+.3f} to {max(gains):+.3f})" if len(gains) > 1 else ""
            cells.append("" if way == "GPT" else f"{statistics.fmean(gains):+.3f}{several}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(seeds: Sequence[Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Writes bars: how much lower than the GPT's the loss of the Retro is on each text with each
    kind of neighbours; a line for the range over the seeds."""
    from pictures import FIRST, SECOND, new_figure, save

    figure = new_figure(3.0)
    axes = figure.subplots()
    ways = list(WAYS)[1:]
    for place, (way, color) in enumerate(zip(ways, (FIRST, "#8a8a8a", SECOND), strict=True)):
        for number, name in enumerate(NAMES):
            gains = [seed["GPT"][name] - seed[way][name] for seed in seeds]
            mean = statistics.fmean(gains)
            axes.bar(
                number + 0.26 * (place - 1), mean, 0.24, color=color,
                yerr=[[mean - min(gains)], [max(gains) - mean]] if len(gains) > 1 else None,
                label=way if number == 0 else None,
            )  # fmt: skip
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(NAMES)), [TITLES[name] for name in NAMES])
    axes.set_ylabel("loss below the GPT's, nats per token")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--web", required=True, help='JSON lines with "text": pages of the web')
    result.add_argument("--folder", required=True, help="keeps text, project and checkpoints")
    result.add_argument("--steps", type=int, default=STEPS)
    result.add_argument("--seeds", nargs="+", type=int, default=[1234])
    result.add_argument("--plot", help="a PNG file of the gains")
    result.add_argument("--dry-run", action="store_true", help="print the commands")
    result.add_argument("flags", nargs="*", help="more flags of the trainings, after --")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
