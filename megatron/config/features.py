"""Features: folders outside the core, each of which can extend a run through hooks.

A feature is a folder of ``megatron/features`` or ``megatron/apps`` whose ``feature.py`` defines a
subclass of :class:`Feature` as ``FEATURE``. Features are discovered, not listed: removing a folder
removes the feature and its flags.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar

from megatron.config.flags import ConfigResolver, Settings
from megatron.config.sections import DOCUMENTS, PACKED, FlagPart, FlagSection, KindConfig, ModelPart  # noqa: F401  # declarations import them from here
from megatron.config.training_hooks import TrainingHooks

FOLDERS = ("megatron.features", "megatron.apps")
"""Packages that contain features. Nothing else in the core names them."""

AHEAD = "mtp."
"""Prefix of the canonical names of multi-token prediction blocks."""


class Feature(TrainingHooks):
    """Hooks through which a folder extends a run.

    By default a hook adds nothing. Hooks import the folder's other modules when they are called, so
    that a run pays only for the features that it uses.

    Attributes:
        needs: names of the features whose modules this one imports.
        sections: flag class of each section that the feature adds to a saved configuration.
        flag_parts: flags that the feature adds to a section of the core, by section name.
        model_parts: classes of flags that the feature adds to the model.
        families: names of the model families that :meth:`family` returns.
        heads: values of ``ModelConfig.head`` for which :meth:`network` adds a last layer to models
            of a family, by family name.
        tokenizers: values of ``--tokenizer-type`` that :meth:`tokenizer` accepts.
        only_trained: prefixes of the canonical names of parameters that only training uses.
            Checkpoints written for other programs leave them out.
        optimizers: values of ``--optimizer`` that :meth:`optimizer` accepts, each with the names of
            a parameter's optimizer states.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    sections: ClassVar[Mapping[str, type[FlagSection]]] = {}
    flag_parts: ClassVar[Mapping[str, type[FlagPart]]] = {}
    model_parts: ClassVar[tuple[type[ModelPart], ...]] = ()
    families: ClassVar[tuple[str, ...]] = ()
    heads: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    tokenizers: ClassVar[tuple[str, ...]] = ()
    only_trained: ClassVar[tuple[str, ...]] = ()
    optimizers: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})

    # Hooks for the configuration of a run.

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        """Return a run's settings, not yet resolved, together with those that the feature's flags
        imply. ``run_of`` builds a run from settings."""
        return settings

    def resolve(self, parts: dict[str, Any], processes: int, resolver: ConfigResolver) -> None:
        """Replace the feature's sections in ``parts``, sections by name, by resolved ones. All core
        sections but the engine's are already resolved. Raises ConfigError on contradictions."""

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        """Check that values of a :class:`~megatron.config.run.RunConfig` do not contradict each
        other. Raises ConfigError if they do."""

    def advice(
        self, flag: str, prog: str, known: Container[str], of_training: Callable[[], Container[str]]
    ) -> str | None:
        """Return advice about a flag, or word without dashes, that ``prog`` rejects, or None.
        ``known`` are the program's flags; ``of_training`` returns those of pretrain_gpt.py."""
        return None

    # Hooks for what a run reads and writes.

    def tokenizer(self, name: str) -> Any:
        """Return the :class:`~megatron.tokenizer.registry.TokenizerType` of that name."""
        raise AssertionError(f"{self} has no tokenizer {name}")

    def training_texts(self, config: Any) -> Callable[[], Iterator[str]] | None:
        """Return a function that yields the run's training texts, on which a tokenizer is trained,
        or None if the data is not text."""
        return None

    def tokenizer_files(self, config: Any) -> Any:
        """Return the ``TokenizerConfig`` completed with the files of the published model that its
        flags describe, or None to leave it unchanged."""
        return None

    def batch_encoder(self) -> Any:
        """Return the class that ``--bpe-library`` selects for encoding batches of text with BPE
        merges, or None for the default. Raises ConfigError if its library is not installed."""
        return None

    def open_url(self, url: str, cache_path: str | None) -> Any:
        """Open the :class:`~megatron.data.indexed.IndexedDataset` at a URL. Return None if the
        feature does not support the URL."""
        return None

    def corpora(self, config: Any) -> Mapping[str, Any] | None:
        """Return the corpora that a run can name without a corpora file, by name, each a
        :class:`~megatron.data.sources.DataSource`. ``config`` is the run's, or None."""
        return None

    def named_sources(self, config: Any, kind_of: Callable[[str], str]) -> Any:
        """Return a function that takes the arguments of a flag such as ``--train-data``, and the
        flag, and returns a list of :class:`~megatron.data.sources.DataSource`. Return None if the
        run names no corpora. ``kind_of`` returns the kind of the data at a path."""
        return None

    def checkpoints(self, config: Any) -> Mapping[str, str | None]:
        """Return the paths of the checkpoints that a run reads besides ``--load``, by flag."""
        return {}

    def formats(self) -> Sequence[Any]:
        """Return each :class:`~megatron.checkpoint.source.Format` that the feature adds."""
        return ()

    def architectures(self) -> Sequence[Any]:
        """Return each :class:`~megatron.formats.huggingface.architecture.Architecture` of Hugging
        Face that the feature adds."""
        return ()

    def conversions(self) -> Mapping[str, Callable[[], Any]]:
        """Return commands of ``tools/convert_checkpoint.py`` by name. Each value imports and
        returns a function that is called with the command's arguments."""
        return {}

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        """Return the inputs that must be the same when a run is resumed, by name. Each has a
        ``path``, a ``folder`` and a digest of its ``content``."""
        return {}

    def folders(self, config: Any) -> Mapping[str, str | None]:
        """Return the folders that every node of a run must be able to read, by flag."""
        return {}

    def data_kind(self, section: str) -> Any:
        """Return the :class:`~megatron.data.pipeline.DataKind` whose flags are this section."""
        raise AssertionError(f"{self} has no kind of data {section}")

    def family(self, name: str) -> Any:
        """Return the :class:`~megatron.families.family.Family` of that name."""
        raise AssertionError(f"{self} has no family {name}")

    # Hooks for processes, models, engines and training; see docs/design/structure.md.

    after: ClassVar[tuple[str, ...]] = ()
    """Names of features whose hooks are called before this feature's, if those features exist."""
    training_flags: ClassVar[Sequence[type]] = ()
    """Classes of flags that evaluation does not use."""
    json_sections: ClassVar[tuple[str, ...]] = ()
    """Sections of a DeepSpeed JSON that the feature reads instead of DeepSpeed. A setting of the
    same name contains the text of the section."""

    def json_file(self, text: str, content: Any, path: str) -> Any:
        """Return the part of a DeepSpeed JSON file that is passed to DeepSpeed. ``content`` is the
        parsed ``text``, or None if it is not JSON. Raises ConfigError if the file is wrong."""
        return content

    def json_notes(self, content: Mapping[str, Any], path: str) -> Sequence[str]:
        """Return notes for the user about the DeepSpeed JSON file at ``path``."""
        return ()

    def check_json(self, sections: Mapping[str, str]) -> None:
        """Check the JSON texts of :attr:`json_sections`. Raises ConfigError if one is invalid."""

    def check_engine(self, content: Mapping[str, Any], config: Any) -> Sequence[str]:
        """Return notes for the user about a completed DeepSpeed JSON. Raises ConfigError if it
        contradicts the run's configuration."""
        return ()

    def engine_settings(self, settings: dict[str, Any], on_cpu: bool) -> None:
        """Edit the settings for DeepSpeed's engine in place, to turn off what :meth:`built` does
        instead. Raises ConfigError if the engine's device does not support a setting."""

    def launch(self, settings: Settings, argv: Sequence[str] | None) -> int | None:
        """Called before the run's processes are counted. May launch them, with the arguments
        ``argv`` (by default this process's own), and then exit. Return the number of processes if
        the settings are only explained, else None."""
        return None

    def start(self, settings: Settings, processes: int) -> int:
        """Called in each of a run's processes before the settings are resolved. Return the number
        of processes, which differs from ``processes`` if they were restarted."""
        return processes

    def meeting(self) -> Any:
        """Return the :class:`~megatron.parallel.meeting.Meeting` of a run's processes, or None."""
        return None

    def watch(self, config: Any) -> AbstractContextManager[Any] | None:
        """Return a context manager that ends this process if it makes no progress, or None. Its
        ``among_ranks`` is another context manager: an error in it that other ranks have caused
        names those ranks. When it exits, before the rendezvous store closes, other ranks are no
        longer watched."""
        return None

    def network(self, spec: Any, model: Any, parallel: Any) -> Any:
        """Return the :class:`~megatron.model.spec.ModelSpec` of a network, trained or not, given
        its family's ``spec``. ``model`` and ``parallel`` are its configuration and layout."""
        return spec

    def model(self, spec: Any, config: Any) -> Any:
        """Return the :class:`~megatron.model.spec.ModelSpec` of a run, given the network's."""
        return spec

    def mlp(self, config: Any, layer: int, tp: Any) -> Any:
        """Return the module that replaces a block's MLP, or None for an
        :class:`~megatron.model.mlp.MLP`. The module takes and returns the hidden states and the
        :class:`~megatron.model.layer_list.LayerState`. ``config`` is a
        :class:`~megatron.config.ModelConfig`."""
        return None

    def mixer(self, config: Any, layer: int, tp: Any, recompute: bool) -> Any:
        """Return the module that replaces a block's causal attention, or None for an
        :class:`~megatron.model.attention.Attention`, which takes the same arguments. It maps hidden
        states and the :class:`~megatron.model.layer_list.LayerState` to hidden states."""
        return None

    def attention(self, attend: Any, config: Any, layer: int, tp: Any, kind: str) -> Any:
        """Return the :data:`~megatron.model.attention_backends.AttentionBackend` of a block, given
        the one without the feature, ``attend``. ``kind`` is its ``AttentionKind``."""
        return attend

    def attention_kernel(self, name: str, dropout: float) -> Any:
        """Return the :data:`~megatron.model.attention_backends.AttentionBackend` for a dropout
        probability and a value of ``--attention-backend`` other than eager, or None if the feature
        has no such backend. Raises ConfigError if a package or a suitable GPU is missing."""
        return None

    def attention_line(self, config: Any, device: Any, kind: Any) -> str | None:
        """Return a line for the user about a run's attention kernels, or None. ``kind`` is the
        blocks' ``AttentionKind``."""
        return None

    def base(self, spec: Any, config: Any) -> tuple[Any, int] | None:
        """If the feature changes how weights are stored, return the spec of the model that training
        starts from and an integer that identifies the storage format. Return None otherwise."""
        return None

    def load_base(self, engine: Any, source: Any) -> None:
        """Load the weights of ``source`` into an evaluator of a model that :meth:`base` returned.
        Called on every rank."""

    def shape(self, shape: Any, config: Any) -> Any:
        """Return the :class:`~megatron.model.flops.TransformerShape` of a run, given the core's."""
        return shape

    def check_device(self, config: Any, device: Any) -> None:
        """Check, before the model is built, that a device supports what the flags select. Raises
        ConfigError if it does not."""

    def why_eager(self, config: Any, automatic: bool) -> str | None:
        """Return the reason why blocks are not compiled, printed after ``--torch-compile``'s value,
        or None. With ``automatic`` the value is ``auto``, and compilation must repay its time."""
        return None

    def kernels(self, blocks: Sequence[Any], config: Any) -> None:
        """Set the :class:`~megatron.parallel.linear.LinearKernel` of the layers in ``blocks``."""

    def kernel_states(
        self,
        blocks: Sequence[Any],
        names: Mapping[Any, str],
        config: Any,
        mesh: Any,
        partitioned: bool,
    ) -> Any:
        """Return the :class:`~megatron.parallel.linear.KernelStates` of the feature's layers or
        kernels, or None. ``names`` has the parameters' names. ``partitioned`` tells whether each
        process holds only a shard of the weights (ZeRO 3)."""
        return None

    def optimizer(self, config: Any, trained: Mapping[Any, str], mesh: Any) -> Any:
        """Return the :class:`~megatron.engine.update.optimizer.OptimizerPlan` for the trained
        parameters, given with their names, or None if this feature lacks the optimizer."""
        return None

    def update_factors(
        self, config: Any, names: Mapping[Any, str], rules: Mapping[Any, str]
    ) -> Mapping[Any, Any]:
        """Return the :class:`~megatron.engine.update.optimizer.Factors` of learning rate, weight
        decay and epsilon for every trained parameter. An empty mapping, on all ranks, changes none.
        ``names`` are canonical; ``rules`` are the update rules from a feature's optimizer."""
        return {}

    def group_factors(
        self, config: Any, names: Mapping[Any, str], factors: Mapping[Any, Any]
    ) -> Mapping[Any, Any]:
        """Change ``factors``, the merged results of all features' :meth:`update_factors`, and
        return them."""
        return factors

    def group_lines(
        self, config: Any, names: Mapping[Any, str], factors: Mapping[Any, Any], mesh: Any
    ) -> Sequence[str]:
        """Return lines for the user about parameter groups whose factors differ from the default.
        Raises ConfigError on every rank if flags select parameters that no pipeline stage has."""
        return ()

    def stored_states(self, config: Any, trained: Any, mesh: Any, device: Any) -> Any:
        """Return the :class:`~megatron.engine.update.adam.StateStore` that holds the optimizer
        states of this rank's trained parameters, given with their names; None for float32."""
        return None

    def built(self, engine: Any) -> None:
        """Called with a new :class:`~megatron.engine.train_engine.TrainEngine`."""

    def load(self, engine: Any, source: Any, fresh: Sequence[str], continues: bool) -> Any:
        """Load the weights of ``source`` in the feature's own way, except the parameters ``fresh``,
        which ``source`` lacks. Return the source from which to load optimizer and random states, or
        None if the engine is to load the weights."""
        return None


