#!/usr/bin/env python
"""Speed of tools/preprocess_data.py, against Hugging Face tokenizers and tiktoken.

    python benchmarks/preprocess.py --vocab-file vocab.json --merge-file merges.txt
    python benchmarks/preprocess.py --vocab-file ... --merge-file ... --input corpus.jsonl \
        --scaling 1,2,4,8 --rounds 5 --json out.json

All read the same JSON lines with GPT-2's vocabulary. In each round, in another order every time:
this project's tool, as a command with 1 and more worker processes, its start and its writing
included ("no start": less the CPU seconds of the same command for a file of one line);
tokenizers' `encode_batch_fast`, set up as `transformers` does; tiktoken's `encode_to_numpy` with
its own pattern for GPT-2, each on 1 and more threads, without their start and without writing
anything. CPU seconds are user and system time of all processes of a contestant, memory is the peak
of its largest process. All ids must be equal. Medians over the rounds are shown. Without --input,
Python's installed sources are read.
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
END_OF_TEXT = "<|endoftext|>"
LINES_AT_A_TIME = 1000
OURS, HUGGING_FACE, TIKTOKEN = "preprocess_data.py", "tokenizers", "tiktoken"


@dataclass(frozen=True)
class Contestant:
    """A program and the number of processes or threads that it may use."""

    name: str
    workers: int

    def __str__(self) -> str:
        kind = "worker" if self.name == OURS else "thread"
        return f"{self.name}, {self.workers} {kind}{'s' if self.workers > 1 else ''}"


@dataclass(frozen=True)
class Taken:
    """Costs of one run."""

    cpu: float
    """Seconds."""
    wall: float
    """Seconds."""
    peak_bytes: int
    start_cpu: float = 0.0
    """Seconds that the same command takes for a file of one line; part of `cpu`."""


class Race:
    """Runs contestants over one file and compares what they make of it."""

    def __init__(self, options: argparse.Namespace, source: Path, folder: Path) -> None:
        self.options, self.source, self.folder = options, source, folder
        self.bytes = source.stat().st_size
        self.line = folder / "line.jsonl"
        self.line.write_text(json.dumps({options.json_key: "a"}))
        self.reference: tuple[np.ndarray, np.ndarray] | None = None
        self.tokens = 0

    def run(self, contestant: Contestant) -> Taken:
        """One run; its ids must be those of all runs before.

        Raises:
            AssertionError: they are not.
        """
        output = self.folder / "output"
        if contestant.name == OURS:
            start, _ = self._timed(contestant, self._our_command(contestant, self.line, output))
            taken, _ = self._timed(contestant, self._our_command(contestant, self.source, output))
            taken = replace(taken, start_cpu=start.cpu)
        else:
            taken, told = self._timed(contestant, self._peer_command(contestant, output))
            taken = replace(taken, **json.loads(told))
        self._compare(contestant, output)
        return taken

    def _timed(self, contestant: Contestant, command: list[Any]) -> tuple[Taken, str]:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**os.environ, **_environment(contestant)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if contestant.name == OURS else None,
            text=True,
        )
        assert process.stdout is not None
        told = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{contestant} ended with {process.returncode}: {command}")
        wall, cpu = time.perf_counter() - began, usage.ru_utime + usage.ru_stime
        unit = 1 if sys.platform == "darwin" else 1024
        return Taken(cpu, wall, usage.ru_maxrss * unit), told

    def _our_command(self, contestant: Contestant, source: Path, output: Path) -> list[Any]:
        return [
            *(ROOT / "tools" / "preprocess_data.py", "--tokenizer-type", "GPT2BPETokenizer"),
            *("--vocab-file", self.options.vocab_file, "--merge-file", self.options.merge_file),
            *("--input", source, "--json-keys", self.options.json_key),
            *("--output-prefix", output, "--workers", contestant.workers),
        ]

    def _peer_command(self, contestant: Contestant, output: Path) -> list[Any]:
        return [
            *(Path(__file__), "--peer", contestant.name, "--peer-output", output),
            *("--vocab-file", self.options.vocab_file, "--merge-file", self.options.merge_file),
            *("--input", self.source, "--json-key", self.options.json_key),
            *("--scaling", contestant.workers),
        ]

    def _compare(self, contestant: Contestant, output: Path) -> None:
        if contestant.name == OURS:
            from megatron.data.indexed import IndexedDataset

            dataset = IndexedDataset(f"{output}_{self.options.json_key}_document")
            ids = np.concatenate([block for _, block in dataset.token_blocks()])
            lengths = np.array(dataset.sequence_lengths)
        else:
            ids, lengths = np.load(f"{output}.ids.npy"), np.load(f"{output}.lengths.npy")
            lengths = lengths[lengths > 0]
        if self.reference is None:
            self.reference, self.tokens = (ids, lengths), len(ids)
        same = all(map(np.array_equal, self.reference, (ids, lengths)))
        assert same, f"{contestant} gives other ids"


def _environment(contestant: Contestant) -> dict[str, str]:
    threads = contestant.workers if contestant.name == HUGGING_FACE else 1
    return {
        "PYTHONPATH": str(ROOT),
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
    }


# What a peer's process does


def run_peer(options: argparse.Namespace) -> None:
    """Encodes the file as a user of the library would; prints the seconds, leaves the ids."""
    threads = int(options.scaling)
    build = {HUGGING_FACE: hugging_face_encoder, TIKTOKEN: tiktoken_encoder}[options.peer]
    encode = build(options.vocab_file, options.merge_file, threads)
    found: list[np.ndarray] = []
    wall, cpu = time.perf_counter(), time.process_time()
    for texts in batches(options.input, options.json_key):
        found += encode(texts)
    taken = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    np.save(f"{options.peer_output}.ids.npy", np.concatenate(found))
    np.save(f"{options.peer_output}.lengths.npy", np.array(list(map(len, found))))
    print(json.dumps(taken))


def batches(path: Path, key: str) -> Iterator[list[str]]:
    """The texts of a file, parsed by the fastest common parser."""
    import orjson

    texts = []
    with path.open("rb") as file:
        for line in file:
            texts.append(orjson.loads(line)[key])
            if len(texts) == LINES_AT_A_TIME:
                yield texts
                texts = []
    yield texts


Encode = Callable[[list[str]], list[np.ndarray]]


def hugging_face_encoder(vocab_file: Path, merge_file: Path, threads: int) -> Encode:
    """`tokenizers` with GPT-2's parts."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(str(vocab_file), str(merge_file)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return lambda texts: [
        np.array(encoded.ids, np.uint32) for encoded in tokenizer.encode_batch_fast(texts)
    ]


