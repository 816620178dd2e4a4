"""A process of a run: it meets the others, can write its files, ends with an error for users or
without one."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpoint.source import FoundCheckpoint
from megatron.config import ConfigError, RunConfig
from megatron.config.features import taking_part
from megatron.data.loader import TrainingData
from megatron.engine.environment import deterministic_kernels, distributed
from megatron.parallel import agreement
from megatron.parallel.mesh import Mesh
from megatron.run.run import Run
from megatron.util.errors import (
    RESTART_STATUS,
    FaultError,
    is_for_users,
    name_lost_pages,
    one_line,
    outlive_output,
)
from megatron.util.processes import is_main_process


class Watch(Protocol):
    """Ends a process that does not advance."""

    def among_ranks(self) -> contextlib.AbstractContextManager[None]:
        """Within it errors that follow from those of other ranks name these. At its end it leaves
        them, as before the store ends."""


@contextlib.contextmanager
def connected(run: Run, *more: Any, watched: bool = True) -> Iterator[Mesh]:
    """The mesh of a run's processes, which are compared first, also by the dataclasses of flags
    ``more`` of a tool. A watchdog ends the run where it does not advance, unless it may wait as
    long as it likes (``watched``). Raises what :func:`distributed` raises, and LostRankError."""

    def facts() -> agreement.Facts:
        from megatron.run.fingerprint import run_facts

        return run_facts(run.config, run.content, *more)

    with contextlib.ExitStack() as stack:
        stack.enter_context(deterministic_kernels(run.config))
        watches = (feature.watch(run.config) for feature in taking_part()) if watched else ()
        watching = next((watch for watch in watches if watch is not None), None)
        if watching is None:
            yield stack.enter_context(distributed(run.config.parallel, facts))
            return
        watch: Watch = stack.enter_context(watching)
        yield stack.enter_context(distributed(run.config.parallel, facts, watch.among_ranks))


def compare_data(data: TrainingData) -> None:
    """Compares the files that the processes of a run train on. Raises DisagreementError if they
    differ."""

    def facts() -> agreement.Facts:
        from megatron.run.fingerprint import data_facts

        return data_facts(data.files())

    agreement.compare(facts)


def compare_checkpoints(
    checkpoints: Sequence[FoundCheckpoint | None], config: RunConfig | None = None
) -> None:
    """Compares the checkpoints that the processes of a run load, the last thing that they compare;
    with ``config`` also those that its flags name next to them. Raises DisagreementError if they
    differ."""

    def facts() -> agreement.Facts:
        from megatron.run.fingerprint import checkpoint_facts

        return checkpoint_facts(checkpoints, config)

    agreement.compare(facts)
    agreement.settled()


def check_output(flag: str, path: str | Path | None) -> None:
    """Creates the folder of a file that is written at the end. Raises ConfigError if that or
    writing there is not possible, or the path is a folder."""
    if path is None:
        return
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot write to {path.parent} ({error.strerror}); choose a folder "
            "with write access"
        ) from None


@contextlib.contextmanager
def errors_for_users(outlives_output: bool = True) -> Iterator[None]:
    """Turns errors about the user's input into one line and exit status 2. These are errors that
    this package raised with a message for users; anything raised deeper (torch, deepspeed, an
    assertion) keeps its traceback. A mapped file that is cut short ends the process likewise. Where
    standard output cannot be written, a program that ``outlives_output`` continues."""
    name_lost_pages()
    if outlives_output:
        outlive_output()
    try:
        yield
    except agreement.DisagreementError as error:
        _print_error(error)
        sys.exit(2)
    except FaultError as error:
        agreement.give_up(str(error))
        if is_main_process() or hasattr(error, "status"):
            _print_error(error)
        else:
            time.sleep(1)  # the launcher ends all others as soon as one has ended
        sys.exit(getattr(error, "status", RESTART_STATUS))
    except (ValueError, OSError) as error:
        if not is_for_users(error):
            agreement.give_up(repr(error))
            raise
        if is_main_process():
            _print_error(error)
            agreement.give_up(str(error))
        else:
            # Usually all processes find the same error; the launcher ends this one once the main
            # process has printed it.
            time.sleep(1 if agreement.give_up(str(error)) else 5)
            _print_error(error)
        sys.exit(2)
    except SystemExit:  # also of --help and --explain-config, which only one may have been given
        agreement.give_up("it has ended before the run began; see what it printed")
        raise
    except BaseException as error:
        agreement.give_up(repr(error))
        raise


def _print_error(error: Exception) -> None:
    who = "" if is_main_process() else f"{agreement.own_name()}: "
    print(f"{who}error: {one_line(error)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def ending_process() -> Iterator[None]:
    """Ends the process after a command without finalising the interpreter. gloo's threads release
    tensors some time after a collective. When that happens during finalisation, they cannot get the
    interpreter's lock and abort the finished process with SIGABRT (torch 2.13)."""
    status: Any = 0
    try:
        yield
    except SystemExit as exit:
        status = exit.code
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