@cache
def features() -> Mapping[str, Feature]:
    """Return the features by folder name, sorted, without those that need a missing feature."""
    by_name: dict[str, Feature] = {}
    for parent in FOLDERS:
        if find_spec(parent) is None:
            continue
        for module in pkgutil.iter_modules(import_module(parent).__path__):
            name = f"{parent}.{module.name}.feature"
            if module.ispkg and find_spec(name) is not None:
                by_name[module.name] = import_module(name).FEATURE
    while incomplete := [
        n for n, feature in by_name.items() if not by_name.keys() >= {*feature.needs}
    ]:
        for name in incomplete:
            del by_name[name]
    return MappingProxyType(dict(sorted(by_name.items())))


@cache
def taking_part() -> tuple[Feature, ...]:
    """Return all features in the order in which the hooks of a run are called: sorted by name, but
    each after the features in its :attr:`Feature.after`."""
    known, ordered = features(), dict[str, Feature]()

    def add(name: str) -> None:
        if name in known and name not in ordered:
            for earlier in known[name].after:
                add(earlier)
            ordered[name] = known[name]

    for name in known:
        add(name)
    return tuple(ordered.values())


def first_answer(hook: Callable[[Feature], Any]) -> Any:
    """Call ``hook`` with each feature, and return the first result that is not None, or None."""
    answers = (hook(feature) for feature in taking_part())
    return next((answer for answer in answers if answer is not None), None)


@cache
def section_classes() -> Mapping[str, type[FlagSection]]:
    """Return the flag class of each section that features add, by name, in the order of --help."""
    sections = [s for feature in features().values() for s in feature.sections.items()]
    sections.sort(key=lambda section: (not issubclass(section[1], KindConfig), section[0]))
    return MappingProxyType(dict(sections))


def flag_parts(section: str) -> tuple[type[FlagPart], ...]:
    """Return the flag classes that features add to a core section."""
    of_features = (feature.flag_parts.get(section) for feature in taking_part())
    return tuple(part for part in of_features if part is not None)


@cache
def model_parts() -> tuple[type[ModelPart], ...]:
    """Return the model flag classes that features add, in the order of --help."""
    return tuple(part for feature in features().values() for part in feature.model_parts)


@cache
def kind_classes() -> Mapping[str, type[KindConfig]]:
    """Return the flag classes of all kinds of data by section name, sorted."""
    kinds = {n: cls for n, cls in section_classes().items() if issubclass(cls, KindConfig)}
    return MappingProxyType(kinds)


def file_kinds() -> dict[str, str]:
    """Return the section name of each kind of data that reads files, by corpora-file name."""
    return {cls.files: name for name, cls in kind_classes().items() if cls.files is not None}
