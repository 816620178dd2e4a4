"""The quickstart whole, on a few source files and a few steps: its commands as programs that are
forked, and as people start them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import LINKS, free_port, understood

from megatron.apps.quickstart import commands
from megatron.apps.quickstart.corpus import standard_library
from tools import quickstart as program

ROOT = Path(__file__).parents[2]
LAST_LINE = (
    r"quickstart: validation loss (\d+\.\d\d) \(unigram (\d+\.\d\d), bits per byte \d+\.\d\d\), "
    r"\d+\.\dM tokens, exported to (.*)/hf"
)


def quickstart(folder: Path, *flags: str) -> str:
    """Runs it; returns its output."""
    command = [sys.executable, "tools/quickstart.py", "--output", str(folder / "out")]
    command += ["--sources", str(folder / "sources"), "--train-iters", "2", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def sources(folder: Path) -> None:
    """The files to train on."""
    for package in ("asyncio", "email", "json", "logging"):
        ignore = shutil.ignore_patterns("__pycache__")
        target = folder / "sources" / package
        shutil.copytree(standard_library() / package, target, ignore=ignore)


def check_result(folder: Path, output: str) -> None:
    out = folder / "out"
    for name in ("tokenizer", "data", "checkpoints", "hf", "tensorboard"):
        assert any((out / name).iterdir()), name
    assert (out / "loss.png").stat().st_size > 10_000
    last = re.fullmatch(LAST_LINE, output.splitlines()[-1])
    assert last and last[3] == str(out)
    assert 5 < float(last[2]) < 7
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if row["kind"] == "resume"] == [1]
    assert [row["iteration"] for row in rows if row["kind"] == "train"] == [1, 2]
    assert "def read_file(path):" in output, "the generated text is shown"


def test_result_of_forked_commands(programs, tmp_path, monkeypatch, capsys):
    """All of it but the start of its commands, among them DeepSpeed's launcher."""
    sources(tmp_path)
    for name in LINKS:
        (tmp_path / name).symlink_to(ROOT / name)

    def run(command: commands.Command) -> None:
        words = [free_port() if word == commands.FREE_PORT else word for word in command.words]
        if words[:2] == ["python", "-c"]:
            (tmp_path / "program.py").write_text(words[2])
            status, printed = programs.run("program.py", words[3:], tmp_path)
        else:
            told = understood(shlex.join(words), words)
            assert (
                told.program is not None and told.processes == command.words.count("deepspeed") + 1
            )
            status, printed = programs.run(told.program, told.words, tmp_path, told.processes)
        assert status == 0, printed
        print(printed)

    monkeypatch.setattr(commands, "run_command", run)
    monkeypatch.chdir(tmp_path)
    program.main(["--output", str(tmp_path / "out"), "--sources", "sources", "--train-iters", "2"])
    check_result(tmp_path, capsys.readouterr().out)


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[Path, str]:
    """A quickstart in a folder, and its output."""
    folder = tmp_path_factory.mktemp("quickstart")
    sources(folder)
    return folder, quickstart(folder)


@pytest.mark.proof
def test_result(first):
    check_result(*first)


@pytest.mark.proof
def test_second_run_reuses(first):
    folder, output = first
    trained = (folder / "out" / "metrics.jsonl").stat().st_mtime_ns
    again = quickstart(folder)
    assert re.findall(r"quickstart: (\w+): up to date", again) == [
        *("tokenizer", "data", "train", "resume", "export"),
    ]
    assert again.splitlines()[-1] == output.splitlines()[-1]
    assert (folder / "out" / "metrics.jsonl").stat().st_mtime_ns == trained
