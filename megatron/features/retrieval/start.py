"""Initialisation of a retriever's encoders from a BERT checkpoint, in any format."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import differences
from megatron.checkpoint.source import FoundCheckpoint, Source, locate_checkpoint, nothing_at
from megatron.config import ModelConfig
from megatron.features.masked.bert import HEAD_PARTS
from megatron.features.retrieval.flags import BiencoderConfig
from megatron.features.retrieval.layers import CONTEXT, QUERY, SHARED
from megatron.formats.derived import RenamedSource
from megatron.training.resume import ResumeSource

BERT = "bert"


class TowerSource(RenamedSource):
    """Checkpoint source that presents a BERT as the encoders of a bi-encoder. Each encoder gets all
    of the BERT's weights except the heads."""

    title = "BERT"

    def __init__(self, bert: Source, wanted: ModelConfig) -> None:
        """Create the source. Raises CheckpointError if the BERT's architecture is not
        ``wanted``."""
        super().__init__(bert.folder)
        self.original, part = bert, wanted.part(BiencoderConfig)
        differing = differences(_encoder(bert.model), _encoder(wanted))
        if differing:
            raise CheckpointError(
                f"--bert-load {bert.folder} has a different architecture: {'; '.join(differing)}"
            )
        # As for any other family, loading a "BERT" initialises what it lacks: the projection.
        family = BERT if part.biencoder_projection_dim else wanted.family
        self.model = dataclasses.replace(wanted, family=family)
        self.tokenizer = bert.tokenizer
        shared = part.biencoder_shared_query_context_model
        self._towers = (SHARED,) if shared else (QUERY, CONTEXT)
        self._names = [name for name in bert.names() if not name.startswith(HEAD_PARTS)]
        self.notes = (*bert.notes, f"{' and '.join(self._towers)} start from {bert.folder}")

    def names(self) -> Sequence[str]:
        return [f"{tower}.{name}" for tower in self._towers for name in self._names]

    def original_name(self, name: str) -> str:
        return name.partition(".")[2]


@dataclasses.dataclass(frozen=True)
class _Towers:
    """Checkpoint format of a :class:`TowerSource`, as `FoundCheckpoint` expects it."""

    bert: FoundCheckpoint
    wanted: ModelConfig
    title: str = TowerSource.title
    on_base: bool = False

    def __call__(self, folder: Path) -> TowerSource:
        return TowerSource(self.bert.open(verify=False), self.wanted)

    def family(self, folder: Path) -> str:
        return self.wanted.family

    def verify(self, folder: Path, share: int = 0, shares: int = 1) -> None:
        self.bert.verify(share, shares)


def towers_of(path: str, wanted: ModelConfig) -> ResumeSource:
    """Return the ``--bert-load`` checkpoint as a source for a bi-encoder. Raises CheckpointError if
    it does not exist, or is not of a BERT."""
    flag = f"--bert-load {path}"
    checkpoint = locate_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{flag}: {nothing_at(path)}; name the folder of a BERT's checkpoint")
    if checkpoint.family != BERT:
        raise CheckpointError(
            f"{flag} is a model of the family {checkpoint.family}, and retrievers start from a "
            "BERT; name one, or continue from a retriever by --load or --pretrained-checkpoint"
        )
    form = cast(type[Source], _Towers(checkpoint, wanted))
    return ResumeSource(FoundCheckpoint(form, checkpoint.folder), flag, continues=False)


def _encoder(model: ModelConfig) -> ModelConfig:
    """Return a model configuration without its heads and its bi-encoder options."""
    parts = tuple(
        BiencoderConfig() if isinstance(part, BiencoderConfig) else part for part in model.parts
    )
    return dataclasses.replace(model, head="span", num_labels=None, label_names=(), parts=parts)
