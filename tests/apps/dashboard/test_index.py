"""The index of a file of metrics: whatever becomes of the file, its tables have the rows that are
in it now."""

import errno
import json
import os
import random
import shutil
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron.apps.dashboard import index as module
from megatron.apps.dashboard.index import RunIndex
from megatron.apps.dashboard.tables import MetricTable


def line(kind: str, step: int, **values: object) -> bytes:
    row = {"kind": kind, "iteration": step, "consumed_samples": 8 * step}
    return json.dumps({**row, "consumed_tokens": 64 * step, **values}).encode() + b"\n"


def train(*steps: int) -> bytes:
    return b"".join(line("train", step, loss=1 / step) for step in steps)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def opened(path) -> RunIndex:
    index = RunIndex(path)
    read(index)
    return index


def read(index: RunIndex) -> int:
    """Reads what is new; the number of pieces."""
    return sum(1 for _ in index.update())


def column(index: RunIndex, kind: str, name: str = "iteration") -> list[float]:
    return index.tables[kind].column(name).tolist()


def test_rows_by_kind_with_gaps(path):
    path.write_bytes(
        line("train", 1, loss=2.0)
        + line("validation web", 1, loss=3.0)
        + line("train", 2, loss=None, late=5.0)
        + line("text", 2, prompt="a", answer="b", ended=False)
    )
    index = opened(path)
    assert column(index, "train", "loss")[0] == 2.0 and np.isnan(column(index, "train", "loss")[1])
    assert np.isnan(column(index, "train", "late")[0]) and column(index, "train", "late")[1] == 5
    assert column(index, "validation web", "samples") == [8]
    assert index.texts == [
        {"iteration": 2, "prompt": "a", "answer": "b", "reference": "", "ended": False}
    ]


def test_broken_lines_are_counted_and_half_a_line_waits(path):
    broken = (
        b"{\n",
        b"[1]\n",
        b'{"kind": 3, "iteration": 1}\n',
        b'{"kind": "train", "iteration": -1}\n',
        b'{"kind": "train", "iteration": true}\n',
        b'{"kind": "train", "iteration": 1e3}\n',
        b"\x00\xff\n",
        b"\n",
    )
    last = train(3)
    path.write_bytes(train(1) + b"".join(broken) + train(2) + last[:20])
    index = opened(path)
    assert column(index, "train") == [1, 2] and index.broken == len(broken)
    with path.open("ab") as file:
        file.write(last[20:])
    read(index)
    assert column(index, "train") == [1, 2, 3] and index.broken == len(broken)


def test_values_that_are_no_numbers_are_absent(path):
    odd = {"loss": "x", "text": "1.5", "many": [1, 2], "big": 1, "flag": True}
    path.write_bytes(line("train", 1, **odd) + line("train", 2, **{**odd, "loss": 1.5}))
    index = opened(path)
    assert np.isnan(column(index, "train", "loss")[0]) and column(index, "train", "loss")[1] == 1.5
    assert column(index, "train", "flag") == column(index, "train", "big") == [1, 1]
    for name in ("text", "many"):
        assert np.isnan(column(index, "train", name)).tolist() == [True, True], name


@pytest.mark.parametrize("announced", [True, False])
def test_a_resume_voids_later_steps(announced, path):
    """Of every kind, whether the run says that it resumed or its steps are simply there again."""
    first = train(10, 20, 30, 40) + line("save", 20, seconds=1.0) + line("validation", 40, loss=1.0)
    path.write_bytes(first + line("text", 40, prompt="p", answer="a"))
    index = opened(path)
    with path.open("ab") as file:
        if announced:
            file.write(line("resume", 20))
            file.flush()
            read(index)
            assert column(index, "train") == [10, 20]
        file.write(train(30, 40))
    read(index)
    assert column(index, "train") == [10, 20, 30, 40]
    assert column(index, "validation") == [] and column(index, "save") == [20]
    assert not index.texts


