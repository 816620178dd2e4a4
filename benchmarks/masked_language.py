#!/usr/bin/env python
"""Trains a small BERT or T5 on given text; its losses on held-out text next to those of n-grams.

    python benchmarks/masked_language.py --family bert --text web.jsonl articles.txt
    python benchmarks/masked_language.py --family t5 --text web.jsonl articles.txt --json t5.json
    python benchmarks/masked_language.py --family bert --text web.jsonl --steps 500 -- --lr 1e-3

Files that end in .jsonl have a document in each line's "text", of others every line is one. Each
twentieth document is held out. The vocabulary is trained on the others with
tools/train_tokenizer.py, the data are made by tools/preprocess_data.py, and the trainer is that of
pretrain_bert.py and pretrain_t5.py; what follows "--" is appended to its flags. All losses are
those of the same hidden tokens, in nats.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ngrams import Bigram, HiddenText, token_losses
from trainings import new_parser

from megatron.apps.parity.runs import RunRecord, watched_trainer
from megatron.data.indexed import IndexedDataset
from megatron.data.loader import TrainingData
from megatron.engine.environment import distributed
from megatron.run.run import parse_run, run_data
from megatron.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT = 20
SAMPLES = 512
"""Samples of the held-out part."""
MODEL = (
    "--hidden-size 128 --num-attention-heads 4 --seq-length 64 --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 16 --tokenizer-type BertWordPieceLowerCase "
    "--init-method-std 0.05 --lr 3e-3 --lr-decay-style linear --lr-warmup-fraction 0.1 "
    "--adam-beta2 0.98 --weight-decay 0.01 --num-workers 0 --eval-iters 32 "
    "--eval-interval 1000000 --log-interval 50 --peak-tflops 1 --zero-stage 0"
).split()
BERT = (
    "--num-layers 4 --position-embedding-type rope --sliding-window 2 --window-attn-skip-freq 4 "
    "--bert-no-binary-head --no-whole-word-masking --mask-prob 0.3"
).split()
"""Three blocks see a token on either side, the fourth all: that is learned sooner."""
T5 = (
    "--num-layers 2 --position-embedding-type relative --normalization RMSNorm --mask-prob 0.5 "
    "--mean-noise-span-length 8 --max-noise-span-length 24 --decoder-seq-length 80 "
    "--vocab-extra-ids 20"
).split()
"""Half of the text is predicted, so that a sample teaches more."""


def bert_text(sample: Any, tokenizer: Any) -> HiddenText:
    """Return the hidden text of a BERT's sample."""
    size = int(sample.padding_mask_S.sum())
    shown, hidden = sample.tokens_S[:size], np.flatnonzero(sample.loss_mask_S)
    text = shown.copy()
    text[hidden] = sample.labels_S[hidden]
    return HiddenText(text, hidden, shown[hidden])


def t5_text(sample: Any, tokenizer: Any) -> HiddenText:
    """Return the hidden text of a T5's sample, within its text and an end token on either side."""
    encoder = sample.encoder_tokens_E[: int(sample.encoder_padding_mask_E.sum())]
    labels = sample.labels_D[: int(sample.decoder_padding_mask_D.sum()) - 1]
    starts = np.flatnonzero(np.isin(labels, tokenizer.sentinels))
    spans = {int(span[0]): span[1:] for span in np.split(labels, starts)[1:]}
    nothing = np.empty(0, np.int64)
    parts, hidden = [encoder[-1:]], [np.zeros(1, bool)]
    for token in encoder.tolist():
        span = spans.get(token, nothing)
        parts.append(span if token in spans else np.array([token]))
        hidden.append(np.full(len(parts[-1]), token in spans))
    return HiddenText(np.concatenate(parts), np.flatnonzero(np.concatenate(hidden)))


def masked_alone(sample: Any, tokenizer: Any) -> Any:
    """A BERT's sample with the loss of those tokens alone in whose place the mask is shown."""
    return sample._replace(loss_mask_S=sample.loss_mask_S * (sample.tokens_S == tokenizer.mask))


