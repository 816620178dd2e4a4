"""Fill-in-the-middle training: documents cut in three, the middle moved to the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.flags import ConfigError, option
from megatron.config.kinds import KindConfig


@dataclass(frozen=True)
class FimConfig(KindConfig):
    """Fill in the middle: how often, in which order, and the tokens between the parts."""

    fim_data: bool = option(False)
    """Cut documents into prefix, middle and suffix at random characters, and move the middle to
    the end, so that the model learns to fill gaps."""
    fim_rate: float = option(0.5)
    """Share of the documents that are cut."""
    fim_spm_rate: float = option(0.5)
    """Share of these that have the order suffix, prefix, middle; the others have prefix, suffix,
    middle."""
    fim_split_sample: str | None = option(None)
    """Token at which a document falls into fragments (the files of a repository); each is cut by
    itself."""
    fim_fragment_rate: float | None = option(None, derived="--fim-rate")
    """Share of the fragments that are cut, in the documents that --fim-rate chooses."""
    fim_no_prefix: str | None = option(None)
    """Documents and fragments that begin with this text stay as they are."""
    fim_prefix_token: str = option("<fim_prefix>")
    """Token before the prefix."""
    fim_middle_token: str = option("<fim_middle>")
    """Token before the middle."""
    fim_suffix_token: str = option("<fim_suffix>")
    """Token before the suffix."""
    fim_pad_token: str = option("<fim_pad>")
    """Token that fills up a sample which has become shorter; it does not count in the loss."""
    fim_eod_token: str | None = option(None, derived="the tokenizer's end of document")
    """Token that ends documents."""

    idle: ClassVar[str] = "it goes with --fim-data"

    @property
    def acts(self) -> bool:
        """See `KindConfig.acts`."""
        return self.fim_data

    def check(self) -> None:
        """Finds rates that are none.

        Raises:
            ConfigError: naming flag and value.
        """
        for flag, rate in (
            ("--fim-rate", self.fim_rate),
            ("--fim-spm-rate", self.fim_spm_rate),
            ("--fim-fragment-rate", self.fim_fragment_rate),
        ):
            if rate is not None and not 0 <= rate <= 1:
                raise ConfigError(f"{flag} {rate} must be from 0 to 1")
        if self.fim_fragment_rate is not None and self.fim_split_sample is None:
            raise ConfigError(
                f"--fim-fragment-rate {self.fim_fragment_rate} needs --fim-split-sample: the token "
                "between fragments"
            )
