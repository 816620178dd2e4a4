"""The features: folders next to the core, each of which can add to a run.

A feature is a folder of ``megatron/features`` or ``megatron/apps`` whose ``feature.py`` has a
subclass of :class:`Feature` as ``FEATURE``. No list names them: a folder that is removed is a
feature less, and its flags go with it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar

from megatron.config.flags import Settings

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

    # The configuration of a run.

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        """The settings of a run before they are resolved, with what flags of the feature imply;
        ``run_of`` makes a run of others."""
        return settings

    def data_kind(self, section: str) -> Any:
        """The :class:`~megatron.data.pipeline.DataKind` whose flags are in a section."""
        raise AssertionError(f"{self} has no kind of data {section}")

    def family(self, name: str) -> Any:
        """The :class:`~megatron.families.family.Family` of that name."""
        raise AssertionError(f"{self} has no family {name}")

    # Hooks of processes, models, engines and trainings; see docs/design/structure.md.

    after: ClassVar[tuple[str, ...]] = ()
    """Names of features whose hooks are called before those of this one, where they exist."""
    training_flags: ClassVar[Sequence[type]] = ()
    """Classes of flags that an evaluation does not use."""
    json_sections: ClassVar[tuple[str, ...]] = ()
    """Sections of a DeepSpeed JSON that the feature reads instead of DeepSpeed: the setting of the
    same name is the text of the section."""

    def check_json(self, sections: Mapping[str, str]) -> None:
        """Raise ConfigError for wrong texts of :attr:`json_sections`, by name."""

    def start(self, settings: Settings, processes: int) -> int:
        """Called in each of the ``processes`` of a run before it resolves its settings: return
        their number, which may be another one where processes start again."""
        return processes

    def watch(self, config: Any) -> AbstractContextManager[Any] | None:
        """A context that watches a process of a run, a :class:`~megatron.run.process.Watch`; None
        for none."""
        return None

    def model(self, spec: Any, config: Any) -> Any:
        """The :class:`~megatron.model.spec.ModelSpec` of a run, from that of its family."""
        return spec

    def shape(self, shape: Any, config: Any) -> Any:
        """The :class:`~megatron.model.flops.TransformerShape` of a run's model."""
        return shape

    def check_device(self, config: Any, device: Any) -> None:
        """Raise ConfigError for a device that cannot do what the flags say, before the model is
        built."""

    def why_eager(self, config: Any, automatic: bool) -> str | None:
        """Why blocks are not compiled, to follow the value of ``--torch-compile``; ``automatic``:
        the value is ``auto``, and compiling has to repay. None for no reason."""
        return None

    def kernels(self, blocks: Sequence[Any], config: Any) -> None:
        """Set the :class:`~megatron.parallel.layers.LinearKernel` of layers of these blocks."""

    def kernel_states(
        self,
        blocks: Sequence[Any],
        names: Mapping[Any, str],
        config: Any,
        mesh: Any,
        partitioned: bool,
    ) -> Any:
        """The :class:`~megatron.parallel.layers.KernelStates` of those kernels, where the feature
        has set any; ``names``: of each parameter; ``partitioned``: whether processes have parts of
        the weights (ZeRO 3). None for none."""
        return None

    def stored_states(self, config: Any) -> Any:
        """The :class:`~megatron.engine.update.adam.StateStore` of the optimizer; None for
        float32."""
        return None

    def built(self, engine: Any) -> None:
        """Called with a :class:`~megatron.engine.train_engine.TrainEngine` that has just been
        built."""

    def load(self, engine: Any, source: Any, fresh: Sequence[str], continues: bool) -> Any:
        """Load the weights of ``source`` in the feature's own way, except the parameters ``fresh``,
        which it lacks. Return the source from which optimizer and random state are loaded; None to
        leave the weights to the engine."""
        return None

    def check_run(self, run: Any, mesh: Any, device: Any) -> None:
        """Raise ConfigError for a run, of training or evaluation, before its data are read."""

    def check_source(self, config: Any, source: Any) -> None:
        """Raise ConfigError where a run cannot start from the
        :class:`~megatron.training.resume.ResumeSource` that its flags name, or None."""

    def begin(self, context: Any) -> None:
        """Called with the :class:`~megatron.training.context.RunContext` before data are read."""

    def before_engine(self, context: Any) -> None:
        """Called when data, plan and source of the context exist."""

    def before_load(self, context: Any) -> None:
        """Called when its engine exists; may replace ``context.source``."""

    def ready(self, context: Any) -> None:
        """Called when everything in the context exists, to add callbacks to it."""

    def answer_ends(self, train: Any, tokenizer: Any, of_base: Sequence[int]) -> Any:
        """The tokens at which the examples of a data set end answers, a frozenset; ``of_base``:
        those of the model that training starts from. None where the feature cannot tell."""
        return None

    def extent(self, config: Any, plan: Any, sizes: Callable[[], Sequence[Any]]) -> Sequence[str]:
        """Lines at the start of a run about how much it trains; ``sizes``: of its data files."""
        return ()

    def missing_evaluation(self, config: Any, kinds: Sequence[str]) -> str | None:
        """An evaluation after the last step that is not among the ``kinds`` of rows in the metrics;
        None if all are there."""
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


@cache
def taking_part() -> tuple[Feature, ...]:
    """All features in the order in which the hooks of a run are called: sorted by name, but each
    behind those that it names in :attr:`Feature.after`."""
    known, ordered = features(), dict[str, Feature]()

    def add(name: str) -> None:
        if name in known and name not in ordered:
            for earlier in known[name].after:
                add(earlier)
            ordered[name] = known[name]

    for name in known:
        add(name)
    return tuple(ordered.values())
