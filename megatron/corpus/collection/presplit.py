"""Documents whose text is sentences on lines of their own, as --presplit-sentences reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.config.flags import option
from megatron.corpus.collection.command import json_inputs, required
from megatron.corpus.collection.job import Job, Report, RunConfig, run
from megatron.corpus.collection.lines import Emit, Mapped, Record, map_records
from megatron.corpus.collection.workers import BatchStep
from megatron.corpus.preprocessing.inputs import LineBatch
from megatron.data.sentences import available_splitter, build_splitter


@dataclass(frozen=True)
class PresplitConfig:
    """Splitting documents into sentences."""

    input: tuple[str, ...] = option(())
    """JSON-lines files, globs or folders, plain or packed by gzip or zstd."""
    output: str | None = option(None)
    """The JSON-lines file to write; .gz or .zst at its end packs it."""
    text_key: str = option("text")
    """Key of the text."""
    sentence_splitter: str = option("auto", choices=("auto", "punkt", "rules"))
    """What finds the sentences: NLTK's punkt, a few rules, or punkt where its data is at hand."""
    lang: str = option("english")
    """Language of the text."""


@dataclass(frozen=True)
class PresplitStep:
    """Puts a line feed after each sentence, and only there."""

    text_key: str
    splitter: str
    lang: str

    def build(self) -> BatchStep:
        split = build_splitter(self.splitter, self.lang, keep_newlines=False)

        def step(record: Record, counts: Counter[str]) -> Iterator[Emit]:
            # A line break inside a sentence would read as its end.
            sentences = [" ".join(s.split("\n")) for s in split(record.fields[self.text_key])]
            if sentences:
                counts["sentences written"] += len(sentences)
                yield 0, record.replaced(**{self.text_key: "\n".join(sentences)})
            else:
                counts["empty documents left out"] += 1

        def batch_step(batch: LineBatch) -> Mapped:
            return map_records(batch, (self.text_key,), step, outputs=1)

        return batch_step


def presplit(config: PresplitConfig, running: RunConfig) -> Report:
    """Writes every document of the inputs with its sentences on lines.

    Raises:
        ConfigError: a flag is missing, or punkt is asked for and not there.
        ValueError, OSError: see `job.run`.
    """
    required(input=config.input, output=config.output)
    assert config.output is not None
    kind = config.sentence_splitter
    step = PresplitStep(
        config.text_key, available_splitter(config.lang) if kind == "auto" else kind, config.lang
    )
    build_splitter(step.splitter, step.lang, keep_newlines=False)
    job = Job(
        "presplit_sentences_json",
        json_inputs(config.input),
        [Path(config.output)],
        step,
        settings=asdict(step),
    )
    return run(job, running)
