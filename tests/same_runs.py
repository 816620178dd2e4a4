#!/usr/bin/env python
"""Ten fixed short runs, from two source trees: are they bitwise the same?

    python tests/same_runs.py --record runs/before path/to/one/tree
    python tests/same_runs.py path/to/one/tree path/to/another
    python tests/same_runs.py runs/before . --runs pp2-tied resume

For a change of structure, which may change no number. Of every run it compares the loss, the
gradient norm and the loss scale of each step as exact numbers, and the SHA-256 of every final
weight and moment (through each tree's own reader, so that the layout of files does not matter).
Then the tree AFTER loads the checkpoints that BEFORE wrote half-way, and must continue as BEFORE
did. BEFORE may be a folder of results that --record or --keep made. Exit status 1 on any
difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent

TRAINING = (
    "--seq-length 16 --lr 1e-2 --micro-batch-size 1 --global-batch-size 4 "
    "--tokenizer-type NullTokenizer --vocab-size 99 --mock-data --num-workers 0 --eval-iters 0 "
    "--peak-tflops 1 --log-interval 1 --train-iters 6"
)
GPT2 = "--num-layers 4 --hidden-size 32 --num-attention-heads 4"
LLAMA = (
    f"{GPT2} --num-query-groups 2 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
HALF = 3
"""The step after which the runs that go straight through save a first checkpoint."""


@dataclass(frozen=True)
class Leg:
    """One training command.

    Attributes:
        processes: how many.
        flags: those of pretrain_gpt.py beyond :data:`TRAINING`.
        source: the folder, next to its own, whose newest checkpoint it loads; None for a start
            from scratch, with a checkpoint after step :data:`HALF`.
    """

    processes: int
    flags: str
    source: str | None = None


CONVERSION = "conversion"
"""The run that begins with a Llama of transformers and ends as one."""

RUNS = {
    "one-fp32": [Leg(1, GPT2)],
    "dp2-zero1-bf16": [Leg(2, f"{GPT2} --zero-stage 1 --bf16")],
    "tp2-sp-zero1": [
        Leg(2, f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1")
    ],
    "pp2-tied": [Leg(2, f"{GPT2} --pipeline-model-parallel-size 2")],
    "pp2-interleaved": [
        Leg(2, f"{LLAMA} --pipeline-model-parallel-size 2 --pipeline-schedule interleaved")
    ],
    "pp2-dualpipev": [
        Leg(2, f"{GPT2} --pipeline-model-parallel-size 2 --pipeline-schedule dualpipev")
    ],
    # The first step overflows and is skipped.
    "tp2-dp2-zero2-fp16": [
        Leg(
            4,
            f"{GPT2} --tensor-model-parallel-size 2 --zero-stage 2 --fp16 "
            "--initial-loss-scale 262144 --hysteresis 1",
        )
    ],
    "dp2-zero3-bf16": [Leg(2, f"{LLAMA} --zero-stage 3 --bf16")],
    "resume": [
        Leg(2, f"{GPT2} --tensor-model-parallel-size 2 --sequence-parallel --exit-interval 4"),
        Leg(2, f"{GPT2} --zero-stage 1", source="leg0"),
    ],
    CONVERSION: [Leg(1, "--use-checkpoint-args --exit-interval 3", source="from-hf")],
}
"""The legs of each run by its name; dropout is on, by default."""


class Failed(Exception):
    """A command of a tree ended with an error; the message has the end of its output."""


def call(tree: Path, argv: Sequence[str | Path], processes: int = 1, **environment: str) -> str:
    """Runs a Python program of a tree, and gives what it printed.

    Raises:
        Failed: it ended with an error.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    own = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}
    own |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), *map(str, argv)],
        cwd=tree,
        env=os.environ | own | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        # What torchrun says of its processes comes after what they said themselves.
        own_words, *_ = (done.stdout + done.stderr).partition("torch/distributed/elastic")
        raise Failed(f"in {tree}: {' '.join(map(str, argv))}\n{own_words[-2000:]}")
    return done.stdout


def train(tree: Path, leg: Leg, save: Path, load: Path | None, tag: str = "latest") -> None:
    """Trains a leg into a folder; saves are there, and metrics.jsonl with all digits."""
    flags = f"{TRAINING} {leg.flags} --save-interval {HALF}".split()
    if load:
        tags = [] if tag == "latest" else ["--load-tag", tag]
        flags += ["--load", str(load), *tags]
    call(tree, ["pretrain_gpt.py", *flags, "--save", save], leg.processes)


