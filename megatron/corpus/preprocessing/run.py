"""One job from its sources to complete files in its working folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path

from megatron.corpus.preprocessing.bad_lines import BadLineReport
from megatron.corpus.preprocessing.blocks import Block, BlockReader
from megatron.corpus.preprocessing.cutting import BLOCK_BYTES
from megatron.corpus.preprocessing.description import Description
from megatron.corpus.preprocessing.encode import BlockCounts, EncodeConfig, Encoder
from megatron.corpus.preprocessing.job import Job
from megatron.corpus.preprocessing.pool import Output, Written, write_here, write_in_processes
from megatron.corpus.preprocessing.sources import Form, Source

SECONDS_BETWEEN_SAVES = 10.0
_UNITS = {Form.ARRAY: "item", Form.PARQUET: "row"}

Report = Callable[[int, int, int], None]
"""Called with the documents, the bytes of text and the bytes on disk that a block had."""


class JobRun:
    """Does what is left of a job."""

    def __init__(
        self,
        job: Job,
        sources: Sequence[Source],
        encoder: Encoder,
        workers: int,
        report: Report,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """With no `workers`, encodes in this process."""
        self._job, self._sources, self._encoder = job, sources, encoder
        self._workers, self._report, self._is_stopped = workers, report, is_stopped
        self._can_resume = all(source.path is not None for source in sources)
        self._bad = BadLineReport(stop=encoder.config.stop_at_bad_line)
        self._bad.merge(job.state.bad_lines, job.state.shown)
        self._bytes_before = [0]
        for source in sources:
            self._bytes_before.append(self._bytes_before[-1] + source.bytes_to_read)
        self._first_lines: dict[int, int] = {}

    def run(self) -> None:
        """Reads, encodes and writes until all sources are done.

        Raises:
            ValueError: a malformed record that stops the run, or a damaged file.
            OSError: the output cannot be written.
        """
        state, saved = self._job.state, time.monotonic()
        with closing(self._written(self._encoder.config)) as written:
            for block, counts in written:
                self._take(block, counts)
                if self._can_resume and time.monotonic() - saved >= SECONDS_BETWEEN_SAVES:
                    self._job.save()
                    saved = time.monotonic()
        state.source, state.cursor, state.records = len(self._sources), 0, 0
        self._job.finish()

    def _written(self, config: EncodeConfig) -> Generator[Written, None, None]:
        state = self._job.state
        reader = BlockReader(self._sources, config.keys, config.max_line_bytes, BLOCK_BYTES)
        blocks = reader.read(state.source, state.cursor)
        output = Output(
            self._job.token_paths, self._job.token_offsets, self._encoder.dtype.itemsize
        )
        if not self._workers:
            return write_here(blocks, self._encoder, output)
        return write_in_processes(blocks, config, output, self._workers, self._is_stopped)

    def _take(self, block: Block, counts: BlockCounts) -> None:
        state = self._job.state
        if block.source != state.source:
            state.source, state.records = block.source, 0
        if counts.bad_lines:
            first = self._first_line(block.source) + state.records
            self._bad.add(
                block.name,
                _UNITS.get(block.form, "line"),
                [line.shifted(first) for line in counts.bad_lines],
            )
            state.bad_lines, state.shown = dict(self._bad.by_reason), self._bad.shown
        bytes_read = self._bytes_before[block.source] + block.bytes_read
        documents, text_bytes = state.documents, sum(key.text_bytes for key in state.keys)
        self._job.add(counts)
        newly_read, state.bytes_read = bytes_read - state.bytes_read, bytes_read
        state.cursor, state.records = block.cursor, state.records + counts.records
        self._report(
            state.documents - documents,
            sum(key.text_bytes for key in state.keys) - text_bytes,
            newly_read,
        )

    def _first_line(self, number: int) -> int:
        """Lines of a file before what this partition reads of it."""
        if number not in self._first_lines:
            source = self._sources[number]
            assert source.path is not None or not source.start
            self._first_lines[number] = (
                lines_before(source.path, source.start) if source.path and source.start else 0
            )
        return self._first_lines[number]


def lines_before(path: Path, position: int) -> int:
    """Lines of a file that start before a position which is not its first byte."""
    lines, left = 1, position - 1
    with path.open("rb") as file:
        while left and (data := file.read(min(left, BLOCK_BYTES))):
            lines += data.count(b"\n")
            left -= len(data)
    return lines


def open_job(
    folder: Path, description: Description, encoder: Encoder, say: Callable[[str], None]
) -> Job:
    """A job, gone on with where it was interrupted or begun anew; tells which.

    Raises:
        ValueError: another process is at work there.
        OSError: the folder cannot be made or written to.
    """
    job = Job(folder, encoder.config.keys, encoder.dtype)
    try:
        job.open(description)
    except BaseException:  # an interrupt too must give up the lock
        job.close()
        raise
    if job.restarted is not None:
        say(f"{folder}: what an interrupted run did there is thrown away: {job.restarted}")
    elif job.state.is_complete:
        say(f"{folder}: an interrupted run did all of it: {job.state.documents:,} documents")
    elif job.has_journal:
        say(
            f"{folder}: goes on after the {job.state.documents:,} documents, from "
            f"{job.state.bytes_read / 1e6:,.1f} MB of input, of an interrupted run"
        )
    return job
