"""Lifecycle of one process of a run: how it connects to the other processes, and how it ends, with
or without an error."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from megatron.config.features import first_answer
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
from megatron.util.processes import ends_with_run, is_main_process


@contextlib.contextmanager
def connected(run: Run, *more: Any, watched: bool = True) -> Iterator[Mesh]:
    """Connect the processes of a run, check that their configurations and a tool's flags ``more``
    agree, and yield the mesh. Unless ``watched`` is False, a watchdog ends a run that makes no
    progress. Raises LostRankError, and the errors of :func:`distributed`."""

    def facts() -> Facts:
        return run_meeting().facts(run, *more)

    with contextlib.ExitStack() as stack:
        stack.enter_context(deterministic_kernels(run.config))
        watching = first_answer(lambda feature: feature.watch(run.config)) if watched else None
        within = stack.enter_context(watching).among_ranks if watching else contextlib.nullcontext
        yield stack.enter_context(distributed(run.config.parallel, facts, within))


@contextlib.contextmanager
def errors_for_users(outlives_output: bool = True) -> Iterator[None]:
    """Report errors in the user's input as one line and exit with status 2. Only errors that this
    project raised for users count. Errors from torch, DeepSpeed or an assertion keep their
    traceback. A truncated memory-mapped file also ends the process with one line. With
    ``outlives_output``, the program continues if it cannot write its output."""
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
            # Usually all processes find the same error. The main process prints it, and the
            # launcher then ends this one.
            time.sleep(1 if run_meeting().give_up(str(error)) else 5)
            _print_error(error)
        sys.exit(2)
    except SystemExit:  # also after --help, which may have been passed to one process only
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
    """End the process after the block without finalising the interpreter. gloo's threads release
    tensors some time after a collective. During finalisation, they could not acquire the GIL and
    would abort the finished process with SIGABRT (torch 2.13)."""
    status: Any = 0
    ends_with_run.set(True)
    try:
        yield
    except SystemExit as exit:
        status = exit.code
    finally:
        ends_with_run.set(False)
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
