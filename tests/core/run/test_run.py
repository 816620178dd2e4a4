"""How a training command begins and ends."""

import dataclasses
import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, Vocabulary
from megatron.families import family_names, family_of
from megatron.features.tokenizers.train import train_byte_level_bpe
from megatron.run.process import ending_process
from megatron.run.run import parse_run, run_data, run_of
from megatron.util.processes import ends_with_run

PROGRAM = """
import atexit, json, os, sys, tempfile
from megatron.run.process import ending_process

class Finalised:
    def __del__(self):
        print("taken apart")

def ended(end):
    files = [tempfile.TemporaryFile() for _ in range(2)]
    child = os.fork()
    if child == 0:
        kept = Finalised()
        for number, file in enumerate(files, start=1):
            os.dup2(file.fileno(), number)
        atexit.register(print, "handler")
        with ending_process():
            print("output")
            exec(end)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    return status, *(file.read().decode() for file in files)

print(json.dumps({end: ended(end) for end in sys.argv[1:]}))
"""
ENDS = {
    "": (0, ""),
    "sys.exit(0)": (0, ""),
    "sys.exit(2)": (2, ""),
    "sys.exit('wrong')": (1, "wrong\n"),
}
ERROR = "raise KeyError('x')"


def test_a_process_that_an_error_keeps_alive_does_not_end_with_its_run():
    with pytest.raises(KeyError), ending_process():
        assert ends_with_run.get()
        raise KeyError
    assert not ends_with_run.get()


@pytest.fixture(scope="module")
def ended():
    """Status, output and errors by how a process ends, each forked from one that has imported."""
    words = [sys.executable, "-c", PROGRAM, *ENDS, ERROR]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("end", ENDS)
def test_process_ends_at_once_with_its_status(ended, end):
    """Output is flushed and exit handlers run, but the interpreter is not finalised."""
    status, errors = ENDS[end]
    assert ended[end] == [status, "output\nhandler\n", errors]


def test_an_unexpected_error_keeps_its_traceback(ended):
    status, _, errors = ended[ERROR]
    assert status == 1
    assert "KeyError: 'x'" in errors


def test_a_missing_sentencepiece_model_is_trained_on_the_run_s_text(tmp_path):
    """And on nothing but the text that is trained on; the next run finds it there."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefg", k=rng.randint(2, 6))) for _ in range(200)]
    for name, word in (("train", "hello"), ("valid", "xylophone")):
        lines = [" ".join([*rng.choices(words, k=20), word]) for _ in range(100)]
        texts = "".join(json.dumps({"body": line}) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(texts)
    model = tmp_path / "new.model"
    argv = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1 "
        "--micro-batch-size 1 --train-iters 1 --text-key body "
        f"--train-data-path {tmp_path}/train.jsonl --valid-data-path {tmp_path}/valid.jsonl "
        f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {model} --vocab-size 120"
    ).split()
    settings = FlagParser(*FLAG_CLASSES).settings(argv)
    tokenizer = run_of(settings, 1).tokenizer
    assert len(tokenizer.tokenize("hello")) < len(tokenizer.tokenize("xylop"))
    trained = model.stat().st_mtime_ns
    assert run_of(settings, 1).tokenizer.vocab_size == tokenizer.vocab_size
    assert model.stat().st_mtime_ns == trained


def run_with(words, world_size=1):
    argv = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1 "
        f"--micro-batch-size 1 --train-iters 1 --eval-iters 0 {words}"
    ).split()
    return run_of(FlagParser(*FLAG_CLASSES).settings(argv), world_size)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """The flags of a byte-pair encoding's files, and the encoding."""
    tokenizer = train_byte_level_bpe(["import os"] * 9, 260, 2)
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizer.save_pretrained(folder)
    return f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt", tokenizer


def test_vocabulary_files_are_a_byte_pair_encoding_by_default(vocabulary):
    files, tokenizer = vocabulary
    run = run_with(f"--mock-data {files}")
    assert run.config.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    assert run.tokenizer.tokenize("import") == tokenizer.tokenize("import")
    origin = run.resolved.origins["tokenizer_type"]
    assert origin == "derived: --vocab-file without --tokenizer-type"


