"""New tokens per CPU second with drafts and without, and how many drafts are right.

    python benchmarks/speculation.py --load CHECKPOINT --text valid.txt --rounds 3

Prompts are pieces of the text; each setting continues all of them, one setting after the other in
every round, on one thread. Texts of all settings must be equal. Flags of the checkpoint's tokenizer
and others of tools/generate.py are passed on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron.apps.generation.memory import ServedConfig
from megatron.apps.generation.opening import OpenedRunner, opened_runner
from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules
from megatron.apps.generation.scheduling.engine import EngineStats, GenerationEngine
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.run.run import RunToolParser, start_processes

SETTINGS = (("", 0), ("mtp", 1), ("mtp", 2), ("mtp", 3), ("ngram", 3))
Texts = list[tuple[int, ...]]


def measured(
    args: argparse.Namespace, opened: OpenedRunner, drafts: int
) -> tuple[Texts, EngineStats, float]:
    """Texts of all prompts, what the engine did, and CPU seconds."""
    tokens = opened.tokenizer.tokenize(Path(args.text).read_text("utf-8"))
    step = len(tokens) // args.prompts
    requests = [
        GenerationRequest(
            tuple(tokens[n * step : n * step + args.prompt_tokens]),
            StopRules(args.new_tokens),
            Sampling(greedy=not args.temperature, temperature=args.temperature or 1.0, seed=n),
        )
        for n in range(args.prompts)
    ]
    limits = EngineLimits(args.at_once, 512 + args.at_once * drafts, args.prompts, drafts)
    engine = GenerationEngine(opened.runner, opened.tokenizer, limits)
    begun = time.process_time()
    texts = [each.tokens for each in engine.complete(requests)]
    return texts, engine.stats, time.process_time() - begun


def opened(stack: ExitStack, argv: list[str]) -> OpenedRunner:
    """A checkpoint, until the end of the program."""
    config, settings = RunToolParser(ServedConfig, None).parse(argv)
    processes = start_processes(settings, None)
    runner = stack.enter_context(opened_runner(settings, processes, config))
    assert runner is not None
    return runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    args, rest = parser.parse_known_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    most = max(drafts for _, drafts in SETTINGS)
    ahead = ["--num-speculative-tokens", str(most), "--speculative-method", "mtp"]
    stack, argv = ExitStack(), ["--load", args.load, "--kv-cache-gib", "0.1", *rest]
    plain, drafting = opened(stack, argv), opened(stack, [*argv, *ahead])
    seconds: dict[tuple[str, int], list[float]] = {setting: [] for setting in SETTINGS}
    stats: dict[tuple[str, int], EngineStats] = {}
    first: Texts | None = None
    for _ in range(args.rounds):
        for method, drafts in SETTINGS:
            runner = drafting if method == "mtp" else plain
            texts, stats[method, drafts], taken = measured(args, runner, drafts)
            seconds[method, drafts].append(taken)
            first = first or texts
            assert texts == first, f"{method} {drafts}: the texts are not those without drafts"
    without = statistics.median(seconds["", 0])
    print("| drafts | steps | right | tokens per CPU second | ratio |\n|---|---|---|---|---|")
    for (method, drafts), of_setting in seconds.items():
        done, taken = stats[method, drafts], statistics.median(of_setting)
        right = done.accepted_tokens / max(done.draft_tokens, 1)
        name = f"{method} {drafts}" if drafts else "none"
        rate = done.new_tokens / taken
        print(f"| {name} | {done.steps} | {right:.0%} | {rate:.0f} | {without / taken:.2f} |")


if __name__ == "__main__":
    main()
