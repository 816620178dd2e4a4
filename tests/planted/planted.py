"""A planted bug: a change of one place of the source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Planted:
    """A mistake, as a small patch.

    Attributes:
        name: unique in the catalogue.
        axis: the part of the layout that it is about, which names the runs that should show it.
        kind: its class, such as ``missing sum``.
        file: the file, relative to ``megatron/``.
        old: text that is in the file exactly once.
        new: what replaces it.
        what: the mistake in one line.
        tests: further tests that should catch it, as arguments of pytest.
    """

    name: str
    axis: str
    kind: str
    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...] = ()

    def applied(self, root: Path) -> str:
        """The text of its file with the mistake in it. Raises ValueError if the patch does not fit
        the source any more."""
        text = (root / "megatron" / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: its old text is {count} times in megatron/{self.file}")
        return text.replace(self.old, self.new)
