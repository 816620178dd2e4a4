"""Retrieved neighbours of a GPT's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import KindConfig
from megatron.config.flags import POSITIVE, option


@dataclass(frozen=True)
class RetroDataConfig(KindConfig):
    """Retro: the neighbours of the samples."""

    retro_project_dir: str | None = option(None, aliases=("--retro-workdir",))
    """Folder of tools/retro/preprocess_data.py: database and neighbours. Its config.json says the
    run's data, tokenizer, sequence length, seed, batch size, number of samples and evaluations."""
    dataloader_type: str = option("single", choices=("single", "cyclic"))
    """single: samples are read in one pass, in Megatron's order. cyclic: those that have neighbours
    are read again, in the same order, for --retro-cyclic-train-iters."""
    retro_cyclic_train_iters: int | None = option(None, bounds=POSITIVE)
    """Iterations to train with --dataloader-type cyclic, in place of the project's number of
    samples."""
    retro_verify_neighbor_count: bool = option(True, off="--retro-no-verify-neighbor-count")
    """Train although the number of samples is not the one that has neighbours; those without
    neighbours read end-of-document tokens."""
    retro_return_doc_ids: bool = option(False)
    """Batches say the documents that their samples are from."""

    idle: ClassVar[str] = (
        "only a model with --retro-add-retriever (pretrain_retro.py) reads neighbours"
    )
