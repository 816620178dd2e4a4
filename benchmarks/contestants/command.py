"""`benchmarks/train.py` after its flags are read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contestants.flags import EXPERTS
from contestants.measure import Measurement
from contestants.process import ContestantError, environment, prepare
from contestants.registry import DEFAULT, contestant
from contestants.report import compared, markdown
from contestants.setting import OF_TODAY, Setting
from megatron.util.errors import one_line
from megatron.util.files import write_whole

TOLERANCE = {"bf16": 0.02, "fp32": 1e-3}
"""Largest relative difference of two contestants' losses that is only rounding."""


def measure(options: argparse.Namespace, command: list[str]) -> int:
    """Measures, prints the tables, writes the JSON; the exit status."""
    try:
        found = measured(options, command)
    except (ValueError, OSError, ContestantError) as error:
        print(f"train.py: error: {one_line(error)}", file=sys.stderr)
        return 2
    print(markdown(found), end="", flush=True)
    if options.json:
        write_whole(options.json, (json.dumps(found, indent=1) + "\n").encode())
    return 0


def measured(options: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """Everything that there is to say.

    Raises:
        ValueError: an option is wrong.
        ContestantError: not even the weights could be made.
    """
    names = list(dict.fromkeys((options.contestants or ",".join(DEFAULT)).split(",")))
    for name in names:
        contestant(name)
    for option in ("rounds", "steps", "warmup", "threads", "micro_batch", "micro_batches"):
        if getattr(options, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} is {getattr(options, option)}, below 1")
    if options.json and not options.json.absolute().parent.is_dir():
        raise ValueError(f"--json {options.json}: {options.json.parent} is not a directory")
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="train-benchmark-") as folder:
        setting = setting_of(options, folder)
        steps = setting.warmup + options.rounds * setting.steps
        peak = options.peak_tflops and options.peak_tflops * 1e12
        machine = prepare(setting, steps, peak, environment(setting, tuned_malloc=True))
        measurement = Measurement(names, setting, not options.default_malloc, options.timeout, _say)
        run = measurement.one_at_a_time if options.one_at_a_time else measurement.interleaved
        results = run(options.rounds)
    found = {
        "command": " ".join(command),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "setting": dataclasses.asdict(setting) | {"folder": ""},
        "tuned_malloc": not options.default_malloc,
        "one_at_a_time": options.one_at_a_time,
        "contestants": results,
    }
    return compared(found, TOLERANCE[setting.dtype])


def setting_of(options: argparse.Namespace, folder: str | Path) -> Setting:
    """The options as a setting.

    Raises:
        ValueError: a shape that no contestant can have.
    """
    sparse, t5 = options.architecture in EXPERTS, options.architecture == "t5"
    llama = sparse or options.architecture in ("llama", *OF_TODAY)
    if options.hidden_size % options.heads:
        raise ValueError(
            f"--hidden-size {options.hidden_size} / --heads {options.heads}: not whole"
        )
    if options.kv_heads and not llama:
        raise ValueError("--kv-heads: GPT-2 has as many as query heads; use --architecture llama")
    if options.decoder_length and not t5:
        raise ValueError("--decoder-length: only --architecture t5 has a decoder of its own")
    kv_heads = options.kv_heads or options.heads
    if options.heads % kv_heads:
        raise ValueError(f"--heads {options.heads} / --kv-heads {kv_heads}: not whole")
    ffn = 8 * options.hidden_size // 3 // 64 * 64 if llama else 4 * options.hidden_size
    return Setting(
        layers=options.layers,
        hidden_size=options.hidden_size,
        heads=options.heads,
        kv_heads=kv_heads,
        ffn_hidden_size=options.ffn_hidden_size or ffn,
        seq_length=options.seq_length,
        vocab_size=options.vocab_size,
        micro_batch=options.micro_batch,
        micro_batches=options.micro_batches,
        architecture=options.architecture,
        dtype=options.dtype,
        threads=options.threads,
        warmup=options.warmup,
        steps=options.steps,
        folder=str(folder),
        shared_weights=not options.own_weights,
        hf_activation=options.hf_activation,
        experts=options.experts if sparse else 0,
        choices=options.choices if sparse else 0,
        decoder_length=options.decoder_length or (options.seq_length // 4 if t5 else 0),
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
