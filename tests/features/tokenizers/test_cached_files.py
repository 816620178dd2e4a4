"""Vocabularies that are found in --cache-dir."""

import json
from pathlib import Path

import pytest
from transformers import BertTokenizer

from megatron.config import ConfigError, TokenizerConfig
from megatron.features.raw_text.encoder import tokenizer_identity
from megatron.tokenizer import build_tokenizer

GPT2 = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}


def gpt2(folder: Path, **others) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type="GPT2BPETokenizer", cache_dir=str(folder), **others)


def put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())


@pytest.mark.parametrize(
    "place",
    [
        "{}",
        "gpt2-{}",
        "gpt2/{}",
        "models--gpt2/snapshots/607a30d/{}",
        "models--openai-community--gpt2/snapshots/607a30d/{}",
        "hub/models--gpt2/snapshots/607a30d/{}",
    ],
)
def test_gpt2(trained, trained_folder, tmp_path, place):
    for name in GPT2.values():
        put(trained_folder / name, tmp_path / place.format(name))
    found = build_tokenizer(gpt2(tmp_path))
    assert found.tokenize("import os") == trained.tokenize("import os")


def test_downloads_of_2019(trained, trained_folder, tmp_path):
    """Named by a digest, next to a file with their address."""
    for number, name in enumerate(GPT2.values()):
        put(trained_folder / name, tmp_path / f"{number}.etag")
        note = {"url": f"https://models.example/bert/gpt2-{name}", "etag": "x"}
        (tmp_path / f"{number}.etag.json").write_text(json.dumps(note))
    (tmp_path / "other.json").write_text("[]")
    assert build_tokenizer(gpt2(tmp_path)).vocab_size == trained.vocab_size


@pytest.mark.parametrize(
    "kind, name, file",
    [
        ("BertWordPieceTokenizer", None, "bert-large-uncased-vocab.txt"),
        ("BertWordPieceTokenizer", "bert-base-cased", "bert-base-cased/vocab.txt"),
        ("BertWordPieceLowerCase", None, "vocab.txt"),
        ("BertWordPieceCase", None, "models--google-bert--bert-large-cased/snapshots/1/vocab.txt"),
    ],
)
def test_bert(wordpiece_file, tmp_path, kind, name, file):
    put(wordpiece_file, tmp_path / file)
    config = TokenizerConfig(
        tokenizer_type=kind, tokenizer_model_type=name, cache_dir=str(tmp_path)
    )
    lower = kind.endswith("LowerCase") or (kind.endswith("Tokenizer") and name is None)
    tokenizer = build_tokenizer(config)
    assert (tokenizer.tokenize("IMPORT") == tokenizer.tokenize("import")) == lower


def bert(path: Path | str, kind: str = "BertWordPieceTokenizer", **others) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type=kind, tokenizer_model_type=str(path), **others)


@pytest.mark.parametrize(
    ("named", "lower"),
    [
        ("vocab.txt", True),
        ("bert-base-cased/vocab.txt", False),
        ("bert-base-cased/x/vocab.txt", True),
        ("bert-base-cased", False),
        ("bert-large-uncased-vocab.txt", True),
        ("words", True),
    ],
)
@pytest.mark.parametrize("relative", [True, False])
def test_a_path_is_the_file(wordpiece_file, tmp_path, monkeypatch, named, lower, relative):
    """Or its folder, whatever is in --cache-dir; as 2019's `BertTokenizer.from_pretrained`."""
    file = named if named.endswith(".txt") or named == "words" else f"{named}/vocab.txt"
    put(wordpiece_file, tmp_path / "here" / file)
    put(wordpiece_file, tmp_path / "other.txt")
    monkeypatch.chdir(tmp_path / "here")
    path = named if relative else tmp_path / "here" / named
    tokenizer = build_tokenizer(bert(path))
    assert (tokenizer.tokenize("IMPORT") == tokenizer.tokenize("import")) == lower
    reference = BertTokenizer(str(tmp_path / "here" / file), do_lower_case=lower)
    text = "import os, IMPORT re"
    assert tokenizer.tokenize(text) == reference(text, add_special_tokens=False)["input_ids"]
    assert build_tokenizer(bert(path, "BertWordPieceCase")).vocab_size == tokenizer.vocab_size
    given = bert(path, vocab_file=str(tmp_path / "other.txt"))
    assert build_tokenizer(given).source.endswith("other.txt")
    # Digests do not depend on where the file is, but on whether case counts.
    put(wordpiece_file, tmp_path / "moved" / file)
    assert tokenizer_identity(bert(tmp_path / "moved" / named)) == tokenizer_identity(bert(path))


