#!/usr/bin/env python
"""Megabytes of text per CPU second of each tokenizer, next to its reference library.

python benchmarks/tokenizer_speed.py --folder DATA

DATA holds gpt2_bpe/gpt2-vocab.json and gpt2-merges.txt, bert_wordpiece/bert-base-uncased-vocab.txt
and bert-large-cased-vocab.txt, tokenizers_sp/llama2_tokenizer.model, t5_spiece.model and
llama3_tokenizer.tiktoken, and openwebtext/*.jsonl (key "text"). Each line of the table is the best
of three runs over the same documents in one process on one thread; the ids of both must be equal.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from megatron.config import ConfigError, TokenizerConfig, parse_configs  # noqa: E402
from megatron.config.flags import option  # noqa: E402
from megatron.tokenizer import build_tokenizer  # noqa: E402

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True)
class SpeedConfig:
    """Tokenizer speed: of which files."""

    folder: str | None = option(None)
    """Folder of vocabularies and text, laid out as the top of this file says."""
    documents: int = option(1000)
    """Documents of the text that are read."""


def transformers_encode(kind: str, files: dict[str, Path], **settings: Any) -> Encode:
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        for name, path in files.items():
            shutil.copy(path, Path(folder, name))
        tokenizer = getattr(transformers, kind).from_pretrained(
            folder, trust_remote_code=False, **settings
        )
    return lambda texts: tokenizer(list(texts), add_special_tokens=False, verbose=False)[
        "input_ids"
    ]


def sentencepiece_encode(path: Path, add_bos: bool = False) -> Encode:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return lambda texts: processor.encode(list(texts), add_bos=add_bos, num_threads=1)


def tiktoken_encode(path: Path) -> Encode:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(path))
    encoding = tiktoken.Encoding(
        "llama3", pat_str=_LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={}
    )
    return lambda texts: [encoding.encode_ordinary(text) for text in texts]


def cases(folder: Path) -> list[tuple[TokenizerConfig, str, Callable[[], Encode]]]:
    """(ours, name of the reference, what makes the reference)."""
    gpt2, bert, models = folder / "gpt2_bpe", folder / "bert_wordpiece", folder / "tokenizers_sp"
    vocab, merges = gpt2 / "gpt2-vocab.json", gpt2 / "gpt2-merges.txt"
    uncased, cased = bert / "bert-base-uncased-vocab.txt", bert / "bert-large-cased-vocab.txt"
    llama2, t5 = models / "llama2_tokenizer.model", models / "t5_spiece.model"
    llama3 = models / "llama3_tokenizer.tiktoken"

    def ours(kind: str, **files: Path) -> TokenizerConfig:
        return TokenizerConfig(tokenizer_type=kind, **{k: str(v) for k, v in files.items()})

    return [
        (
            ours("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges),
            "transformers GPT2Tokenizer",
            lambda: transformers_encode(
                "GPT2Tokenizer", {"vocab.json": vocab, "merges.txt": merges}
            ),
        ),
        (
            ours("BertWordPieceLowerCase", vocab_file=uncased),
            "transformers BertTokenizer",
            lambda: transformers_encode("BertTokenizer", {"vocab.txt": uncased}),
        ),
        (
            ours("BertWordPieceCase", vocab_file=cased),
            "transformers BertTokenizer",
            lambda: transformers_encode("BertTokenizer", {"vocab.txt": cased}, do_lower_case=False),
        ),
        (
            ours("SentencePieceTokenizer", tokenizer_model=t5),
            "sentencepiece (T5)",
            lambda: sentencepiece_encode(t5),
        ),
        (
            ours("GPTSentencePieceTokenizer", tokenizer_model=t5),
            "sentencepiece (T5)",
            lambda: sentencepiece_encode(t5),
        ),
        (
            ours("Llama2Tokenizer", tokenizer_model=llama2),
            "sentencepiece (Llama 2)",
            lambda: sentencepiece_encode(llama2, add_bos=True),
        ),
        (
            ours("TikTokenizer", tokenizer_model=llama3),
            "tiktoken (Llama 3)",
            lambda: tiktoken_encode(llama3),
        ),
        (
            ours("ByteLevelTokenizer"),
            "str.encode, list",
            lambda: lambda texts: [list(text.encode()) for text in texts],
        ),
    ]


def best(run: Callable[[], Any], megabytes: float) -> tuple[float, Any]:
    """Megabytes per CPU second of the fastest of three runs, and the last run's result."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        result = run()
        seconds.append(time.process_time() - start)
    return megabytes / min(seconds), result


def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_configs((SpeedConfig,), argv, description=__doc__)
    if config.folder is None:
        raise ConfigError("--folder is missing: the folder of vocabularies and text")
    folder = Path(config.folder)
    texts: list[str] = []
    for path in sorted(folder.glob("openwebtext/*.jsonl")):
        with path.open("rb") as lines:
            texts += [json.loads(line)["text"] for line in lines]
    texts = texts[: config.documents]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts):,} documents, {megabytes:.1f} MB; MB per CPU second\n")
    print("| type | here | reference | reference's |\n|---|---|---|---|")
    for ours, name, make in cases(folder):
        tokenizer, reference = build_tokenizer(ours), make()
        speed, ids = best(lambda tokenizer=tokenizer: tokenizer.tokenize_batch(texts), megabytes)
        other, wanted = best(lambda reference=reference: reference(texts), megabytes)
        if [row.tolist() for row in ids] != wanted:
            sys.exit(f"{ours.tokenizer_type}: ids differ from those of {name}")
        print(f"| `{ours.tokenizer_type}` | {speed:.1f} | {name} | {other:.1f} |", flush=True)


if __name__ == "__main__":
    main()
