"""Processes of one run that differ in flags, data, tokenizer, checkpoint, code or packages end
within seconds with the same error, and none of them trains."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from samples import sampled
from warm_runs import alive, wait

from megatron.apps.corpus.indexed_files import check_dataset
from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter

ROOT = Path(__file__).parents[2]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --num-workers 0 --eval-iters 0 --peak-tflops 1 "
    "--train-iters 2 --log-interval 1"
).split()
NULL = "--tokenizer-type NullTokenizer --vocab-size 99".split()
MOCK = [*NULL, "--mock-data"]
SECONDS = 10.0


def started(warm, tmp_path, *flags_of_ranks, environment=()):
    """Starts the processes of a run, each with flags of its own; what each printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outputs, processes, began = [], [], time.monotonic()
    for rank, flags in enumerate(flags_of_ranks):
        outputs.append(tmp_path / f"output.{rank}")
        variables = {
            **{"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"},
            **{"WORLD_SIZE": len(flags_of_ranks), "MASTER_PORT": port},
            **(environment[rank] if environment else {}),
        }
        processes.append(warm.fork([*MODEL, *flags], variables, outputs[-1]))
    wait(processes, lambda: not alive(processes), pause=0.01)
    return [output.read_text() for output in outputs], time.monotonic() - began


def corpus(prefix, seed):
    """Documents of the same lengths, and other tokens for each seed."""
    lengths = np.random.default_rng(0).integers(5, 60, 200)
    generator = np.random.default_rng(seed)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetWriter(str(prefix), "uint16") as writer:
        for length in lengths:
            writer.add_document([generator.integers(0, 98, length)])
    return prefix


def on(prefix):
    return [*NULL, "--data-path", prefix, "--split", "100,0,0"]


def flags(tmp_path):
    return [*MOCK, "--lr", "1e-3"], [*MOCK, "--lr", "2e-3"], "--lr is 0.002 on rank 1 and 0.001"


def layout(tmp_path):
    other = [*MOCK, "--tensor-model-parallel-size", "2"]
    return MOCK, other, "--tensor-model-parallel-size is 2 on rank 1 and 1 on rank 0"


def one_parses_nothing(tmp_path):
    wrong = [*MOCK, "--global-batch-size", "3"]
    return MOCK, wrong, "--global-batch-size 3 is not a multiple of"


def deepspeed_json(tmp_path):
    (tmp_path / "a.json").write_text('{"gradient_clipping": 0.5}')
    (tmp_path / "b.json").write_text('{"gradient_clipping": 0.7}')
    names = ([*MOCK, "--deepspeed_config", tmp_path / f"{name}.json"] for name in "ab")
    return *names, "--clip-grad is 0.7 on rank 1 and 0.5 on rank 0"


def tokenizer(tmp_path):
    flags = []
    for word in ("cat", "dog"):
        (tmp_path / word).mkdir()
        vocabulary = tmp_path / word / "vocab.txt"
        vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", word]))
        os.chdir(ROOT)
        link = tmp_path / f"link-{word}"
        link.symlink_to(vocabulary)
        flags.append(["--mock-data", "--vocab-file", vocabulary])
    wordpiece = ["--tokenizer-type", "BertWordPieceLowerCase"]
    return *([*each, *wordpiece] for each in flags), "the tokenizer's files is"


def other_data(tmp_path):
    first = corpus(tmp_path / "first", 1)
    other = corpus(tmp_path / "other", 2)
    return on(first), on(other), "--data-path is"


def no_data(tmp_path):
    found = on(corpus(tmp_path / "first", 1))
    missing = [tmp_path / "none" if flag == tmp_path / "first" else flag for flag in found]
    return found, missing, "none"


