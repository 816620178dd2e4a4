"""Running a step over files: order, packing, malformed lines, and what a kill leaves."""

import dataclasses
import functools
import json
import os
import tracemalloc
from itertools import product

import pytest
from samples import sampled

from megatron.apps.corpus.collection import line_job
from megatron.apps.corpus.collection.json_files import BadRecordError, OutputFile
from megatron.apps.corpus.collection.line_job import LineJob, LineJobConfig, run
from megatron.config import ConfigError


def upper_step(log: str | None = None):
    """Texts in capitals to output 0; those with an x also to output 1. Logs its calls."""

    def step(record, counts):
        counts["seen"] += 1
        if log:
            with open(log, "a") as file:
                file.write(f"{record.path.name} {record.number}\n")
        if record.fields["text"] == "refused":
            raise BadRecordError("refused", "as planned")
        yield 0, record.replaced(text=record.fields["text"].upper())
        if "x" in record.fields["text"]:
            yield 1, record.unchanged()

    return step


def records(count: int, start: int = 0) -> list[dict]:
    return [
        {"n": i, "text": f"word {i} {'x' if i % 3 == 0 else 'y'} é\n"}
        for i in range(start, start + count)
    ]


def upper_job(files, inputs, packed="", **more) -> LineJob:
    outputs = [files.folder / f"{name}.jsonl{packed}" for name in ("upper", "x")]
    return LineJob(
        "upper", [files.folder / name for name in inputs], outputs, upper_step, ("text",), **more
    )


@pytest.mark.parametrize(
    "packed, workers",
    sampled(product(["", ".gz", ".zst"], [1, 2]), [("", 1), (".gz", 1), (".zst", 2)].__contains__),
)
def test_every_record_in_order(files, packed, workers):
    files.lines(f"a.jsonl{packed}", records(2500))
    files.lines("empty.jsonl", [])
    files.lines("b.jsonl", records(10, 2500))
    inputs = [f"a.jsonl{packed}", "empty.jsonl", "b.jsonl"]
    report = run(upper_job(files, inputs, packed), LineJobConfig(workers=workers))
    expected = [{**r, "text": r["text"].upper()} for r in records(2510)]
    assert files.records(f"upper.jsonl{packed}") == expected
    assert files.records(f"x.jsonl{packed}") == [r for r in records(2510) if r["n"] % 3 == 0]
    assert (report.documents, report.counts["seen"]) == (2510, 2510)
    assert files.names() == {*inputs, f"upper.jsonl{packed}", f"x.jsonl{packed}"}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("packed", ["", ".zst", pytest.param(".gz", marks=pytest.mark.proof)])
@pytest.mark.parametrize("step", ["write", "checkpoint", "publish"])
def test_killed_at_any_time_and_run_again(files, packed, step, monkeypatch):
    inputs = [
        files.lines(name, records(1700, start))
        for name, start in (("a.jsonl", 0), ("b.jsonl", 1700))
    ]
    names = [os.path.basename(path) for path in inputs]
    config = LineJobConfig(checkpoint_interval=0.03)  # several in each file
    run(upper_job(files, names, packed), config)
    expected = files.read(f"upper.jsonl{packed}"), files.read(f"x.jsonl{packed}")
    whole = (files.folder / f"upper.jsonl{packed}").read_bytes()

    place = line_job if step == "publish" else OutputFile
    original = getattr(place, step)
    for killed_at in range(1, 40):
        for name in ("upper", "x"):
            (files.folder / f"{name}.jsonl{packed}").unlink()
        calls = 0

        def dying(*args, original=original, killed_at=killed_at):
            nonlocal calls
            calls += 1
            if calls == killed_at:
                raise Killed
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(place, step, dying)
            try:
                run(upper_job(files, names, packed), config)
                break
            except Killed:
                pass
        if step != "publish":
            assert not (files.folder / f"upper.jsonl{packed}").exists()
        run(upper_job(files, names, packed), config)
        assert (files.read(f"upper.jsonl{packed}"), files.read(f"x.jsonl{packed}")) == expected
        assert (files.folder / f"upper.jsonl{packed}").read_bytes() == whole
        assert files.names() == {*names, f"upper.jsonl{packed}", f"x.jsonl{packed}"}
    assert killed_at > 2