def test_kept_and_continued(path, monkeypatch):
    path.write_bytes(train(*range(1, 50)))
    opened(path).close()
    monkeypatch.setattr(module.orjson, "loads", counted := Counted(module.orjson.loads))
    with path.open("ab") as file:
        file.write(train(50))
    again = opened(path)
    assert column(again, "train") == list(range(1, 51))
    assert counted.calls == 2, "the manifest, and the new line"


class Counted:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


def test_what_was_read_before_the_end_is_kept(path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 200)
    path.write_bytes(train(*range(1, 50)))
    index = RunIndex(path)
    pieces = index.update()
    next(pieces)
    pieces.close()
    index.close()
    again = RunIndex(path)
    assert 1 <= again.tables["train"].rows < 10
    read(again)
    assert column(again, "train") == list(range(1, 50))


def test_rows_that_a_killed_process_wrote_without_counting(path):
    path.write_bytes(train(1, 2))
    index = opened(path)
    table = index.tables["train"]
    table.add({"iteration": 9, "loss": 9.0})
    table.flush()
    index.close()
    with path.open("ab") as file:
        file.write(train(3))
    assert column(opened(path), "train") == [1, 2, 3]


@pytest.mark.parametrize("damage", ["column", "manifest", "format"])
def test_a_damaged_index_is_made_again(damage, path):
    path.write_bytes(train(1, 2, 3))
    index = opened(path)
    index.close()
    folder = path.with_name(f".{path.name}.index")
    if damage == "column":
        os.truncate(next(folder.glob("*.f64")), 8)
    elif damage == "manifest":
        (folder / "index.json").write_bytes(b"{")
    else:
        content = json.loads((folder / "index.json").read_bytes())
        (folder / "index.json").write_text(json.dumps({**content, "format": 0}))
    assert column(opened(path), "train") == [1, 2, 3]


@pytest.mark.parametrize("how", ["replaced", "shorter", "other beginning"])
def test_another_file_under_the_name(how, path):
    path.write_bytes(train(1, 2, 3))
    index = opened(path)
    if how == "replaced":
        other = path.with_name("other")
        other.write_bytes(train(1, 2, 3, 4))
        other.replace(path)
    elif how == "shorter":
        path.write_bytes(train(1))
    else:
        path.write_bytes(train(5, 6, 7, 8))
    read(index)
    expected = {"replaced": [1, 2, 3, 4], "shorter": [1], "other beginning": [5, 6, 7, 8]}
    assert column(index, "train") == expected[how]


def test_a_copied_run_has_its_index(path, tmp_path, monkeypatch):
    """As after rsync: the file is another one, with more rows."""
    path.write_bytes(train(*range(1, 50)))
    opened(path).close()
    copied = tmp_path / "copy" / "metrics.jsonl"
    copied.parent.mkdir()
    shutil.copytree(path.with_name(f".{path.name}.index"), copied.parent / f".{path.name}.index")
    copied.write_bytes(path.read_bytes() + train(50))
    monkeypatch.setattr(module.orjson, "loads", counted := Counted(module.orjson.loads))
    assert column(opened(copied), "train") == list(range(1, 51))
    assert counted.calls == 2, "the manifest, and the new line"


def test_a_copy_of_which_the_end_differs_is_read_again(path):
    path.write_bytes(train(*range(1, 50)))
    index = opened(path)
    path.write_bytes(train(*range(1, 49)) + line("train", 49, loss=7) + train(50))
    assert len(train(49)) != len(line("train", 49, loss=7))
    read(index)
    assert column(index, "train", "loss")[48] == 7


@pytest.fixture
def full(monkeypatch):
    """Folders in which nothing can be written any more."""
    folders: list[Path] = []
    written = MetricTable._write

    def write(table, place, *arguments):
        if place and table._folder in folders:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(table, place, *arguments)

    monkeypatch.setattr(MetricTable, "_write", write)
    return folders


