#!/usr/bin/env python
"""A small model that is trained at 256 and 1,024 tokens and continued at 8,192 with YaRN: passkey
by depth, loss by position, and the same logits in transformers.

    python benchmarks/long_context.py --data DATA --folder runs/long-context

DATA has corpora/wiki_demo.txt, openwebtext/openwebtext-1000.decoded.jsonl and
wikitext2/wiki.valid.raw; the last is held out. From text alone a model this small does not learn
to find anything: it begins with drills, short documents that repeat words and numbers or ask for
one, and later ones have the lengths of a stage. Keys are other ones than in the evaluation.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from random import Random

from megatron.apps.pictures.length import draw_grid, draw_loss
from megatron.apps.pictures.plots import save_picture
from megatron.apps.tasks.length.haystacks import (
    WORDS,
    Essay,
    random_number,
    split_sentences,
    texts_of_file,
)
from megatron.apps.tasks.length.ruler import TASKS, Scene

DRILL, SHORT, LONG = 256, 1024, 8192
HAYSTACKS = ("passkey", 30), ("passkey", 30), ("niah_single_1", 30), ("niah_single_2", 60)
"""Tasks and tokens of a unit of theirs, about."""
TOKENS_OF_WORD, TOKENS_OF_QUESTION = 4, 200
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --kv-channels 32 --ffn-hidden-size "
    "172 --swiglu --normalization RMSNorm --apply-layernorm-1p --disable-bias-linear "
    "--position-embedding-type rope --rotary-base 100000 --rotary-percent 0.5 --qk-layernorm "
    "--attention-output-gate --untie-embeddings-and-output-weights --init-method-std 0.1 "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 2 --linear-num-value-heads 2 --linear-key-head-dim 32 "
    "--linear-value-head-dim 32 --hidden-dropout 0 --attention-dropout 0"
).split()
"""Two blocks of Qwen3.5: linear attention, whose convolution sees neighbours, and attention."""
TRAINING = (
    "--bf16 --zero-stage 1 --weight-decay 0.1 --adam-beta2 0.98 --clip-grad 1 --split 100,0,0 "
    "--eval-iters 0 --log-interval 20 --num-workers 0 --reset-attention-mask --peak-tflops 1 "
    "--num-gpus-per-node 2"
).split()
AT_LONG = ["--seq-length", LONG, "--max-position-embeddings", LONG]
SHARES = 0.3, 0.25, 0.45
"""Shares of text, copies and questions in the samples."""
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
    """A vocabulary of 1,024 tokens, and indexed files of text, of copies and of questions."""
    folder.mkdir(parents=True, exist_ok=True)
    web = texts_of_file(data / "openwebtext/openwebtext-1000.decoded.jsonl", "--data")
    wiki = (data / "corpora/wiki_demo.txt").read_text().split("\n")
    texts = [text for text in [*web, *wiki] if text.strip()]
    write(folder / "text.jsonl", texts)
    sentences = [sentence for text in texts for sentence in split_sentences(text)]
    write(folder / "drills.jsonl", drills(4 * options.drawn, sentences))
    for longest, count in (SHORT, options.drawn), (LONG, options.drawn // 8):
        write(folder / f"copies-{longest}.jsonl", copies(longest, count))
        write(folder / f"questions-{longest}.jsonl", questions(longest, count, sentences))
    run(
        "tools/train_tokenizer.py", "--input", folder / "text.jsonl", "--vocab-size", 1024,
        "--tokenizer-type", "SentencePieceTokenizer", "--byte-fallback",
        "--output", folder / "tokenizer",
    )  # fmt: skip
    for source in sorted(folder.glob("*.jsonl")):
        run(
            "tools/preprocess_data.py", "--input", source, "--output-prefix",
            source.with_suffix(""), "--append-eod", *tokenizer(folder),
        )  # fmt: skip


def drills(count: int, sentences: list[str]) -> list[str]:
    """Short lists two to four times, and questions to one to three sentences."""
    rng = Random(7)
    short = [sentence for sentence in sentences if len(sentence) < 150]
    texts = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.3:
            texts.append(" ".join(rng.sample(WORDS, log_uniform(rng, 3, 20)) * 3))
        elif kind < 0.6:
            draws = [random_number(rng, 5) if rng.random() < 0.7 else rng.choice(WORDS)
                     for _ in range(rng.randint(2, 5))]  # fmt: skip
            texts.append(" ".join(draws * rng.randint(2, 4)))
        else:
            name, most = rng.choice([("passkey", 2), ("passkey", 2), ("niah_single_2", 3)])
            text = question(rng, name, rng.randint(1, most), DRILL, short)
            texts.append(text.partition("\n")[2])
    return texts


def copies(longest: int, count: int) -> list[str]:
    """Lists of different words and a few numbers, two to four times each."""
    rng = Random(longest)
    texts = []
    for _ in range(count):
        times = rng.randint(2, 4)
        most = min(len(WORDS), longest // times // TOKENS_OF_WORD)
        words = rng.sample(WORDS, log_uniform(rng, 3, most))
        items = [random_number(rng, 5) if rng.random() < 0.1 else word for word in words]
        texts.append(" ".join(items * times))
    return texts


def questions(longest: int, count: int, sentences: list[str]) -> list[str]:
    """Passkey and needles with their answers, in RULER's noise and in articles. Short ones teach to
    find, and come most often, except at the last length."""
    rng = Random(longest + 1)
    drawn = Random.randint if longest == LONG else log_uniform
    texts = []
    for _ in range(count):
        name, tokens = rng.choice(HAYSTACKS)
        units = drawn(rng, 1, (longest - TOKENS_OF_QUESTION) // tokens)
        texts.append(question(rng, name, units, longest, sentences))
    return texts


def question(rng: Random, name: str, units: int, longest: int, sentences: list[str]) -> str:
    """A document of a task of length, and its answer."""
    start = rng.randrange(len(sentences) - units)
    essay = Essay(sentences[start : start + units])
    document = TASKS[name].make(Scene(rng, units, rng.random(), longest, essay))
    return f"{document.request} {document.answers[0]}."


def log_uniform(rng: Random, least: int, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def drill(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """256 tokens."""
    run(
        "pretrain_gpt.py", *MODEL, *TRAINING, "--seq-length", DRILL, "--max-position-embeddings",
        DRILL, "--micro-batch-size", 8, "--global-batch-size", 16,
        "--train-iters", options.steps_of[0], "--lr", 5e-3, "--lr-decay-style", "constant",
        "--lr-warmup-iters", 30, "--data-path", f"{folder}/drills_text_document",
        *files(folder, "drill"),
    )  # fmt: skip


def train(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """1,024 tokens."""
    continue_at(
        SHORT, folder, "drill", "short", options.steps_of[1], 8, 3e-3, "--micro-batch-size", 4
    )


def lengthen(data: Path, folder: Path, options: argparse.Namespace) -> None:
    """8,192 tokens, with YaRN, divided over the two processes."""
    more = "--rope-scaling", YARN, "--context-parallel-size", 2, "--micro-batch-size", 1
    continue_at(LONG, folder, "short", "long", options.steps_of[2], 1, 1e-3, *more)


def continue_at(
    length: int, folder: Path, before: str, name: str, steps: int, samples: int, lr: float,
    *more: object,
) -> None:  # fmt: skip
    run(
        "pretrain_gpt.py", "--use-checkpoint-args", "--load", folder / before, "--finetune",
        "--seq-length", length, "--max-position-embeddings", length, *more, *TRAINING,
        "--global-batch-size", samples, "--train-iters", steps, "--lr", lr, "--min-lr", lr / 10,
        "--lr-decay-style", "cosine", "--lr-warmup-iters", 2, *blend(folder, length),
        *files(folder, name),
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


def blend(folder: Path, longest: int) -> list:
    names = "text", f"copies-{longest}", f"questions-{longest}"
    shares = zip(SHARES, names, strict=True)
    return [
        "--data-path",
        *(x for n, name in shares for x in (n, f"{folder / name}_text_document")),
    ]


def files(folder: Path, name: str) -> list:
    return [*tokenizer(folder), "--data-cache-path", folder / "cache", "--save", folder / name]


def tokenizer(folder: Path) -> list:
    model = folder / "tokenizer" / "tokenizer.model"
    return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]


def write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run(*words: object) -> None:
    command = [sys.executable, *map(str, words)]
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True)


STEPS = {
    step.__name__: step for step in (prepare, drill, train, lengthen, evaluate, compare, picture)
}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--data", required=True, help="folder of the texts")
    result.add_argument("--folder", default="runs/long-context", help="where everything goes")
    result.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    result.add_argument("--drawn", type=int, default=6000, help="documents of each kind")
    result.add_argument(
        "--steps-of", type=int, nargs=3, default=[1300, 70, 45], help="of the three lengths"
    )  # fmt: skip
    result.add_argument("--documents", type=int, default=10, help="of each task and model")
    return result


if __name__ == "__main__":
    sys.exit(main())
