"""The command line of every program: help, versions, completion, progress bars."""

import ast
import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron import __version__
from megatron.config.command_line import MANY_FLAGS, SECONDS_OF_OTHERS, CommandParser
from megatron.formats.transformers_folder import quiet_transformers
from megatron.util.progress import progress_bar

ROOT = Path(__file__).parents[3]
PROGRAMS = sorted(
    path
    for path in [*ROOT.glob("*.py"), *(ROOT / "tools").rglob("*.py")]
    if "__main__" in path.read_text()
)
TEXT = r"""Does a thing.

    deepspeed --num_gpus 2 tool.py --first 1 \
        --second 2
    VAR=1 python tool.py

python tool.py shows more.
More prose,
    an indented line.
"""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def completions(line: str, *words: str, start: int = 1) -> list[str]:
    """What a program offers to a shell at the end of a line: argcomplete's own protocol, with the
    answer on file descriptor 8."""
    reader, writer = os.pipe()
    program = f"import os, sys; os.dup2({writer}, 8); os.execv(sys.executable, sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", program, sys.executable, *words],
        env=os.environ | {
            "PYTHONPATH": str(ROOT), "_ARGCOMPLETE": str(start), "_ARGCOMPLETE_IFS": "\n",
            "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
        },
        cwd=ROOT, pass_fds=[writer], capture_output=True, check=True,
    )  # fmt: skip
    os.close(writer)
    with open(reader) as answer:
        return [word.strip() for word in answer.read().split("\n")]


def test_completes_flags_choices_and_files():
    script = str(ROOT / "pretrain_gpt.py")
    assert completions("pretrain_gpt.py --attention-b", script) == ["--attention-backend"]
    assert completions("pretrain_gpt.py --attention-backend ", script) == [
        "sdpa", "cudnn", "eager", "flash", "flash2", "flash3", "flash4",
    ]  # fmt: skip
    assert completions("python pretrain_gpt.py --load deepspeed_con", script, start=2) == [
        "deepspeed_configs/"
    ]
    assert completions("pretrain_gpt.py --micro-b", script) == ["--micro-batch-size"]
    assert completions("pretrain_gpt.py --num-layers ", script) == [""]


def test_completes_commands_and_their_flags():
    script = str(ROOT / "tools" / "convert_checkpoint.py")
    assert completions("convert_checkpoint.py to-h", script) == ["to-hf"]
    assert completions("convert_checkpoint.py to-hf --arch", script) == ["--architecture"]
    line = "python tools/convert_checkpoint.py to-hf --dtype b"
    assert completions(line, script, start=2) == ["bfloat16"]


EVERY_PROGRAM = """
import os, runpy, sys
sys.path.insert(0, os.getcwd())
import pretrain_gpt  # the children share what it imports
assert type(sys.modules["torch"]).__module__ == "megatron.apps.completion"
for path in sys.argv[1:]:
    if not os.fork():
        os.environ["COMP_LINE"], os.environ["COMP_POINT"] = f"{path} --vers", str(len(path) + 7)
        os.environ["_ARGCOMPLETE_STDOUT_FILENAME"] = f"/dev/fd/{os.dup(1)}"
        sys.argv = [path]
        runpy.run_path(path, run_name="__main__")
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.wait()[1])
    print(f" {path} {status}", flush=True)
"""


