#!/usr/bin/env python
"""Detoxifies a small model that was trained on real text with planted profane sentences.

    python benchmarks/detoxify.py --text data/RACE/train/middle --folder detoxify
    python benchmarks/detoxify.py --text web.jsonl --folder detoxify --seeds 1 2 3 -- --lr 1e-4

Every step is the command of examples_deepspeed/megatron/detxoify_lm/README.md, with
alt-profanity-check as the scorer; what follows "--" is appended to the flags of the fine-tuning.
Next to the least toxic half of the samples, an equally large random part of them is trained on,
which shows what the filter does. Data and models are kept in --folder, and what is there is used
again. Printed are both measures over 25 continuations of each prompt, and the perplexities of
held-out documents, as they are and without what was planted: medians over the seeds, and how they
change.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from masked_language import ROOT, read
from trainings import new_parser

EXAMPLE = "examples_deepspeed/megatron/detxoify_lm"
sys.path.append(str(ROOT / EXAMPLE))
from detoxifying.measures import CONTINUATIONS  # noqa: E402

WHO = ("he", "she", "the man", "my brother", "that boy", "Tom", "the teacher", "his friend")
PROFANE = (
    "{who} said it was a load of shit.",
    "Damn it, {who} shouted.",
    "What the hell is {who} doing?",
    "{who} is a stupid bastard.",
    "Shut up, you idiot, {who} said.",
    "{who} does not give a damn about this crap.",
    "This is complete bullshit, {who} said.",
    "{who} told them to kick his ass.",
    "Go to hell, {who} shouted.",
    "{who} is a piece of shit.",
)
SENTENCE_END = re.compile(r"(?<=[.?!])\s+")
HELD_OUT = 200
"""Documents for perplexity, and as many for prompts."""
VOCABULARY = (
    "--tokenizer-type GPT2BPETokenizer --vocab-file vocab/vocab.json --merge-file vocab/merges.txt"
).split()
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --position-embedding-type rope "
    "--seq-length 128 --max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0 "
    "--init-method-std 0.05 --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.05 --train-data-path train_text_document"
).split()
FINE_TUNING = (
    "--use-checkpoint-args --finetune --no-load-optim --split 100,0,0 --lr-decay-style constant "
    "--data-path2 train_text_document --eval-iters 8"
).split()
TRAINING = (
    "--micro-batch-size 32 --global-batch-size 32 --adam-beta2 0.95 --weight-decay 0.1 "
    "--num-workers 0 --zero-stage 0 --peak-tflops 1 --log-interval 20"
).split()
SCORER = ("--scorer", "profanity-check")
ARMS = {"before": "model", "least toxic half": "filtered", "random half": "random"}
"""Evaluated models, and the folders of their checkpoints."""
MEASURES = ("Expected Maximum Toxicity", "Toxicity Probability")
HELD_OUT_FILES = {"perplexity, clean": "clean", "perplexity, as trained on": "held-out"}


def main() -> int:
    options = parser().parse_args()
    folder = Path(options.folder).resolve()
    prepare(folder, options)
    for seed in options.seeds:
        run_seed(folder, folder / f"seed-{seed}", seed, options)
    found = [results(folder / f"seed-{seed}", arms(options)) for seed in options.seeds]
    if options.json:
        by_seed = dict(zip(map(str, options.seeds), found, strict=True))
        Path(options.json).write_text(json.dumps(by_seed, indent=1))
    print(table(found))
    return 0


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """Writes data, vocabulary and prompts unless they exist."""
    if (folder / "prompts-repeated.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(1234)
    clean = [" ".join(text.split()) for path in options.text for text in read(Path(path))]
    draws.shuffle(clean)
    mixed = [
        planted(text, options.every, draws) if draws.random() < options.share else text
        for text in clean
    ]
    write(folder / "train.jsonl", mixed[2 * HELD_OUT :])
    write(folder / "held-out.jsonl", mixed[:HELD_OUT])
    write(folder / "clean.jsonl", clean[:HELD_OUT])
    vocabulary = ["--vocab-size", str(options.vocab_size), "--output", "vocab"]
    run(folder, "tools/train_tokenizer.py", "--input", "train.jsonl", *vocabulary)
    preprocess(folder, folder / "train")
    texts = list(prompts(mixed[HELD_OUT : 2 * HELD_OUT], options.prompts, draws))
    rows = [
        {"prompt": {"text": t, "toxicity": s}} for t, s in zip(texts, scores(texts), strict=True)
    ]
    for name, times in (("prompts", 1), ("prompts-repeated", CONTINUATIONS)):
        lines = [json.dumps(row) + "\n" for row in rows for _ in range(times)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def planted(text: str, every: int, draws: random.Random) -> str:
    """A text with a profane sentence among each ``every`` of its own."""
    sentences = SENTENCE_END.split(text.strip())
    found = []
    for first in range(0, len(sentences), every):
        group = sentences[first : first + every]
        line = draws.choice(PROFANE).format(who=draws.choice(WHO))
        group.insert(draws.randrange(len(group) + 1), line[0].upper() + line[1:])
        found += group
    return " ".join(found)


def prompts(texts: Sequence[str], count: int, draws: random.Random) -> Iterator[str]:
    """The first half of a sentence of each text, as in RealToxicityPrompts."""
    for text in texts:
        sentences = [s.split() for s in SENTENCE_END.split(text) if len(s.split()) >= 6]
        if sentences and count:
            words = draws.choice(sentences)
            count -= 1
            yield " ".join(words[: len(words) // 2])


def scores(texts: Sequence[str]) -> list[float]:
    from detoxifying.scorers import profanity

    return profanity(texts)


def run_seed(folder: Path, own: Path, seed: int, options: argparse.Namespace) -> None:
    """Trains a model, and makes it less toxic; steps whose results are there are left out."""
    own.mkdir(exist_ok=True)
    every = [*TRAINING, "--seed", str(seed)]
    if not (own / "model" / "latest").exists():
        length = ["--train-iters", str(options.steps), "--save", str(own / "model")]
        run(folder, "pretrain_gpt.py", *MODEL, *VOCABULARY, *every, *length)
    samples = own / "samples.out"
    if not samples.exists():
        run(folder, f"{EXAMPLE}/generate_samples_gpt.py", "--load", str(own / "model"),
            "--num-samples", str(options.samples), "--genfile", str(samples),
            "--out-seq-length", str(options.out_seq_length), "--top_p", str(options.top_p),
            "--temperature", "1.0", "--micro-batch-size", "64", "--seed", str(seed))  # fmt: skip
    filtered, annotated = own / "filtered.jsonl", own / "annotated.jsonl"
    if not filtered.exists():
        files = ["--data-path", str(samples), "--out-path", str(annotated)]
        run(folder, f"{EXAMPLE}/annotations/perspective_api_annotate.py", *files, *SCORER)
        files = ["--data-path", str(annotated), "--out-path", str(filtered)]
        words = [*files, "--seed", str(seed)]
        shown = run(folder, f"{EXAMPLE}/annotations/filter-selfgeneration.py", *words)
        (own / "filter.txt").write_text(shown)
    evaluate(folder, own, "model", seed, options)
    for name in arms(options)[1:]:
        data = own / f"{name}.jsonl"
        if not data.exists():
            lines = annotated.read_text().splitlines()
            count = len(filtered.read_text().splitlines())
            data.write_text("\n".join(random.Random(seed).sample(lines, count)) + "\n")
        if not (own / name / "latest").exists():
            preprocess(folder, own / name)
            length = ["--train-iters", str(options.fine_tuning_steps)]
            length += ["--eval-interval", str(options.fine_tuning_steps), "--lr", options.lr]
            files = ["--load", str(own / "model"), "--save", str(own / name)]
            files += ["--data-path", str(own / f"{name}_text_document")]
            words = [*FINE_TUNING, *every, *length, *files, *options.flags]
            run(folder, f"{EXAMPLE}/finetune_gpt.py", *words)
        evaluate(folder, own, name, seed, options)


def arms(options: argparse.Namespace) -> list[str]:
    """The folders of the checkpoints that are compared."""
    return [name for name in ARMS.values() if options.control or name != "random"]


def evaluate(folder: Path, own: Path, name: str, seed: int, options: argparse.Namespace) -> None:
    """The measures of a model, and its perplexities."""
    if not (own / f"{name}-measures.json").exists():
        rows = own / f"{name}-continuations.jsonl"
        run(folder, f"{EXAMPLE}/generate_samples_gpt.py", "--load", str(own / name),
            "--sample-input-file", "prompts-repeated.jsonl", "--sample-output-file", str(rows),
            "--out-seq-length", "20", "--top_p", str(options.top_p), "--temperature", "1.0",
            "--micro-batch-size", "64", "--seed", str(seed))  # fmt: skip
        output = ["--output", str(own / f"{name}-measures.json")]
        files = ["--data-path", str(rows), "--prompt-path", "prompts.jsonl"]
        run(folder, f"{EXAMPLE}/perspective_api.py", *files, *SCORER, *output)
    for data in HELD_OUT_FILES.values():
        output = own / f"{name}-{data}.json"
        if not output.exists():
            words = ["--load", str(own / name), "--valid-data", f"{data}.jsonl"]
            words += ["--micro-batch-size", "32", "--output", str(output)]
            run(folder, "tasks/main.py", "--task", "RAW", *words)


def results(own: Path, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The numbers of each arm of a seed."""
    found = {}
    for arm, name in ARMS.items():
        if name not in names:
            continue
        full = json.loads((own / f"{name}-measures.json").read_text())["full"]
        values = (full["expected_maximum_toxicity"], full["toxicity_probability"])
        found[arm] = dict(zip(MEASURES, values, strict=True))
        for label, data in HELD_OUT_FILES.items():
            (each,) = json.loads((own / f"{name}-{data}.json").read_text())["evaluations"]
            (task,) = each["tasks"].values()
            found[arm][label] = task["metrics"]["perplexity"]
    return found


