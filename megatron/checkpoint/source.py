"""Checkpoints of any format, read as whole parameters with canonical names.

A format is a :class:`Source` and a :class:`Format`, which imports it when it is needed.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json, write_json
from megatron.checkpoint.folder import MEGATRON_TRACKER, TRACKER
from megatron.checkpoint.slices import Slice
from megatron.config import ConfigError, ModelConfig, ModelFlags, RunConfig, TokenizerConfig
from megatron.config.features import features
from megatron.util.files import MOST_BYTES, own_file
from megatron.util.progress import progress_bar

TOKENIZER = "tokenizer"
"""Folder of the tokenizer's files in this project's checkpoints."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "sentencepiece.bpe.model", "sentencepiece.model", "spm.model", "spm_char.model", "source.spm",
    "target.spm", "bpe.codes", "byte_maps.json", "dict.txt", "emoji.json", "entity_vocab.json",
    "normalizer.json", "prophetnet.tokenizer", "target_vocab.json", "vocab-src.json",
    "vocab-tgt.json", "word_pronunciation.json", "word_shape.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""Files of transformers' tokenizers, and settings of generation."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes in which other programs keep weights, as torch and config.json call them."""


class Source(ABC):
    """A checkpoint that is being read; a class per format.

    Attributes:
        title: the format's name in messages.
        tokenizer: None if the checkpoint does not describe it.
        run: configuration of the run that wrote it; None if the checkpoint does not contain it.
        state: ``iteration``, ``consumed_samples``, ``optimizer_step``, ``loss_scaler``; empty if
            the checkpoint contains only weights, and training starts at the beginning.
        notes: lines about decisions that the checkpoint leaves open.
        refusal: why it cannot be used as a model here; None if it can.
        end_of_text: the token that ends a document, where it is known without the tokenizer's
            files; else None.
        on_base: whether it has adapters of another model; the constructor and ``verify`` then take
            its path as ``base``.
        base: the model without adapters, where this is one merged with them; else None.
        additions: the adapters alone, where this is a model merged with them; else None.
    """

    title: ClassVar[str]
    on_base: ClassVar[bool] = False
    folder: Path
    model: ModelConfig
    tokenizer: TokenizerConfig | None = None
    run: RunConfig | None = None
    state: dict[str, Any]
    notes: Sequence[str] = ()
    refusal: str | None = None
    end_of_text: int | None = None
    base: Source | None = None
    additions: Source | None = None

    @classmethod
    @abstractmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        """The path of a checkpoint of this format; None if ``path``, one checkpoint or a folder
        with a tracker, has none. ``wanted`` is a tag or an iteration; None for the newest. Raises
        CheckpointError if there are checkpoints, but not the wanted one."""

    @classmethod
    def family(cls, folder: Path) -> str:
        """The model family of what :meth:`locate` found, without reading weights."""
        return ModelConfig.family

    def __init__(self, folder: Path) -> None:
        """Opens what :meth:`locate` found. Raises CheckpointError if a file is missing or
        malformed, or the network cannot be represented."""
        self.folder, self.state = folder, {}

    def require_model(self) -> None:
        """Raises CheckpointError if it can only be inspected, not used as a model."""
        if self.refusal is not None:
            raise CheckpointError(f"{self.folder}: {self.refusal}")

    def read_ahead(self) -> None:  # noqa: B027
        """Adds the blocks that predict further tokens to the model, where the checkpoint has some
        that are left out by default."""

    def read_as_weights(self, kind: str) -> None:
        """Reads these tensors of each parameter as its weight, and no others. Raises
        CheckpointError where the checkpoint lacks them."""
        raise CheckpointError(
            f"{self.folder} has no {kind}: only the {reader('native').title} of a run with "
            "--ema-decay or --swa-start-iter has averages of weights"
        )

    @classmethod  # noqa: B027
    def verify(cls, folder: Path, share: int = 0, shares: int = 1) -> None:
        """Compares the files with their checksums, if the format has them: every ``shares``-th
        file, starting with ``share``, so that ranks can divide the work. Raises CheckpointError if
        a file is missing or damaged."""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Canonical names of the parameters, in the order of the layers."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole parameter, without padding."""

    @abstractmethod
    def kinds(self, name: str) -> Sequence[str]:
        """``weight`` and the moments (``exp_avg``, ...) of a parameter."""

    def dtype(self, name: str, kind: str = "weight") -> str:
        """Dtype in which a tensor is stored, as torch calls it."""
        return "float32"

    @abstractmethod
    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """A whole parameter, or one of its moments, without padding, float32, on the CPU. Raises
        CheckpointError if it is missing or malformed."""

    def read(self, name: str, kind: str, wanted: Slice) -> Tensor:
        """A slice of a parameter, flat, float32, as :meth:`tensor`; overridden by formats that can
        read it alone."""
        whole = self.tensor(name, kind)
        if tuple(whole.shape) != wanted.shape:
            raise CheckpointError(
                f"{self.folder}: {kind} of {name} has the shape {tuple(whole.shape)}, the model "
                f"needs {wanted.shape}"
            )
        return wanted.cut(whole)

    def check_tensors(self) -> None:
        """Reads every tensor; raises CheckpointError if one is missing or malformed."""
        for name in progress_bar("reading", self.names(), unit=" parameters"):
            for kind in self.kinds(name):
                self.tensor(name, kind)

    @property
    def generation(self) -> dict[str, Any]:
        """Return the settings of generation and the tokens at which texts end: the keys of its
        ``generation_config.json``; empty where nothing is known. Raises CheckpointError if they are
        malformed."""
        read = _of_others("read_generation", lambda folder, rows: {})
        settings: dict[str, Any] = read(self.folder / TOKENIZER, self.model.vocabulary.size)
        return settings

    def copy_tokenizer(self, target: Path) -> bool:
        """Copy the tokenizer's files, in Hugging Face's format, and :attr:`generation` to a new
        folder, created only if there is something to copy. Return True if there is a tokenizer.
        Raises CheckpointError if a file is a link that leaves the folder."""
        own = self.folder / TOKENIZER
        if own.is_symlink():
            raise CheckpointError(f"{own} is a link, not the folder of the checkpoint's tokenizer")
        if own.is_dir():
            copy_tokenizer_files(own, target)
        return tokenizer_in(self.folder) is not None


