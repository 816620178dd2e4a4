#!/usr/bin/env python
"""A small model that is trained at 1,024 tokens and continued at 8,192 with YaRN: passkey by depth,
loss by position, and the same logits in transformers.

    python benchmarks/long_context.py --data DATA --folder runs/long-context

DATA has corpora/wiki_demo.txt, openwebtext/openwebtext-1000.decoded.jsonl and
wikitext2/wiki.valid.raw; the last is held out. A third of the training's tokens are passkey
documents, with other keys than those of the evaluation, and half are words and numbers that come
twice: a model this small learns from text alone neither to copy nor the task.
"""

import argparse
import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from random import Random

from megatron.apps.pictures.length import draw_grid, draw_loss
from megatron.apps.pictures.plots import save_picture
from megatron.apps.tasks.length.haystacks import WORDS, essay_of_words, random_number, texts_of_file
from megatron.apps.tasks.length.ruler import TASKS, Scene

SHORT, LONG = 1024, 8192
TOKENS_OF_NOISE, TOKENS_OF_ITEM = 30, 5
MODEL = (
    "--num-layers 3 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 344 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--rotary-base 10000 --hidden-dropout 0 --attention-dropout 0 --bf16 --zero-stage 1"
).split()
TRAINING = (
    "--weight-decay 0.1 --adam-beta2 0.98 --clip-grad 1 --lr-decay-style cosine --split 100,0,0 "
    "--eval-iters 0 --log-interval 20 --num-workers 0 --reset-attention-mask --peak-tflops 1"
).split()
AT_LONG = ["--seq-length", LONG, "--max-position-embeddings", LONG]
YARN = json.dumps(
    {"rope_type": "yarn", "factor": LONG / SHORT, "original_max_position_embeddings": SHORT}
)


def main() -> int:
    options = parser().parse_args()
    folder = Path(options.folder)
    for step in options.steps:
        STEPS[step](Path(options.data), folder, options)
    return 0


