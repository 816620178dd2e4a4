"""Flags of fill-in-the-middle, which cuts documents in three and moves the middle to the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import KindConfig
from megatron.config.flags import ConfigError, option


@dataclass(frozen=True)
class FimConfig(KindConfig):
    """Fill in the middle: rates, order, and special tokens."""

    fim_data: bool = option(False)
    """Fill-in-the-middle: cut documents into prefix, middle and suffix at random characters, and
    move the middle to the end."""
    fim_rate: float = option(0.5)
    """Fraction of the documents that are cut."""
    fim_spm_rate: float = option(0.5)
    """Fraction of the cut documents in the order suffix, prefix, middle (SPM); the others have the
    order prefix, suffix, middle (PSM)."""
    fim_split_sample: str | None = option(None)
    """Token that separates a document into fragments, such as the files of a repository; each
    fragment is cut separately."""
    fim_fragment_rate: float | None = option(None, derived="--fim-rate")
    """Fraction of the fragments that are cut, within the documents that --fim-rate selects."""
    fim_no_prefix: str | None = option(None)
    """Do not cut documents and fragments that begin with this text."""
    fim_prefix_token: str = option("<fim_prefix>")
    """Token before the prefix."""
    fim_middle_token: str = option("<fim_middle>")
    """Token before the middle."""
    fim_suffix_token: str = option("<fim_suffix>")
    """Token before the suffix."""
    fim_pad_token: str = option("<fim_pad>")
    """Token that pads samples that have become shorter. It does not count in the loss."""
    fim_eod_token: str | None = option(None, derived="the tokenizer's end of document")
    """Token at the end of documents."""

    streams: ClassVar[frozenset[str]] = frozenset({"fim_data"})
    idle: ClassVar[str] = "it needs --fim-data"

    @property
    def acts(self) -> bool:
        return self.fim_data

    @property
    def moves_text(self) -> str | None:
        return "--fim-data" if self.fim_data else None

    def check(self) -> None:
        """Raise ConfigError if a rate is outside of [0, 1], or a fragment rate has no fragments."""
        for flag, rate in (
            ("--fim-rate", self.fim_rate),
            ("--fim-spm-rate", self.fim_spm_rate),
            ("--fim-fragment-rate", self.fim_fragment_rate),
        ):
            if rate is not None and not 0 <= rate <= 1:
                raise ConfigError(f"{flag} {rate} must be in [0, 1]")
        if self.fim_fragment_rate is not None and self.fim_split_sample is None:
            raise ConfigError(
                f"--fim-fragment-rate {self.fim_fragment_rate} needs --fim-split-sample: the token "
                "between fragments"
            )