def tiktoken_encoder(vocab_file: Path, merge_file: Path, threads: int) -> Encode:
    """`tiktoken` as `tiktoken.get_encoding("gpt2")`, from these files."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    from megatron.tokenizer.gpt2_bpe import read_vocabulary, token_bytes

    vocab = read_vocabulary(str(vocab_file))
    end = vocab.pop(END_OF_TEXT)
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks={token_bytes(token): number for token, number in vocab.items()},
        special_tokens={END_OF_TEXT: end},
    )
    pool = ThreadPoolExecutor(threads)

    def encode(text: str) -> np.ndarray:
        return encoding.encode_to_numpy(text, allowed_special="all")

    return lambda texts: list(map(encode, texts) if threads == 1 else pool.map(encode, texts))


# The race


def main() -> int:
    options = parser().parse_args()
    if options.peer:
        run_peer(options)
        return 0
    scaling = sorted({int(word) for word in options.scaling.split(",")})
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        race = Race(options, options.input or python_sources(folder), folder)
        taken = compete(race, contestants(scaling), options.rounds)
    found: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        },
        "bytes": race.bytes,
        "tokens": race.tokens,
        "runs": {
            str(contestant): [vars(run) for run in runs] for contestant, runs in taken.items()
        },
    }
    show(race, taken, found["machine"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def contestants(scaling: list[int]) -> list[Contestant]:
    """All that are installed."""
    found = [Contestant(OURS, workers) for workers in scaling]
    for library in (HUGGING_FACE, TIKTOKEN):
        if importlib.util.find_spec(library) is None:
            print(f"{library} is not installed and left out")
        else:
            found += [Contestant(library, workers) for workers in (scaling[0], scaling[-1])]
    return list(dict.fromkeys(found))


def compete(race: Race, names: list[Contestant], rounds: int) -> dict[Contestant, list[Taken]]:
    """All contestants in all rounds, each round in an order of its own."""
    taken: dict[Contestant, list[Taken]] = {contestant: [] for contestant in names}
    chance = random.Random(1)
    for number in range(rounds):
        for contestant in chance.sample(names, len(names)):
            taken[contestant].append(race.run(contestant))
            print(f"round {number + 1} of {rounds}: {contestant}", file=sys.stderr)
    return taken


def show(race: Race, taken: dict[Contestant, list[Taken]], machine: dict[str, Any]) -> None:
    rounds = len(next(iter(taken.values())))
    print(f"{race.source.name}: {race.bytes / 1e6:.1f} MB, {race.tokens:,} tokens, ", end="")
    print(f"{rounds} rounds, {machine}; all ids equal")
    heads = (("MB per", "range", "no start", "tokens per", "MB per", "peak"),
             ("CPU s", "", "", "CPU s", "wall s", "MB"))  # fmt: skip
    for words in heads:
        widths = zip(words, (8, 12, 10, 12, 8, 7), strict=True)
        print(" " * 30 + "".join(f"{word:>{width}}" for word, width in widths))
    size = race.bytes / 1e6
    for contestant, runs in taken.items():
        cpu = statistics.median(run.cpu for run in runs)
        running = statistics.median(run.cpu - run.start_cpu for run in runs)
        wall = statistics.median(run.wall for run in runs)
        rates = [size / run.cpu for run in runs]
        spread = f"{min(rates):.1f}-{max(rates):.1f}"
        print(
            f"{contestant!s:30}{size / cpu:8.1f}{spread:>12}{size / running:10.1f}"
            f"{race.tokens / cpu:12,.0f}{size / wall:8.1f}"
            f"{max(run.peak_bytes for run in runs) / 1e6:7.0f}"
        )


def python_sources(folder: Path) -> Path:
    """About 30 MB of Python code as JSON lines, a file a line."""
    path, size = folder / "python.jsonl", 0
    paths = sysconfig.get_paths()
    with path.open("w") as file:
        for root in (paths["stdlib"], paths["purelib"]):
            for source in sorted(Path(root).rglob("*.py")):
                # Tests and encodings are tables of strange characters, not code.
                if size > 30_000_000 or not {"test", "encodings"}.isdisjoint(source.parts):
                    continue
                try:
                    size += file.write(json.dumps({"text": source.read_text()}) + "\n")
                except (UnicodeDecodeError, OSError):
                    continue
    return path


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    result.add_argument("--input", type=Path, help="plain JSON lines; default: Python's sources")
    result.add_argument("--json-key", default="text", help="key of the texts")
    result.add_argument("--vocab-file", type=Path, required=True, help="GPT-2's vocab.json")
    result.add_argument("--merge-file", type=Path, required=True, help="GPT-2's merges.txt")
    result.add_argument("--rounds", type=int, default=3, help="rounds that are measured")
    result.add_argument(
        "--scaling", default=f"1,{cores}", help="numbers of workers; peers run at the ends of it"
    )
    result.add_argument("--folder", type=Path, help="where to write, by default /tmp")
    result.add_argument("--json", type=Path, metavar="FILE", help="write every time that was taken")
    result.add_argument("--peer", choices=(HUGGING_FACE, TIKTOKEN), help=argparse.SUPPRESS)
    result.add_argument("--peer-output", type=Path, help=argparse.SUPPRESS)
    return result


if __name__ == "__main__":
    sys.exit(main())