def test_continues_instead_of_starting_again(files, monkeypatch, capsys):
    files.lines("a.jsonl", records(5000))
    log = files / "log"
    job = dataclasses.replace(
        upper_job(files, ["a.jsonl"]), prepare=functools.partial(upper_step, log)
    )
    config = LineJobConfig(checkpoint_interval=0.05)
    original, calls = OutputFile.write, 0

    def dying(*args):
        nonlocal calls
        calls += 1
        if calls > 6:  # two outputs: in the fourth of five batches
            raise Killed
        original(*args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(OutputFile, "write", dying)
        run(job, config)
    (files.folder / "log").unlink()
    report = run(job, config)
    assert "continuing" in capsys.readouterr().err
    assert report.documents == report.counts["seen"] == 5000
    assert [line.split()[1] for line in files.read("log").decode().splitlines()][0] != "1"
    assert len(files.records("upper.jsonl")) == 5000


@pytest.mark.parametrize("change", ["input", "settings", "partial"])
def test_another_run_is_not_continued(files, change, monkeypatch, capsys):
    files.lines("a.jsonl", records(3000))
    job = upper_job(files, ["a.jsonl"])
    config = LineJobConfig(checkpoint_interval=0.03)
    original, calls = OutputFile.write, 0

    def dying(*args):
        nonlocal calls
        calls += 1
        if calls > 4:
            raise Killed
        original(*args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(OutputFile, "write", dying)
        run(job, config)
    assert (files.folder / "upper.jsonl.progress").exists()
    count = 3000
    if change == "input":
        files.lines("a.jsonl", records(2000, start=7))
        count = 2000
    elif change == "settings":
        job = dataclasses.replace(job, settings={"other": 1})
    else:
        (files.folder / "upper.jsonl.partial").unlink()
    assert run(job, config).documents == count
    assert "starting again" in capsys.readouterr().err
    assert len(files.records("upper.jsonl")) == count


def test_shorter_than_what_was_left(files):
    """Bytes of a stopped run behind the end of a new, shorter one do not stay."""
    (files.folder / "upper.jsonl.partial").write_bytes(b"x" * 100_000)
    files.lines("a.jsonl", records(3))
    run(upper_job(files, ["a.jsonl"]), LineJobConfig())
    assert len(files.records("upper.jsonl")) == 3


def test_malformed_lines(files):
    lines = [
        *records(3),
        b'{"text": 1}\n',
        b"nonsense\n",
        b"\n",
        {"text": "refused"},
        *records(2, 3),
    ]
    path = files.lines("a.jsonl", lines)
    with pytest.raises(ValueError, match=f'{path}, line 4: "text" is not a string'):
        run(upper_job(files, ["a.jsonl"]), LineJobConfig())
    report = run(upper_job(files, ["a.jsonl"]), LineJobConfig(on_bad_line="skip"))
    assert [r["n"] for r in files.records("upper.jsonl")] == [0, 1, 2, 3, 4]
    assert report.bad == {'"text" is not a string': 1, "not JSON": 1, "refused": 1}
    assert (report.documents, len(report.shown)) == (5, 3)
    assert "3 malformed lines left out" in str(report)


def test_records_nested_too_deeply(files):
    """They could not be written again."""
    files.lines("a.jsonl", [b'{"text": "a", "more": ' + b"[" * 1000 + b"]" * 1000 + b"}\n"])
    with pytest.raises(ValueError, match="line 1: nested too deeply"):
        run(upper_job(files, ["a.jsonl"]), LineJobConfig())


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_a_line_without_an_end_is_not_read_into_memory(files, packed, monkeypatch):
    for module in ("features.raw_text.records", "apps.corpus.preprocessing.inputs"):
        monkeypatch.setattr(f"megatron.{module}.LONGEST_RECORD", 1 << 16)
    files.lines(f"a.jsonl{packed}", [*records(2), b" " * (1 << 25), b"\n", *records(1, 2)])
    tracemalloc.start()
    with pytest.raises(ValueError, match="line 3: longer than 0.0625 MiB"):
        run(upper_job(files, [f"a.jsonl{packed}"]), LineJobConfig())
    report = run(upper_job(files, [f"a.jsonl{packed}"]), LineJobConfig(on_bad_line="skip"))
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
    assert [r["n"] for r in files.records("upper.jsonl")] == [0, 1, 2]
    assert report.bad.total() == 1


def test_outputs_of_each_input(files):
    for name, start in (("a", 0), ("b", 40), ("c", 80)):
        files.lines(f"{name}.jsonl", records(40 if name != "b" else 0, start))
    outputs = [files.folder / f"{name}_{kind}.jsonl" for name in "abc" for kind in ("upper", "x")]
    inputs = [files.folder / f"{name}.jsonl" for name in "abc"]
    run(LineJob("upper", inputs, outputs, upper_step, ("text",), per_input=True), LineJobConfig())
    assert [r["n"] for r in files.records("c_upper.jsonl")] == list(range(80, 120))
    assert [r["n"] for r in files.records("a_x.jsonl")] == list(range(0, 40, 3))
    assert files.read("b_upper.jsonl") == files.read("b_x.jsonl") == b""


def test_numbers_keep_every_digit(files):
    line = b'{"id": 123456789012345678901234567890, "score": NaN, "text": "a\\u00e9", "z": 1e2}\n'
    files.lines("a.jsonl", [line])
    run(upper_job(files, ["a.jsonl"]), LineJobConfig())
    expected = '{"id": 123456789012345678901234567890, "score": NaN, "text": "AÉ", "z": 100.0}\n'
    assert files.read("upper.jsonl").decode() == expected


def test_lone_surrogate_is_malformed(files):
    path = files.lines("a.jsonl", [b'{"text": "ok", "other": "\\ud800"}\n'])
    with pytest.raises(ValueError, match=f"{path}, line 1: a lone surrogate"):
        run(upper_job(files, ["a.jsonl"]), LineJobConfig())


def test_input_is_not_overwritten(files):
    files.lines("upper.jsonl", records(1))
    with pytest.raises(ConfigError, match="input and output"):
        run(upper_job(files, ["upper.jsonl"]), LineJobConfig())
    assert files.records("upper.jsonl") == records(1)


def test_two_processes_do_not_write_one_file(files):
    held = OutputFile(files.folder / "upper.jsonl", 0)
    files.lines("a.jsonl", records(1))
    with pytest.raises(OSError, match="being written by another process"):
        run(upper_job(files, ["a.jsonl"]), LineJobConfig())
    held.close()


def test_errors_of_a_worker_arrive(files):
    files.lines("a.jsonl", records(1))
    job = dataclasses.replace(upper_job(files, ["a.jsonl"]), prepare=failing_step)
    with pytest.raises(ValueError, match="planned"):
        run(job, LineJobConfig(workers=2))


def failing_step():
    raise ValueError("planned")


def test_lines_pass_byte_for_byte(files):
    odd = b'{"text":  "x",\t"a":1}\r\n'
    files.lines("a.jsonl", [odd, json.dumps({"text": "x"}).encode()])
    run(upper_job(files, ["a.jsonl"]), LineJobConfig())
    assert files.read("x.jsonl") == odd.replace(b"\r\n", b"\n") + b'{"text": "x"}\n'
