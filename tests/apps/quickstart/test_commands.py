"""The chain: what runs again and what does not, and what a failure says."""

import shlex
import socket
import sys

import pytest

from megatron.apps.quickstart.commands import FREE_PORT, Command, CommandChain, CommandFailed, shown

WRITE = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def command(folder, name, text="x", **options):
    """A command that appends ``text`` to the file ``name``."""
    path = folder / name
    return Command(name, ("python", "-c", WRITE, str(path), text), makes=(path,), **options)


def ran(folder, *steps, start="s"):
    chain = CommandChain(folder / "stamps", start)
    return [chain.run(s) for s in steps]


def test_nothing_runs_twice(folder):
    steps = [command(folder, "a"), command(folder, "b")]
    assert ran(folder, *steps) == [True, True]
    assert ran(folder, *steps) == [False, False]
    assert (folder / "a").read_text() == "x"


def test_a_change_reruns_what_follows_and_nothing_before(folder):
    a, b, c = (command(folder, name) for name in "abc")
    ran(folder, a, b, c)
    assert ran(folder, a, command(folder, "b", "y"), c) == [False, True, True]
    assert (folder / "b").read_text() == "y", "its results are removed first"
    assert ran(folder, a, command(folder, "b", "y"), c, start="other") == [True, True, True]


def test_a_changed_input_or_a_missing_result_reruns(folder):
    read = folder / "input"
    read.write_text("1")
    a = command(folder, "a", reads=(read,))
    ran(folder, a)
    read.write_text("2")
    assert ran(folder, a) == [True]
    (folder / "a").unlink()
    assert ran(folder, a) == [True]


def test_a_step_that_continues_keeps_what_is_there(folder):
    ran(folder, command(folder, "a"))
    ran(folder, command(folder, "a", "y", continues=True))
    assert (folder / "a").read_text() == "xy"


def test_a_command_that_makes_nothing_always_runs(folder):
    s = Command("say", ("python", "-c", "pass"))
    assert ran(folder, s) == ran(folder, s) == [True]


def test_a_failed_command_is_not_done(folder):
    a = command(folder, "a")
    ran(folder, a)
    failing = Command("a", ("python", "-c", "raise SystemExit(3)"), makes=a.makes, continues=True)
    with pytest.raises(CommandFailed, match="a: the command above failed with exit status 3"):
        ran(folder, failing)
    assert (folder / "a").exists()
    assert ran(folder, a) == [True], "the failed command may have left anything"


def test_a_command_that_leaves_nothing_has_failed(folder):
    with pytest.raises(CommandFailed, match="left no .*gone"):
        ran(folder, Command("a", ("python", "-c", "pass"), makes=(folder / "gone",)))


def test_unknown_command(folder):
    with pytest.raises(CommandFailed, match="command no-such-command not found"):
        ran(folder, Command("a", ("no-such-command",)))


def test_commands_are_those_of_this_environment_and_shown(folder, capfd):
    program = "import sys; print(sys.executable)"
    ran(folder, Command("a", ("python", "-c", program)))
    out = capfd.readouterr().out
    assert f"$ python -c '{program}'" in out and f"\n{sys.executable}\n" in out


def test_free_port_is_new_each_time_and_not_part_of_the_stamp(folder):
    bind = (
        "import socket, sys; socket.socket().bind(('127.0.0.1', int(sys.argv[1]))); "
        "open(sys.argv[2], 'w')"
    )
    s = Command("a", ("python", "-c", bind, FREE_PORT, str(folder / "a")), makes=(folder / "a",))
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        assert ran(folder, s) == [True]
    assert ran(folder, s) == [False]


@pytest.mark.parametrize(
    "words",
    [
        ["python", "tool.py", "sub", "--flag", "a value", "--on", "--many", "1", "2", "it's"],
        ["python", "tool.py", *[f"--flag-number-{n} {n}" for n in range(20)]],
        ["python", "-c", "print('a')\nprint(\"b\")"],
    ],
)
def test_shown_commands_can_be_pasted(words):
    text = shown(words, width=40)
    assert shlex.split(text.replace("\\\n", " ")) == words
