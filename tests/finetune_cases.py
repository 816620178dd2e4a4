"""A small model as a Hugging Face folder, files of examples, and fine-tunings of it in the pool."""

from __future__ import annotations

import json
import random
from pathlib import Path

from megatron.tokenizer.train import train_byte_level_bpe

WORDS = "red blue green one two three cat dog bird sun moon star".split()
QUICK = (
    "--train-iters 6 --lr 3e-3 --micro-batch-size 2 --global-batch-size 4 --seq-length 160 "
    "--held-out 0.2 --eval-interval 3 --samples 2 --sample-tokens 12 --num-workers 0 "
    "--log-interval 1 --peak-tflops 1"
).split()


def save_base(folder: Path) -> Path:
    """A Llama with random weights and a tokenizer without a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = [" ".join(random.Random(n).choices(WORDS, k=8)) for n in range(20)]
    alpaca = "Below is an instruction that describes a task. ### Instruction:\n### Response:\n"
    tokenizer = train_byte_level_bpe([*texts, alpaca], vocab_size=300, min_frequency=2)
    end = tokenizer.eod
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.1, bos_token_id=end, eos_token_id=end,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_data(folder: Path) -> dict[str, str]:
    """Files by kind: instructions, and pairs whose better answer repeats the instruction."""
    draw = random.Random(3)
    rows, pairs = [], []
    for _ in range(30):
        word, other = draw.sample(WORDS, 2)
        rows.append({"instruction": f"say {word}", "input": "", "output": f"{word} {word}"})
        pairs.append({"instruction": f"say {word}", "chosen": word, "rejected": other})
    found = {"sft": folder / "rows.json", "dpo": folder / "pairs.jsonl"}
    found["sft"].write_text(json.dumps(rows))
    found["dpo"].write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return {kind: str(path) for kind, path in found.items()}


def tune(argv: list[str]) -> None:
    """finetune.py with these flags; for the pool."""
    from megatron.finetune.command import fine_tune, parse

    fine_tune(parse(None, argv))


def metrics(output: Path, kind: str) -> list[dict]:
    """The rows of a kind that a fine-tuning has written."""
    lines = (output / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]
