#!/usr/bin/env python
"""Pretrains a small model, fine-tunes it on instructions (all weights, LoRA) and preferences (DPO),
and measures what each has learnt.

    python benchmarks/alignment.py --sft alpaca_en_demo.json --text corpus.jsonl --folder alignment

The instructions are a file of records with instruction, input and output. 210 of those with an
answer of up to 600 characters are held out; the others train. An answer is cut to its first
sentences, 250 characters or so: short answers are learnt in minutes. DPO trains on the other pieces
of the answers too, each with its instruction. A pair of preferences is the answer to an instruction
and that to another one, of about the same length, and every answer is once the better and once the
worse one: length and style give nothing away. Every stage is a command that is printed; stages
whose result exists are left out. Measured are the held-out loss of answers before and after, the
share of held-out pairs whose better answer gains more probability than the worse one, how many of
50 held-out prompts are answered to an end, and whether transformers' greedy answers by the exported
folder are those of this project.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HELD_OUT, LONGEST, PIECE, PROMPTS, VOCABULARY = 210, 600, 250, 50, 2048
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' else '\\n\\nAnswer:\\n' }}{% endfor %}"
)
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --use-rotary-position-embeddings "
    "--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --init-method-std 0.05 --max-position-embeddings 1024"
)
PRETRAIN = (
    "--seq-length 256 --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-fraction 0.03 "
    "--weight-decay 0.1 --adam-beta2 0.95 --micro-batch-size 8 --split 99,1,0 --eval-iters 20 "
    "--eval-interval 500 --log-interval 50"
)
SFT = (
    "--packing --seq-length 512 --micro-batch-size 4 --global-batch-size 4 --weight-decay 0.1 "
    "--samples 2 --sample-tokens 80"
)
DPO = (
    "--preference dpo --seq-length 256 --micro-batch-size 7 --global-batch-size 14 "
    "--lr 2e-4 --lr-decay-style constant --samples 2 --sample-tokens 80"
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sft", type=Path, required=True, help="file of instructions")
    parser.add_argument("--text", nargs="+", required=True, help="to pretrain on, .jsonl or .txt")
    parser.add_argument("--folder", type=Path, required=True, help="for all results")
    parser.add_argument("--iterations", type=int, default=1200, help="of pretraining")
    parser.add_argument("--epochs", type=int, default=5, help="of the instructions")
    parser.add_argument("--dpo-epochs", type=int, default=2, help="of the pairs")
    parser.add_argument("--seed", type=int, default=7, help="of the data and of every stage")
    options = parser.parse_args(argv)
    at: Path = options.folder.resolve()
    at.mkdir(parents=True, exist_ok=True)
    held = write_data(options.sft, options.text, at, options.seed)
    run(
        at / "tokenizer",
        f"tools/train_tokenizer.py --input {at}/corpus.jsonl --vocab-size {VOCABULARY} "
        f"--output {at}/tokenizer",
    )
    tokenizer = (
        "--tokenizer-type GPT2BPETokenizer --vocab-file "
        f"{at}/tokenizer/vocab.json --merge-file {at}/tokenizer/merges.txt"
    )
    run(
        at / "pretrained" / f"global_step{options.iterations}",
        f"pretrain_gpt.py {MODEL} {PRETRAIN} {tokenizer} --seed {options.seed} "
        f"--data-path {at}/corpus.jsonl --train-iters {options.iterations} "
        f"--save {at}/pretrained --load {at}/pretrained",
    )
    run(
        at / "base",
        f"tools/convert_checkpoint.py to-hf --load {at}/pretrained --output {at}/base",
    )
    asked = f"--seed {options.seed} --chat-template {at}/template.jinja"
    instructions = (
        f"{asked} --data {at}/train.json --eval-data {at}/held.json {SFT} --epochs {options.epochs}"
    )
    tune(at, "sft", "base", f"{instructions} --lr 1.5e-3")
    tune(at, "lora", "base", f"{instructions} --lora --lora-rank 16 --lr 3e-3")
    pairs = f"{asked} --data {at}/pairs.jsonl --eval-data {at}/held-pairs.jsonl {DPO}"
    tune(at, "dpo", "sft", f"{pairs} --epochs {options.dpo_epochs}")
    for name in ("sft", "lora", "dpo"):
        report(at / name)
    for name in ("sft", "dpo"):
        ended, same, count = answers(at / name, held[:PROMPTS])
        print(f"{name}: {ended} of {count} answers end; {same} of {count} as transformers' own")


def write_data(sft: Path, text: Sequence[str], at: Path, seed: int) -> list[dict[str, str]]:
    """The files of all stages; returns the held-out records. No held-out record is in a file that
    is trained on."""
    draw = random.Random(seed)
    rows = json.loads(sft.read_text())
    draw.shuffle(rows)
    rows = [row for row in rows if pieces(row)]
    held = [row for row in rows if len(row["output"]) <= LONGEST][:HELD_OUT]
    others = [row for row in rows if row not in held]
    held = [pieces(row)[0] for row in held]
    train = [pieces(row)[0] for row in others]
    (at / "held.json").write_text(json.dumps(held))
    (at / "train.json").write_text(json.dumps(train))
    (at / "template.jinja").write_text(TEMPLATE)
    write_pairs(at / "pairs.jsonl", [each for row in others for each in pieces(row)])
    write_pairs(at / "held-pairs.jsonl", held)
    with (at / "corpus.jsonl").open("w") as corpus:
        for path in map(Path, text):
            for each in path.read_text().split("\n" if path.suffix == ".jsonl" else "\n\n"):
                if each.strip():
                    each = json.loads(each)["text"] if path.suffix == ".jsonl" else each
                    corpus.write(json.dumps({"text": each}) + "\n")
        for row in others:
            parts = (row["instruction"], row.get("input") or "", row["output"])
            corpus.write(json.dumps({"text": "\n".join(filter(None, parts))}) + "\n")
    return held


def pieces(row: dict[str, str]) -> list[dict[str, str]]:
    """A record for each piece of the answer: whole sentences or lines, up to PIECE characters."""
    found = [""]
    for sentence in re.findall(r".+?(?:[.!?]\s+|\n+|$)", row["output"], re.DOTALL):
        if found[-1] and len(found[-1] + sentence) > PIECE:
            found.append("")
        found[-1] += sentence
    return [row | {"output": piece.strip()} for piece in found if 0 < len(piece) <= 2 * PIECE]


def write_pairs(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """A pair of each answer and that of a record next to it in length, in a circle: each answer is
    once the better one and once the worse one."""
    rows = sorted(rows, key=lambda row: len(row["output"]))
    rows = rows[::2] + rows[1::2][::-1]  # up and down again: neighbours in a circle are alike
    with path.open("w") as file:
        for at, row in enumerate(rows):
            asked = {key: row.get(key) or "" for key in ("instruction", "input")}
            pair = {"chosen": row["output"], "rejected": rows[at - 1]["output"]}
            if pair["chosen"] != pair["rejected"]:
                file.write(json.dumps(asked | pair) + "\n")


def tune(at: Path, name: str, base: str, flags: str) -> None:
    """A fine-tuning of one result to another."""
    run(
        at / name / "config.json",
        f"finetune.py --model {at}/{base} --output {at}/{name} {flags}",
    )


def run(result: Path, command: str) -> None:
    """Prints and runs a command, unless its result is there."""
    if result.exists():
        return
    program, *flags = shlex.split(command)
    if program.endswith(("pretrain_gpt.py", "finetune.py")):
        flags += ["--num-workers", "0", "--peak-tflops", "1"]
    print("$ python", program, *flags, flush=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, str(ROOT / program), *flags], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{program}: {spent:.0f} CPU seconds", flush=True)


def report(folder: Path) -> None:
    """Prints the numbers on held-out data before and after."""
    lines = (folder / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "validation"]
    for name, value in rows[-1].items():
        known = isinstance(value, float) and not name.endswith(("PPL", "perplexity"))
        if known and isinstance(rows[0].get(name), float):
            print(f"{folder.name}: {name} {rows[0][name]:.4f} -> {value:.4f}")


def answers(folder: Path, rows: Sequence[dict[str, str]], most: int = 512) -> tuple[int, int, int]:
    """Compare greedy answers of transformers with this project's: how many end, and how many are
    equal."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends)
    prompts, theirs = [], []
    for row in rows:
        asked = row["instruction"] + (f"\n{row['input']}" if row.get("input") else "")
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, return_dict=True
        )["input_ids"]  # fmt: skip
        prompts.append(tuple(prompt[-400:]))
        tokens = torch.tensor([prompts[-1]])
        # Without a mask transformers takes the padding token, wherever it is, for padding.
        found = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=most, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        theirs.append(tuple(found[0, len(prompts[-1]) :].tolist()))
    ours = own_answers(folder, prompts, ends, most)
    ended = sum(answer[-1] in ends for answer in theirs)
    return ended, sum(a == b for a, b in zip(ours, theirs, strict=True)), len(rows)


def own_answers(folder: Path, prompts: Sequence[Any], ends: set[int], most: int) -> list[Any]:
    """This project's greedy answers."""
    from megatron.apps.generation.memory import CacheConfig
    from megatron.apps.generation.opening import opened_runner
    from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules
    from megatron.apps.generation.scheduling.engine import GenerationEngine
    from megatron.run.run import RunToolParser

    cache, settings = RunToolParser(CacheConfig, None).parse(
        ["--load", str(folder), "--kv-cache-gib", "0.5"]
    )
    stopping = StopRules(most, frozenset(ends))
    requests = [GenerationRequest(prompt, stopping, Sampling(greedy=True)) for prompt in prompts]
    with opened_runner(settings, 1, cache) as opened:
        assert opened is not None
        engine = GenerationEngine(opened.runner, opened.tokenizer)
        return [answer.tokens for answer in engine.complete(requests)]


if __name__ == "__main__":
    main()
