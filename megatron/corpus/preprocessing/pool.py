"""Encodes blocks and writes their tokens, in several processes, in the order of the input.

Tokens never come here. A worker that has encoded a block tells how many tokens it has; as soon as
all blocks before it are counted, it is told from which byte of the files on to write them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from megatron.corpus.preprocessing.blocks import Block
from megatron.corpus.preprocessing.encode import BlockCounts, EncodeConfig, Encoder
from megatron.corpus.preprocessing.token_file import TokenFiles
from megatron.util.processes import Worker

_BLOCKS_PER_WORKER = 4
"""Blocks under way at a time, so that a worker need not wait for one that is slower."""
_SECONDS_BETWEEN_LOOKS = 0.5

Offsets = list[int]
"""Byte of the token file of each key."""
Written = tuple[Block, BlockCounts]


@dataclass(frozen=True)
class Output:
    """Where tokens go."""

    paths: Sequence[Path]
    """A file for each key."""
    offsets: Sequence[int]
    """Byte of each from which on to write."""
    itemsize: int
    """Bytes of a token."""

    def behind(self, offsets: Offsets, counts: BlockCounts) -> Offsets:
        """Where the next block goes."""
        tokens = [documents.tokens for documents in counts.documents]
        return [o + t * self.itemsize for o, t in zip(offsets, tokens, strict=True)]


def write_here(
    blocks: Iterator[Block], encoder: Encoder, output: Output
) -> Generator[Written, None, None]:
    """Encodes and writes in this process; yields each block when its tokens are written."""
    files, offsets = TokenFiles(output.paths), list(output.offsets)
    try:
        for block in blocks:
            encoded = encoder(block)
            files.write(offsets, encoded.tokens)
            offsets = output.behind(offsets, encoded.counts)
            yield block, encoded.counts
    finally:
        files.close()


def write_in_processes(
    blocks: Iterator[Block],
    config: EncodeConfig,
    output: Output,
    workers: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Generator[Written, None, None]:
    """The same in several processes, in the same order; a bounded number of blocks is under way.

    Raises:
        ChildProcessError: a worker died.
        InterruptedError: `is_stopped` says so.
    """
    processes: list[_Worker] = []
    try:
        for _ in range(workers):
            processes.append(_Worker(config, output.paths))
        yield from _Turns(blocks, output, processes, is_stopped).run()
    finally:
        for process in processes:
            process.stop()


@dataclass
class _Order:
    """What a worker is to do: write what it holds, then encode a block."""

    offsets: dict[int, Offsets]
    """By the number of the block."""
    block: tuple[int, Block] | None = None


@dataclass
class _Answer:
    """What a worker has done."""

    written: list[int]
    encoded: tuple[int, BlockCounts] | None = None


class _Turns:
    """Hands blocks out, says where their tokens go, and gives them back in order."""

    def __init__(
        self,
        blocks: Iterator[Block],
        output: Output,
        processes: Sequence[_Worker],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._blocks, self._output, self._processes = blocks, output, processes
        self._is_stopped = is_stopped
        self._limit = _BLOCKS_PER_WORKER * len(processes)
        self._under_way: deque[tuple[int, Block]] = deque()
        self._next = 0  # number of the next block to hand out
        self._next_placed = 0  # number of the next block that gets its offsets
        self._offsets = list(output.offsets)
        self._holders: dict[int, _Worker] = {}
        self._counts: dict[int, BlockCounts] = {}
        self._written: set[int] = set()
        self._failure: Exception | None = None
        self._is_exhausted = False

    def run(self) -> Generator[Written, None, None]:
        while self._hand_out():
            busy = {worker.pipe: worker for worker in self._processes if worker.is_busy}
            ready = wait(list(busy), timeout=_SECONDS_BETWEEN_LOOKS)
            if self._is_stopped():
                raise InterruptedError("another partition has failed")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._take(busy[pipe], busy[pipe].take())
            self._place()
            while self._under_way and self._under_way[0][0] in self._written:
                number, block = self._under_way.popleft()
                self._written.remove(number)
                yield block, self._counts.pop(number)
        if self._failure is not None:
            raise self._failure

    def _hand_out(self) -> bool:
        """Gives idle workers something to do; whether one has."""
        for worker in self._processes:
            if worker.is_busy:
                continue
            block = self._next_block()
            if block is not None or worker.offsets:
                worker.hand(block)
        return any(worker.is_busy for worker in self._processes)

    def _next_block(self) -> tuple[int, Block] | None:
        if self._is_exhausted or len(self._under_way) >= self._limit:
            return None
        try:
            block = next(self._blocks, None)
        except Exception as error:  # raised when all blocks before have been looked at
            self._failure, block = error, None
        if block is None:
            self._is_exhausted = True
            return None
        self._under_way.append((self._next, block))
        self._next += 1
        return self._under_way[-1]

    def _take(self, worker: _Worker, answer: _Answer) -> None:
        self._written.update(answer.written)
        if answer.encoded is not None:
            number, counts = answer.encoded
            self._counts[number], self._holders[number] = counts, worker

    def _place(self) -> None:
        while worker := self._holders.pop(self._next_placed, None):
            worker.offsets[self._next_placed] = self._offsets
            counts = self._counts[self._next_placed]
            self._offsets = self._output.behind(self._offsets, counts)
            self._next_placed += 1


class _Worker(Worker[_Order, _Answer]):
    """A process that encodes and writes."""

    def __init__(self, config: EncodeConfig, paths: Sequence[Path]) -> None:
        super().__init__(_Desk(config, paths).open)
        self.is_busy = False
        self.offsets: dict[int, Offsets] = {}
        """Where the blocks go that it holds, as far as that is known."""

    def hand(self, block: tuple[int, Block] | None) -> None:
        """Has it write what can be written, and encode a block; raises as `send`."""
        self.send(_Order(self.offsets, block))
        self.is_busy, self.offsets = True, {}

    def take(self) -> _Answer:
        """Its answer; raises as `receive`."""
        answer = self.receive()
        self.is_busy = False
        return answer


@dataclass
class _Desk:
    """What a worker process works with."""

    config: EncodeConfig
    paths: Sequence[Path]
    held: dict[int, list] = field(default_factory=dict)
    """Tokens of the blocks that are not written yet."""

    def open(self) -> Callable[[_Order], _Answer]:
        """Loads the tokenizer and opens the files."""
        self.encoder, self.files = Encoder(self.config), TokenFiles(self.paths)
        return self.follow

    def follow(self, order: _Order) -> _Answer:
        """Writes, then encodes."""
        for number, offsets in order.offsets.items():
            self.files.write(offsets, self.held.pop(number))
        answer = _Answer(list(order.offsets))
        if order.block is not None:
            number, block = order.block
            encoded = self.encoder(block)
            self.held[number] = encoded.tokens
            answer.encoded = number, encoded.counts
        return answer
