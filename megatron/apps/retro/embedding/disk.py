"""``tools/bert_embedding``: embeddings of texts, computed in parallel and stored in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.blocks import (
    FileBlock,
    barrier,
    begin_blocks,
    blocks_of,
    connected,
    run_blocks,
)
from megatron.apps.retro.config import EmbedderFlags
from megatron.apps.retro.embedding import Embedder, build_embedder
from megatron.config import ConfigError, Settings
from megatron.config.flags import POSITIVE, option
from megatron.config.output import check_output
from megatron.features.retro.hdf5 import needed_h5py, read_array
from megatron.run.run import RunToolParser, start_processes
from megatron.util.digests import digest_of_parts
from megatron.util.json_text import parse_json
from megatron.util.processes import is_main_process
from megatron.util.progress import say

ARRAY = "data"
"""Name of the array of embeddings in each file, [n, width]."""


@dataclass(frozen=True, kw_only=True)
class TextEmbeddingConfig(EmbedderFlags):
    """Embedding of texts: input, output and model."""

    input: str | None = option(None)
    """File with one text per line, or one JSON object per line (.jsonl, .json) that contains the
    text under --json-key."""
    json_key: str = option("text")
    """Key of the text in each JSON object."""
    output: str | None = option(None)
    """Output folder for the files START-END.hdf5, each with the embeddings of a block of texts."""
    block_size: int = option(100_000, bounds=POSITIVE)
    """Number of texts per output file."""


def run_embedding(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Embed the texts that the command line selects. Raises ValueError or OSError, naming the flag
    or file, if one cannot be used."""
    config, settings = RunToolParser(TextEmbeddingConfig, description).parse(argv)
    if config.input is None:
        raise ConfigError("--input is missing: the file of texts")
    if config.output is None:
        raise ConfigError("--output is missing: the folder for the vectors")
    if not Path(config.input).is_file():
        raise ConfigError(f"--input {config.input}: there is no such file")
    needed_h5py()  # fail now rather than after hours of work
    processes = start_processes(settings, argv)
    folder, texts = Path(config.output), texts_of(config.input, config.json_key)
    if is_main_process():
        check_output("--output", str(folder / "any"))
    with connected(settings, processes):
        embedder = build_embedder(config, settings)
        blocks = DiskEmbedder(embedder, config.block_size).embed(folder, texts)
        if is_main_process():
            say(f"{folder}: {len(texts):,} vectors of width {embedder.width} in {blocks} files")


def texts_of(path: str, key: str) -> list[str]:
    """Return the texts of a file: its lines, or the values of ``key`` in JSON lines. Raises
    ValueError, naming the file and line, if a line is malformed."""
    try:
        lines = Path(path).read_text("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--input {path} is not UTF-8 text: {error.reason}") from None
    if lines == [""]:
        raise ConfigError(f"--input {path} is empty")
    if Path(path).suffix not in (".jsonl", ".json"):
        return lines
    texts = []
    for number, line in enumerate(lines, 1):
        where = f"--input {path}, line {number}"
        row = parse_json(line, where, lenient=True)
        if not isinstance(row, dict) or not isinstance(row.get(key), str):
            raise ConfigError(f'{where} has no text under "{key}"; --json-key is its name')
        texts.append(row[key])
    return texts


class DiskEmbedder:
    """Writer of embeddings in blocks, which the processes share. Existing blocks of the same texts
    and embedder are not recomputed."""

    def __init__(self, embedder: Embedder, block_size: int = 100_000) -> None:
        self.embedder, self.block_size = embedder, block_size

    def embed(self, folder: Path, texts: Sequence[str]) -> int:
        """Write the embeddings of texts, and return the number of files. Collective: every process
        must call it. Raises OSError if a file cannot be written, and ValueError if a file cannot be
        read."""
        if is_main_process():
            content = digest_of_parts(text.encode("utf-8", "surrogatepass") for text in texts)
            identity, size = dict(self.embedder.identity), self.block_size
            begin_blocks(folder, {"texts": content, "embedder": identity, "block size": size})
        barrier()
        blocks = blocks_of(folder, len(texts), self.block_size)

        def vectors(block: FileBlock) -> Mapping[str, npt.NDArray[np.float32]]:
            return {ARRAY: self.embedder.embed(texts[block.start : block.stop])}

        run_blocks(blocks, vectors, "embedding", " texts")
        return len(blocks)


def stored_vectors(folder: Path) -> npt.NDArray[np.float32]:
    """Return the embeddings stored in a folder, in the order of the texts, [n, width]. Raises
    ValueError or OSError if a file is missing or damaged."""
    files = sorted(folder.glob("*-*.hdf5"))
    if not files:
        raise ConfigError(f"{folder} has no vectors")
    return np.concatenate([read_array(path, ARRAY) for path in files])


def embedder_of(
    load: str | None = None,
    kind: str | None = None,
    batch_size: int = 128,
    max_length: int = 256,
    settings: Settings | None = None,
) -> Embedder:
    """Return the embedder in a model folder. ``kind`` is a value of --bert-embedder-type."""
    flags = EmbedderFlags(
        bert_embedder_type=kind,
        bert_load=load,
        retro_bert_batch_size=batch_size,
        retro_bert_max_chunk_length=max_length,
    )
    return build_embedder(flags, settings)
