"""Whether this process works or waits for other ranks, seen from another of its threads."""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType

from megatron.util.phases import activity, background_groups

_MEETS = ("/torch/distributed/", "/deepspeed/comm/")
"""Packages whose functions end in a collective, a transfer or a store."""
_MEETS_NOBODY = ("/torch/distributed/tensor/", "/torch/distributed/fsdp/")
"""Some of their modules register thousands of operators when they are imported."""
_DEVICE_SECONDS = 1.0
_WRAPPERS = ("wrapper", "log_wrapper")
_IMPORT = "<frozen importlib"
_INNERMOST = 4
"""Frames between a call of those packages and the thread's innermost one, such as an operator's."""
_PASSES_ON = (
    "/threading.py",
    "/queue.py",
    "/concurrent/futures/_base.py",
    "/torch/autograd/graph.py",
)
"""Where a thread waits for another one of its process, or runs the backward pass in others."""


def where_it_waits(frames: Mapping[int, FrameType] | None = None) -> FrameType | None:
    """The frame in which this process waits for other ranks, in a collective, a transfer or the
    store at which they meet; None where its main thread works, or waits for something else. Costs
    some microseconds.

    Where the main thread has left its work to others of its threads, as a backward pass on a GPU
    and the end of a save do, these are looked at. What a thread does beside a main thread that
    works, such as a save in the background, does not count.

    Args:
        frames: innermost frame of each thread by its identifier; those of now by default.
    """
    frames = frames_of_others() if frames is None else frames
    main = frames.get(threading.main_thread().ident or 0)
    if main is None:
        return None
    if (found := _meets(main)) is not None:
        return found
    passes_on = _normal(main.f_code.co_filename).endswith(_PASSES_ON)
    if not passes_on or activity.phase == "data":  # the other thread reads what it waits for
        return None
    others = (frame for frame in frames.values() if frame is not main)
    return next((found for frame in others if (found := _meets(frame)) is not None), None)


def frames_of_others() -> dict[int, FrameType]:
    """Innermost frame of each other thread by its identifier. They keep what the functions have in
    their variables: a caller lets go of them at once."""
    frames = sys._current_frames()
    # A frame in one of its own variables lives, with all others, until cycles are looked for.
    frames.pop(threading.get_ident())
    return frames


def device_is_busy() -> bool:
    """Whether this process's GPU has not done all that was queued: it computes, or waits for the
    GPUs of other ranks. Where the main thread hangs by itself, its GPU soon has nothing to do. A
    driver that does not answer within a second counts as busy."""
    asked, answers = activity.device_busy, list[bool]()
    if asked is None:
        return False

    def ask() -> None:
        try:
            answers.append(asked())
        except RuntimeError:  # an error of the device's, with which this rank will end
            answers.append(False)

    thread = threading.Thread(target=ask, name="device", daemon=True)
    thread.start()
    thread.join(_DEVICE_SECONDS)
    return not answers or answers[0]


def collectives_begun() -> int:
    """How many collectives this process has begun in all its groups but those of threads in the
    background: some are a library's own, such as those in which an engine is set up. Costs some
    microseconds, and does not wait."""
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    begun = 0
    if torch is not None:
        with contextlib.suppress(RuntimeError):  # a group that is just made
            for group in list(torch._world.pg_map):
                if group not in background_groups:
                    begun += group._get_sequence_number_for_group()
    return begun


def failed_to_meet(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that other ranks did not answer: a collective, a
    transfer or the store raised it."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if isinstance(error, RuntimeError) and trace is not None:
            code = trace.tb_frame.f_code
            if _is_of_packages(code.co_filename) or _calls_wait(_Identity(code), trace.tb_lineno):
                return True
        error = error.__cause__ or error.__context__
    return False


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_site(frame: FrameType) -> str:
    """The function of this project that a frame belongs to or was called from, with what it calls:
    ``all_reduce in megatron/parallel/mesh.py:97 any_rank``."""
    name = frame.f_code.co_name
    for outer in outwards(frame):
        file = _normal(outer.f_code.co_filename)
        meets = _is_of_packages(file)
        if "/megatron/" in file and not meets:
            place = f"megatron/{file.rpartition('/megatron/')[2]}:{outer.f_lineno}"
            return f"{name} in {place} {outer.f_code.co_name}"
        if meets:
            name = name if outer.f_code.co_name in _WRAPPERS else outer.f_code.co_name
    return f"{name} in {_normal(frame.f_code.co_filename)}:{frame.f_lineno}"


def _meets(frame: FrameType) -> FrameType | None:
    """The frame of a thread that waits for other ranks, given its innermost one."""
    for inner in islice(outwards(frame), _INNERMOST):
        if inner.f_code.co_name == "<module>":  # it imports, which may be slow
            return None
        if _is_of_packages(inner.f_code.co_filename):
            return None if _is_imported(inner) else inner
    # The handle of a transfer is torch's, without a frame of its own.
    return frame if _calls_wait(_Identity(frame.f_code), frame.f_lineno) else None


def _is_imported(frame: FrameType) -> bool:
    """Whether a frame runs because a module is imported, which is work."""
    return any(outer.f_code.co_filename.startswith(_IMPORT) for outer in outwards(frame))


class _Identity:
    """A code object as a key of a cache. Hashing the code itself hashes its constants, and those of
    code that torch's compiler makes can be dictionaries. The key keeps the code alive, so that its
    identity is not used again."""

    __slots__ = ("code",)

    def __init__(self, code: CodeType) -> None:
        self.code = code

    def __hash__(self) -> int:
        return id(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.code is self.code


@lru_cache(4096)
def _calls_wait(key: _Identity, line: int) -> bool:
    """True if a line calls a method ``wait``. Methods of threads, processes and futures have their
    own frames, so that the innermost frame is not here."""
    lines, here = dict(dis.findlinestarts(key.code)), None
    for instruction in dis.get_instructions(key.code):
        here = lines.get(instruction.offset, here)
        if here == line and instruction.argval == "wait":
            return True
    return False


@lru_cache(4096)
def _is_of_packages(file: str) -> bool:
    path = _normal(file)
    return any(part in path for part in _MEETS) and not any(part in path for part in _MEETS_NOBODY)


@lru_cache(4096)
def _normal(file: str) -> str:
    return file.replace("\\", "/")
