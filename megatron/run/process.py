"""A process of a run: its meeting with the others, writable files, and its end with or without an
error."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

from megatron.config.features import taking_part
from megatron.engine.environment import deterministic_kernels, distributed
from megatron.parallel.meeting import DisagreementError, Facts, own_name, run_meeting
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
        """Within this context, errors caused by other ranks' errors name them. On exit it leaves
        the ranks, before the store ends."""


@contextlib.contextmanager
def connected(run: Run, *more: Any, watched: bool = True) -> Iterator[Mesh]:
    """The mesh of a run's processes, which are compared first, also by the dataclasses of flags
    ``more`` of a tool. A watchdog ends the run where it does not advance, unless it may wait as
    long as it likes (``watched``). Raises what :func:`distributed` raises, and LostRankError."""

    def facts() -> Facts:
        return run_meeting().facts(run, *more)

    with contextlib.ExitStack() as stack:
        stack.enter_context(deterministic_kernels(run.config))
        watches = (feature.watch(run.config) for feature in taking_part()) if watched else ()
        watching = next((watch for watch in watches if watch is not None), None)
        if watching is None:
            yield stack.enter_context(distributed(run.config.parallel, facts))
            return
        watch: Watch = stack.enter_context(watching)
        yield stack.enter_context(distributed(run.config.parallel, facts, watch.among_ranks))


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
    except DisagreementError as error:
        _print_error(error)
        sys.exit(2)
    except FaultError as error:
        run_meeting().give_up(str(error))
        if is_main_process() or hasattr(error, "status"):
            _print_error(error)
        else:
            time.sleep(1)  # the launcher ends all other processes as soon as one has ended
        sys.exit(getattr(error, "status", RESTART_STATUS))
    except (ValueError, OSError) as error:
        if not is_for_users(error):
            run_meeting().give_up(repr(error))
            raise
        if is_main_process():
            _print_error(error)
            run_meeting().give_up(str(error))
        else:
            # Usually all processes find the same error; the launcher ends this one once the main
            # process has printed it.
            time.sleep(1 if run_meeting().give_up(str(error)) else 5)
            _print_error(error)
        sys.exit(2)
    except SystemExit:  # also of --help and --explain-config, which only one may have been given
        run_meeting().give_up("it has ended before the run began; see what it printed")
        raise
    except BaseException as error:
        run_meeting().give_up(repr(error))
        raise


def _print_error(error: Exception) -> None:
    who = "" if is_main_process() else f"{own_name()}: "
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
