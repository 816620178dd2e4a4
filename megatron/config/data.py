"""Where the data is and how samples are made of it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import NOT_NEGATIVE, option
from megatron.config.resolver import ConfigResolver


@dataclass(frozen=True)
class DataConfig:
    """Data: where it is and how samples are made of it."""

    data_path: tuple[str, ...] = option(())
    """PREFIX of a PREFIX.bin/.idx pair, or WEIGHT PREFIX WEIGHT PREFIX ... to blend several.
    PREFIX@FIRST:LAST takes its documents from one fraction to another, such as books@0:0.95; a
    path that ends in .json or .jsonl is text, tokenized as it is read."""
    data_args_path: str | None = option(None)
    """File with what --data-path would be given."""
    train_data_path: tuple[str, ...] = option(())
    """Like --data-path, for training only; whole files, no split."""
    valid_data_path: tuple[str, ...] = option(())
    """Like --data-path, for validation only."""
    test_data_path: tuple[str, ...] = option(())
    """Like --data-path, for testing only."""
    per_split_data_args_path: str | None = option(None)
    """JSON file {"train": [...], "valid": [...], "test": [...]}: what --train-data-path and the
    like would be given."""
    train_weighted_split_paths: tuple[str, ...] = option(())
    """'NAME: WEIGHT FIRST:LAST PREFIX, WEIGHT FIRST:LAST PREFIX, ...': a blend of ranges of
    documents."""
    valid_weighted_split_paths: tuple[str, ...] = option(())
    """The same for validation; several names are evaluated each by itself."""
    test_weighted_split_paths: tuple[str, ...] = option(())
    """The same for testing."""
    train_weighted_split_paths_path: str | None = option(None)
    """File with what --train-weighted-split-paths would be given."""
    valid_weighted_split_paths_path: str | None = option(None)
    """File with what --valid-weighted-split-paths would be given."""
    test_weighted_split_paths_path: str | None = option(None)
    """File with what --test-weighted-split-paths would be given."""
    train_data: tuple[str, ...] = option(())
    """NAME NAME ... or WEIGHT NAME WEIGHT NAME ... of the corpora file; without --valid-data and
    --test-data its documents are shared out by --split."""
    valid_data: tuple[str, ...] = option(())
    """Like --train-data, for validation."""
    test_data: tuple[str, ...] = option(())
    """Like --train-data, for testing."""
    corpora_file: str = option("corpora.json")
    """JSON file that says of what files the names of --train-data are made."""
    split: str = option("969,30,1")
    """Shares of the documents of --data-path for training, validation, test."""
    skip_samples: tuple[str, ...] = option(())
    """FIRST:LAST ...: numbers of training samples that are passed over; LAST itself is not."""
    data_cache_path: str | None = option(None, derived="index-cache beside the data")
    """Folder of the cached sample indices."""
    object_storage_cache_path: str | None = option(None, derived="object-storage-cache")
    """Folder that keeps what was read of data paths such as s3://bucket/prefix."""
    num_workers: int = option(2, bounds=NOT_NEGATIVE, role="course")
    """Processes that load data, per rank; 0 loads in the training process."""
    mock_data: bool = option(False)
    """Train on synthetic tokens; no data files are needed."""
    reset_position_ids: bool = option(False)
    """Restart positions after each end-of-document token."""
    reset_attention_mask: bool = option(False)
    """Keep attention within documents."""
    eod_mask_loss: bool = option(False)
    """Take no loss on positions whose input is the end-of-document token."""

    def check(self, resolver: ConfigResolver) -> None:
        """Refuses data files beside --mock-data.

        Raises:
            ConfigError: naming the flags.
        """
        parts = ("train", "valid", "test")
        named = [
            resolver.flag(name)
            for name in (
                *("data_path", "data_args_path", "per_split_data_args_path"),
                *(f"{part}_data" for part in parts),
                *(f"{part}_data_path" for part in parts),
                *(f"{part}_weighted_split_paths" for part in parts),
                *(f"{part}_weighted_split_paths_path" for part in parts),
            )
            if getattr(self, name)
        ]
        resolver.check(
            not (self.mock_data and named),
            f"--mock-data contradicts {', '.join(named)}: give one of them",
        )
