"""Where the data is and how samples are made of it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import option


@dataclass(frozen=True)
class DataConfig:
    """Data: where it is and how samples are made of it."""

    data_path: tuple[str, ...] = option(())
    """PREFIX of a PREFIX.bin/.idx pair, or WEIGHT PREFIX WEIGHT PREFIX ... to blend several."""
    train_data_path: tuple[str, ...] = option(())
    """Like --data-path, for training only; whole files, no split."""
    valid_data_path: tuple[str, ...] = option(())
    """Like --data-path, for validation only."""
    test_data_path: tuple[str, ...] = option(())
    """Like --data-path, for testing only."""
    split: str = option("969,30,1")
    """Shares of the documents of --data-path for training, validation, test."""
    data_cache_path: str | None = option(None, derived="index-cache beside the data")
    """Folder of the cached sample indices."""
    num_workers: int = option(2)
    """Processes that load data, per rank; 0 loads in the training process."""
    mock_data: bool = option(False)
    """Train on synthetic tokens; no data files are needed."""
    reset_position_ids: bool = option(False)
    """Restart positions after each end-of-document token."""
    reset_attention_mask: bool = option(False)
    """Keep attention within documents."""
    eod_mask_loss: bool = option(False)
    """Take no loss on positions whose input is the end-of-document token."""