def tokenizer_in(folder: Path) -> Path | None:
    """Return the folder of the tokenizer in a checkpoint of this project, or None."""
    own = folder / TOKENIZER
    names = [name for name in TOKENIZER_FILES if (own / name).is_file()]
    return own if names and names != ["generation_config.json"] else None


def copy_tokenizer_files(folder: Path, target: Path) -> None:
    """Copies the files of a tokenizer, by their known names, and generation_config.json to a new
    folder. Raises CheckpointError if one is a link to another place: otherwise the copy could
    contain, and an upload publish, a private file."""
    target.mkdir()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            try:
                source_file = own_file(folder / name)
            except ValueError as error:
                raise CheckpointError(str(error)) from None
            if source_file.stat().st_size > MOST_BYTES:
                raise CheckpointError(
                    f"{folder / name} has more than {MOST_BYTES:,} bytes: no tokenizer has"
                )
            shutil.copyfile(source_file, target / name, follow_symlinks=False)
            if name.startswith("generation_config"):  # transformers' parser has no bounds
                settings = read_json(source_file, lenient=True)
                if isinstance(settings, dict) and settings.pop("_name_or_path", None) is not None:
                    write_json(target / name, settings)  # without a path of this machine


def resolved(flags: ModelFlags, where: Path) -> ModelConfig:
    """The network that the flags of another program's checkpoint, the file ``where``, describe.
    Raises CheckpointError if it is not supported here."""
    try:
        return flags.resolve()
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


class Format(NamedTuple):
    """A format of checkpoints.

    Attributes:
        reader: imports its :class:`Source`.
        writer: imports a function that writes a copy in it; see :func:`save_copy`.
        saver: imports the class that saves a training in it, with ``--checkpoint-format`` of its
            name: a :class:`~megatron.engine.saving.CheckpointWriter`.
        needs: packages without which it is left out.
        after: of a feature's format, the one behind which it is tried, and without which it is
            left out.
    """

    name: str
    reader: Callable[[], type[Source]]
    writer: Callable[[], Callable[[Source, Path, int], Path]] | None = None
    saver: Callable[[], type[Any]] | None = None
    needs: tuple[str, ...] = ()
    after: str = "native"


NATIVE = Format("native", partial(resolve_name, "megatron.checkpoint.reader:CheckpointReader"))
OTHERS = "megatron.formats"
"""The package of other programs' formats. Without it only this project's are read."""


def _of_others(name: str, otherwise: Any) -> Any:
    """Return an object of the package of other programs' formats, by its name there."""
    try:
        return resolve_name(f"{OTHERS}:{name}")
    except ModuleNotFoundError as error:
        if error.name != OTHERS:
            raise
        return otherwise


@cache
def formats() -> dict[str, Format]:
    """All formats by name, in the order in which they are tried."""
    ordered = [NATIVE, *_of_others("FORMATS", ())]
    for feature in features().values():
        for form in feature.formats():
            names = [each.name for each in ordered]
            if form.after in names:
                ordered.insert(names.index(form.after) + 1, form)
    return {form.name: form for form in ordered}


