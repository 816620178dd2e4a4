"""Saves checkpoints in the memory of the nodes, in the background, with copies on other nodes.

Every node has a folder of checkpoints in this project's format. It has the files of its own ranks
and copies of those of other nodes; index, manifest and the other JSON files are complete on each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.files import CheckpointError, Facts
from megatron.checkpoint.writer import PROCESS
from megatron.engine.deepspeed_json import Json
from megatron.engine.saving import CheckpointWriter, SaveJob
from megatron.engine.train_engine import TrainEngine
from megatron.features.resilience.file_transfer import FileTransfer, exchange
from megatron.features.resilience.node_memory.node_folders import NodeFolders, free_bytes

_SMALL_FILES_BYTES = 2**24
"""For index, configuration and tokenizer of a checkpoint, roughly."""


class NodeWriter(CheckpointWriter):
    """Writes the checkpoints of a run to the folders of its nodes. ``factor`` nodes have what each
    rank saves, as far as there are so many. Whenever processes or nodes end, those that are left
    have this checkpoint or the one before it, which is deleted when the new one is whole on all."""

    def __init__(
        self,
        engine: TrainEngine,
        content: Json,
        save_tokenizer: Callable[[Path], None],
        data: Sequence[Json],
        folders: NodeFolders,
        factor: int,
    ) -> None:
        options = replace(
            engine.config.checkpoint,
            save=str(folders.folder),
            async_save=True,
            save_universal=False,
            keep_last=1,
            keep_every=None,
        )
        super().__init__(engine, content, save_tokenizer, data, options, main=folders.leads)
        self.folders, self.factor = folders, factor
        # Of the background thread; those of training and of the start are others.
        self._in_thread = replace(folders, group=self._group)

    def check(self, job: SaveJob) -> None:
        """Raises CheckpointError if the node has no room for its files and the copies."""
        own = sum(each.nbytes for part in job.slices.tensors.values() for each in part.values())
        sizes, nodes = self._in_thread.gather(own), self.folders
        kept = [n for n in range(len(nodes.nodes)) if self._keeps(n)]
        needed = _SMALL_FILES_BYTES + sum(sizes[rank] for n in kept for rank in nodes.nodes[n])
        free = free_bytes(self.folder)
        if needed > free:
            raise CheckpointError(
                f"{self.folder} needs {needed / 1e6:,.0f} MB for a checkpoint beside the one "
                f"before it, and {free / 1e6:,.0f} MB are free; see --replication-factor "
                f"{self.factor}, or leave out --non-persistent-save-interval"
            )

    def write(self, job: SaveJob) -> None:
        super().write(job)
        self._together(lambda: self._copy_to_others(job))

    def _keeps(self, node: int) -> bool:
        """Whether this rank's node keeps what another node saves, or it is its own."""
        own = self.folders.node
        return node == own or own in self.folders.copies_of(node, self.factor)

    def _copy_to_others(self, job: SaveJob) -> None:
        """Gives every node the lists of all ranks, and the files that it keeps copies of."""
        folders, rank = self._in_thread, self.folders.rank
        texts = folders.gather((job.folder / PROCESS.format(rank)).read_text())
        wanted = [
            transfer
            for source, text in enumerate(texts)
            for node in folders.copies_of(folders.node_of(source), self.factor)
            for transfer in transfers(
                source, _counterpart(folders, source, node), json.loads(text)["files"]
            )
        ]
        failed = exchange(
            wanted,
            rank,
            folders.group,
            sent=lambda each: job.folder / each.name,
            received=lambda each: job.folder / each.name,
        )
        if failed:
            raise CheckpointError(failed[0][1])
        if folders.leads:
            for source, text in enumerate(texts):
                if source not in folders.members:
                    (job.folder / PROCESS.format(source)).write_text(text)


def transfers(source: int, target: int, files: Mapping[str, Facts]) -> Iterable[FileTransfer]:
    """What brings files, by their entries in a manifest, from one rank to another."""
    for name, facts in files.items():
        yield FileTransfer(source, target, name, facts["bytes"], facts["sha256"])


def _counterpart(folders: NodeFolders, source: int, node: int) -> int:
    """The rank of a node that receives what a rank of another sends, so that all have a share."""
    place = folders.nodes[folders.node_of(source)].index(source)
    targets = folders.nodes[node]
    return targets[place % len(targets)]
