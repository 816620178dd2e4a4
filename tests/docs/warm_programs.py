"""Runs the project's programs in processes forked from one that has imported everything.

    python tests/docs/warm_programs.py

reads a JSON object a line, ``{"file": ..., "argv": [...], "folder": ..., "output": ...,
"environments": [{...}, ...]}``; runs the file as a script in as many processes as there are
environments, each with one; and prints a JSON list of their exit statuses. With ``"serves": true``
it prints that of their process ids at once, and ``{"stop": [...]}`` ends them by SIGTERM. A program
starts in a fraction of a second instead of several.
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import preloaded  # noqa: E402, F401
import torch  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402, F401

import megatron.apps.generation.opening  # noqa: E402, F401
import pretrain_gpt  # noqa: E402, F401


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


def main() -> None:
    """Serves until the input ends."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "stop" in job:
            for child in job["stop"]:
                os.kill(child, signal.SIGTERM)
            print(json.dumps([ended(child) for child in job["stop"]]), flush=True)
            continue
        children = []
        for rank, environment in enumerate(job["environments"]):
            output = job["output"] + (f".{rank}" if rank else "")
            child = os.fork()
            if child == 0:
                run(job, environment, output)
            children.append(child)
        print(json.dumps(children if job["serves"] else list(map(ended, children))), flush=True)


def ended(child: int) -> int:
    """The exit status of a process that ends."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main()