def make_llama(folder: Path) -> None:
    """A small Llama as transformers makes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def record(tree: Path, name: str, folder: Path) -> None:
    """Does a run into a folder: ``leg0``, ``leg1`` ... are its legs' checkpoints."""
    convert: list[str | Path] = ["tools/convert_checkpoint.py"]
    if name == CONVERSION:
        make_llama(folder / "hf")
        call(tree, [*convert, "from-hf", "--input", folder / "hf", "--output", folder / "from-hf"])
    for number, leg in enumerate(RUNS[name]):
        train(tree, leg, folder / f"leg{number}", folder / leg.source if leg.source else None)
    if name == CONVERSION:
        call(tree, [*convert, "to-hf", "--load", folder / "leg0", "--output", folder / "to-hf"])


def continue_run(tree: Path, name: str, before: Path, folder: Path) -> None:
    """Does the end of a run from the checkpoint that another tree wrote."""
    leg = RUNS[name][-1]
    if leg.source:
        train(tree, leg, folder, before / leg.source)
    else:
        train(tree, leg, folder, before / "leg0", f"global_step{HALF}")


def print_digests() -> None:
    """Prints the SHA-256 of every tensor in the newest checkpoint of each folder that is named on
    the command line, as JSON; it runs with the packages of one tree."""
    from safetensors.torch import load_file

    try:
        from megatron.checkpoint.source import open_checkpoint
    except ImportError:  # a tree from before the registry was merged into it
        from megatron.checkpoint.registry import open_checkpoint

    found: dict[str, dict[str, str]] = {}
    for folder in map(Path, sys.argv[1:]):
        found[str(folder)] = digests = {}
        files = sorted(folder.glob("*.safetensors"))
        for name, tensor in (item for file in files for item in load_file(file).items()):
            digests[name] = f"{tuple(tensor.shape)} {tensor.dtype} {sha256(tensor)}"
        if not files:
            reader = open_checkpoint(folder, verify=False)
            for name in reader.names():
                for kind in reader.kinds(name):
                    tensor = reader.tensor(name, kind)
                    digests[f"{kind} of {name}"] = f"{tuple(tensor.shape)} {sha256(tensor)}"
    print(json.dumps(found))


def sha256(tensor) -> str:
    """Of a tensor's bytes."""
    import torch

    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def digests_of(tree: Path, folders: Sequence[Path]) -> dict[str, dict[str, str]]:
    """What :func:`print_digests` says of folders, by folder."""
    program = "import same_runs; same_runs.print_digests()"
    output = call(tree, ["-c", program, *folders], PYTHONPATH=f"{tree}:{TESTS}")
    return json.loads(output.splitlines()[-1])


def numbers(folder: Path) -> dict[str, dict[int, tuple[str, ...]]]:
    """Loss, gradient norm and loss scale of each step of each leg in a run's folder, exactly."""
    found: dict[str, dict[int, tuple[str, ...]]] = {}
    for file in sorted(folder.glob("leg*/metrics.jsonl")):
        rows = map(json.loads, file.read_text().splitlines())
        found[file.parent.name] = {
            row["iteration"]: tuple(
                "-" if row[key] is None else float(row[key]).hex()
                for key in ("loss", "grad_norm", "loss_scale", "skipped_steps")
            )
            for row in rows
            if row["kind"] == "train"
        }
    return found


def different_steps(before: dict, after: dict) -> Iterator[str]:
    """Steps whose numbers differ, first ones first."""
    for step in sorted(before.keys() | after.keys()):
        if before.get(step) != after.get(step):
            yield f"step {step}: {before.get(step)} before, {after.get(step)} after"


