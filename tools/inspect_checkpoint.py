#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Shows what is in a checkpoint of any format, or what differs between two.

    python tools/inspect_checkpoint.py checkpoints
    python tools/inspect_checkpoint.py checkpoints/global_step100 --no-norms
    python tools/inspect_checkpoint.py --diff checkpoints hf-folder

Formats: this project's, DeepSpeed's folders and universal checkpoints, Megatron-LM's folders and
zips, GPT-NeoX's, Hugging Face's and peft's folders. Of adapters their own tensors are shown, and
with --diff the model merged with them. With --diff the exit status is 1 when they differ.
Checksums are not compared: tools/verify_checkpoint.py does that.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import Source, locate_checkpoint, open_checkpoint
from megatron.config.command_line import CommandParser
from megatron.features.adapters.checkpoint import AdaptedCheckpoint, AdaptedSource, BaseRecord
from megatron.formats.inspection import (
    TensorFacts,
    bytes_on_disk,
    counted,
    model_differences,
    model_facts,
    run_facts,
    tensor_differences,
    tensor_facts,
)
from megatron.util.errors import one_line


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    wanted = None if options.iteration is None else str(options.iteration)
    try:
        if options.diff:
            first, second = (open_checkpoint(path, wanted, verify=False) for path in options.diff)
            return show_differences(first, second)
        source = open_alone(options.checkpoint, wanted)
        if options.json:
            json.dump(as_json(source, options.norms), sys.stdout, indent=1)
            print()
        else:
            for line in report(source, options.norms):
                print(line)
        return 0
    except (ValueError, OSError) as error:
        sys.exit(f"inspect_checkpoint.py: error: {one_line(error)}")


def parser() -> CommandParser:
    result = CommandParser(__doc__)
    where = result.add_mutually_exclusive_group(required=True)
    where.add_argument("checkpoint", nargs="?", help="one checkpoint, or a folder of several")
    where.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two checkpoints")
    result.add_argument("--iteration", type=int, help="iteration (default: the newest)")
    result.add_argument(
        "--no-norms", dest="norms", action="store_false", help="do not read the tensors"
    )
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def open_alone(path: str, wanted: str | None) -> Source:
    """A checkpoint; of adapters those alone, as they are in its files."""
    checkpoint = locate_checkpoint(path, wanted)
    if checkpoint is not None and checkpoint.form is AdaptedCheckpoint:
        source: Source = CheckpointReader(checkpoint.folder)
        record = BaseRecord.read(checkpoint.folder)
        source.notes = (f"adapters of {record.path} ({record.title}, {len(record.digests)} "
                        "parameters)",)  # fmt: skip
        return source
    source = open_checkpoint(path, wanted, verify=False)
    if not isinstance(source, AdaptedSource):
        return source
    source.additions.notes = (f"adapters of {source.base.folder}",)
    return source.additions


def report(source: Source, norms: bool) -> Iterator[str]:
    yield f"{source.folder}: {source.title}, {bytes_on_disk(source.folder) / 1e6:,.1f} MB"
    yield f"  {counted(source)}"
    for key, value in run_facts(source).items():
        yield f"  {key.replace('_', ' ')}: {value}"
    if not source.state:
        yield "  weights only: training from it starts at iteration 0"
    for line in filter(None, (*source.notes, source.refusal)):
        yield f"  {line}"
    yield "model: " + ", ".join(f"{key} {value}" for key, value in model_facts(source).items())
    width = max(len(name) for name in source.names())
    not_finite = 0
    for facts in tensor_facts(source, norms):
        label = facts.name if facts.kind == "weight" else f"  .{facts.kind}"
        shape = " x ".join(map(str, facts.shape)) if facts.kind == "weight" else ""
        norm = "" if facts.norm is None else f"  norm {facts.norm:.6g}"
        damage = "  NOT FINITE" if facts.finite is False else ""
        yield f"  {label:{width}}  {shape:>16}  {facts.dtype:8}{norm}{damage}".rstrip()
        not_finite += facts.finite is False
    if not_finite:
        yield f"{not_finite} tensors contain infinities or NaN"


def as_json(source: Source, norms: bool) -> dict[str, Any]:
    return {
        "folder": str(source.folder),
        "format": source.title,
        "bytes": bytes_on_disk(source.folder),
        "run": run_facts(source),
        "model": model_facts(source),
        "tensors": [described(facts) for facts in tensor_facts(source, norms)],
    }


def described(facts: TensorFacts) -> dict[str, Any]:
    fields = {key: value for key, value in vars(facts).items() if value is not None}
    return fields | {"shape": list(facts.shape)}


def show_differences(first: Source, second: Source) -> int:
    print(f"first:  {first.folder} ({first.title})\nsecond: {second.folder} ({second.title})")
    lines = [f"model: {line}" for line in model_differences(first, second)]
    here, there = run_facts(first), run_facts(second)
    for key in dict.fromkeys([*here, *there]):
        if here.get(key) != there.get(key):
            lines.append(f"{key.replace('_', ' ')}: {here.get(key)} and {there.get(key)}")
    for line in lines:
        print(line)
    differing = 0
    for difference in tensor_differences(first, second):
        differing += 1
        what = difference.what or (
            f"largest difference {difference.largest:.3g}, relative {difference.relative:.3g}"
        )
        kind = "" if difference.kind == "weight" else f".{difference.kind}"
        print(f"{difference.name}{kind}: {what}")
    print(f"{differing} tensors differ" if differing else "all tensors are bitwise equal")
    return 1 if differing or lines else 0


if __name__ == "__main__":
    sys.exit(main())
