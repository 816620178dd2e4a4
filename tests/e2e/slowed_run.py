"""``pretrain_gpt.py`` with one rank that is slower than the others: the first argument is
``RANK:WHERE:SECONDS``, where WHERE is ``step`` or ``data`` and the rank sleeps so long in each step
or each read of a micro batch, or ``lock``, which is a step that holds the interpreter's lock."""

from __future__ import annotations

import os
import sys
import time
from ctypes import PyDLL
from functools import wraps

import pretrain_gpt
from megatron.data import loader
from megatron.engine.train_engine import TrainEngine

PLACES = {"step": TrainEngine, "lock": TrainEngine, "data": loader._Samples}
METHODS = {"step": "prepare", "lock": "prepare", "data": "__getitems__"}


def main() -> None:
    """Trains."""
    rank, where, seconds = sys.argv.pop(1).split(":")
    if rank == os.environ["RANK"]:
        owner, name = PLACES[where], METHODS[where]
        method = getattr(owner, name)
        pause = _hold if where == "lock" else time.sleep

        @wraps(method)
        def slow(*args: object) -> object:
            pause(float(seconds))
            return method(*args)

        setattr(owner, name, slow)
    pretrain_gpt.main()


def _hold(seconds: float) -> None:
    PyDLL(None).usleep(int(1e6 * seconds))
