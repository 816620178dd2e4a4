"""The report of a run that does not advance, on the console and in files: what each rank does, and
the collectives that its communication library has recorded last (torch's flight recorder)."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron.features.resilience.reports import Report
from megatron.features.resilience.verdict import Silent
from megatron.util.secrets import Redactor

COLLECTIVES = "collectives"
"""Folder in ``--save`` with a pickle ``rank_N`` of each rank; ``torchfrtrace`` reads NCCL's."""
_RECORDED = "2000"
"""Collectives of a rank."""
_SECONDS = 5.0
"""For which it may take to be written; its storage may be what hangs."""


def described(reports: Mapping[int, Report], silent: Sequence[Silent]) -> str:
    """What each rank does, with its stacks; the silent ones first."""
    lines = []
    for one in silent:
        state = f"its process {one.state}" if one.state else "nothing is known of its process"
        last = f"last seen in phase {one.phase} at iteration {one.iteration}"
        lines.append(f"{one.name} does not answer: {state}; {last}")
    for rank in sorted(reports):
        found = reports[rank]
        does = "waits for other ranks in" if found.waits else "works in"
        if found.device:
            does = f"has a device that is busy, and {does}"
        detail = f" ({found.detail})" if found.detail else ""
        lines.append(
            f"{found.name}: {found.place}{detail}, {found.idle} s without progress; it {does} "
            f"{found.site}"
        )
        if found.waited_for:
            lines.append(f"  it waits for {found.waited_for}")
        if found.error:
            lines.append(f"  it ends by an error: {found.error}")
        lines.append(found.stacks)
    return "\n".join(lines)


def write_report(line: str, body: str, save: str | None) -> None:
    """Writes a line and what follows to the console and, with ``save``, to a file
    ``hang-<time>.txt`` in that folder; without waiting long for either."""

    def show() -> None:
        print(f"{line}\n{body}" if body else line, file=sys.stderr, flush=True)

    def store() -> None:
        folder = Path(save or "")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            shown = Redactor(os.environ).text(f"{line}\n\n{body}\n")
            file.write_text(shown, encoding="utf-8")

    works = [show, store] if save is not None and body else [show]
    in_time(*works)


def in_time(*works: Callable[[], None]) -> None:
    """Does things beside each other, and returns when they are done, or take too long."""
    threads = [threading.Thread(target=work, name="report", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def record_collectives(save: str | None) -> None:
    """Lets NCCL record its collectives, and write them to :data:`COLLECTIVES` at a timeout of its
    own, unless the environment says otherwise; gloo always records. Before the first process
    group; without GPUs nothing happens."""
    import torch

    if not torch.cuda.is_available():
        return
    wanted = {"TORCH_FR_BUFFER_SIZE": _RECORDED, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if save is not None:
        wanted["TORCH_FR_DUMP_TEMP_FILE"] = str(_record_of(save, ""))
        with contextlib.suppress(OSError):  # whoever saves first says what is wrong with it
            _record_of(save, "").parent.mkdir(parents=True, exist_ok=True)
    for name, value in wanted.items():
        if not any(known in os.environ for known in (name, *_OLDER_NAMES.get(name, ()))):
            os.environ[name] = value


_OLDER_NAMES = {
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
}
"""Which torch still reads; it warns of both."""


def write_collectives(save: str, rank: int) -> None:
    """Writes the collectives that this rank has recorded to :data:`COLLECTIVES`."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as library

    if not dist.is_initialized():
        return
    nccl = dist.get_backend() == dist.Backend.NCCL
    dump = getattr(library, "_dump_nccl_trace" if nccl else "_dump_fr_trace")

    def store() -> None:
        file = _record_of(save, rank)
        with contextlib.suppress(OSError, RuntimeError):
            file.parent.mkdir(parents=True, exist_ok=True)
            # Stacks would take seconds, and libraries that may be on the storage that hangs.
            file.write_bytes(dump(includeStackTraces=False))

    # The library asks the device for the state of its work, with the interpreter's lock held: only
    # a thread without it can end a process whose driver does not answer.
    faulthandler.dump_traceback_later(2 * _SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
    in_time(store)
    faulthandler.cancel_dump_traceback_later()


def _record_of(save: str, rank: int | str) -> Path:
    return Path(save).absolute() / COLLECTIVES / f"rank_{rank}"