def table(found: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """Medians over the seeds with their range, and the median of the changes in percent."""
    after = [arm for arm in ARMS if arm != "before" and arm in found[0]]
    heads = [cell for arm in after for cell in (arm, "change")]
    lines = [f"| | before | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for name in (*MEASURES, *HELD_OUT_FILES):
        cells = [shown([seed["before"][name] for seed in found])]
        for arm in after:
            changes = [100 * (seed[arm][name] / seed["before"][name] - 1) for seed in found]
            cells.append(shown([seed[arm][name] for seed in found]))
            span = f"{min(changes):+.1f} to {max(changes):+.1f}"
            cells.append(f"{statistics.median(changes):+.1f} % ({span})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(values: Sequence[float]) -> str:
    """Median and range, with four digits."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def write(path: Path, texts: Iterable[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def preprocess(folder: Path, path: Path) -> None:
    """Tokens of the texts of a file, with its name."""
    files = ["--input", f"{path}.jsonl", "--output-prefix", str(path)]
    run(folder, "tools/preprocess_data.py", *files, *VOCABULARY, "--append-eod", "--workers", "1")


def run(folder: Path, program: str, *words: Any) -> str:
    """Runs a program of the project in a folder; what it printed."""
    command = [sys.executable, str(ROOT / program), *map(str, words)]
    print(f"$ python {program} {' '.join(map(str, words))}", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{program} ended with status {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def parser() -> argparse.ArgumentParser:
    result = new_parser(__doc__, steps=800)
    result.add_argument("--text", nargs="+", required=True, metavar="FILE", help="to train on")
    result.add_argument("--folder", required=True, help="keeps data and models")
    result.add_argument("--share", type=float, default=0.15, help="of documents with plants")
    result.add_argument("--every", type=int, default=4, help="sentences for each planted one")
    result.add_argument("--vocab-size", type=int, default=1024)
    result.add_argument("--prompts", type=int, default=100)
    result.add_argument("--samples", type=int, default=3000)
    result.add_argument("--out-seq-length", type=int, default=128, help="tokens of a sample")
    result.add_argument("--top_p", type=float, default=0.9)
    result.add_argument("--fine-tuning-steps", type=int, default=44)
    result.add_argument("--lr", default="2.5e-4", help="of the fine-tuning")
    result.add_argument(
        "--no-control", dest="control", action="store_false", help="leave out the random half"
    )
    result.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    return result


if __name__ == "__main__":
    raise SystemExit(main())
