"""A planted bug: a change of one place of the source."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path


@dataclass(frozen=True)
class Planted:
    """A mistake, as a small patch.

    Attributes:
        name: unique in the catalogue.
        axis: the part of the layout or of a run that it is about. For those of ``cases.py`` the
            symbolic check looks for it in the runs there.
        kind: its class, such as ``missing sum``.
        file: the file, relative to ``megatron/``.
        old: text that is in the file exactly once.
        new: what replaces it.
        what: the mistake in one line.
        tests: tests that must catch it, as arguments of pytest, relative to ``tests/``; of axes
            that the symbolic check knows, those for what that check does not see.
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

    @property
    def patch(self) -> str:
        """A digest of the change and of what must catch it: evidence of another one is none."""
        content = "\0".join((self.file, self.old, self.new, *self.tests))
        return blake2b(content.encode(), digest_size=5).hexdigest()
