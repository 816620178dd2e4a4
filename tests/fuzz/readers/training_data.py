"""What training reads: indexed files, text, examples, preferences, TFRecord."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from fuzz.fuzzer import Fuzzer
from fuzz.wire import example, frame

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.config import DataConfig, TokenizerConfig
from megatron.data.blend import BlendedDataset
from megatron.data.corpora import INDEXED
from megatron.data.gpt_dataset import GPTRecipe
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset
from megatron.data.sources import BlendReader
from megatron.features.corpora.corpora import read_corpora
from megatron.features.instruction.conversations import read_examples
from megatron.features.masked.tfrecord import TFRecordRecipe, TFRecords
from megatron.features.preference.records import read_preferences
from megatron.features.raw_text.documents import open_raw_text, text_settings
from megatron.features.raw_text.encoder import TextEncoder
from megatron.features.raw_text.flags import RawTextConfig

LENGTHS, DOCUMENTS = [7, 0, 30, 1, 12, 5, 0, 44, 3, 9], [1, 2, 1, 3, 0, 1, 2]
BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")


def write_indexed(folder: Path) -> None:
    with IndexedDatasetWriter(folder / "x", "uint16") as writer:
        tokens = np.random.default_rng(3).integers(1000, size=sum(LENGTHS))
        writer.add_documents(tokens, LENGTHS, DOCUMENTS)


def write_indexed_with_cache(folder: Path) -> None:
    write_indexed(folder)
    read_indexed(folder)


def read_indexed(folder: Path) -> None:
    indexed = IndexedDataset(folder / "x")
    cache = IndexCache(folder / "cache")
    for number in range(min(len(indexed), 100)):
        indexed.get(number)
    part = GPTRecipe(8, 3).build(indexed, range(10), 25, "train", cache)
    blend = BlendedDataset.build([part, part], [0.4, 0.6], 25, cache, "train")
    for number in range(len(blend)):
        _ = blend[number]


TEXTS = ("One text.", "", "Two\nlines, é\u2028漢字", '"quoted\\"', "words " * 40)


def write_json_lines(folder: Path) -> None:
    lines = (json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(TEXTS))
    (folder / "x.jsonl").write_text("\n".join(lines))


def write_tables(folder: Path) -> None:
    rows = "".join(f'{n},"{text.replace(chr(34), chr(34) * 2)}"\n' for n, text in enumerate(TEXTS))
    (folder / "x.csv").write_text("n,text\n" + rows)


def read_text(folder: Path) -> None:
    path = next(folder.glob("x.*"), folder / "x.jsonl")
    config = RawTextConfig()
    encoder = TextEncoder(text_settings(config, BYTES))
    documents = open_raw_text(str(path), config, encoder, IndexCache(None))
    for number in range(min(len(documents), 100)):
        documents.get(number)


EXAMPLES = (
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "system": "f"},
    {"prompt": "a", "completion": "b"},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "x"},
            {
                "role": "assistant", "content": None, "weight": 1, "reasoning_content": "b",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
        ],
        "tools": "[{}]", "chat_template_kwargs": {"a": True}, "id": 1, "system": "c",
    },
)  # fmt: skip
PREFERENCES = (
    {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5},
    {"instruction": "a", "input": "b", "output": ["c", "d"]},
    {"prompt": [{"role": "user", "content": "a"}], "completion": "b", "label": True},
    {
        "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}],
        "prompt": "a", "messages": [{"role": "user", "content": "a"}],
    },
)  # fmt: skip


def write_records(records: tuple[dict, ...], columns: str):  # type: ignore[no-untyped-def]
    def make(folder: Path) -> None:
        (folder / "x.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        (folder / "y.json").write_text(json.dumps(records, indent=1))
        (folder / "z.csv").write_text(f'{columns}\n"a\nb",c,d\n')

    return make


def read_records(read):  # type: ignore[no-untyped-def]
    def both(folder: Path) -> None:
        for name in ("x.jsonl", "y.json", "z.csv"):
            for _ in read(str(folder / name)):
                pass

    return both


def write_tfrecord(folder: Path) -> None:
    def features(n: int) -> dict[str, list]:
        return {
            "input_ids": [10 * n + i for i in range(1, 7)] + [0, 0],
            "input_mask": [1] * 6 + [0, 0], "segment_ids": [0, 0, 1, 1, 1, 1, 0, 0],
            "masked_lm_positions": [2, 4, 0], "masked_lm_ids": [700 + n, 800 + n, 0],
            "masked_lm_weights": [1.0, 1.0, 0.0], "next_sentence_labels": [n % 2],
        }  # fmt: skip

    content = b"".join(frame(example(features(n))) for n in range(6))
    (folder / "x.tfrecord").write_bytes(content)


def seal_tfrecord(folder: Path) -> None:
    """Frames of the right checksums about the edited records."""
    path = folder / "x.tfrecord"
    data, found, at = path.read_bytes(), b"", 0
    while at + 12 <= len(data):
        size = min(int.from_bytes(data[at : at + 8], "little"), len(data))
        found += frame(data[at + 12 : at + 12 + size])
        at += 16 + size
    path.write_bytes(found)


def read_tfrecord(folder: Path) -> None:
    records = TFRecords(str(folder / "x.tfrecord"), IndexCache(None))
    records.check_vocabulary(1000)
    samples = TFRecordRecipe(12, 1, 0, 1000).build(
        records, range(len(records)), 12, "train", IndexCache(None)
    )
    for number in range(len(samples)):
        _ = samples[number]


CORPORA = {
    "wikipedia": {"files": "wiki/*_text_document.bin", "weight": 2},
    "books": {"files": ["books/a_text_document"], "range": "0:0.9", "weight": 1,
              "tokenizer": {"vocab_file": "v.json", "vocab_size": 7}},
    "questions": {"files": "questions.jsonl", "type": "instruction", "weight": 0.1},
    "all": {"corpora": ["books", "questions"]},
}  # fmt: skip


def write_corpora(folder: Path) -> None:
    (folder / "corpora.json").write_text(json.dumps(CORPORA, indent=1))
    (folder / "wiki").mkdir()
    (folder / "wiki" / "a_text_document.bin").write_bytes(b"")


def read_named_corpora(folder: Path) -> None:
    corpora = read_corpora(str(folder / "corpora.json"), (INDEXED, "text", "instruction"))
    for name in ("all", "wikipedia"):
        corpora.find(name, None, "--train-data")
        corpora.find(name, 0.5, "--train-data")


def write_blends(folder: Path) -> None:
    (folder / "data.txt").write_text("0.3 books@0:0.95\n0.7 code\n")
    (folder / "parts.json").write_text(
        json.dumps({"train": ["0.3", "books", "0.7", "code"], "valid": ["v"], "test": ["t"]})
    )
    (folder / "splits.txt").write_text("'train: 0.3 0:0.5 books, 0.7 0.5:1 code'")


def read_blends(folder: Path) -> None:
    reader = BlendReader()
    reader.parts(DataConfig(data_args_path=str(folder / "data.txt")))
    reader.parts(DataConfig(per_split_data_args_path=str(folder / "parts.json")))
    reader.parts(DataConfig(train_weighted_split_paths_path=str(folder / "splits.txt")))


FUZZERS = (
    Fuzzer("indexed", write_indexed_with_cache, read_indexed),
    Fuzzer("raw-text", write_json_lines, read_text),
    Fuzzer("raw-text-tables", write_tables, read_text),
    Fuzzer(
        "instructions",
        write_records(EXAMPLES, "instruction,input,output"),
        read_records(read_examples),
    ),
    Fuzzer(
        "preferences",
        write_records(PREFERENCES, "prompt,chosen,rejected"),
        read_records(read_preferences),
    ),
    Fuzzer("tfrecord", write_tfrecord, read_tfrecord, repair=seal_tfrecord),
    Fuzzer("corpora", write_corpora, read_named_corpora),
    Fuzzer("blends", write_blends, read_blends),
)
