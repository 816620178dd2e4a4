"""The flags of each kind of data, a file each.

``megatron/config/kinds/<name>.py`` holds one :class:`KindConfig`, whose fields are flags. What it
asks for is done by ``megatron/data/kinds/<name>``, imported by the runs that use it. A new kind of
data is these two; nothing lists them.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import ClassVar

DOCUMENTS = "documents"


class KindConfig:
    """Flags of a kind of data, and what they say of it before its module is imported.

    Attributes:
        files: what a corpora file calls files of this kind; None: it reads none.
        samples: what becomes of the files: ``documents``, of which every model makes its own
            samples, or samples that only the models take which name them.
        holds_text: whether a tokenizer can be learned from the files.
        idle: why the flags would change nothing in a run that does not use the kind.
        eval_text_key: key of the text in files for evaluation; None: as for training.
    """

    files: ClassVar[str | None] = None
    samples: ClassVar[str] = DOCUMENTS
    holds_text: ClassVar[bool] = False
    idle: ClassVar[str] = "nothing in this run asks for it"
    eval_text_key: str | None = None

    @property
    def reads_all(self) -> bool:
        """Whether flags say that all data paths name files of this kind."""
        return False

    @property
    def endings(self) -> tuple[str, ...]:
        """Ends of data paths that name files of this kind, unless they are prefixes of a .bin."""
        return ()

    @property
    def acts(self) -> bool:
        """Whether flags ask the kind to change samples or their order."""
        return False


@cache
def kind_classes() -> MappingProxyType[str, type[KindConfig]]:
    """The flags of all kinds by the kind's name, sorted: the sections of a saved configuration."""
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
    """The names of kinds that read files, by what a corpora file calls these."""
    return {cls.files: name for name, cls in kind_classes().items() if cls.files is not None}