def test_a_disk_that_becomes_full(path, tmp_path, monkeypatch, full):
    """Nothing is left of the index there, and it is made again in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path.write_bytes(train(1, 2))
    index = opened(path)
    full.append(index._folder)
    with path.open("ab") as file:
        file.write(train(3) + line("validation", 3, loss=1.0))
    read(index)
    assert column(index, "train") == [1, 2, 3] and column(index, "validation") == [3]
    assert [each.name for each in full[0].iterdir()] == ["lock"]
    assert (tmp_path / "cache") in index._folder.parents
    index.close()
    assert column(opened(path), "validation") == [3]


def test_no_room_anywhere(path, tmp_path, monkeypatch, full):
    """Named, and read once there is room again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path.write_bytes(train(1, 2))
    index = RunIndex(path)
    with monkeypatch.context() as patched:
        patched.setattr(MetricTable, "_write", no_room)
        for _ in range(2):
            with pytest.raises(OSError, match="no room for its index: No space left"):
                read(index)
    read(index)
    assert column(index, "train") == [1, 2]
    index.close()


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("link", ["folder", "column", "manifest", "lock", "other file"])
def test_links_in_a_folder_of_another_user(link, path, tmp_path, monkeypatch):
    """A run that was passed on leads to no files that are then cut off or removed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path.write_bytes(train(1, 2, 3))
    opened(path).close()
    folder, mine = path.with_name(f".{path.name}.index"), tmp_path / "mine"
    mine.mkdir()
    notes = mine / "notes"
    notes.write_text("notes" * 100)
    if link == "folder":
        shutil.rmtree(folder)
        folder.symlink_to(mine)
    else:
        name = {"column": "0-0.f64", "manifest": "index.json", "lock": "lock"}.get(link, "more")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(notes)
    with path.open("ab") as file:
        file.write(train(4))
    index = opened(path)
    assert column(index, "train") == [1, 2, 3, 4]
    index.close()
    assert [each.name for each in mine.iterdir()] == ["notes"]
    assert notes.read_text() == "notes" * 100


@pytest.mark.parametrize("seed", range(20))
def test_any_file_is_read_alike_at_once_and_by_pieces(seed, tmp_path, monkeypatch):
    """Rows, resumes and ruined bytes in any order, with ends of the dashboard between them: the
    tables are those of the whole file read by itself."""
    monkeypatch.setattr(module, "_CHUNK_BYTES", 300)
    draw = random.Random(seed)
    path, alone = tmp_path / "a" / "metrics.jsonl", tmp_path / "b" / "metrics.jsonl"
    path.parent.mkdir()
    alone.parent.mkdir()
    path.write_bytes(b"")
    index, step = RunIndex(path), 0
    for _ in range(30):
        step = max(0, step + draw.choice([1, 1, 1, 1, 2, -3]))
        name = draw.choice(["loss", "mfu", "\u00e4", "iteration", "kind"])
        value = draw.choice([1.5, None, "2", [1, 2], 10**30, -0.0, True, {"a": 1}, step])
        kind = draw.choice(["train", "train", "train", "resume", "validation", "text", "save"])
        row = bytearray(line(kind, step, **({name: value} if name != "kind" else {})))
        if draw.random() < 0.15:
            row[draw.randrange(len(row))] = draw.randrange(256)
        with path.open("ab") as file:
            file.write(row[: draw.choice([len(row), len(row), 7])])
        match draw.randrange(6):
            case 0:
                index.close()
                index = RunIndex(path)
            case 1 | 2:
                read(index)
    read(index)
    shutil.copy(path, alone)
    whole = opened(alone)
    assert list(index.tables) == list(whole.tables) and index.texts == whole.texts
    assert (index.lines, index.broken) == (whole.lines, whole.broken)
    for kind, table in whole.tables.items():
        assert set(table.columns) == set(index.tables[kind].columns)
        for name in table.columns:
            np.testing.assert_array_equal(column(index, kind, name), column(whole, kind, name))


def test_two_dashboards_of_a_run(path):
    path.write_bytes(train(1, 2))
    first, second = opened(path), opened(path)
    with path.open("ab") as file:
        file.write(train(3))
    assert read(first) == read(second) == 1
    assert column(first, "train") == column(second, "train") == [1, 2, 3]
    folder = second._folder
    second.close()
    assert not folder.exists()


def test_a_folder_that_nobody_may_write(path, tmp_path, monkeypatch):
    path.write_bytes(train(1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path.with_name(f".{path.name}.index").write_text("a file, where the folder would be")
    opened(path).close()
    assert list((tmp_path / "cache").rglob("*.f64"))


def test_a_file_without_rights_or_that_is_none(tmp_path):
    with pytest.raises(OSError):
        RunIndex(tmp_path / "missing")
    with pytest.raises(OSError):
        RunIndex(tmp_path)


def forge(path: Path, **changes: object) -> None:
    """An index next to a file, as another machine may have sent it, with columns of 1 GiB that take
    no room on a disk."""
    folder = path.with_name(f".{path.name}.index")
    content = json.loads((folder / "index.json").read_bytes())
    (folder / "index.json").write_text(json.dumps(content | changes))
    for name in ("0-0.f64", "0-1.f64", "0-2.f64", "0-3.f64"):
        os.truncate(folder / name, 1 << 30)


CLOCKED = ["iteration", "samples", "tokens", "loss"]


@pytest.mark.parametrize(
    "changes",
    [
        {"mark": "", "offset": 0, "lines": 0, "tables": [["train", 1 << 27, CLOCKED]]},
        {"tables": [["train", 1 << 27, CLOCKED]]},
        {"tables": [["train", 1 << 27, CLOCKED]], "lines": 1 << 27},
        {"tables": [["train", 20, CLOCKED]]},
        {"tables": [["train", -1, CLOCKED]]},
        {"tables": [["train", 3.0, CLOCKED]]},
        {"tables": [["train", True, CLOCKED]]},
        {"tables": [["train", 3, ["loss"]]]},
        {"tables": [["train", 3, ["iteration", "iteration"]]]},
        {"tables": [["train", 3, CLOCKED], ["train", 0, []]]},
        {"tables": [["train", 3, [*CLOCKED, "absent"]]]},
        {"tables": [["train", 3, "iteration"]]},
        {"tables": [[["train"], 3, CLOCKED]]},
        {"tables": [["x" * 1000, 3, CLOCKED]]},
        {"tables": [[f"k{n}", 0, []] for n in range(501)]},
        {"tables": {"train": 3}},
        {"offset": -5},
        {"offset": 1 << 40},
        {"offset": None},
        {"lines": -1},
        {"broken": 4},
        {"last": "3"},
        {"left_out": [0, 0]},
        {"left_out": [-1, 0, 0]},
        {"mark": "00"},
        {"mark": ["a"]},
        {"format": 4},
        {"format": 2},
        {"texts": [{"iteration": "x"}]},
        {"texts": [[]]},
        {"texts": [{"iteration": 1}] * 2001},
    ],
)
def test_an_index_that_cannot_be_of_the_file_is_made_again(changes, path):
    path.write_bytes(train(1, 2, 3))
    opened(path).close()
    forge(path, **changes)
    tracemalloc.start()
    index = opened(path)
    assert column(index, "train") == [1, 2, 3] and not index.texts
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20_000_000 and list(index.tables) == ["train"]


@pytest.mark.parametrize("content", ["[" * 10_000_000, "null", "[]", '{"format": 3}', "sparse"])
def test_a_manifest_of_something_else(content, path):
    path.write_bytes(train(1, 2, 3))
    opened(path).close()
    manifest = path.with_name(f".{path.name}.index") / "index.json"
    manifest.write_text(content)
    if content == "sparse":
        os.truncate(manifest, 1 << 40)
    assert column(opened(path), "train") == [1, 2, 3]


def test_an_index_of_a_file_that_is_mostly_holes(path):
    """Its rows could take more memory than the machine has."""
    path.write_bytes(train(1, 2, 3))
    opened(path).close()
    size = 1 << 38
    os.truncate(path, size)
    with path.open("rb") as file:
        mark = module._mark(file, size)
    rows = (1 << 30) // 8
    forge(path, mark=mark, offset=size, lines=rows, tables=[["train", rows, CLOCKED]])
    index = RunIndex(path)
    assert not index.tables and index.offset == 0
    index.close()


def test_a_manifest_that_is_larger_than_its_file(path):
    path.write_bytes(train(1, 2, 3))
    opened(path).close()
    forge(path, more=[[]] * 500_000)
    index = RunIndex(path)
    assert not index.tables and index.offset == 0
    index.close()


def test_hard_links_in_an_index_are_left_alone(path, tmp_path, monkeypatch):
    """A backup may share files with the folder that it was made of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path.write_bytes(train(1, 2, 3))
    opened(path).close()
    shared = path.with_name(f".{path.name}.index") / "0-0.f64"
    kept = tmp_path / "kept"
    kept.hardlink_to(shared)
    before = kept.read_bytes()
    with path.open("ab") as file:
        file.write(train(4))
    index = opened(path)
    assert column(index, "train") == [1, 2, 3, 4] and kept.read_bytes() == before
    index.close()