def prepare(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """A vocabulary of 1,024 tokens, and indexed files of text and of passkey documents."""
    folder.mkdir(parents=True, exist_ok=True)
    web = texts_of_file(data / "openwebtext/openwebtext-1000.decoded.jsonl", "--data")
    wiki = (data / "corpora/wiki_demo.txt").read_text().split("\n")
    write(folder / "text.jsonl", [text for text in [*web, *wiki] if text.strip()])
    for longest in (SHORT, LONG):
        write(folder / f"passkeys-{longest}.jsonl", passkeys(longest, options.passkeys))
        write(folder / f"copies-{longest}.jsonl", copies(longest, options.passkeys))
    run(
        "tools/train_tokenizer.py", "--input", folder / "text.jsonl", "--vocab-size", 1024,
        "--tokenizer-type", "SentencePieceTokenizer", "--byte-fallback",
        "--output", folder / "tokenizer",
    )  # fmt: skip
    kinds = product(("passkeys", "copies"), (SHORT, LONG))
    for name in ("text", *(f"{kind}-{longest}" for kind, longest in kinds)):
        run(
            "tools/preprocess_data.py", "--input", folder / f"{name}.jsonl", "--output-prefix",
            folder / name, "--append-eod", *tokenizer(folder),
        )  # fmt: skip


def passkeys(longest: int, count: int) -> list[str]:
    """Passkey documents with answers, of lengths from 100 tokens to the longest, log-uniform."""
    rng, essay, task = Random(longest), essay_of_words(), TASKS["passkey"]
    most = (longest - 150) // TOKENS_OF_NOISE
    texts = []
    for _ in range(count):
        units = round(math.exp(rng.uniform(0, math.log(most))))
        document = task.make(Scene(rng, units, rng.random(), longest, essay))
        texts.append(f"{document.request} {document.answers[0]}.")
    return texts


def copies(longest: int, count: int) -> list[str]:
    """Words and numbers that are repeated once, up to half the longest length apart."""
    rng = Random(longest)
    texts = []
    for _ in range(count):
        items = round(math.exp(rng.uniform(math.log(5), math.log(longest / 2 / TOKENS_OF_ITEM))))
        drawn = [
            random_number(rng, 5) if rng.random() < 0.5 else rng.choice(WORDS) for _ in range(items)
        ]
        texts.append(" ".join(drawn * 2))
    return texts


def train(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """1,024 tokens."""
    run(
        "pretrain_gpt.py", *MODEL, *TRAINING, "--seq-length", SHORT, "--micro-batch-size", 8,
        "--global-batch-size", 8, "--train-iters", options.steps_short, "--lr", 4e-3,
        "--min-lr", 4e-4, "--lr-warmup-iters", 30, *tokenizer(folder),
        *blend(folder, SHORT, options.shares),
        "--save", folder / "short", "--metrics-file", folder / "short.jsonl",
    )  # fmt: skip


def lengthen(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """The checkpoint at 8,192 tokens, with YaRN."""
    run(
        "pretrain_gpt.py", "--use-checkpoint-args", "--load", folder / "short", "--finetune",
        *AT_LONG, "--rope-scaling", YARN, *TRAINING, "--bf16", "--zero-stage", 1,
        "--micro-batch-size", 1, "--global-batch-size", 1,
        "--train-iters", options.steps_long, "--lr", 1e-3, "--min-lr", 1e-4,
        "--lr-warmup-iters", 2, *blend(folder, LONG, options.shares), *tokenizer(folder),
        "--save", folder / "long", "--metrics-file", folder / "long.jsonl",
    )  # fmt: skip


def evaluate(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """Passkey and loss by position of both models, and transformers' losses of the export."""
    for name in ("short", "long"):
        flags = AT_LONG if name == "short" else []
        run(
            "tools/evaluate.py", "--load", folder / name, *flags, "--eval_fp32",
            "--tasks", f"passkey,passkey_generate,loss_by_position={held_out(data)}",
            "--lengths", f"{SHORT},{LONG}", "--depths", "0,25,50,75,100",
            "--limit", options.documents, "--batch-size", 1, "--output", folder / f"{name}.json",
        )  # fmt: skip


def compare(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """The losses of one document in transformers, of the exported folder."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron.config import TokenizerConfig
    from megatron.tokenizer import build_tokenizer

    run(
        "tools/convert_checkpoint.py", "to-hf", "--load", folder / "long", "--dtype", "float32",
        "--output", folder / "hf",
    )  # fmt: skip
    run(
        "tools/evaluate.py", "--load", folder / "long", "--eval_fp32", "--lengths", LONG,
        "--tasks", f"loss_by_position={held_out(data)}", "--limit", 1, "--batch-size", 1,
        "--output", folder / "one.json",
    )  # fmt: skip
    ours = json.loads((folder / "one.json").read_text())["by_length"]["loss"]
    words = tokenizer(folder)
    tokens = build_tokenizer(TokenizerConfig(words[1], tokenizer_model=str(words[3])))
    documents = map(tokens.tokenize, texts_of_file(held_out(data), "--data"))
    window = next(list(each[:LONG]) for each in documents if len(each) >= LONG)
    begin = tokens.eod if tokens.special_ids.bos is None else tokens.special_ids.bos
    ids = torch.tensor([[begin, *window]])
    model = AutoModelForCausalLM.from_pretrained(
        folder / "hf", dtype=torch.float32, trust_remote_code=False
    )
    print(model.config.max_position_embeddings, model.config.rope_parameters)
    with torch.no_grad():
        log_probs = model(ids[:, :-1]).logits[0].log_softmax(-1)
    losses = -log_probs.gather(1, ids[0, 1:, None])[:, 0]
    start = 0
    for end, loss in ours.items():
        theirs = losses[start : int(end)].mean().item()
        print(f"to {end}: {loss:.6f}, transformers {theirs:.6f}, {loss - theirs:+.1e}")
        start = int(end)


def picture(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """Both models: passkey by length and depth, and the loss by position."""
    from matplotlib.figure import Figure

    labels = {"short": "trained at 1,024", "long": "continued at 8,192, YaRN"}
    both = {n: json.loads((folder / f"{n}.json").read_text())["by_length"] for n in labels}
    figure = Figure(figsize=(12, 3.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, (name, label) in zip(panels, labels.items(), strict=False):
        image = draw_grid(axes, f"passkey, {label}", both[name]["scores"]["passkey"])
    figure.colorbar(image, ax=list(panels[:2]), aspect=30).set_label("share right")
    draw_loss(panels[2], {labels[name]: each["loss"] for name, each in both.items()})
    panels[2].set_title("held-out articles", fontsize="medium")
    save_picture(figure, folder / "long-context.png")


def held_out(data: Path) -> Path:
    return data / "wikitext2/wiki.valid.raw"


def blend(folder: Path, longest: int, shares: list[float]) -> list:
    names = "text", f"copies-{longest}", f"passkeys-{longest}"
    pairs = [pair for pair in zip(shares, names, strict=True) if pair[0]]
    paths = [word for n, name in pairs for word in (n, f"{folder / name}_text_document")]
    return ["--data-path", *paths, "--data-cache-path", folder / "cache"]


def tokenizer(folder: Path) -> list:
    model = folder / "tokenizer" / "tokenizer.model"
    return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]


def write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run(*words: object) -> None:
    command = [sys.executable, *map(str, words)]
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True)


STEPS = {step.__name__: step for step in (prepare, train, lengthen, evaluate, compare, picture)}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--data", required=True, help="folder of the texts")
    result.add_argument("--folder", default="runs/long-context", help="where everything goes")
    result.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    result.add_argument("--passkeys", type=int, default=3000, help="documents of each length")
    result.add_argument(
        "--shares", type=float, nargs=3, default=[0.15, 0.5, 0.35], metavar="SHARE",
        help="of the samples: text, copies, passkeys",
    )  # fmt: skip
    result.add_argument("--steps-short", type=int, default=500)
    result.add_argument("--steps-long", type=int, default=15)
    result.add_argument("--documents", type=int, default=10, help="of each task and model")
    return result


if __name__ == "__main__":
    sys.exit(main())
