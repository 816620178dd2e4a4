"""What preprocessing wrote."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.corpus.preprocessing.encode import DocumentCounts


@dataclass(frozen=True)
class KeySummary:
    """What was written for one key."""

    prefix: str
    """Of the .bin and .idx."""
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the texts."""
    empty: int = 0
    """Texts without a token, left out."""

    def plus(self, part: DocumentCounts) -> KeySummary:
        """After the documents of a block have been written, too."""
        return KeySummary(
            self.prefix,
            self.documents + len(part.sequences_per_document),
            self.sequences + len(part.sequence_lengths),
            self.tokens + part.tokens,
            self.text_bytes + part.text_bytes,
            self.empty + part.empty,
        )

    def joined(self, other: KeySummary) -> KeySummary:
        """Both together, under this one's prefix."""
        return KeySummary(
            self.prefix,
            self.documents + other.documents,
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.text_bytes + other.text_bytes,
            self.empty + other.empty,
        )


@dataclass(frozen=True)
class Summary:
    """What preprocessing did."""

    keys: dict[str, KeySummary]
    bad_lines: dict[str, int]
    """Lines left out, by reason."""
    seconds: float
    """In this run, without what an interrupted one had done before."""
    parts_left: str | None = None
    """With --partition-rank: what is still to do before there is an output."""