def rows(kind: str, count: int) -> bytes:
    """Rows of which each asks for something new."""
    of_kind = {
        "names": lambda n: line("train", n, **{f"x{n}": 1}),
        "names of events": lambda n: line("odd", n, **{f"x{n}": 1}),
        "kinds": lambda n: line(f"kind {n}", n, x=1),
        "resumes": lambda n: line("train", count + n % 2, x=1) + line("resume", count - 1),
        "resumes far back": lambda n: train(n % 7 + 1),
        "steps of two": lambda n: train(min(n, count // 2 + n % 2)),
        "texts and resumes": lambda n: line("text", 9, prompt="p") + line("resume", 8),
    }[kind]
    return train(*range(1, count)) + b"".join(of_kind(n) for n in range(1, count))


@pytest.mark.parametrize(
    "kind, count, note",
    [
        ("names", 10_000, "9,603 values are left out, of names beyond the first 400 of a kind"),
        ("names of events", 6_000, "5,602 values are left out"),
        ("kinds", 2_000, "1,500 rows are left out, of kinds beyond the first 500"),
        ("resumes", 15_000, None),
        ("resumes far back", 15_000, None),
        ("steps of two", 20_000, None),
        ("texts and resumes", 15_000, None),
    ],
)
def test_rows_that_ask_for_something_new_take_linear_time(kind, count, note, path):
    """Twice as many rows took four times as long."""
    path.write_bytes(rows(kind, count))
    begin = time.process_time()
    index = opened(path)
    assert time.process_time() - begin < 2.5
    assert len(index.notes) == (note is not None)
    assert not note or index.notes[0].startswith(note)
    notes = index.notes
    index.close()
    assert opened(path).notes == notes


def test_a_line_without_end_is_not_kept_in_memory(path):
    path.write_bytes(train(1) + b"[" * 12_000_000 + b"\n" + train(2) + b"[" * 12_000_000)
    tracemalloc.start()
    index = opened(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 30_000_000
    assert column(index, "train") == [1, 2] and index.broken == 1
    index.close()
    again = RunIndex(path)  # within the line
    with path.open("ab") as file:
        file.write(b"]\n" + train(3))
    read(again)
    assert column(again, "train") == [1, 2, 3] and (again.lines, again.broken) == (5, 2)


def test_long_names_kinds_and_texts_are_left_out(path):
    path.write_bytes(
        line("train", 1, **{"x" * 201: 1.0})
        + line("y" * 201, 1, a=1.0)
        + b"".join(line("text", n, prompt="p" * 20_100) for n in range(1, 1001))
    )
    index = opened(path)
    assert len(index.notes) == 3 and index.notes[2] == "581 older texts are left out"
    assert index.texts[0]["prompt"].endswith("p […]") and len(index.texts[0]["prompt"]) == 20_000
    assert sum(len(text["prompt"]) for text in index.texts) <= 2**23