def different_tensors(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """Tensors that differ or that one side does not have."""
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            there = [side for side, has in (("before", before), ("after", after)) if name in has]
            yield f"{name} differs" if len(there) == 2 else f"{name} is only {there[0]}"


def results(folder: Path) -> dict:
    """What :func:`record_tree` kept of each run."""
    return json.loads((folder / "results.json").read_text())


def record_tree(tree: Path, folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Does runs of a tree into a folder, with their numbers and digests in ``results.json``.

    Returns:
        What failed, by the name of the run.
    """
    failures, kept = {}, {}
    for name in names:
        start = time.perf_counter()
        (folder / name).mkdir(parents=True)
        try:
            record(tree, name, folder / name)
        except Failed as error:
            failures[name] = str(error)
            continue
        kept[name] = {"numbers": numbers(folder / name), "seconds": time.perf_counter() - start}
        print(f"{folder.name:8} {name:20} {kept[name]['seconds']:5.1f} s", flush=True)
    ends = {n: f"leg{len(RUNS[n]) - 1}" if n != CONVERSION else "to-hf" for n in kept}
    found = digests_of(tree, [folder / name / end for name, end in ends.items()])
    for name, end in ends.items():
        kept[name]["digests"] = found[str(folder / name / end)]
    (folder / "results.json").write_text(json.dumps(kept, indent=1))
    return failures


def differences(name: str, before: dict, after: dict) -> list[str]:
    """What differs between two trees' results of a run."""
    found = []
    for leg in sorted(before["numbers"].keys() | after["numbers"].keys()):
        there, here = before["numbers"].get(leg, {}), after["numbers"].get(leg, {})
        found += [f"{leg}, {line}" for line in different_steps(there, here)]
    return found + list(different_tensors(before["digests"], after["digests"]))


def old_checkpoint(tree: Path, name: str, before: Path, kept: dict, folder: Path) -> list[str]:
    """What differs where a tree continues from the other's checkpoint.

    Raises:
        Failed: it does not load.
    """
    continue_run(tree, name, before / name, folder / "leg")
    last = f"leg{len(RUNS[name]) - 1}"
    first = 0 if RUNS[name][-1].source else HALF
    rows = {step: row for step, row in kept["numbers"][last].items() if int(step) > first}
    found = list(different_steps(rows, json.loads(json.dumps(numbers(folder)["leg"]))))
    if name != CONVERSION:  # what it ended with is Hugging Face's
        digests = digests_of(tree, [folder / "leg"])[str(folder / "leg")]
        found += different_tensors(kept["digests"], digests)
    return found


def compare(before: Path, tree: Path, folder: Path, names: Sequence[str]) -> bool:
    """Compares a tree with results, prints a table, and says whether all is the same."""
    failures = record_tree(tree, folder / "after", names)
    there, here = results(before), results(folder / "after")
    print(f"\n{'run':20} {'steps':>5} {'tensors':>7}  {'numbers and weights':20} old checkpoint")
    equal, details = True, []
    for name in names:
        if name in failures:
            words, lines = ["failed", "-"], [failures[name]]
        else:
            lines = differences(name, there[name], here[name])
            words = [f"{len(lines)} differences" if lines else "equal"]
            try:
                old = old_checkpoint(tree, name, before, there[name], folder / "old" / name)
                words.append(f"{len(old)} differences" if old else "continues equally")
                lines += [f"from the old checkpoint, {line}" for line in old]
            except Failed as error:
                words.append("failed")
                lines.append(str(error))
        steps = sum(map(len, there[name]["numbers"].values()))
        tensors = len(there[name]["digests"])
        print(f"{name:20} {steps:5} {tensors:7}  {words[0]:20} {words[1]}", flush=True)
        equal = equal and not lines
        details += [f"{name}: {line}" for line in lines[:5]]
    print("\n".join(["", *details, "all equal" if equal else "NOT equal"]))
    return equal


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="source tree, or folder of kept results")
    parser.add_argument("after", type=Path, nargs="?", help="source tree")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME",
                        help=f"of {', '.join(RUNS)}; default: all")  # fmt: skip
    parser.add_argument("--record", type=Path, help="only do BEFORE's runs, into this new folder")
    parser.add_argument("--keep", type=Path, help="new folder for what the runs wrote")
    options = parser.parse_args()
    if bool(options.record) == bool(options.after):
        parser.error("give two trees, or --record FOLDER and one")
    before = options.before.resolve()
    if options.record:
        failures = record_tree(before, options.record.resolve(), options.runs)
        sys.exit("\n".join(failures.values()) or None)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        if not (before / "results.json").is_file():
            failures = record_tree(before, folder / "before", options.runs)
            if failures:
                sys.exit("\n".join(failures.values()))
            before = folder / "before"
        sys.exit(not compare(before, options.after.resolve(), folder, options.runs))


if __name__ == "__main__":
    main()
