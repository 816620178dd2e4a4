"""Training SentencePiece models, by hand and where a run misses its model."""

import hashlib
import multiprocessing
import time
from itertools import product
from pathlib import Path

import pytest
import sentencepiece
from samples import sampled

from megatron.config import ConfigError, TokenizerConfig
from megatron.features.tokenizers.train import train_missing_model, train_sentencepiece_model
from megatron.tokenizer import build_tokenizer

TEXTS = ["the quick brown fox jumps over the lazy dog 123\n"] * 5 + ["a lazy fox,\n\ta quick dog"]


CASES = list(product(["unigram", "bpe", "char"], [False, True]))


@pytest.mark.parametrize(("kind", "byte_fallback"), sampled(CASES, CASES[::2].__contains__))
def test_pieces_and_determinism(python_sources, kind, byte_fallback):
    texts = python_sources[:20]
    model = train_sentencepiece_model(iter(texts), kind, 600, byte_fallback)
    assert model == train_sentencepiece_model(iter(texts), kind, 600, byte_fallback)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert [processor.id_to_piece(i) for i in range(4)] == ["<unk>", "<s>", "</s>", "<pad>"]
    assert len(processor) == 600 or kind == "char"
    assert processor.is_byte(4) == byte_fallback
    text = "  two  spaces\tand ㍍"
    same = processor.decode(processor.encode(text)) == text
    assert same == byte_fallback, "byte fallback keeps every text as it is"


def test_no_text_is_left_out():
    """SentencePiece skips long sentences; they are cut before spaces, else anywhere."""
    words = " ".join(f"word{n % 7}x" for n in range(5000))
    model = train_sentencepiece_model([words + "é" * 9000], "char", 100)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert {*"word0123456x", "é"} <= {processor.id_to_piece(i) for i in range(len(processor))}


def test_file_appears_whole(tmp_path):
    train_missing_model(config(tmp_path / "new" / "m.model"), lambda: TEXTS)
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"m.model", "m.vocab", "m.model.lock"}
    lines = (tmp_path / "new" / "m.vocab").read_text().splitlines()
    assert lines[:2] == ["<unk>\t0", "<s>\t0"]
    assert all(float(line.split("\t")[1]) <= 0 for line in lines)


@pytest.mark.parametrize(
    "texts, kind, size, message",
    [
        ([], "bpe", 100, "there is no text to train"),
        (["", " \n"], "unigram", 100, "there is no text to train"),
        (TEXTS, "bpe", 5, "cannot train a bpe model of --vocab-size 5"),
        (TEXTS, "word", 100, "--tokenizer-model-type word is not a SentencePiece model"),
    ],
)
def test_errors(tmp_path, texts, kind, size, message):
    with pytest.raises(ValueError, match=message):
        missing = config(tmp_path / "m.model", vocab_size=size, tokenizer_model_type=kind)
        train_missing_model(missing, lambda: texts)
    assert {path.name for path in tmp_path.iterdir()} <= {"m.model.lock"}


def test_error_of_the_texts_is_the_one_that_is_raised(tmp_path):
    def texts():
        yield from TEXTS
        raise ValueError("line 7: bad")

    with pytest.raises(ValueError, match="line 7: bad"):
        train_missing_model(config(tmp_path / "m.model"), texts)
    assert [path.name for path in tmp_path.iterdir()] == ["m.model.lock"]


def config(path: Path, **changes) -> TokenizerConfig:
    values = {"tokenizer_type": "SentencePieceTokenizer", "vocab_size": 40} | changes
    return TokenizerConfig(tokenizer_model=str(path), **values)


@pytest.mark.parametrize("name", ["m.model", "m"])
def test_a_missing_model_is_trained_as_in_2019(tmp_path, name):
    """`m` is written and found as `m.model`, as NVIDIA's code of 2019 does."""
    wanted = train_sentencepiece_model(TEXTS, "unigram", 40)
    given = config(tmp_path / name, tokenizer_model_type="unigram")
    tokenizer = build_tokenizer(given, lambda: TEXTS)
    assert (tmp_path / "m.model").read_bytes() == wanted
    again = build_tokenizer(given, lambda: pytest.fail("trained again"))
    assert again.tokenize("quick fox") == tokenizer.tokenize("quick fox")
    assert build_tokenizer(given).vocab_size == tokenizer.vocab_size


def test_a_missing_model_without_text_or_size(tmp_path):
    with pytest.raises(FileNotFoundError, match="m.model does not exist.*tools/train_tokenizer.py"):
        build_tokenizer(config(tmp_path / "m.model"))
    with pytest.raises(ConfigError, match="--vocab-size is missing: --tokenizer-model .*m.model"):
        build_tokenizer(config(tmp_path / "m.model", vocab_size=None), lambda: TEXTS)
    with pytest.raises(ConfigError, match="--tokenizer-model-type bert-large-uncased is no"):
        build_tokenizer(
            config(tmp_path / "m.model", tokenizer_model_type="bert-large-uncased"), lambda: TEXTS
        )
    llama = config(tmp_path / "m.model", tokenizer_type="Llama2Tokenizer")
    with pytest.raises(FileNotFoundError, match="m.model does not exist"):
        build_tokenizer(llama, lambda: TEXTS)


def _ask(path: Path) -> None:
    def texts():
        with open(path.with_name("trained"), "a") as log:
            log.write("x")
        time.sleep(0.5)
        return TEXTS

    train_missing_model(config(path), texts)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name(f"seen-{multiprocessing.current_process().pid}").write_text(digest)


def test_one_of_several_processes_trains(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_ask, args=(tmp_path / "m.model",)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "trained").read_text() == "x"
    assert len({path.read_text() for path in tmp_path.glob("seen-*")}) == 1
