"""The features: folders next to the core, each of which can add to a run.

A feature is a folder of ``megatron/features`` or ``megatron/apps`` whose ``feature.py`` has a
subclass of :class:`Feature` as ``FEATURE``. No list names them: a folder that is removed is a
feature less, and its flags go with it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar

FOLDERS = ("megatron.features", "megatron.apps")
"""Where features are. This is the only place of the core that names them."""


class Feature:
    """What a folder adds to a run.

    Hooks have defaults that add nothing. They import the folder's other modules when they are
    called, so that a run pays for the features that it uses.

    Attributes:
        sections: the class of flags of each section of a saved configuration.
        families: names of the model families that :meth:`family` returns.
    """

    sections: ClassVar[Mapping[str, type]] = {}
    families: ClassVar[tuple[str, ...]] = ()

    def data_kind(self, section: str) -> Any:
        """The :class:`~megatron.data.pipeline.DataKind` whose flags are in a section."""
        raise AssertionError(f"{self} has no kind of data {section}")

    def family(self, name: str) -> Any:
        """The :class:`~megatron.families.family.Family` of that name."""
        raise AssertionError(f"{self} has no family {name}")

    def writers(
        self, logging: Any, configuration: Mapping[str, Any], iteration: int, samples: int
    ) -> Sequence[Any]:
        """Each :class:`~megatron.training.writers.RunWriter` of the main process for metrics, next
        to the JSON lines; ``iteration`` and ``samples`` are those before its first row."""
        return ()

    def step_numbers(self, config: Any, plan: Any) -> Any:
        """Numbers of single steps, which every rank measures, a
        :class:`~megatron.training.report.StepNumbers`; None for none."""
        return None


@cache
def features() -> Mapping[str, Feature]:
    """All features by the name of their folder, sorted."""
    found = {}
    for parent in FOLDERS:
        if find_spec(parent) is None:
            continue
        for module in pkgutil.iter_modules(import_module(parent).__path__):
            name = f"{parent}.{module.name}.feature"
            if module.ispkg and find_spec(name) is not None:
                found[module.name] = import_module(name).FEATURE
    return MappingProxyType(dict(sorted(found.items())))
