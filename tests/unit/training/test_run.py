"""How a training command begins and ends."""

import json
import random
import subprocess
import sys

import pytest

from megatron.config import FLAG_CLASSES, FlagParser
from megatron.training.run import run_of

PROGRAM = """
import atexit, sys
from megatron.training.run import ending_process
atexit.register(print, "handler")

class Finalised:
    def __del__(self):
        print("taken apart")

kept = Finalised()

def command():
    print("output")
    {end}

with ending_process():
    command()
"""


@pytest.mark.parametrize(
    ("end", "status", "errors"),
    [
        ("", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('wrong')", 1, "wrong\n"),
    ],
)
def test_process_ends_at_once_with_its_status(end, status, errors):
    """Output is flushed and exit handlers run, but the interpreter is not finalised."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True
    )
    assert done.returncode == status
    assert done.stdout == "output\nhandler\n"
    assert done.stderr == errors


def test_an_unexpected_error_keeps_its_traceback():
    program = PROGRAM.format(end="raise KeyError('x')")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "KeyError: 'x'" in done.stderr


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
