"""The flags of kinds of data.

A feature with a kind of data has a subclass of :class:`KindConfig`, whose fields are flags, among
its sections; ``data_kind`` returns the implementation, which only runs that use it import.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import ClassVar

from megatron.config.features import features

DOCUMENTS = "documents"


class KindConfig:
    """Flags of a kind of data, and what is known of it before its module is imported.

    Attributes:
        files: the kind's name in a corpora file; None if it reads no files.
        samples: ``documents``, from which every model makes its own samples, or the name of samples
            for the models that accept them.
        shares: flags of other kinds that this one depends on, too.
        idle: why the flags change nothing in a run that does not use the kind.
    """

    files: ClassVar[str | None] = None
    samples: ClassVar[str] = DOCUMENTS
    holds_text: ClassVar[bool] = False
    shares: ClassVar[frozenset[str]] = frozenset()
    idle: ClassVar[str] = "nothing in this run uses it"
    eval_text_key: str | None = None

    @property
    def reads_all(self) -> bool:
        """Whether the flags declare all data paths to be files of this kind."""
        return False

    @property
    def endings(self) -> tuple[str, ...]:
        """Endings of data paths that are files of this kind, unless they are prefixes of a .bin."""
        return ()

    @property
    def acts(self) -> bool:
        """Whether the kind changes samples or their order in this run."""
        return False


@cache
def kind_classes() -> MappingProxyType[str, type[KindConfig]]:
    """The flags of all kinds by name, sorted: the sections of a saved configuration."""
    sections = [s for feature in features().values() for s in feature.sections.items()]
    return MappingProxyType(
        {name: cls for name, cls in sorted(sections) if issubclass(cls, KindConfig)}
    )


def file_kinds() -> dict[str, str]:
    """The kinds that read files, by their name in a corpora file."""
    return {cls.files: name for name, cls in kind_classes().items() if cls.files is not None}
