"""A small encoder of transformers, and what transformers makes of a text alone."""

from pathlib import Path

import torch
import transformers
from small_tokenizers import TEXTS as WORDS
from torch import Tensor

from megatron.features.tokenizers.train import train_wordpiece

TEXTS = [
    "The quick brown fox.",
    "",
    "It isn't so: they've said 'no'! Why? 12.5 + 3 = 15.5",
    "<|endoftext|>",
    "lazy dogs<|endoftext|>",
    "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 6,
    "naïve Straße русский 中文字 日本語",
    "fox",
]
"""Without words, with ends of documents, longer than :data:`POSITIONS`, beyond ASCII."""
POSITIONS, WIDTH = 40, 24


def write_encoder(folder: Path, kind: str = "Bert") -> Path:
    """A model with weights so large that no token's state is like another's, and a tokenizer."""
    tokenizer = train_wordpiece(lambda: WORDS, 200, 1, lower_case=True)
    tokenizer.save_pretrained(folder)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=tokenizer.vocab_size, hidden_size=WIDTH, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=3, max_position_embeddings=POSITIONS,
    )  # fmt: skip
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForPreTraining")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def states_alone(folder: Path, text: str, most: int = POSITIONS) -> Tensor:
    """The last hidden states of a text, special tokens included, [S, H], float64."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, truncation=True, max_length=most, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(ids).last_hidden_state[0]
