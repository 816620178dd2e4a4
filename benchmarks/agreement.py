"""Cost of comparing a run's processes at their start: with it and without, in turn.

    python benchmarks/agreement.py --processes 4 --rounds 10

prints the median milliseconds between the first process's call and the end of the comparison: one
number with facts computed and compared, one of a barrier in the same store alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

from megatron.config import FLAG_CLASSES, FlagParser
from megatron.features.agreement.agreement import Agreement
from megatron.features.agreement.facts import checkpoint_facts, data_facts, run_facts
from megatron.run.run import run_of

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 99 "
    "--mock-data --train-iters 3 --model-family gpt"
).split()


def _measure(rank: int, processes: int, port: int, rounds: int, pipe: Connection) -> None:
    values = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    run = run_of(FlagParser(*FLAG_CLASSES).settings(FLAGS), processes)
    found: dict[str, list[float]] = {"compared": [], "barrier": []}
    for number in range(rounds):
        for kind, seconds in found.items():
            os.environ["TORCHELASTIC_RESTART_COUNT"] = f"{number}-{kind}"
            agreement = Agreement(timedelta(seconds=60))
            agreement.compare({})
            began = time.perf_counter()
            if kind == "compared":
                agreement.compare(run_facts(run.config, run.content))
                agreement.compare(data_facts([]))
                agreement.compare(checkpoint_facts([None]))
            else:
                agreement.compare({})
            seconds.append(time.perf_counter() - began)
    pipe.send(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for rank in range(options.processes):
        ours, theirs = context.Pipe()
        arguments = (rank, options.processes, store.port, options.rounds, theirs)
        workers.append(context.Process(target=_measure, args=arguments))
        workers[-1].start()
        pipes.append(ours)
    found = pipes[0].recv()
    for worker in workers:
        worker.join()
    for kind, seconds in found.items():
        print(f"{kind}: {1000 * statistics.median(seconds):.1f} ms (of {options.rounds})")


if __name__ == "__main__":
    main()