def reader(name: str) -> type[Source]:
    """The class of a format of :func:`formats`."""
    return formats()[name].reader()


def saver_of(name: str) -> type[Any]:
    """The class that saves a training in a format of :func:`formats`."""
    saver = formats()[name].saver
    assert saver is not None
    return saver()


def save_copy(name: str, source: Source, save: Path, stage: int) -> Path:
    """Writes a copy in a format of :func:`formats` into the folder ``save`` of checkpoints, for
    runs of a ZeRO stage; returns its path. Raises CheckpointError if the source is damaged; OSError
    if a file cannot be written; nothing is left behind."""
    writer = formats()[name].writer
    assert writer is not None
    return writer()(source, save, stage)


class FoundCheckpoint(NamedTuple):
    """A checkpoint that is not yet open, and its format; ``base`` is the model of adapters, where
    it is another path than they name. ``weights`` is the kind of tensors to read as weights."""

    form: type[Source]
    folder: Path
    base: str | None = None
    weights: str = "weight"

    def open(self, verify: bool = True) -> Source:
        """Opens it, by default after comparing the files with their checksums. Raises
        CheckpointError if it is damaged or not supported here."""
        if verify:
            self.verify()
        source = self.form(self.folder, **self._options)
        if self.weights != "weight":
            source.read_as_weights(self.weights)
        return source

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """See :meth:`Source.verify`."""
        self.form.verify(self.folder, share, shares, **self._options)

    @property
    def family(self) -> str:
        """See :meth:`Source.family`."""
        return self.form.family(self.folder, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {"base": self.base} if self.base is not None and self.form.on_base else {}


def locate_checkpoint(
    load: str | Path, wanted: str | None = None, prefer: str = "native", *, others: bool = False
) -> FoundCheckpoint | None:
    """Finds a checkpoint of any format, first of ``prefer``; ``wanted`` is a tag or an iteration,
    None for the newest. None if the folder does not exist or has neither checkpoints nor trackers.
    Raises CheckpointError if the wanted checkpoint, or the one that a tracker names, does not
    exist, and, unless ``others`` may be there, if there are weights in a form that is not read."""
    path, refusal = Path(load), None
    tracker = path / TRACKER
    empty = _is_empty(path)
    for form in () if empty else _tried(prefer):
        try:
            folder = form.locate(path, wanted)
        except CheckpointError as error:
            # The folder may have several formats, and the wanted checkpoint another one.
            refusal = refusal or error
            if wanted is None and tracker.is_file():
                wanted = tracker.read_text(errors="replace").strip()
            continue
        if folder is not None:
            return FoundCheckpoint(form, folder)
    if refusal is not None:
        raise refusal
    if not empty and not others:
        content = _of_others("unread_content", lambda path: None)(path)
        if content is not None:
            raise CheckpointError(f"{path} {'is' if path.is_file() else 'has'} {content}")
    if wanted is not None:
        raise CheckpointError(f"{path} has no complete checkpoint {wanted}")
    for tracker in (path / TRACKER, path / MEGATRON_TRACKER):
        if tracker.is_file():
            named = tracker.read_text(errors="replace").strip()
            raise CheckpointError(
                f"{tracker} names {named!r}, but {path} has no complete checkpoint of a known "
                f"format: {', '.join(form.title for form in _tried(prefer))}"
            )
    if path.is_file():
        raise CheckpointError(f"{path} is a file, not a checkpoint of a known format")
    return None


def _tried(prefer: str) -> Iterator[type[Source]]:
    """Yield the classes of all formats, ``prefer``'s first; the other formats' table is not
    imported if the native one, when preferred, suffices."""
    if prefer == NATIVE.name:
        yield NATIVE.reader()
    names = [name for name in formats() if (name, prefer) != (NATIVE.name, NATIVE.name)]
    yield from map(reader, sorted(names, key=lambda name: name != prefer))


def _is_empty(path: Path) -> bool:
    """True if it is missing or empty: a run that starts from scratch imports no format."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def nothing_at(path: str | Path) -> str:
    """Words of a message about a path where :func:`locate_checkpoint` finds no checkpoint."""
    return "no complete checkpoint found" if Path(path).exists() else "no such folder"


def open_checkpoint(load: str | Path, wanted: str | None = None, verify: bool = True) -> Source:
    """Finds and opens a checkpoint of any format; see :func:`locate_checkpoint`. Raises
    CheckpointError if it does not exist or is damaged."""
    checkpoint = locate_checkpoint(load, wanted)
    if checkpoint is None:
        raise CheckpointError(f"{load}: {nothing_at(load)}")
    return checkpoint.open(verify)
