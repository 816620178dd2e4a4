#!/usr/bin/env python
"""Chunks of text that each embedder of Retro embeds in a CPU second, next to sentence-transformers
on the same encoder.

    python benchmarks/embedding.py --encoder hf --input corpus.jsonl

The encoder is the folder of a BERT in Hugging Face's form, such as tools/convert_checkpoint.py
to-hf writes of one that pretrain_bert.py trained; the text is JSON lines (key "text"). One process,
one thread, by turns: each round embeds the same chunks with every contestant. The vectors of the
huggingface embedder and of sentence-transformers, which read one folder, are compared; the others'
are means without [CLS] and [SEP], of as much work. sentence-transformers is left out where it is
not installed.
"""

import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
import torch  # noqa: E402
from machine import machine  # noqa: E402

from megatron.apps.retro.config import EmbedderFlags  # noqa: E402
from megatron.apps.retro.embedding import build_embedder  # noqa: E402
from megatron.config import ConfigError, parse_configs  # noqa: E402
from megatron.config.flags import POSITIVE, option  # noqa: E402

WORDS = 45
"""Words of a chunk: about 64 tokens of GPT-2."""
PEER = "sentence-transformers"

Embed = Callable[[Sequence[str]], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class EmbeddingSpeedConfig:
    """Speed of embedders: on what."""

    encoder: str | None = option(None)
    """Folder of a BERT in Hugging Face's form."""
    input: str | None = option(None)
    """JSON lines with texts."""
    chunks: int = option(2048, bounds=POSITIVE)
    """Chunks of a round."""
    rounds: int = option(5, bounds=POSITIVE)
    """Rounds, of which the median counts."""
    batch_sizes: tuple[int, ...] = option((32, 128))
    """Batch sizes of each contestant; 32 is the peer's default, 128 that of Retro."""


def contestants(encoder: str, sizes: Sequence[int], folder: Path) -> dict[str, Embed]:
    """Functions from chunks to vectors, by name."""
    found: dict[str, Embed] = {"hashing": build_embedder(EmbedderFlags()).embed}
    peer = None
    if importlib.util.find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer

        # Without modules.json it makes those of a mean.
        peer = SentenceTransformer(encoder, device="cpu", local_files_only=True)
        peer.save(str(folder))
    for size in sizes:
        for kind in ("megatron", "huggingface"):
            of_peer = kind == "huggingface" and peer is not None
            flags = EmbedderFlags(
                bert_embedder_type=kind,
                bert_load=str(folder) if of_peer else encoder,
                retro_bert_batch_size=size,
            )
            found[f"{kind}, batches of {size}"] = build_embedder(flags).embed
        if peer is not None:
            found[f"{PEER}, batches of {size}"] = _of_peer(peer, size)
    return found


def _of_peer(model: object, size: int) -> Embed:
    return lambda texts: model.encode(  # type: ignore[attr-defined,no-any-return]
        list(texts), batch_size=size, show_progress_bar=False
    )


def read_chunks(path: Path, count: int) -> list[str]:
    """The first chunks of a file; ConfigError if it has fewer."""
    chunks: list[str] = []
    with path.open("rb") as lines:
        for line in lines:
            words = json.loads(line)["text"].split()
            chunks += [" ".join(words[n : n + WORDS]) for n in range(0, len(words), WORDS)]
            if len(chunks) >= count:
                return chunks[:count]
    raise ConfigError(f"--input {path} has {len(chunks)} chunks, fewer than --chunks {count}")


def _shown(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_configs((EmbeddingSpeedConfig,), argv, description=__doc__)
    if config.encoder is None or config.input is None:
        raise ConfigError("--encoder and --input are needed: the folder of a BERT, and text")
    torch.set_num_threads(1)
    chunks = read_chunks(Path(config.input), config.chunks)
    print(json.dumps(machine()))
    with tempfile.TemporaryDirectory() as folder:
        found = contestants(config.encoder, config.batch_sizes, Path(folder))
        seconds: dict[str, list[float]] = {name: [] for name in found}
        vectors = {}
        for _ in range(config.rounds):
            for name, embed in found.items():
                start = time.process_time()
                vectors[name] = embed(chunks)
                seconds[name].append(time.process_time() - start)
    print(f"\n{len(chunks):,} chunks of {WORDS} words, {config.rounds} rounds\n")
    print("| embedder | chunks per CPU second: median | slowest to fastest round |\n|---|---|---|")
    for name, each in seconds.items():
        rates = sorted(len(chunks) / s for s in each)
        median = statistics.median(rates)
        low, middle, high = (_shown(rate) for rate in (rates[0], median, rates[-1]))
        print(f"| {name} | {middle} | {low} to {high} |", flush=True)
    for name in [name for name in found if name.startswith(PEER)]:
        own = vectors[name.replace(PEER, "huggingface")]
        difference = float(np.abs(own - vectors[name]).max())
        print(f"\n{name}: vectors differ from those of huggingface by up to {difference:.1e}")
        if difference > 1e-4:
            sys.exit("the vectors are not those of the same encoder")


if __name__ == "__main__":
    main()