def spans_alone(sample: Any, tokenizer: Any) -> Any:
    """A T5's sample without the loss of sentinels and of the end token."""
    others = np.isin(sample.labels_D, [*tokenizer.sentinels, tokenizer.eos])
    return sample._replace(loss_mask_D=sample.loss_mask_D * ~others)


@dataclass(frozen=True)
class Task:
    """Task of a family.

    Attributes:
        flags: next to those of :data:`MODEL`.
        text: the hidden text of a sample.
        part: a sample with the losses of some of its tokens alone.
        loss_mask: of a sample.
        whole_name: of the losses of whole samples.
        part_name: of those of the part.
    """

    flags: Sequence[str]
    text: Callable[[Any, Any], HiddenText]
    part: Callable[[Any, Any], Any]
    loss_mask: Callable[[Any], Any]
    whole_name: str
    part_name: str


TASKS = {
    "bert": Task(
        BERT,
        bert_text,
        masked_alone,
        attrgetter("loss_mask_S"),
        "all predicted tokens",
        "those shown as [MASK]",
    ),
    "t5": Task(
        T5,
        t5_text,
        spans_alone,
        attrgetter("loss_mask_D"),
        "with sentinels and ends",
        "hidden text",
    ),
}


def main() -> int:
    options = parser().parse_args()
    torch.set_num_threads(1)
    task = TASKS[options.family]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        flags = [*MODEL, *task.flags, *prepare(folder, options.text, options.vocab_size)]
        flags += ["--train-iters", str(options.steps), *options.flags]
        model = train(options.family, task, flags)
        ngrams = baselines(options.family, task, flags)
    print(table(task, model, ngrams))
    if options.json:
        Path(options.json).write_text(json.dumps({"model": model, "ngrams": ngrams}, indent=1))
    return 0


def prepare(folder: Path, texts: Sequence[str], vocab_size: int) -> list[str]:
    """Writes vocabulary, training and held-out data unless they exist; their flags."""
    wordpiece = ["--tokenizer-type", "BertWordPieceLowerCase"]
    vocab = ["--vocab-file", str(folder / "vocab" / "vocab.txt")]
    parts = {name: folder / f"{name}.jsonl" for name in ("train", "held-out")}
    if not (folder / "vocab").exists():
        folder.mkdir(parents=True, exist_ok=True)
        documents = [json.dumps({"text": each}) for path in texts for each in read(Path(path))]
        held_out = documents[::HELD_OUT]
        del documents[::HELD_OUT]
        for path, content in zip(parts.values(), (documents, held_out), strict=True):
            path.write_text("\n".join(content) + "\n")
        size = ["--vocab-size", str(vocab_size), "--output", str(folder / "vocab")]
        tool("train_tokenizer", "--input", str(parts["train"]), *size, *wordpiece)
        for path in parts.values():
            output = ["--output-prefix", str(path.with_suffix("")), "--split-sentences"]
            tool("preprocess_data", "--input", str(path), *output, *wordpiece, *vocab)
    return [
        *vocab,
        *("--train-data-path", f"{folder}/train_text_sentence"),
        *("--valid-data-path", f"{folder}/held-out_text_sentence"),
    ]


def read(path: Path) -> Iterator[str]:
    """The documents of a file, or the articles of a folder of RACE."""
    if path.is_dir():
        for file in sorted(path.rglob("*.txt")):
            yield from (json.loads(line)["article"] for line in file.read_text().splitlines())
        return
    for line in path.read_text().splitlines():
        if line.strip():
            yield json.loads(line)["text"] if path.suffix == ".jsonl" else line


def tool(name: str, *flags: str) -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / f"{name}.py"), *flags], check=True)