@pytest.mark.proof
def test_every_program_completes_without_its_libraries():
    """Module-level code must not do with a library what its placeholder cannot stand in for."""
    names = [name_of(path) for path in PROGRAMS]
    done = subprocess.run(
        [sys.executable, "-c", EVERY_PROGRAM, *names],
        cwd=ROOT, env=os.environ | {"_ARGCOMPLETE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    expected = "".join(f"--version {name} 0\n" for name in names)
    assert " ".join(done.stdout.split()) == " ".join(expected.split()), done.stderr


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_shells_know_that_a_program_completes(path):
    """argcomplete looks for its marker in the first 1,024 bytes."""
    assert "PYTHON_ARGCOMPLETE_OK" in path.read_text()[:1024]


def test_completion_costs_nothing_where_nothing_is_completed():
    program = "import sys, megatron.config; assert 'argcomplete' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_an_installed_command(tmp_path):
    command = tmp_path / "megatron-layouts"
    command.write_text(f"#!{sys.executable}\nfrom tools.layouts import main\nmain()\n")
    command.chmod(0o755)
    script = f"""
        eval "$({sys.executable} -m argcomplete.scripts.register_python_argcomplete {command.name})"
        COMP_LINE="{command.name} --mark" COMP_POINT=22 COMP_TYPE=9 COMP_WORDS=()
        _python_argcomplete {command.name} --mark
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.strip() == "--markdown", done.stderr


def test_help_shows_examples_as_lines_to_paste():
    assert CommandParser(TEXT, prog="tool.py").description == (
        "Does a thing.\n\n"
        "    deepspeed --num_gpus 2 tool.py --first 1 \\\n        --second 2\n\n"
        "    VAR=1 python tool.py\n\n"
        "    python tool.py shows more.\n\n"
        "More prose,\n    an indented line."
    )


def test_a_long_help_repeats_the_examples_at_its_end():
    parser = CommandParser(TEXT, prog="tool.py")
    assert parser.format_help().count("--num_gpus") == 1
    for number in range(MANY_FLAGS):
        parser.add_argument(f"--{number}")
    text = parser.format_help()
    assert text.count("--num_gpus") == 2
    assert text.endswith(
        "\nexamples:\n\n    deepspeed --num_gpus 2 tool.py --first 1 \\\n        --second 2\n\n"
        "    VAR=1 python tool.py\n\n    python tool.py shows more.\n"
    )


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_docstrings_keep_their_backslashes(path):
    source = path.read_text()
    text = ast.get_docstring(ast.parse(source)) or ""
    assert text, "a program says what it does"
    assert text.count("\\\n") == source.split('"""')[1].count("\\\n"), 'write r"""'
    assert "\\\\" not in text


def test_version_names_what_a_run_depends_on(capsys, monkeypatch):
    found = {"torch": "2.13.0"}

    def version(package):
        if package not in found:
            raise importlib.metadata.PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit) as end:
        CommandParser().parse_args(["--version"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(
        f"megatron-deepspeed {__version__}, torch 2.13.0, deepspeed not installed, Python 3."
    )


def test_setup_and_package_have_one_version():
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split()[-1] == __version__, done.stderr


def test_a_misspelled_flag_of_a_plain_parser(capsys):
    parser = CommandParser(prog="tool")
    parser.add_argument("--all", action="store_true")
    with pytest.raises(SystemExit):
        parser.parse_args(["--al"])
    assert capsys.readouterr().err == (
        "tool: error: unknown flag --al; the nearest known flag is --all (--help lists all)\n"
    )


def test_a_missing_value_names_what_is_right(capsys):
    parser = CommandParser(prog="tool")
    parser.add_argument("--size", type=int, metavar="INT", help="Tokens of a sample. 2 or more.")
    parser.add_argument("--shape", choices=("flat", "round"), nargs="+", help="Of a sample.")
    for argv, expected in (
        (["--size", "--shape", "flat"], "--size: expected one argument, INT: Tokens of a sample"),
        (["--shape"], "--shape: expected at least one argument, {flat,round} [{flat,round} ...]"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(argv)
        assert f"tool: error: argument {expected}" in capsys.readouterr().err


def test_one_process_says_that_all_have_a_wrong_command_line(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr("megatron.config.command_line.time.sleep", waited.append)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit):
            CommandParser(prog="tool").parse_args(["--al"])
        assert "unknown flag --al" in capsys.readouterr().err
    assert waited == [SECONDS_OF_OTHERS]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "terminal, rank, shown", [(True, 0, True), (False, 0, False), (True, 1, False)]
)
def test_progress_is_shown_on_a_terminal_by_one_process(monkeypatch, terminal, rank, shown):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("RANK", str(rank))
    assert list(progress_bar("indexing", range(3), unit=" files")) == [0, 1, 2]
    assert ("indexing" in stream.getvalue() and "0/3" in stream.getvalue()) is shown
    assert bool(stream.getvalue()) is shown


def test_bars_on_a_terminal_without_a_size(monkeypatch):
    """As of `script` and others, where tqdm shows nothing by itself."""
    reader, writer = os.openpty()
    with open(writer, "w") as terminal, open(reader, "rb", buffering=0) as shown:
        assert os.get_terminal_size(writer).columns == 0
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("RANK", "0")
        with progress_bar("indexing", total=3, unit=" files") as bar:
            bar.update()
            os.set_blocking(reader, False)
            assert b"indexing:   0%" in (shown.read(1000) or b"")


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_of_transformers_are_on_a_terminal_too(monkeypatch, terminal):
    from transformers.utils import logging

    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        with quiet_transformers():
            assert logging.is_progress_bar_enabled() == terminal
    finally:
        logging.enable_progress_bar() if shown else logging.disable_progress_bar()