@pytest.mark.parametrize(
    "words, told",
    [
        ("--vocab-file v.json", "needs --merge-file"),
        ("--merge-file m.txt", "needs --vocab-file"),
        ("--tokenizer-model m", "--tokenizer-model m needs --tokenizer-type: HFTokenizer"),
        ("--cache-dir none", "--cache-dir none does not have the vocabulary of gpt2"),
        ("", "--tokenizer-type is missing"),
    ],
)
def test_a_tokenizer_that_is_not_complete(words, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        run_with(f"--mock-data {words}")


def test_other_families_have_another_default(tmp_path):
    """The samples of tools may be those of another family than the model's."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "import"]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    argv = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1 "
        f"--micro-batch-size 1 --train-iters 1 --vocab-file {tmp_path}/vocab.txt"
    ).split()
    run = run_of(FlagParser(*FLAG_CLASSES).settings(argv), 1, samples="bert")
    assert run.config.tokenizer.tokenizer_type == "BertWordPieceLowerCase"


def test_vocabulary_size_of_a_tokenizer_with_files(vocabulary):
    files, tokenizer = vocabulary
    size = tokenizer.vocab_size
    padding = "--mock-data --make-vocab-size-divisible-by 1"
    rows = [
        run_with(f"{padding} {files} --vocab-size {n}").config.model.vocabulary.padded
        for n in (size, size + 5)
    ]
    assert rows == [size, size + 5]
    with pytest.raises(ConfigError, match=f"--vocab-size {size - 1} is smaller .* {size} ids"):
        run_with(f"{padding} {files} --vocab-size {size - 1}")


@pytest.fixture
def numbers(tmp_path):
    """Indexed data with the ids 0 to 99."""
    with IndexedDatasetWriter(str(tmp_path / "data"), np.dtype("<u2")) as writer:
        for _ in range(20):
            writer.add_document([np.arange(100, dtype=np.uint16)])
    return tmp_path / "data"


def test_a_number_of_ids_without_a_tokenizer(numbers):
    run = run_with(f"--data-path {numbers} --vocab-size 100 --make-vocab-size-divisible-by 1")
    assert run.config.model.vocabulary == Vocabulary(100, 100)
    assert run_data(run).datasets.train is not None


def test_a_number_of_ids_that_the_data_exceed(numbers):
    with pytest.raises(ValueError, match="token id 99, but the vocabulary has 99 .*--vocab-size"):
        run_data(run_with(f"--data-path {numbers} --vocab-size 99"))


@pytest.mark.parametrize(
    "flag", ["--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask"]
)
def test_no_id_is_taken_for_the_end_of_a_document(numbers, flag):
    run = run_with(f"--data-path {numbers} --vocab-size 100 {flag}")
    with pytest.raises(ValueError, match=f"^{flag}: --vocab-size 100, .*--tokenizer-type GPT2BPE"):
        run_data(run)


def test_text_needs_a_tokenizer(tmp_path):
    (tmp_path / "text.json").write_text(json.dumps({"text": "import os"}) + "\n")
    run = run_with(f"--data-path {tmp_path}/text.json --vocab-size 100")
    with pytest.raises(ValueError, match="found 'import': name .*--tokenizer-type GPT2BPE"):
        run_data(run)


def test_unused_flags_are_fields():
    """What a family does not depend on is named as a flag is, and of each family by another."""
    fields = {field.name for cls in FLAG_CLASSES for field in dataclasses.fields(cls)}
    for name in family_names():
        assert family_of(name).unused_flags <= fields, name
    assert not frozenset.intersection(*(family_of(name).unused_flags for name in family_names()))


def test_help_has_no_flag_that_the_program_refuses(capsys):
    shown = {}
    for name in ("gpt", "bert", "t5"):
        with pytest.raises(SystemExit):
            parse_run("Pretrain.", ["--help"], family=name)
        shown[name] = set(re.findall(r"^  (--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE))
    assert "--bert-no-binary-head" in shown["bert"] - shown["gpt"] - shown["t5"]
    assert "--reset-position-ids" in shown["gpt"] - shown["bert"]
    assert "--num-layers" in shown["gpt"] & shown["bert"] & shown["t5"]
