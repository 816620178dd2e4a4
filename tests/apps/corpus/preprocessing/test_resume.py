"""Preprocessing that is killed and continued, and in partitions, against one run without."""

import gzip
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zstandard
from samples import sampled

from megatron.apps.corpus.preprocessing.inputs import PreprocessConfig
from megatron.apps.corpus.preprocessing.job import lock_folder
from megatron.apps.corpus.preprocessing.preprocess import preprocess
from megatron.config import TokenizerConfig

ROOT = Path(__file__).parents[4]
NULL = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000)
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Many blocks, and a journal after each."""
    monkeypatch.setattr("megatron.apps.corpus.preprocessing.readers.BLOCK_BYTES", 1200)
    monkeypatch.setattr("megatron.apps.corpus.preprocessing.job.SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # slow, and for the death of machines


def run(inputs: list[Path], prefix: Path, tokenizer=NULL, **flags):
    flags = {"workers": 1, **flags}
    names = tuple(map(str, inputs))
    return preprocess(PreprocessConfig(input=names, output_prefix=str(prefix), **flags), tokenizer)


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name.partition("_")[2]: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[Path]:
    """Files of several kinds, some empty, with lines of very different lengths."""
    chance = random.Random(5)
    folder = tmp_path_factory.mktemp("sources")

    def records(count: int) -> list[str]:
        texts = [" ".join(["7"] * int(chance.paretovariate(0.7))) for _ in range(count)]
        return [json.dumps({"text": text[:2000], "other": "3"}) for text in texts]

    (folder / "a.jsonl").write_text("\n".join(records(60)) + "\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(records(40)).encode()))
    (folder / "c.json").write_text("[" + ",\n".join(records(30)) + "]")
    (folder / "d.jsonl").write_text("")
    (folder / "d.txt").write_text("5 " * 900)
    (folder / "d.jsonl.zst").write_bytes(zstandard.compress("\n".join(records(40)).encode()))
    names = ["a.jsonl", "b.jsonl.gz", "c.json", "d.jsonl", "d.txt", "d.jsonl.zst"]
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table(
            {"text": [f"{i % 999} " * (i % 3) for i in range(1500)], "other": ["3"] * 1500}
        )
        parquet.write_table(table, folder / "d.parquet", row_group_size=900)
        names.append("d.parquet")
    (folder / "e.jsonl").write_text("\n".join(records(50)))
    return [folder / name for name in [*names, "e.jsonl"]]


@pytest.fixture
def mixed(sources, tmp_path) -> list[Path]:
    """Copies of the files, which a test may change."""
    return [Path(shutil.copy(path, tmp_path)) for path in sources]


@pytest.fixture(scope="module")
def whole(sources, tmp_path_factory) -> dict[str, bytes]:
    """Outputs of one run, with blocks of the usual size."""
    folder = tmp_path_factory.mktemp("whole")
    run(sources, folder / "p", append_eod=True)
    return outputs(folder)


def killed_at(target: object, name: str, count: int, work, counts=lambda *_: True) -> bool:
    """Does `work` in a process that kills itself at call `count` of a function, of those calls that
    count; whether it did."""

    def child() -> None:
        original, calls = getattr(target, name), [0]

        def wrapper(*args, **kwargs):
            calls[0] += bool(counts(*args))
            if calls[0] == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(target, name, wrapper)
        work()
        os._exit(0)

    process = FORK.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def points():
    from megatron.apps.corpus.preprocessing import job

    return {
        "rename": (os, "replace"),
        "remove": (Path, "unlink"),
        "sync": (os, "fsync"),
        "block": (job.PreprocessJob, "_add"),
        "write": (job.Spool, "append"),
        "index": (job.Spool, "blocks"),
    }


def counts(name: str) -> list:
    """A few of the calls in the middle; each of the last ones, and all of them under proof."""
    first = [1, 9]
    return [
        *first,
        *(pytest.param(n, marks=pytest.mark.proof) for n in range(1, 60) if n not in first),
    ]


@pytest.mark.parametrize("point", points())
@pytest.mark.parametrize("count", counts("all"))
def test_against_run_without_kill(mixed, whole, tmp_path, capfd, point, count):
    out = tmp_path / "out"

    def work():
        run(mixed, out / "p", append_eod=True)

    was_killed = killed_at(*points()[point], count, work)
    has_journal = (out / "p.preprocessing" / "part-0-of-1" / "journal.json").exists()
    capfd.readouterr()
    if was_killed:
        work()
        said = capfd.readouterr().err
        assert has_journal == ("an interrupted run" in said)
    assert outputs(out) == whole


@pytest.mark.parametrize(
    "target, name, count", [(os, "replace", 1), (os, "replace", 2), (shutil, "rmtree", 1)]
)
def test_killed_while_it_is_published(mixed, whole, tmp_path, target, name, count):
    """Before and after the tokens got their final name, over older files, and at the very end."""
    out = tmp_path / "out"
    out.mkdir()
    for ending in ("bin", "idx"):
        (out / f"p_text_document.{ending}").write_bytes(b"old")

    def work():
        run(mixed, out / "p", append_eod=True)

    def is_final(*arguments) -> bool:
        return name == "rmtree" or "_document." in str(arguments[-1])

    assert killed_at(target, name, count, work, is_final)
    assert (out / "p_text_document.idx").exists() == (target is shutil)
    work()
    assert outputs(out) == whole


@pytest.mark.proof
def test_killed_again_and_again(mixed, whole, tmp_path):
    out, kills = tmp_path / "out", 0

    def work():
        run(mixed, out / "p", append_eod=True)

    from megatron.apps.corpus.preprocessing.job import PreprocessJob

    while killed_at(PreprocessJob, "_save", 5, work):
        kills += 1
        assert kills < 300, "it does not get on"
    assert kills > 5 and outputs(out) == whole


def command(inputs: list[Path], prefix: Path, *flags: str) -> subprocess.Popen:
    """tools/preprocess_data.py that saves all the time."""
    code = (
        "import os, sys\n"
        "from megatron.apps.corpus.preprocessing import job, readers\n"
        "if __name__ == '__main__':\n"
        "    os.fsync = lambda file: None\n"
        "    job.SECONDS_BETWEEN_SAVES = 0\n"
        "    readers.BLOCK_BYTES = 50_000\n"
        "    from tools.preprocess_data import main\n"
        "    main(sys.argv[1:])\n"
    )
    script = prefix.parent.parent / "command.py"
    script.write_text(code)
    words = ["--input", *inputs, "--output-prefix", prefix, *flags]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.proof
@pytest.mark.parametrize(
    "flags, kills",
    [
        (("--workers", "2"), 1),
        (("--workers", "1"), 12),
        (("--workers", "2"), 12),
        (("--workers", "2", "--partitions", "3"), 12),
    ],
)
def test_command_killed_as_soon_as_it_got_on(tmp_path, monkeypatch, flags, kills):
    """Parent and workers live and die as they do at home. The normal run kills at each step of the
    job above, and a command in test_preprocessing.py."""
    monkeypatch.setattr("megatron.apps.corpus.preprocessing.readers.BLOCK_BYTES", 1 << 20)
    path, folder = tmp_path / "in.jsonl", tmp_path / "out" / "p.preprocessing"
    texts = (" ".join([str(i % 1000)] * (i % 97)) for i in range(40_000))
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    run([path], tmp_path / "whole" / "p")

    def journals() -> list[int]:
        return [journal.stat().st_mtime_ns for journal in folder.glob("*/journal.json")]

    killed = 0
    for number in range(kills + 1):
        process, before = command([path], tmp_path / "out" / "p", *flags), journals()
        while number < kills and process.poll() is None and journals() == before:
            time.sleep(0.002)
        if number < kills:
            process.kill()
        _, told = process.communicate()
        killed += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, told
    assert killed and "an interrupted run" in told
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")


# Other work in the folder


@pytest.fixture
def interrupted(mixed, tmp_path) -> Path:
    """An output prefix whose run was killed in the middle."""
    from megatron.apps.corpus.preprocessing.job import PreprocessJob

    prefix = tmp_path / "out" / "p"
    assert killed_at(PreprocessJob, "_save", 8, lambda: run(mixed, prefix, append_eod=True))
    return prefix


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"append_eod": False}, "--append-eod was true and is false"),
        ({"on_bad_line": "skip"}, "--on-bad-line was true and is false"),
        ({"max_line_bytes": 99999}, "--max-line-bytes was 67108864 and is 99999"),
    ],
)
def test_other_flags_start_again(mixed, interrupted, tmp_path, capfd, flags, message):
    flags = {"append_eod": True, **flags}
    run(mixed, interrupted, **flags)
    assert f"the work of an interrupted run there is discarded: {message}" in capfd.readouterr().err
    run(mixed, tmp_path / "other" / "p", **flags)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "other")


def test_other_tokenizer_starts_again(mixed, interrupted, tmp_path, capfd):
    tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=70_000)
    run(mixed, interrupted, tokenizer, append_eod=True)
    assert "--vocab-size was 1000 and is 70000" in capfd.readouterr().err
    run(mixed, tmp_path / "other" / "p", tokenizer, append_eod=True)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "other")


@pytest.mark.parametrize("change", ["longer", "touched", "another", "fewer"])
def test_other_input_starts_again(mixed, interrupted, tmp_path, capfd, change):
    path = mixed[-1]
    if change == "longer":
        path.write_text(path.read_text() + '\n{"text": "1"}')
    elif change == "touched":
        os.utime(path, ns=(1, 1))
    elif change == "another":
        mixed = [*mixed, tmp_path / "f.jsonl"]
        mixed[-1].write_text('{"text": "1"}')
    else:
        mixed = mixed[:-1]
    run(mixed, interrupted, append_eod=True)
    words = {"another": "f.jsonl was not read", "fewer": "e.jsonl is no longer read"}
    assert words.get(change, "e.jsonl has changed") in capfd.readouterr().err
    run(mixed, tmp_path / "other" / "p", append_eod=True)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "other")


def test_damaged_working_folder_starts_again(mixed, whole, interrupted, tmp_path, capfd):
    tokens = tmp_path / "out" / "p.preprocessing" / "part-0-of-1" / "0-text.bin"
    os.truncate(tokens, 3)
    run(mixed, interrupted, append_eod=True)
    assert "its files are shorter than its journal says" in capfd.readouterr().err
    assert outputs(tmp_path / "out") == whole


def test_two_runs_at_once(mixed, tmp_path):
    folder = tmp_path / "out" / "p.preprocessing"
    held, release = FORK.Event(), FORK.Event()

    def hold():
        with lock_folder(folder):
            held.set()
            release.wait(30)

    process = FORK.Process(target=hold)
    process.start()
    assert held.wait(30)
    with pytest.raises(ValueError, match="another process is at work in .*p.preprocessing"):
        run(mixed, tmp_path / "out" / "p")
    release.set()
    process.join()
    run(mixed, tmp_path / "out" / "p")


def test_interrupt_keeps_what_is_done(mixed, whole, tmp_path, capfd, monkeypatch):
    """Ctrl-C after the first journal; a malformed line would remove all."""
    calls = []

    def interrupt(self, *_):
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("megatron.apps.corpus.preprocessing.preprocess.Progress.update", interrupt)
        run(mixed, tmp_path / "out" / "p", append_eod=True)
    assert "keeps what is done; the same command continues" in capfd.readouterr().err
    run(mixed, tmp_path / "out" / "p", append_eod=True)
    assert "continues after the" in capfd.readouterr().err
    assert outputs(tmp_path / "out") == whole


def test_malformed_line_leaves_nothing(mixed, tmp_path):
    mixed[-1].write_text('{"text": "1"}\n' * 99 + "{")
    with pytest.raises(ValueError, match="e.jsonl, line 100: not JSON"):
        run(mixed, tmp_path / "out" / "p")
    assert outputs(tmp_path / "out") == {}


def test_bad_lines_of_the_interrupted_run_are_counted(tmp_path, capfd):
    from megatron.apps.corpus.preprocessing.job import PreprocessJob

    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "1"}\nbad\n' * 300)
    flags = {"on_bad_line": "skip"}
    assert killed_at(
        PreprocessJob, "_save", 3, lambda: run([path], tmp_path / "out" / "p", **flags)
    )
    assert run([path], tmp_path / "out" / "p", **flags).bad_lines == {"not JSON": 300}
    told = capfd.readouterr().err
    assert "line 2: not JSON" in told and "and 295 more" in told


# Partitions


@pytest.mark.parametrize("count", sampled([2, 3, 7, 40], lambda count: count in (3, 40)))
def test_partitions_against_one(mixed, whole, tmp_path, count):
    """Each part by a call of its own, in any order, as on several machines."""
    out, flags = tmp_path / "out", {"append_eod": True, "partitions": count}
    ranks = random.Random(count).sample(range(count), count)
    for rank in ranks:
        summary = run(mixed, out / "p", partition_rank=rank, **flags)
        assert summary.parts_left and [p.name for p in out.iterdir()] == ["p.preprocessing"]
    documents = run(mixed, out / "p", **flags).keys["text"].documents
    assert documents == run(mixed, tmp_path / "again" / "p").keys["text"].documents
    assert outputs(out) == whole


@pytest.mark.parametrize("count", sampled([1, 2, 3, 4], lambda count: count in (1, 3)))
def test_partitions_killed_while_they_are_put_together(mixed, whole, tmp_path, count):
    out, flags = tmp_path / "out", {"append_eod": True, "partitions": 3}
    for rank in range(3):
        run(mixed, out / "p", partition_rank=rank, **flags)
    assert killed_at(os, "replace", count, lambda: run(mixed, out / "p", **flags))
    run(mixed, out / "p", **flags)
    assert outputs(out) == whole


def test_partitions_side_by_side(mixed, whole, tmp_path):
    run(mixed, tmp_path / "out" / "p", append_eod=True, partitions=3, workers=2)
    assert outputs(tmp_path / "out") == whole


def test_part_of_other_partitions_is_discarded(mixed, whole, tmp_path, capfd):
    run(mixed, tmp_path / "out" / "p", append_eod=True, partitions=3, partition_rank=1)
    run(mixed, tmp_path / "out" / "p", append_eod=True)
    assert (
        "part-1-of-3: discarded, since the command has other --partitions" in capfd.readouterr().err
    )
    assert outputs(tmp_path / "out") == whole


@pytest.mark.parametrize("rank", range(3))
def test_line_numbers_in_a_partition(tmp_path, rank):
    """They are those of the file, wherever the partition starts."""
    lines = [b'{"text": "%d"}' % i for i in range(300)]
    bad = rank * 100 + 50
    lines[bad] = b"{"
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=f"in.jsonl, line {bad + 1}: not JSON"):
        run([path], tmp_path / "out" / "p", partitions=3, partition_rank=rank)


def test_failing_partition_ends_the_others(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "1"}\n' * 9000 + "{")
    began = time.monotonic()
    with pytest.raises(ValueError, match="line 9001: not JSON"):
        run([path], tmp_path / "out" / "p", partitions=2, workers=2)
    assert time.monotonic() - began < 60 and threading.active_count() < 20