def words_of_a_file(tmp_path):
    """The same flags, and in the file that they name other weights."""
    first, other = corpus(tmp_path / "first", 1), corpus(tmp_path / "other", 2)
    for name, weight in (("a", 0.5), ("b", 0.7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "words").write_text(f"{weight} {first} 1 {other}")
    words = [[*NULL, "--data-args-path", tmp_path / name / "words"] for name in "ab"]
    return *words, "--data-args-path is"


CASES = (
    flags, layout, one_parses_nothing, deepspeed_json, tokenizer, other_data, no_data,
    words_of_a_file,
)  # fmt: skip


@pytest.mark.parametrize("case", sampled(CASES, lambda case: case in (layout, one_parses_nothing)))
def test_processes_that_differ_end_with_one_error(warm, tmp_path, case):
    mine, other, message = case(tmp_path)
    (first, second), seconds = started(warm, tmp_path, mine, other)
    assert message in first and message in second, first + second
    assert "iteration" not in first and "Traceback" not in first + second
    assert seconds < SECONDS


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_only_explains_its_flags_keeps_nobody_waiting(warm, tmp_path, which):
    flags = [MOCK, MOCK]
    flags[which] = [*MOCK, "--explain-config"]
    printed, seconds = started(warm, tmp_path, *flags)
    named = rf"rank {which}(?: \(\S+\))?: it has ended before the run began"
    assert re.search(named, printed[1 - which]), printed[1 - which]
    assert "--lr" not in printed[1 - which] and seconds < SECONDS


def in_folders(folders, flags):
    """What two processes of a run print that have working directories of their own, as nodes have
    disks of their own: one name leads to other files."""
    program = "import os, sys; os.chdir(sys.argv.pop(1)); import pretrain_gpt; pretrain_gpt.main()"
    return ended(
        [[sys.executable, "-c", program, folder, *MODEL, *flags] for folder in folders], [{}, {}]
    )


def ended(commands, variables):
    """What two processes of a run print, which must refuse to start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank)}
            | {"LOCAL_RANK": str(rank)} | variables[rank],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, command in enumerate(commands)
    ]  # fmt: skip
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], printed
    return printed


@pytest.mark.proof
def test_one_process_sees_other_files_behind_the_same_names(tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    for seed, folder in enumerate(folders):
        corpus(folder / "books", seed)
    printed = in_folders(folders, on("books"))
    assert all("books: sample is" in text and "on rank 1 and" in text for text in printed), printed


@pytest.mark.proof
@pytest.mark.parametrize("second", ["none", "another"])
def test_a_checkpoint_that_one_process_does_not_see_is_named(warm, tmp_path, second):
    folders = [tmp_path / name for name in ("a", "b")]
    for seed, folder in enumerate(folders[: 2 if second == "another" else 1]):
        started(warm, tmp_path, [*MOCK, "--save", folder / "save", "--seed", str(seed + 1)])
    folders[1].mkdir(exist_ok=True)
    printed = in_folders(folders, [*MOCK, "--load", "save"])
    message = "the content of save/global_step2 is" if second == "another" else "to load is none on"
    assert all(message in text for text in printed), printed


def test_a_replaced_file_is_refused_at_resume_and_a_moved_one_is_not(warm, tmp_path):
    books, save = corpus(tmp_path / "books", 1), tmp_path / "save"
    run = [*on(books), "--save", save, "--load", save, "--exit-interval", "1"]
    (first,), _ = started(warm, tmp_path, run)
    assert "saved checkpoint at iteration 1" in first
    state = json.loads((save / "global_step1" / "state.json").read_text())
    assert [file["path"] for file in state["data"]] == [str(books)]

    kept = tmp_path / "kept.bin"
    shutil.copy(f"{books}.bin", kept)
    corpus(books, 2)
    again = [*on(books), "--save", save, "--load", save]
    (refused,), _ = started(warm, tmp_path, again)
    was, now = state["data"][0]["content"]["sample"], "and is"
    assert f"{books}: sample was {was} {now}" in refused and "--allow-changed-data" in refused
    assert not (save / "global_step2").exists()

    moved = corpus(tmp_path / "elsewhere" / "books", 1)
    (silent,), _ = started(warm, tmp_path, [*on(moved), "--load", save])
    assert "iteration        2/       2" in silent and "sample was" not in silent
    (accepted,), _ = started(warm, tmp_path, [*again, "--allow-changed-data"])
    assert "saved checkpoint at iteration 2" in accepted and f"{books}: sample was" in accepted


def test_checksums_are_compared_at_the_start(warm, tmp_path):
    books = corpus(tmp_path / "books", 1)
    run = [*on(books), "--verify-data"]
    (missing,), _ = started(warm, tmp_path, run)
    assert f"{books}.sha256 does not exist" in missing and "--write-checksums" in missing
    check_dataset(str(books), write=True)
    content = bytearray(Path(f"{books}.bin").read_bytes())
    (whole, _), _ = started(warm, tmp_path, run, run)
    assert "iteration        2/       2" in whole
    content[1000] ^= 1
    Path(f"{books}.bin").write_bytes(content)
    printed, seconds = started(warm, tmp_path, run, run)
    assert all(f"{books}.bin has the SHA-256" in text for text in printed), printed
    assert seconds < SECONDS


def clone(folder):
    """The source files of the project, to change one of them."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron", folder / "megatron", ignore=ignore)
    shutil.copy(ROOT / "pretrain_gpt.py", folder)
    return folder


@pytest.mark.proof
@pytest.mark.parametrize("what", ["code", "package", "variable"])
def test_other_code_packages_or_variables_are_named(tmp_path, what):
    roots, variables = [ROOT, ROOT], [{}, {}]
    paths = [str(ROOT), str(ROOT)]
    if what == "code":
        roots[1] = clone(tmp_path / "clone")
        paths[1] = str(roots[1])
        with (roots[1] / "megatron" / "model" / "mlp.py").open("a") as file:
            file.write("# another version\n")
        message = "the code of megatron/model/mlp.py is"
    elif what == "package":
        (tmp_path / "numpy-1.0.dist-info").mkdir()
        (tmp_path / "numpy-1.0.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 1.0\n")
        paths[1] = f"{tmp_path}{os.pathsep}{ROOT}"
        message = "the version of numpy is 1.0 on rank 1 and"
    else:
        variables[1]["NVIDIA_TF32_OVERRIDE"] = "0"
        message = "NVIDIA_TF32_OVERRIDE in the environment is 0 on rank 1 and not set on rank 0"
    commands = [[sys.executable, root / "pretrain_gpt.py", *MODEL, *MOCK] for root in roots]
    own = [each | {"PYTHONPATH": path} for each, path in zip(variables, paths, strict=True)]
    printed = ended(commands, own)
    assert all(message in text for text in printed), printed