def test_case_is_a_part_of_a_path(wordpiece_file, tmp_path):
    for name in ("a-cased", "a-uncased"):
        put(wordpiece_file, tmp_path / name / "vocab.txt")
    first, second = (tokenizer_identity(bert(tmp_path / name)) for name in ("a-cased", "a-uncased"))
    assert first != second


def test_a_name_is_searched_for_where_a_folder_has_it(wordpiece_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(wordpiece_file, tmp_path / "cache" / "bert-base-cased-vocab.txt")
    (tmp_path / "bert-base-cased").mkdir()
    build_tokenizer(bert("bert-base-cased", cache_dir="cache"))
    with pytest.raises(FileNotFoundError, match="bert-base-cased has no vocab.txt; it must be"):
        build_tokenizer(bert("bert-base-cased"))
    for absent in ("no/vocab.txt", "none.txt", f"{tmp_path}/none"):
        with pytest.raises(FileNotFoundError, match=f"--tokenizer-model-type {absent} does not"):
            build_tokenizer(bert(absent, cache_dir="cache"))


def test_the_named_model_is_preferred(wordpiece_file, tmp_path):
    put(wordpiece_file, tmp_path / "bert-large-cased-vocab.txt")
    (tmp_path / "vocab.txt").write_text("of another model")
    build_tokenizer(TokenizerConfig(tokenizer_type="BertWordPieceCase", cache_dir=str(tmp_path)))


def test_given_files_are_used(trained, trained_folder, tmp_path):
    files = {field: str(trained_folder / name) for field, name in GPT2.items()}
    assert build_tokenizer(gpt2(tmp_path, **files)).vocab_size == trained.vocab_size


def test_absent_files_are_named(tmp_path, trained_folder):
    put(trained_folder / "vocab.json", tmp_path / "vocab.json")
    with pytest.raises(ConfigError) as error:
        build_tokenizer(gpt2(tmp_path))
    for part in (
        f"--cache-dir {tmp_path}", "gpt2-vocab.json or vocab.json",
        "gpt2-merges.txt or merges.txt", "--vocab-file and --merge-file",
    ):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(ConfigError, match="put bert-base-cased-vocab.txt or vocab.txt there"):
        build_tokenizer(
            TokenizerConfig(
                tokenizer_type="BertWordPieceTokenizer",
                tokenizer_model_type="bert-base-cased",
                cache_dir=str(tmp_path),
            )
        )


def test_caches_of_text_depend_on_the_files_only(trained_folder, tmp_path):
    """Digests of tokenizers name files on disk; those without --cache-dir stay what they were."""
    files = {field: str(trained_folder / name) for field, name in GPT2.items()}
    given = tokenizer_identity(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **files))
    for name in GPT2.values():
        put(trained_folder / name, tmp_path / name)
    assert tokenizer_identity(gpt2(tmp_path)) == given
    assert "cache_dir" not in given


@pytest.mark.realdata
def test_the_published_vocabulary(realdata):
    tokenizer = build_tokenizer(gpt2(realdata / "gpt2_bpe"))
    assert (tokenizer.vocab_size, tokenizer.tokenize("Hello world")) == (50257, [15496, 995])
