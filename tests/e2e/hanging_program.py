"""``pretrain_gpt.py`` in which a rank hangs: ``HANG=rank:where:iteration:how``.

``where`` is what it does then: ``step``, ``evaluation``, ``save``, ``start`` or ``end``, where it
closes its reports; ``how`` is a name of :data:`HOW`."""

import ctypes
import functools
import os
import threading
import time

import pretrain_gpt
from megatron.engine.saving import CheckpointWriter
from megatron.engine.train_engine import ModelEngine, TrainEngine
from megatron.training.writers import TeeWriter


def loop():
    while True:
        pass


def blocked():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def interpreter_held():
    ctypes.PyDLL(None).sleep(600)


def raises():
    raise KeyError("some weight")


HOW = {
    "sleeps": lambda: time.sleep(600),
    "slow": lambda: time.sleep(15),
    "loops": loop,
    "blocked": blocked,
    "interpreter": interpreter_held,
    "raises": raises,
}


def hang_in(owner, name, reached, how):
    usual = getattr(owner, name)

    @functools.wraps(usual)
    def hanging(*args, **options):
        if reached(*args):
            HOW[how]()
        return usual(*args, **options)

    setattr(owner, name, hanging)


def main():
    given = os.environ.get("HANG")
    if given:
        rank, where, iteration, how = given.split(":")
        if os.environ["RANK"] == rank:
            calls = iter(range(1000))
            if where == "step":
                reached = lambda *_: next(calls) + 1 == int(iteration)  # noqa: E731
                hang_in(TrainEngine, "mean_losses", reached, how)
            elif where == "evaluation":
                hang_in(ModelEngine, "prepare_evaluation", lambda *_: True, how)
                hang_in(TrainEngine, "prepare_evaluation", lambda *_: True, how)
            elif where == "save":
                hang_in(CheckpointWriter, "write_own", lambda *_: True, how)
            elif where == "start":
                from megatron.training import build

                hang_in(build, "build_engine", lambda *_: True, how)
            elif where == "end":
                hang_in(TeeWriter, "close", lambda *_: True, how)
    pretrain_gpt.main()
