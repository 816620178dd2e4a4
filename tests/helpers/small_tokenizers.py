"""A small tokenizer of every kind."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from pathlib import Path

from megatron.config import TokenizerConfig
from megatron.features.tokenizers.byte_level import ByteLevelTokenizer
from megatron.features.tokenizers.huggingface import HFTokenizer
from megatron.features.tokenizers.sentence_piece import SentencePieceTokenizer
from megatron.features.tokenizers.tik_token import TikTokenizer
from megatron.features.tokenizers.train import (
    train_byte_level_bpe,
    train_sentencepiece_model,
    train_wordpiece,
)
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.tokenizer.plain import IdTokenizer, NullTokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 3,
    '{"name": "Ann", "age": 31, "tags": ["a", "b"], "ok": true, "none": null}\n' * 3,
    "It isn't so: they've said 'no'! Why? 12.5 + 3 = 15.5\n\n\tdef f(x): return x\n",
    "naïve Straße русский 中文字 日本語 👩‍👩‍👧‍👦 e\u0301",
]
PIECES = [
    *(
        "a",
        "th",
        " the",
        "The",
        " ",
        "  ",
        "\n",
        "\n\n",
        ":",
        ": ",
        "\t",
        "é",
        "日",
        "本",
        "👩‍👩‍👧‍👦",
    ),
    *(
        " don't",
        " .",
        " ,",
        "'s",
        "x",
        "1",
        '{"',
        '"}',
        "\ufffd",
        "\u2581",
        "ß",
        "русский",
        "e\u0301",
    ),
]


def small_tokenizers(folder: Path) -> dict[str, Callable[[], Tokenizer]]:
    """What makes each; ``folder`` takes their files."""

    def gpt2() -> GPT2BPETokenizer:
        return train_byte_level_bpe(TEXTS, vocab_size=400, min_frequency=2)

    def ranks() -> Tokenizer:
        trained = gpt2()
        tokens = [token for token in trained.token_bytes if token != b"<|endoftext|>"]
        lines = [f"{base64.b64encode(token).decode()} {n}\n" for n, token in enumerate(tokens)]
        path = folder / "ranks.model"
        path.write_text("".join(lines))
        return TikTokenizer.llama3_from_file(path)

    def pieces(kind: str, byte_fallback: bool) -> Path:
        path = folder / f"{kind}.model"
        size = 420 if byte_fallback else 120
        path.write_bytes(train_sentencepiece_model(TEXTS, kind, size, byte_fallback=byte_fallback))
        return path

    def wordpiece() -> Tokenizer:
        return train_wordpiece(lambda: TEXTS, 200, 1, lower_case=False)

    def in_hugging_face_form(make: Callable[[], Tokenizer], name: str) -> Callable[[], Tokenizer]:
        def made() -> Tokenizer:
            make().save_pretrained(folder / name)
            return HFTokenizer(folder / name)

        return made

    def llama() -> Tokenizer:
        return SentencePieceTokenizer.gpt_from_file(pieces("bpe", True), add_bos=True)

    def unigram() -> Tokenizer:
        return SentencePieceTokenizer.gpt_from_file(pieces("unigram", False))

    def with_specials() -> Tokenizer:
        return SentencePieceTokenizer.from_file(pieces("bpe", False), extra_ids=3)

    config = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")
    makers: dict[str, Callable[[], Tokenizer]] = {
        "gpt2": gpt2,
        "ranks": ranks,
        "bytes": lambda: ByteLevelTokenizer.from_config(config),
        "llama": llama,
        "unigram": unigram,
        "with_specials": with_specials,
        "wordpiece": wordpiece,
        "null": lambda: NullTokenizer(20),
        "ids": lambda: IdTokenizer(20),
    }
    for name in ("gpt2", "ranks", "bytes", "llama", "unigram", "with_specials", "wordpiece"):
        makers[f"hf_{name}"] = in_hugging_face_form(makers[name], f"hf_{name}")
    return makers


def random_ids(tokenizer: Tokenizer, rng: random.Random, count: int) -> list[int]:
    """Ids of text, of the vocabulary as it comes, and of the bytes of broken characters."""
    parts: list[list[int]] = []
    while sum(map(len, parts)) < count:
        kind = rng.randrange(4)
        if kind == 0:
            parts.append([rng.randrange(tokenizer.vocab_size)])
        elif kind == 1 and tokenizer.byte_pieces:
            parts.append(rng.choices(sorted(tokenizer.byte_pieces), k=rng.randrange(1, 4)))
        else:
            parts.append(_ids(tokenizer, "".join(rng.choices(PIECES, k=rng.randrange(1, 4)))))
    return [i for part in parts for i in part][:count]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.tokenize(text)
    except ValueError:  # text of numbers only
        return [len(text) % tokenizer.vocab_size]
