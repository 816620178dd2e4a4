#!/usr/bin/env python
"""Evaluates one model with lm-eval, through this project and through lm-eval's own hf model.

    python benchmarks/harness.py --data DATA
    python benchmarks/harness.py --data DATA --batch-size 1 --rounds 3 --json harness.json

Each contestant is a process with the same weights, drawn at random in the shape of GPT-2 and read
from a Hugging Face folder. They answer the same requests in turns, round by round: short multiple
choice, with answers in words and in letters, the last words of LAMBADA, and whole documents in
windows. DATA has the folders race, lambada, wikitext2 and gpt2_bpe of public files. Reported are
tokens per CPU second and the most resident memory, the larger over the rounds; answers that differ
by more than 1e-5 are an error.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from machine import machine

from megatron.util.files import write_whole

OURS, THEIRS = "ours", "hf"
TOLERANCE = 1e-5
SHAPES = {
    "gpt2": {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024},
    "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 256},
}


class Workload(NamedTuple):
    """Requests of one of lm-eval's methods: arguments of each."""

    method: str
    requests: list[tuple[str, ...]]


def workloads(data: Path, size: int) -> dict[str, Workload]:
    """By name; ``size`` questions, words and thousands of characters of documents."""
    words, letters = [], []
    for question, options in islice(_questions(data / "race"), size):
        words += [(question, f" {option}") for option in options]
        listed = "\n".join(f"{a}. {option}" for a, option in zip("ABCD", options, strict=True))
        letters += [(f"{question}\n{listed}\nAnswer:", f" {a}") for a in "ABCD"]
    (lambada,) = sorted((data / "lambada").glob("*.jsonl"))
    rows = [json.loads(line)["text"].rsplit(" ", 1) for line in lambada.open()]
    (raw,) = sorted((data / "wikitext2").glob("*.raw"))
    pages = re.split(r"\n(?= = [^=])", raw.read_text())
    whole = "\n".join(pages)[: 1000 * size]
    return {
        "choices in words": Workload("loglikelihood", words),
        "choices in letters": Workload("loglikelihood", letters),
        "LAMBADA": Workload("loglikelihood", [(a, f" {b}") for a, b in rows[:size]]),
        "whole documents": Workload(
            "loglikelihood_rolling", [(whole[: len(whole) // 3],), (whole[len(whole) // 3 :],)]
        ),
    }


def _questions(race: Path) -> Iterator[tuple[str, list[str]]]:
    for path in sorted(race.glob("**/*.txt")):
        if path.name == "SOURCE.txt":
            continue
        for line in path.read_text().splitlines():
            article = json.loads(line)
            for question, options in zip(article["questions"], article["options"], strict=True):
                if len(options) == 4:
                    yield f"Question: {question}", options


def write_model(folder: Path, data: Path, shape: str) -> None:
    """The model with its tokenizer, in Hugging Face's form."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer

    bpe = data / "gpt2_bpe"
    tokenizer = GPT2BPETokenizer.from_files(bpe / "gpt2-vocab.json", bpe / "gpt2-merges.txt")
    torch.manual_seed(1)
    ends = {"bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod}
    config = GPT2Config(vocab_size=tokenizer.vocab_size, **ends, **SHAPES[shape])
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def their_model(folder: str, batch_size: int) -> Any:
    """lm-eval's own."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(folder, device="cpu", dtype="float32", batch_size=batch_size)


def our_model(folder: str, batch_size: int) -> Any:
    """Ours, built as tools/evaluate.py does; its process group stays open."""
    from contextlib import ExitStack

    from megatron.apps.tasks.harness.command import opened_model, parsed

    argv = ["--load", folder, "--tasks", "none", "--batch-size", str(batch_size)]
    return ExitStack().enter_context(opened_model(*parsed(None, argv))).model


MODELS: dict[str, Callable[[str, int], Any]] = {OURS: our_model, THEIRS: their_model}


def compete(pipe: Any, name: str, folder: str, batch_size: int, threads: int) -> None:
    """A contestant's process: answers workloads until its pipe closes."""
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    import torch
    from contestants.worker import Clock
    from lm_eval.api.instance import Instance

    torch.set_num_threads(threads)
    model = MODELS[name](folder, batch_size)
    pipe.send("ready")
    while True:
        try:
            method, requests = pipe.recv()
        except EOFError:
            os._exit(0)
        instances = [
            Instance(request_type=method, doc={}, arguments=arguments, idx=0)
            for arguments in requests
        ]
        clock = Clock()
        answers = getattr(model, method)(instances, disable_tqdm=True)
        pipe.send((clock.stop(), [_pair(answer) for answer in answers]))


def _pair(answer: Any) -> tuple[float, bool]:
    return (answer, True) if isinstance(answer, float | int) else tuple(answer)


class Contestant:
    """A process that answers requests."""

    def __init__(self, name: str, folder: str, batch_size: int, threads: int) -> None:
        context = get_context("spawn")
        self.name, (self.pipe, far_end) = name, context.Pipe()
        arguments = (far_end, name, folder, batch_size, threads)
        self.process = context.Process(target=compete, args=arguments, daemon=True)
        self.process.start()
        far_end.close()
        assert self.pipe.recv() == "ready"

    def answer(self, workload: Workload) -> tuple[dict[str, float], list[tuple[float, bool]]]:
        """Return its costs, and the answers."""
        self.pipe.send(tuple(workload))
        return self.pipe.recv()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every workload's rounds, by contestant."""
    with tempfile.TemporaryDirectory(prefix="harness-benchmark-") as folder:
        write_model(Path(folder), options.data, options.shape)
        known = workloads(options.data, options.size)
        tokens = token_counts(folder, known)
        shared = (folder, options.batch_size, options.threads)
        contestants = [Contestant(name, *shared) for name in (OURS, THEIRS)]
        found: dict[str, Any] = {}
        for title, workload in known.items():
            rounds: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
            for number in range(options.rounds + 1):
                answers = {}
                for each in contestants[:: 1 if number % 2 else -1]:
                    sample, answers[each.name] = each.answer(workload)
                    if number:  # the first is a warm-up
                        rounds[each.name].append(sample)
                check(title, answers[OURS], answers[THEIRS])
            found[title] = {"tokens": tokens[title], "rounds": rounds}
            print(f"{title}: done", file=sys.stderr, flush=True)
    return found


def token_counts(folder: str, known: dict[str, Workload]) -> dict[str, int]:
    """Tokens of each workload's requests, context and continuation."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return {
        title: sum(len(tokenizer.encode("".join(arguments))) for arguments in workload.requests)
        for title, workload in known.items()
    }


def check(title: str, ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> None:
    """Raises ValueError if answers differ."""
    for number, ((a, a_greedy), (b, b_greedy)) in enumerate(zip(ours, theirs, strict=True)):
        if abs(a - b) > TOLERANCE * max(1.0, abs(b)) or a_greedy != b_greedy:
            raise ValueError(f"{title}, request {number}: ours {a, a_greedy}, hf {b, b_greedy}")


def table(found: dict[str, Any]) -> str:
    """A line per workload."""
    lines = [
        "| | tokens | ours, tokens per CPU s | hf | ours / hf | ours, peak MB | hf | ours / hf |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for title, (tokens, rounds) in ((t, (w["tokens"], w["rounds"])) for t, w in found.items()):
        speeds = {n: [tokens / r["cpu_seconds"] for r in rounds[n]] for n in rounds}
        peaks = {n: max(r["peak_bytes"] for r in rounds[n]) / 1e6 for n in rounds}
        pairs = zip(speeds[OURS], speeds[THEIRS], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        ours, theirs = (statistics.median(speeds[name]) for name in (OURS, THEIRS))
        lines.append(
            f"| {title} | {tokens:,} | {ours:,.0f} | {theirs:,.0f} | {ratio:.2f} | "
            f"{peaks[OURS]:,.0f} | {peaks[THEIRS]:,.0f} | {peaks[OURS] / peaks[THEIRS]:.2f} |"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    default = os.environ.get("MEGATRON_TEST_DATA")
    add("--data", type=Path, default=default, help="folder of public data (MEGATRON_TEST_DATA)")
    add("--shape", choices=tuple(SHAPES), default="gpt2", help="size of the model (gpt2)")
    add("--size", type=int, default=40, help="questions, words, thousands of characters (40)")
    add("--batch-size", type=int, default=8, help="requests in a forward pass (8)")
    add("--threads", type=int, default=1, help="threads of a process (1)")
    add("--rounds", type=int, default=5, help="rounds that are measured (5)")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    return result


def main() -> int:
    """Measures, prints the table, writes the JSON; the exit status."""
    options = parser().parse_args()
    if options.data is None or not options.data.is_dir():
        print("harness.py: error: --data: a folder of public data is needed", file=sys.stderr)
        return 2
    found = measure(options)
    print(table(found), flush=True)
    if options.json:
        content = {
            "command": " ".join(["python", "benchmarks/harness.py", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "workloads": found,
        }
        write_whole(options.json, (json.dumps(content, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
