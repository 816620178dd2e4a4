"""Runs the project's programs in processes forked from one that has imported everything.

A job is a dictionary ``{"file": ..., "argv": [...], "folder": ..., "output": ..., "environments":
[{...}, ...]}``; the file is run as a script in as many processes as there are environments, each
with one; the answer is a list of their exit statuses. With ``"serves": True`` it is that of their
process ids, at once, and ``{"stop": [...]}`` ends them by SIGTERM. A program starts in a fraction
of a second instead of several.
"""

import os
import runpy
import signal
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

import megatron.apps.generation.opening  # noqa: F401
import pretrain_gpt  # noqa: F401


def run(job: dict, environment: dict, output: str) -> NoReturn:
    """The forked process: never comes back."""
    status = 70
    try:
        os.setsid()
        os.chdir(job["folder"])
        sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(sink, stream)
        os.environ.update(environment)
        sys.argv = [job["file"], *job["argv"]]
        sys.path.insert(0, os.path.dirname(job["file"]))
        runpy.run_path(job["file"], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:  # this fork must never return into the server
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(pipe: Connection) -> None:
    """Do jobs until the pipe ends."""
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if "stop" in job:
            for child in job["stop"]:
                os.kill(child, signal.SIGTERM)
            pipe.send([ended(child) for child in job["stop"]])
            continue
        children = []
        for rank, environment in enumerate(job["environments"]):
            output = job["output"] + (f".{rank}" if rank else "")
            child = os.fork()
            if child == 0:
                run(job, environment, output)
            children.append(child)
        pipe.send(children if job["serves"] else list(map(ended, children)))


def ended(child: int) -> int:
    """The exit status of a process that ends."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
