"""Rewards that do harm: each is named, other texts keep their rewards, and nothing is left."""

import contextlib
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import megatron.config  # noqa: F401  # the flags of features are loaded with it
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.apps.reinforcement.rewards.scoring import Rewards, described
from megatron.apps.reinforcement.rewards.sources import CommandSource, FunctionSource

from . import hostile_rewards
from .episodes_of import episode
from .hostile_rewards import HOSTILE, OUTSIDE

FILE = hostile_rewards.__file__
SAMPLE = (
    "infinite_loop", "fork_bomb", "memory", "network", "exception", "not_a_number", "exit_status",
    "writing_outside", "signal_to_the_trainer", "daemon", "wrong_length",
)  # fmt: skip
SLOW = ("memory_of_children", "many_files", "many_large_files", "memory_by_and_by", "deep_folders")
"""Limits other than time end these, which need some."""
COMMANDS = {
    "exit 3": "ended with status 3",
    "kill -9 $$": "was killed by SIGKILL",
    "sleep 4242": "took more than",
    "trap '' TERM INT HUP; sleep 4242": "took more than",
    "f() { f | f & f; }; f; sleep 4242": "started more than|took more than|ended with",
    "cat /dev/zero": "printed more than 1 MiB",
    "head -c 100000 /dev/urandom": "instead of a number",
    "echo nan": "printed 'nan' instead of a number",
    "echo 1e999": "returned inf instead of a number",
    "echo good": "printed 'good' instead of a number",
    "true": "printed '' instead of a number",
    "echo '[1]'": r"printed '\[1\]' instead of a number",
    "echo x > /tmp/megatron-hostile; exit 1": "Permission denied|ended with status 1",
    "exec 3<>/dev/tcp/127.0.0.1/9; exit 2": "ended with status",
    "setsid sleep 4242 & disown; echo 1": None,
    "echo 2 >&2; echo 1": None,
}


@pytest.fixture(
    scope="module", params=["namespaces", pytest.param("without", marks=pytest.mark.proof)]
)
def rewards(request, tmp_path_factory):
    """Its processes have folders in one that is empty at the end; ``without`` is a kernel, or a
    container, that allows no namespaces."""
    OUTSIDE.unlink(missing_ok=True)
    folder = tmp_path_factory.mktemp("boxes")
    before = {name: os.environ.get(name) for name in ("TMPDIR", "LANG")}
    os.environ |= {"TMPDIR": str(folder), "LANG": language()}
    options = ReinforcementConfig(rl="grpo", reward_timeout=0.8, reward_memory_mib=256)
    made = Rewards(options, [])
    made.keepers.limits = replace(made.keepers.limits, unshares=request.param == "namespaces")
    try:
        yield made
        made.close()
        assert not list(folder.rglob("*"))
    finally:
        made.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def left_behind(mark: str, command: str = "sleep 4242") -> list[str]:
    """Command lines of what hostile rewards start, of processes that have ``mark`` in a variable of
    their environment: those of other tests, which run next to these, do not count."""
    lines = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if line.startswith(command) and mark.encode() in (path / "environ").read_bytes():
                lines.append(line)
    return lines


def language() -> str:
    """The number of this process as a language: no other variable reaches rewards."""
    return f"C.UTF-8-{os.getpid()}"


@contextlib.contextmanager
def patience(rewards, needed: bool):
    """Gives rewards that must not run out of time 30 seconds: a busy machine is slow."""
    limits = rewards.keepers.limits
    rewards.keepers.limits = replace(limits, seconds=30.0 if needed else limits.seconds)
    try:
        yield
    finally:
        rewards.keepers.limits = limits


def check(rewards, source, expected) -> None:
    episodes = [episode("good"), episode("bad")]
    good, bad = source.score(episodes, rewards.keepers, {})
    if expected is None:
        assert (good, bad) == (1.0, 1.0)
    else:
        assert isinstance(bad, str) and re.search(expected, bad), bad
        if isinstance(source, FunctionSource):
            assert good == 1.0
    assert not OUTSIDE.exists() and Path(FILE).exists()
    assert not left_behind(language())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.proof])
        for name in HOSTILE
    ],
)  # fmt: skip
def test_hostile_functions(name: str, rewards) -> None:
    with patience(rewards, name in SLOW):
        check(rewards, FunctionSource(name, None, FILE, f"reward_{name}"), HOSTILE[name])


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[] if number in (0, 5, 14) else [pytest.mark.proof])
        for number, command in enumerate(COMMANDS)
    ],
)
def test_hostile_commands(command: str, rewards) -> None:
    source = CommandSource(command, None, ("bash", "-c", command))
    with patience(rewards, COMMANDS[command] is None):
        check(rewards, source, COMMANDS[command])


def test_nothing_is_left_of_a_trainer_that_is_killed(tmp_path: Path) -> None:
    code = (
        "from megatron.apps.reinforcement.rewards.confinement import Limits\n"
        "from megatron.apps.reinforcement.rewards.keepers import Keepers\n"
        "Keepers(1, Limits(600.0)).ask({'kind': 'run', 'words': ['sleep', '4243'], 'input': ''})"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())}
    trainer = subprocess.Popen([sys.executable, "-c", code], env=environment)
    wait_for(lambda: left_behind(str(tmp_path), "sleep 4243"))
    trainer.kill()
    trainer.wait()
    wait_for(lambda: not left_behind(str(tmp_path), "sleep 4243") and not list(tmp_path.iterdir()))


def wait_for(condition) -> None:
    """Fails by the suite's own limit for a test that hangs."""
    while not condition():
        time.sleep(0.05)


def test_there_are_forty() -> None:
    assert len(HOSTILE) + len(COMMANDS) >= 40


def test_failures_are_counted_by_name(rewards) -> None:
    sources = [
        FunctionSource(name, None, FILE, f"reward_{name}")
        for name in ("exception", "leaving_at_once")
    ]
    own = Rewards(rewards.options, sources)
    own.keepers = rewards.keepers
    table = own.score([episode("bad"), episode("good"), episode("bad")])
    np.testing.assert_array_equal(table.values_ER, [[np.nan] * 2, [1.0] * 2, [np.nan] * 2])
    assert described(table.failures) == (
        "exception: 2 x, the first raised ValueError: no reward today; "
        "leaving_at_once: 2 x, the first ended without an answer"
    )
