"""Programs whose output cannot be written, or that a user interrupts."""

import errno
import io
import sys

import pytest

from megatron.run.process import errors_for_users
from megatron.util.errors import (
    READER_GONE,
    ProgramOutput,
    lost_output,
    name_output,
    outlive_output,
    shorten_interrupts,
)


class Failing(io.StringIO):
    """A stream that cannot be written while ``number`` is that of an error."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        if self.number:
            raise OSError(self.number, "No space left on device")  # OSError chooses the class
        return super().write(text)


@pytest.fixture
def streams(monkeypatch):
    """Standard output, which fails, and standard error."""

    def prepare(number: int) -> tuple[Failing, Failing]:
        out, err = Failing(number), Failing()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return out, err

    return prepare


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EDQUOT])
def test_a_training_continues_without_its_log(streams, number):
    _, err = streams(number)
    with errors_for_users():
        for step in range(3):
            print("iteration", step, flush=True)
    assert err.getvalue().count("\n") == 1
    assert err.getvalue().startswith("warning: standard output could not be written (")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_is_closed_from_the_start(streams, monkeypatch, closed):
    """As `pretrain_gpt.py >&-`."""
    streams(0)
    monkeypatch.setattr(sys, closed, None)
    outlive_output()
    stream = getattr(sys, closed)
    print("a line", file=stream, flush=True)
    assert not stream.isatty() and lost_output() == []


def test_a_log_that_can_be_written_again_is(streams):
    out, _ = streams(errno.ENOSPC)
    outlive_output()
    print("lost")
    out.number = 0
    print("written")
    assert out.getvalue() == "written\n"


def test_streams_that_fail_together_are_in_the_record(streams):
    _, err = streams(errno.ENOSPC)
    outlive_output()
    err.number = errno.ENOSPC
    print("lost")
    print("lost too", file=sys.stderr)
    assert [line.partition(" could")[0] for line in lost_output()] == [
        "standard output",
        "standard error",
    ]


def test_a_tool_ends_quietly_with_its_reader(streams):
    """As `inspect_checkpoint.py | head`: the exit status of SIGPIPE, and no message."""
    _, err = streams(errno.EPIPE)
    name_output()
    with pytest.raises(SystemExit) as end:
        try:
            print("a line")
        except (OSError, ValueError) as error:  # as every tool does
            print(f"error: {error}", file=sys.stderr)
    assert end.value.code == READER_GONE and err.getvalue() == ""


def test_a_tool_names_the_output_of_a_full_disk(streams):
    streams(errno.ENOSPC)
    name_output()
    name_output()
    with pytest.raises(OSError, match="standard output") as failure:
        print("a line")
    assert failure.value.errno == errno.ENOSPC
    assert not isinstance(sys.stdout._stream, ProgramOutput)


def test_an_interrupt_is_one_line(streams, monkeypatch):
    _, err = streams(0)
    other: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: other.append(error))
    shorten_interrupts()
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert err.getvalue() == "interrupted\n" and other == []
    sys.excepthook(ValueError, fault := ValueError(), None)
    assert other == [fault]
