"""Filters and repairs by name, for corpora that need more than `cleanup` does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import ftfy

from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.corpus.collection.command import json_inputs, required
from megatron.corpus.collection.job import Job, Report, RunConfig, run
from megatron.corpus.collection.languages import language_finder
from megatron.corpus.collection.lines import Emit, Mapped, Record, map_records
from megatron.corpus.collection.workers import BatchStep
from megatron.corpus.preprocessing.inputs import LineBatch

FILTERS = ("remove_512", "remove_256_javascript", "remove_512_non_english")
REPAIRS = ("ftfy_fix_text", "general_cleaning")
_LINE_ENDS_AND_RUNS = re.compile(r"(?<=\w)\n+ *| {2,}")
_ENDINGS = re.compile(r"(\.jsonl?)?(\.gz|\.zst)?$")


@dataclass(frozen=True)
class FixConfig:
    """Filtering and repairing documents."""

    input_files: tuple[str, ...] = option((), aliases=("--input",))
    """JSON-lines files, globs or folders, plain or packed by gzip or zstd."""
    tasks: tuple[str, ...] = option(())
    """What to do: remove_512 (documents of fewer than 512 characters), remove_256_javascript
    (fewer than 256, and the word javascript), remove_512_non_english (fewer than 512, and another
    language than English), ftfy_fix_text, general_cleaning (runs of spaces, and line breaks inside
    sentences, become one space)."""
    output_path: str | None = option(None)
    """Folder for NAME_cleaned.json and NAME_filtered.json of each file NAME.json."""
    text_key: str = option("text")
    """Key of the text."""


@dataclass(frozen=True)
class FixStep:
    """Filters first, then repairs, whatever the order of the tasks."""

    tasks: tuple[str, ...]
    text_key: str

    def build(self) -> BatchStep:
        filters = {task: find for task, find in _filters(self.tasks).items() if task in self.tasks}

        def step(record: Record, counts: Counter[str]) -> Iterator[Emit]:
            found = text = record.fields[self.text_key]
            removed_by = next((task for task, find in filters.items() if find(text)), None)
            if removed_by:
                counts[f"left out: {removed_by}"] += 1
                yield 1, record.unchanged()
                return
            for task in REPAIRS:
                if task in self.tasks:
                    repaired = ftfy.fix_text(text) if task == "ftfy_fix_text" else tidied(text)
                    if repaired != text:
                        counts[f"texts changed: {task}"] += 1
                    text = repaired
            counts["documents written"] += 1
            same = text == found
            yield 0, record.unchanged() if same else record.replaced(**{self.text_key: text})

        def batch_step(batch: LineBatch) -> Mapped:
            return map_records(batch, (self.text_key,), step, outputs=2)

        return batch_step


def _filters(tasks: tuple[str, ...]) -> dict[str, Callable[[str], bool]]:
    """Name of a filter to whether it takes a text out."""
    language_of = language_finder() if "remove_512_non_english" in tasks else None
    return {
        "remove_512": lambda text: len(text) < 512,
        "remove_256_javascript": lambda text: len(text) < 256 and "javascript" in text.lower(),
        "remove_512_non_english": lambda text: (
            language_of is not None and len(text) < 512 and language_of(text) != "en"
        ),
    }


def tidied(text: str) -> str:
    """One space for each run of spaces, and for line breaks that follow a letter or digit."""
    return _LINE_ENDS_AND_RUNS.sub(" ", text)


def fix(config: FixConfig, running: RunConfig) -> Report:
    """Writes two files for each input: what stays, and what was filtered out.

    Raises:
        ConfigError: a flag is missing or a task unknown; two inputs of the same name.
        ValueError, OSError: see `job.run`.
    """
    required(input_files=config.input_files, tasks=config.tasks, output_path=config.output_path)
    assert config.output_path is not None
    known = (*FILTERS, *REPAIRS)
    for task in config.tasks:
        if task not in known:
            raise ConfigError(f"--tasks {task} is unknown; it is among {' '.join(known)}")
    inputs = json_inputs(config.input_files)
    outputs = []
    for path in inputs:
        ending = _ENDINGS.search(path.name)
        assert ending is not None
        stem = path.name[: ending.start()]
        outputs += [
            Path(config.output_path) / f"{stem}_{kind}{ending.group()}"
            for kind in ("cleaned", "filtered")
        ]
    step = FixStep(config.tasks, config.text_key)
    job = Job("cleanup_fix_dataset", inputs, outputs, step, 2, settings=asdict(step))
    return run(job, running)
