"""Starts training runs from a process that has imported everything already.

    python tests/e2e/warm_runs.py

reads a JSON object a line, ``{"argv": [...], "environment": {...}, "output": "file"}``, and for
each forks a process that is pretrain_gpt.py with those flags; prints its id, which is also that of
its process group. A run starts in a third of a second instead of several.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megatron.engine.environment import prepare_deepspeed  # noqa: E402

prepare_deepspeed()

import deepspeed  # noqa: E402, F401

import pretrain_gpt  # noqa: E402


def run(job: dict) -> NoReturn:
    """The forked process: never comes back."""
    os.setsid()
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(job["environment"])
    sys.argv = ["pretrain_gpt.py", *job["argv"]]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        pretrain_gpt.main()
    finally:
        os._exit(70)


def main() -> None:
    """Serves until the input ends."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a run ended
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, (
        "a process with threads cannot be forked safely"
    )
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            run(job)
        print(child, flush=True)


if __name__ == "__main__":
    main()
