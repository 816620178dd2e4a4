"""A small model as a Hugging Face folder, files of examples, and fine-tunings of it in the pool."""

from __future__ import annotations

import json
import random
from pathlib import Path

from megatron.features.tokenizers.train import train_byte_level_bpe

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
    # Its texts end with an ordinary letter, too, which answers of other data may contain.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 65]}))
    return folder


def save_blank(folder: Path) -> Path:
    """A Llama whose weights nobody reads, and a tokenizer."""
    from safetensors.torch import save_file
    from torch import zeros

    from megatron.features.tokenizers.train import train_byte_level_bpe

    tokenizer = train_byte_level_bpe(["say red green"], vocab_size=260, min_frequency=2)
    H, F, V = 16, 32, tokenizer.vocab_size
    config = {
        "model_type": "llama", "vocab_size": V, "hidden_size": H, "intermediate_size": F,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "tie_word_embeddings": True, "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "embed_tokens": (V, H), "norm": (H,), "layers.0.input_layernorm": (H,),
        "layers.0.post_attention_layernorm": (H,), "layers.0.mlp.gate_proj": (F, H),
        "layers.0.mlp.up_proj": (F, H), "layers.0.mlp.down_proj": (H, F),
        **{f"layers.0.self_attn.{x}_proj": (H, H) for x in "qkvo"},
    }  # fmt: skip
    tensors = {f"model.{name}.weight": zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder


def save_data(folder: Path) -> dict[str, str]:
    """Files by kind: instructions, pairs whose better answer repeats the instruction, and prompts
    with what rewards compare with."""
    draw = random.Random(3)
    rows, pairs, prompts = [], [], []
    for number in range(30):
        word, other = draw.sample(WORDS, 2)
        rows.append(
            {"instruction": f"say {word} {number}", "input": "", "output": f"{word} {word}"}
        )
        pairs.append({"instruction": f"say {word} {number}", "chosen": word, "rejected": other})
        prompts.append({"prompt": f"say {word} {number}", "answer": word})
    found = {
        name: folder / file
        for name, file in (("sft", "rows.json"), ("dpo", "pairs.jsonl"), ("rl", "prompts.jsonl"))
    }
    found["sft"].write_text(json.dumps(rows))
    for name, lines in (("dpo", pairs), ("rl", prompts)):
        found[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {kind: str(path) for kind, path in found.items()}


def tune(argv: list[str]) -> None:
    """finetune.py with these flags; for the pool."""
    from megatron.apps.finetune.command import fine_tune, parse

    fine_tune(parse(None, argv))


def metrics(output: Path, kind: str) -> list[dict]:
    """The rows of a kind that a fine-tuning has written."""
    lines = (output / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]
