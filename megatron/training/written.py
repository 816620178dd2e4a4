"""Texts that a model in training wrote, for people who want to see what it has learnt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_SHOWN = 60


class WrittenText(NamedTuple):
    """What the model wrote after a prompt, and what stands there in the data ("" if nothing does);
    ``ended`` says whether it came to an end by itself."""

    prompt: str
    answer: str
    reference: str
    ended: bool


@dataclass(frozen=True)
class WrittenTexts:
    """The texts of one moment, after ``iteration`` steps."""

    iteration: int
    texts: tuple[WrittenText, ...]

    def line(self) -> str:
        """For the console: the first text, with line breaks as \\n, shortened. The metrics have all
        of them."""
        text = self.texts[0]
        return (
            f"sample 1 of {len(self.texts)} at iteration {self.iteration} | "
            f"prompt: {_short(text.prompt, at_end=True)} | answer: {_short(text.answer)}"
            + ("" if text.ended else " (not ended)")
        )


def _short(text: str, at_end: bool = False) -> str:
    """A text in one line; of a long one its beginning, or ``at_end`` its end."""
    if len(text) > _SHOWN:
        text = f"...{text[-_SHOWN:]}" if at_end else f"{text[:_SHOWN]}..."
    return repr(text)
