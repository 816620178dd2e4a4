"""Bad input ends with exit status 2 and a message that names flag, file and value."""

import contextlib
import io
import json
import logging
import sys

import numpy as np
import pytest
from training_jobs import TINY

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter

BASE = [*TINY, "--train-iters", "4"]


def run_main(argv):
    """(exit status, stderr) of pretrain_gpt.py with these flags; for the pool."""
    from megatron.run.process import errors_for_users
    from megatron.run.run import parse_run
    from megatron.training.build import train

    errors = io.StringIO()
    sys.argv = ["pretrain_gpt.py", *argv]
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            with errors_for_users():
                train(parse_run(None, family="gpt"))
        except SystemExit as exit:
            return exit.code, errors.getvalue()
    return 0, errors.getvalue()


def refused(pool, argv, *parts):
    status, errors = pool.run(1, run_main, [str(word) for word in argv])[0]
    message = errors.strip().splitlines()[-1]
    assert status == 2, errors
    assert "Traceback" not in errors
    for part in parts:
        assert str(part) in message, message
    return message


def without(*flags):
    """BASE without these flags and their values."""
    words, skip = [], 0
    for word in BASE:
        if word in flags:
            skip = 1 if word == "--mock-data" else 2
        if skip:
            skip -= 1
            continue
        words.append(word)
    return words


FLAG_CASES = {
    "unknown": (["--num-layer", "2"], ["unknown flag --num-layer", "--num-layers"]),
    "not a number": (["--lr", "fast"], ["--lr", "'fast'"]),
    "heads": (["--num-attention-heads", "5"], ["--num-attention-heads 5", "--hidden-size 32"]),
    "groups": (["--num-query-groups", "3"], ["--num-query-groups 3", "--num-attention-heads 4"]),
    "batch": (
        ["--micro-batch-size", "3"],
        ["--global-batch-size 4", "--micro-batch-size 3", "the nearest are 3 and 6"],
    ),
    "tensor size": (["--tensor-model-parallel-size", "2"], ["--tensor-model-parallel-size 2", "1"]),
    "two lengths": (["--train-samples", "9"], ["--train-iters 4", "--train-samples 9"]),
    "two precisions": (["--fp16", "--bf16"], ["--fp16", "--bf16"]),
    "warm-up": (["--lr-warmup-iters", "9"], ["--lr-warmup-iters 9", "--lr-decay-iters 4"]),
    "long sequence": (["--max-position-embeddings", "8"], ["--seq-length 16", "8"]),
    "no such tokenizer": (["--tokenizer-type", "Word"], ["--tokenizer-type", "Word", "GPT2BPE"]),
    "mock and data": (["--data-path", "x"], ["--mock-data"]),
    "pipeline": (["--pipeline-model-parallel-size", "1", "--no-pipeline-parallel"], None),
    "no folder": (["--save", "/dev/null/x"], ["--save /dev/null/x", "cannot write"]),
    "json": (["--deepspeed_config", "absent.json"], ["--deepspeed_config absent.json"]),
}


@pytest.mark.parametrize("name", FLAG_CASES)
def test_flags(pool, name):
    flags, parts = FLAG_CASES[name]
    if parts is None:
        status, errors = pool.run(1, run_main, [*BASE, *flags])[0]
        assert status == 0, errors
    else:
        refused(pool, [*BASE, *flags], *parts)


def test_missing_flags(pool):
    refused(pool, without("--num-layers", "--hidden-size"), "--num-layers, --hidden-size")
    refused(pool, without("--lr"), "--lr")


def test_json_contradiction(pool, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}))
    argv = [*BASE, "--deepspeed_config", path]
    refused(pool, [*argv, "--clip-grad", "1.0"], "--clip-grad 1.0", "gradient_clipping 0.5", path)
    refused(pool, [*argv, "--zero-stage", "1"], "--zero-stage 1", "zero_optimization.stage 2")
    path.write_text('{"gradient_cliping": 1.0}')
    refused(pool, argv, "gradient_cliping", "gradient_clipping")
    path.write_text("{")
    refused(pool, argv, path)


def write_corpus(prefix, largest=98, documents=50):
    random = np.random.RandomState(0)
    with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
        for _ in range(documents):
            writer.add_document([random.randint(0, largest + 1, 40).astype(np.uint16)])
    return prefix


DATA = [*without("--mock-data"), "--split", "100,0,0", "--data-path"]


def test_data_files(pool, tmp_path):
    refused(pool, [*DATA, tmp_path / "absent"], "--data-path", tmp_path / "absent")
    prefix = write_corpus(tmp_path / "corpus")
    path = prefix.with_suffix(".bin")
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    refused(pool, [*DATA, prefix], "corpus.bin", len(content), len(content) - 2)
    path.write_bytes(content + b"\0\0")
    refused(pool, [*DATA, prefix], "corpus.bin", len(content) + 2)
    path.write_bytes(content)
    status, errors = pool.run(1, run_main, [*map(str, DATA), str(prefix)])[0]
    assert status == 0, errors


def test_token_past_the_vocabulary(pool, tmp_path):
    prefix = write_corpus(tmp_path / "corpus", largest=150)
    refused(pool, [*DATA, prefix], "corpus", "150", "100")


def test_missing_tokenizer_files(pool):
    argv = [*BASE, "--tokenizer-type", "GPT2BPETokenizer"]
    refused(pool, argv, "--vocab-file")
    refused(pool, [*argv, "--vocab-file", "no.json", "--merge-file", "no.txt"], "no.json")


def run_logged(argv):
    """Exit status of pretrain_gpt.py, and what it logs; for the pool."""
    messages = io.StringIO()
    handler = logging.StreamHandler(messages)
    logging.getLogger("megatron").addHandler(handler)
    try:
        return run_main(argv)[0], messages.getvalue()
    finally:
        logging.getLogger("megatron").removeHandler(handler)


def test_nccl_without_a_gpu_says_that_gloo_is_used(pool):
    """Old scripts name the backend, which is chosen by the device."""
    status, logged = pool.run(1, run_logged, [*BASE, "--distributed-backend", "nccl"])[0]
    assert status == 0
    assert "--distributed-backend nccl needs GPUs; this machine has none, and trains" in logged
