"""Every reader of files refuses edited inputs as `fuzz/fuzzer.py` says: some inputs of each here, a
minute of each with `make proof`, and as long as wanted with `python tests/fuzz/run.py`."""

import ctypes
import os
import random
import sys

import pytest
from fuzz.campaign import Summary, batch, campaign
from fuzz.edits import Edit, apply, files_of
from fuzz.fuzzer import Broken, Fuzzer
from fuzz.fuzzers import FUZZERS
from fuzz.landlock import version
from fuzz.sandbox import Sandbox
from samples import sampled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")

EXAMPLES = 4
PROOF_SECONDS = 60.0


@pytest.mark.parametrize("name", sampled(FUZZERS, lambda name: not FUZZERS[name].heavy))
def test_edited_inputs_are_read_or_refused(name, tmp_path):
    with Sandbox(FUZZERS[name], tmp_path) as sandbox:
        assert sandbox.finding(()) is None
        assert sandbox.read == 1, "the input is not valid without edits"
        batch(sandbox, seed=1, examples=EXAMPLES)


@pytest.mark.proof
@pytest.mark.parametrize("name", FUZZERS)
def test_for_a_minute(name, tmp_path):
    with Sandbox(FUZZERS[name], tmp_path) as sandbox:
        *findings, done = campaign(sandbox, PROOF_SECONDS, seed=random.randrange(2**32))
    assert isinstance(done, Summary) and done.read and done.refused
    assert not findings, "\n\n".join(map(str, findings))


TEXT = '{"a": [1, 2, {"b": "text"}]}'


def write(folder):
    (folder / "a.json").write_text(TEXT)


def read_outside(folder):
    open("/etc/hostname").close()


def read_outside_in_a_library(folder):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.open(b"/etc/hostname", os.O_RDONLY) < 0:
        raise ValueError(f"{folder}: {os.strerror(ctypes.get_errno())}")


def swallow_questions(folder):
    sys.stdin.readline()


def exhaust(folder):
    bytearray(1 << 40)


def forever(folder):
    while True:
        pass


def run_command(folder):
    import subprocess

    subprocess.run(["true"], check=False)


def die(folder):
    ctypes.string_at(0)


def panic(folder):
    class PanicException(BaseException):
        """As Rust's."""

    raise PanicException("called `Option::unwrap()` on a `None` value")


def nameless(folder):
    raise ValueError("not JSON")


@pytest.mark.parametrize(
    ("read", "rule"),
    [
        (read_outside, "open of /etc/hostname"),
        pytest.param(
            read_outside_in_a_library,
            "a library opens what it must not",
            marks=pytest.mark.skipif(not version(), reason="the kernel has no Landlock"),
        ),
        (swallow_questions, "reads the standard input"),
        (exhaust, "MemoryError"),
        (forever, "takes more than"),
        (run_command, "subprocess.Popen"),
        (die, "ends the process"),
        (panic, "PanicException"),
        (nameless, "a message without a file's name"),
    ],
)
def test_what_breaks_the_rule_is_found(read, rule, tmp_path):
    def read_edited(folder):
        if (folder / "a.json").read_text() != TEXT:
            read(folder)

    with Sandbox(Fuzzer("test", write, read_edited, seconds=0.2), tmp_path) as sandbox:
        finding = sandbox.finding([Edit(0, 3)])
        assert finding is not None and rule in finding.rule, finding
        again = sandbox.finding([Edit(0, 3)])  # by another process, if the first one died
        assert again is not None and again.rule == finding.rule


def test_a_finding_has_few_edits(tmp_path):
    def read(folder):
        if "b" not in (folder / "a.json").read_text():
            raise KeyError("b")

    with (
        Sandbox(Fuzzer("test", write, read), tmp_path) as sandbox,
        pytest.raises(Broken, match="again: python tests/fuzz/run.py test --edits") as caught,
    ):
        batch(sandbox, seed=2, examples=100)
    assert len(caught.value.edits) == 1


def test_an_edit_is_the_same_every_time(tmp_path):
    found = []
    for name in "xy":
        (tmp_path / name).mkdir()
        write(tmp_path / name)
        for seed in range(40):
            apply(tmp_path / name, [Edit(0, seed)])
        found.append([path.read_bytes() for path in files_of(tmp_path / name)])
    assert found[0] == found[1]
