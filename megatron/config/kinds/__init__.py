"""The flags of each kind of data, a file per kind.

``megatron/config/kinds/<name>.py`` has one :class:`KindConfig`, whose fields are flags, and
``megatron/data/kinds/<name>`` implements the kind; only runs that use it import it. A new kind of
data consists of these two; nothing lists them.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import ClassVar

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
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return MappingProxyType({name: _flags_in(f"{__name__}.{name}") for name in names})


def _flags_in(name: str) -> type[KindConfig]:
    module = import_module(name)
    (found,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, KindConfig) and value.__module__ == name
    )
    return found


def file_kinds() -> dict[str, str]:
    """The kinds that read files, by their name in a corpora file."""
    return {cls.files: name for name, cls in kind_classes().items() if cls.files is not None}
