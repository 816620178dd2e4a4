"""Time stamps of a program's start, taken from outside it.

benchmarks/startup.py puts this file on the path of the programs it starts under the name
`sitecustomize`, which Python imports before anything else. It times the imports of some packages
and some functions, and appends a line of JSON to the file that STARTUP_STAMPS names at the end of
each training step. A phase's time is its own: that of phases inside it is taken off.
"""

import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from contextlib import contextmanager

IMPORTS = {
    "torch": "import torch",
    "torch._dynamo": "import torch's compiler",
    "torch._inductor": "import torch's compiler",
    "deepspeed": "import deepspeed",
    "transformers": "import transformers",
    "megatron": "import megatron",
}
"""Packages and the phases that importing them is."""

FUNCTIONS = {
    "megatron.run.run": {"parse_run": "configuration", "run_data": "data index"},
    "megatron.tokenizer.registry": {"build_tokenizer": "tokenizer"},
    "megatron.engine.environment": {"prepare_deepspeed": "torch.distributed"},
    "megatron.parallel.mesh": {"build_mesh": "torch.distributed"},
    "megatron.engine.build": {"build_engine": "model"},
    "megatron.engine.train_engine": {"TrainEngine.train_step": "step"},
    "megatron.training.resume": {"load": "checkpoint"},
    "megatron.training.report": {"_peak": "matmul peak"},
    "deepspeed": {
        "init_distributed": "torch.distributed",
        "initialize": "deepspeed.initialize",
    },
}
"""Functions and methods, by module, and the phases that their calls are."""

_FILE = os.environ.get("STARTUP_STAMPS", "")
_PROCESS = os.getpid()
_spent: dict[str, list[float]] = {}
_open: list[list] = []


@contextmanager
def phase(name):
    """Counts the time inside as this phase's; the end of each `step` is written down."""
    if os.getpid() != _PROCESS:  # a worker of the data loader
        yield
        return
    entered = time.time(), time.process_time()
    _open.append([name, 0.0, 0.0])
    try:
        yield
    finally:
        left = time.time(), time.process_time()
        _, inner_wall, inner_cpu = _open.pop()
        wall, cpu = left[0] - entered[0], left[1] - entered[1]
        spent = _spent.setdefault(name, [0.0, 0.0])
        spent[0] += wall - inner_wall
        spent[1] += cpu - inner_cpu
        if _open:
            _open[-1][1] += wall
            _open[-1][2] += cpu
        if name == "step":
            _write({"step": [wall, cpu], "at": left, "phases": _spent})
            _spent.clear()


def _write(found):
    found = {"pid": os.getpid(), **found}
    with open(_FILE, "a") as file:
        file.write(json.dumps(found) + "\n")


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the execution of watched modules; finding them is left to the others."""

    def find_spec(self, name, path=None, target=None):
        label = IMPORTS.get(name) or IMPORTS.get(".".join(name.split(".")[:2]))
        label = label or IMPORTS.get(name.partition(".")[0])
        functions = FUNCTIONS.get(name)
        if functions is None and (label is None or (_open and _open[-1][0] == label)):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            with phase(label):
                execute(module)
            for path, called in (functions or {}).items():
                _time(module, path, called)

        spec.loader.exec_module = exec_module
        return spec


def _time(module, path, name):
    owner, _, attribute = path.rpartition(".")
    owner = getattr(module, owner) if owner else module
    function = getattr(owner, attribute)

    @functools.wraps(function)
    def timed(*args, **kwargs):
        with phase(name):
            return function(*args, **kwargs)

    setattr(owner, attribute, timed)


if _FILE:
    _write({"start": [time.time(), time.process_time()], "parent": os.getppid()})
    sys.meta_path.insert(0, _Finder())
