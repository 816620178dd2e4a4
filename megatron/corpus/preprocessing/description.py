"""All that the output depends on, to tell whether interrupted work can be gone on with."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.corpus.preprocessing.encode import EncodeConfig
from megatron.corpus.preprocessing.sources import Source
from megatron.util.digests import digest

_FORMAT = 1
"""Of the working folder; a higher one does not go on with a lower one's."""

_FLAG_NAMES = {
    "keys": "json_keys",
    "splitter": "sentence_splitter",
    "stop_at_bad_line": "on_bad_line",
}

Description = dict[str, Any]


def describe(sources: Sequence[Source], config: EncodeConfig, rank: int, count: int) -> Description:
    """The settings, and the size and time of every file that is read."""
    settings = dataclasses.asdict(config)
    tokenizer = settings.pop("tokenizer")
    described = {_flag(name): value for name, value in settings.items()}
    described |= {_flag(name): _with_file(value) for name, value in tokenizer.items()}
    described["--input"] = [
        [source.name, source.form.name, source.size, source.mtime_ns, source.start, source.stop]
        for source in sources
    ]
    described["--partitions"] = [rank, count]
    described["format of the working folder"] = _FORMAT
    return json.loads(json.dumps(described))  # tuples are lists, as they are when read back


def identity(description: Description) -> str:
    """Equal for equal descriptions."""
    return digest(json.dumps(description, sort_keys=True))


def difference(old: Description, new: Description) -> str:
    """What is not the same, for the user."""
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if name == "--input":
            return _input_difference(before or [], now or [])
        return f"{name} was {json.dumps(before)} and is {json.dumps(now)}"
    return "nothing"


def _input_difference(before: list[list], now: list[list]) -> str:
    old, new = {entry[0]: entry for entry in before}, {entry[0]: entry for entry in now}
    for name in new:
        if name not in old:
            return f"--input {name} was not read"
        if old[name] != new[name]:
            return f"--input {name} has changed"
    for name in old:
        if name not in new:
            return f"--input {name} is not read any more"
    return "--input has its files in another order"


def _flag(name: str) -> str:
    names = {
        "keys": "json_keys",
        "splitter": "sentence_splitter",
        "stop_at_bad_line": "on_bad_line",
    }
    return "--" + names.get(name, name).replace("_", "-")


def _with_file(value: Any) -> Any:
    """A path with the sizes and times of the files there."""
    if not isinstance(value, str) or not Path(value).exists():
        return value
    path = Path(value)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = [(str(file), os.stat(file)) for file in files if file.is_file()]
    return [value, [[name, status.st_size, status.st_mtime_ns] for name, status in found]]