def train(family: str, task: Task, flags: Sequence[str]) -> dict[str, Any]:
    """Losses of a training, and those on the held-out samples at its end."""
    started = time.process_time()
    run, record = parse_run(None, flags, family), RunRecord()
    with distributed(run.config.parallel) as mesh:
        trainer = watched_trainer(run, mesh, record.add)
        trainer.fit()
        cpu = time.process_time() - started
        whole, part = held_out_losses(trainer, task, run.tokenizer)
    return {"steps": record.losses, "cpu_s": cpu, "whole": whole, "part": part}


def held_out_losses(trainer: Trainer, task: Task, tokenizer: Any) -> tuple[float, float]:
    """Mean losses of the tokens of the held-out samples: of all, and of the task's part."""
    data, size = trainer.data, trainer.plan.micro_batch_size
    (held_out,) = data.datasets.valid.values()
    sums = np.zeros((2, 2))
    for first in range(0, SAMPLES, size):
        whole = [held_out[i] for i in range(first, min(first + size, SAMPLES))]
        part = [task.part(sample, tokenizer) for sample in whole]
        for row, samples in enumerate((whole, part)):
            batch = data.collate(samples)
            tokens = sum(float(task.loss_mask(sample).sum()) for sample in samples)
            sums[row] += [trainer.engine.evaluate(iter([batch]), 1)["lm loss"] * tokens, tokens]
    whole_loss, part_loss = (sums[:, 0] / sums[:, 1]).tolist()
    return whole_loss, part_loss


def baselines(family: str, task: Task, flags: Sequence[str]) -> dict[str, Any]:
    """Losses of n-grams on the same hidden tokens, fitted to the training text, each document
    once."""
    run = parse_run(None, flags, family)
    tokens = int(IndexedDataset(run.config.data.train_data_path[0]).sequence_lengths.sum())
    config = run.config
    size = config.model.seq_length * (config.training.micro_batch_size or 1)
    run = parse_run(None, [*flags, "--train-iters", str(2 * tokens // size)], family)
    data, tokenizer = run_data(run), run.tokenizer
    texts = list(training_texts(data, task, tokens, tokenizer))
    bigram = Bigram.fit(texts, tokenizer.vocab_size)
    (held_out,) = data.datasets.valid.values()
    hidden = [task.text(held_out[i], tokenizer) for i in range(SAMPLES)]
    one_by_one = hidden[0].shown is None
    mask = -1 if one_by_one else tokenizer.mask
    losses = token_losses(bigram, hidden, mask, one_by_one)
    means: dict[str, dict[str, float | None]] = {}
    for name, values in vars(losses).items():
        if one_by_one:
            means[name] = {"whole": None, "part": values.mean()}
        else:
            alone = np.concatenate([text.shown for text in hidden]) == mask
            means[name] = {"whole": values.mean(), "part": values[alone].mean()}
    return means


def training_texts(
    data: TrainingData, task: Task, tokens: int, tokenizer: Any
) -> Iterator[np.ndarray[Any, Any]]:
    """The texts of the first samples, until they have this many tokens."""
    samples = data.datasets.train
    assert samples is not None
    number, left = 0, tokens
    while left > 0:
        text = task.text(samples[number], tokenizer).text
        yield text
        left -= len(text)
        number += 1


def table(task: Task, model: dict[str, Any], ngrams: dict[str, Any]) -> str:
    """Rows of n-grams and of the model."""
    lines = [f"| | {task.whole_name} | {task.part_name} |", "|---|---|---|"]
    names = {
        "unigram": "unigram",
        "left": "bigram, tokens before",
        "both": "bigram, tokens before and after",
    }
    rows = {names[name]: losses for name, losses in ngrams.items()}
    rows[f"model, {model['cpu_s']:.0f} CPU s"] = model
    for name, losses in rows.items():
        shown = ["" if losses[k] is None else f"{losses[k]:.3f}" for k in ("whole", "part")]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = new_parser(__doc__, steps=900)
    result.add_argument("--family", choices=TASKS, required=True)
    result.add_argument("--text", nargs="+", required=True, metavar="FILE")
    result.add_argument("--vocab-size", type=int, default=192)
    result.add_argument("--folder", help="keep vocabulary and data here, or use those that exist")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
