"""Writes, next to it, input.txt, a made-up text, and shakespeare_char.txt, the losses of the first
50 steps of examples_deepspeed/pretrain_shakespeare_char.sh on it and the validation loss after
them, all as a program of plain PyTorch has them (made with torch 2.13.0, one thread, float32).

    python tests/golden/loss/make.py

Of this project it takes the generator that a weight is drawn from. Letters: B batch, S sequence,
H hidden, V vocabulary, N heads, D head width.
"""

import math
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from megatron.parallel.random import generator  # noqa: E402

CHARACTERS, STEPS, WARMUP = 16_000, 50, 10
SEED, LAYERS, HEADS, HIDDEN, LENGTH, BATCH = 1234, 4, 4, 128, 64, 12
RATE, LEAST_RATE, DECAY, BETAS, STD = 1e-3, 1e-4, 0.1, (0.9, 0.99), 0.05


def made_up_text() -> str:
    """Verses of made-up words, some of them frequent."""
    draw = random.Random(SEED)
    syllables = [a + b for a in "bdfglmnrst" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(60)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    text = ""
    while len(text) < CHARACTERS:
        verse = " ".join(draw.choices(words, weights, k=draw.randint(3, 7)))
        text += verse.capitalize() + draw.choice([",\n", ".\n", ":\n\n"])
    return text[:CHARACTERS]


def sample_order(tokens: int, samples: int) -> np.ndarray:
    """Where each sample starts in the endlessly repeated document, in Megatron's order: the last
    epoch is shuffled by itself when less than 80 % of it is wanted."""
    rng = np.random.RandomState(SEED)
    epochs = 1
    while (epochs * tokens - 1) // LENGTH < samples:
        epochs += 1
    total, before = ((n * tokens - 1) // LENGTH for n in (epochs, epochs - 1))
    separate = epochs > 1 and samples - before < int(0.8 * ((tokens - 1) // LENGTH))
    for documents in (epochs - 1, 1) if separate else (epochs,):
        rng.shuffle(np.zeros(documents, np.int32))  # one document: only the generator moves on
    starts = np.arange(total, dtype=np.uint32)
    for part in (starts[:before], starts[before:]) if separate else (starts,):
        rng.shuffle(part)
    return starts[:samples] * LENGTH


def initial_weights(vocabulary: int) -> dict[str, Tensor]:
    """Normal matrices, those that end a branch narrower; norms of weight one and bias zero."""
    shapes = {
        "embedding.word_embeddings.weight": (vocabulary, HIDDEN),
        "embedding.position_embeddings.weight": (LENGTH, HIDDEN),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.attention.qkv.weight": (3 * HIDDEN, HIDDEN),
            f"layers.{layer}.attention.proj.weight": (HIDDEN, HIDDEN),
            f"layers.{layer}.mlp.up.weight": (4 * HIDDEN, HIDDEN),
            f"layers.{layer}.mlp.down.weight": (HIDDEN, 4 * HIDDEN),
        }
    weights = {}
    for name, shape in shapes.items():
        narrow = name.endswith(("proj.weight", "down.weight"))
        std = STD / math.sqrt(2 * LAYERS) if narrow else STD
        weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator(SEED, name))
    names = [f"layers.{n}.{part}_norm" for n in range(LAYERS) for part in ("attention", "mlp")]
    for name in [*names, "final_norm.norm"]:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.ones(HIDDEN), torch.zeros(HIDDEN)
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def loss_of(weights: dict[str, Tensor], samples_BS: Tensor) -> Tensor:
    """Mean cross entropy of GPT-2 without biases in linear layers; its GELU is the exact one."""

    def norm(x_BSH: Tensor, name: str) -> Tensor:
        return F.layer_norm(x_BSH, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x_BSI: Tensor, name: str) -> Tensor:
        return x_BSI @ weights[f"{name}.weight"].T

    table_VH = weights["embedding.word_embeddings.weight"]
    x_BSH = table_VH[samples_BS[:, :-1]] + weights["embedding.position_embeddings.weight"]
    for layer in (f"layers.{n}" for n in range(LAYERS)):
        y_BSI = linear(norm(x_BSH, f"{layer}.attention_norm"), f"{layer}.attention.qkv")
        q_BNSD, k_BNSD, v_BNSD = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in y_BSI.chunk(3, -1)
        )
        y_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True)
        x_BSH = x_BSH + linear(y_BNSD.transpose(1, 2).flatten(2), f"{layer}.attention.proj")
        y_BSI = F.gelu(linear(norm(x_BSH, f"{layer}.mlp_norm"), f"{layer}.mlp.up"))
        x_BSH = x_BSH + linear(y_BSI, f"{layer}.mlp.down")
    logits_BSV = norm(x_BSH, "final_norm.norm") @ table_VH.T
    return F.cross_entropy(logits_BSV.flatten(0, 1), samples_BS[:, 1:].flatten())


def learning_rate(step: int) -> float:
    """Linear warm-up, then half a cosine; step 0 is the first one."""
    if step <= WARMUP:
        return RATE * step / WARMUP
    left = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
    return LEAST_RATE + left * (RATE - LEAST_RATE)


def train(text: str) -> list[float]:
    """The losses of the steps, then the mean one of the validation text's windows."""
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([ids[character] for character in text])
    cut = len(text) * 9 // 10
    stream = tokens[:cut].repeat(STEPS * BATCH * LENGTH // cut + 2)
    starts = sample_order(cut, STEPS * BATCH)
    weights = initial_weights(len(ids))
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    vectors = [weight for weight in weights.values() if weight.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=1e-8)
    losses = []
    for step, batch in enumerate(starts.reshape(STEPS, BATCH).tolist()):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        samples_BS = torch.stack([stream[start : start + LENGTH + 1] for start in batch])
        loss = loss_of(weights, samples_BS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    windows = tokens[cut:].unfold(0, LENGTH + 1, LENGTH)
    assert len(windows) % BATCH == 0, "an evaluation of whole batches reads each window once"
    with torch.no_grad():
        return [*losses, loss_of(weights, windows).item()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(__file__).parent
    text = made_up_text()
    (folder / "input.txt").write_text(text)
    lines = [f"{loss:.6f}\n" for loss in train(text)]
    (folder / "shakespeare_char.txt").write_text("".join(lines))
