"""Which files each part of the data is made of, as the flags say it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from megatron.config import ConfigError, DataConfig, RunConfig, Setting, Settings
from megatron.config.kinds import file_kinds
from megatron.data.corpora import Corpora, read_corpora
from megatron.data.split import parse_share, parse_split

PARTS = ("train", "valid", "test")
INDEXED = "indexed"
_NAMED = ("train_data", "valid_data", "test_data")

_SHARE = re.compile(r"(?P<path>.+)@(?P<first>[\d.eE+-]*):(?P<last>[\d.eE+-]*)")
_PAIRS = (
    "give one PREFIX, or WEIGHT PREFIX pairs such as 0.7 data/books_text_document 0.3 "
    "data/code_text_document"
)


@dataclass(frozen=True)
class Source:
    """One entry of a blend: files of one kind, in proportion to their tokens."""

    paths: tuple[str, ...]
    kind: str = INDEXED
    """What reads them; see `megatron.data.build.SourceReader`."""
    weight: float | None = None
    """Share of the blend, in proportion to the other weights; None: its tokens."""
    share: tuple[float, float] = (0.0, 1.0)
    """From where to where its documents are taken, in fractions of their number."""
    text_key: str | None = None
    """Key of the text in JSON; None: as the flags say."""


@dataclass(frozen=True)
class Blend:
    """What one part is made of."""

    flag: str
    """Where it was asked for, for messages."""
    sources: tuple[Source, ...]
    split: str | None = None
    """--split, where the documents are shared with the other parts."""
    part: int = 0
    """Which of the shares of `split` is meant."""

    @property
    def is_plain(self) -> bool:
        """One path without a weight: its samples are taken as they come, as Megatron does."""
        source = self.sources[0]
        return len(self.sources) == 1 and len(source.paths) == 1 and source.weight is None


class Parts(NamedTuple):
    """Blends by part; validation and test may be several, by name, evaluated each by itself."""

    train: Blend | None = None
    valid: Mapping[str, Blend] = {}
    test: Mapping[str, Blend] = {}


def with_corpora(settings: Settings) -> Settings:
    """Adds the tokenizer that the corpora of --train-data and the like were tokenized with.

    Raises:
        ConfigError: the flags, or two corpora, contradict each other.
    """
    given = {name: settings[name].value for name in _NAMED if name in settings}
    if not any(given.values()):
        return settings
    file = settings["corpora_file"].value if "corpora_file" in settings else DataConfig.corpora_file
    corpora = read_corpora(file, _types())
    found = dict(settings)
    for name, words in given.items():
        flag = "--" + name.replace("_", "-")
        names = [word for word in words if not is_weight(word)]
        for corpus, tokenizer in corpora.tokenizers(names, flag):
            origin = f"{file}: {corpus}"
            for key, value in tokenizer.items():
                before = found.setdefault(key, Setting(value, origin))
                if before.value != value:
                    raise ConfigError(
                        f"{before.origin} has {key} {before.value}, but {origin} was tokenized "
                        f"with {value}: data of one run have one tokenizer"
                    )
    return found


def parts_of(config: RunConfig) -> Parts:
    """Which files a run is made of.

    Raises:
        ConfigError: flags contradict each other or cannot be read.
    """
    data, kinds = config.data, [kind for kind in config.kinds if kind.files is not None]

    def kind_of(path: str) -> str:
        named = [kind for kind in kinds if kind.reads_all]
        if not named and not Path(f"{path}.idx").is_file():
            named = [kind for kind in kinds if path.endswith(kind.endings)]
        return named[0].files or INDEXED if named else INDEXED

    corpora = Corpora()
    if data.train_data or data.valid_data or data.test_data:
        corpora = read_corpora(data.corpora_file, _types())
    eval_text_key = next(filter(None, (kind.eval_text_key for kind in kinds)), None)
    return Reader(kind_of, eval_text_key, corpora).parts(data)


def _types() -> tuple[str, ...]:
    return INDEXED, *file_kinds()


@dataclass(frozen=True)
class Reader:
    """Turns the flags into blends.

    Args:
        kind_of: kind of the files of a path, where the corpora file does not say it.
        eval_text_key: of the text in JSON files for evaluation; None: as for training.
        corpora: what --train-data and the like name.
    """

    kind_of: Callable[[str], str] = lambda path: INDEXED
    eval_text_key: str | None = None
    corpora: Corpora = field(default_factory=Corpora)

    def parts(self, data: DataConfig) -> Parts:
        """The blends of a run.

        Raises:
            ConfigError: flags contradict each other or cannot be read.
        """
        shared = [
            (flag, values)
            for flag, values in (
                ("--data-path", data.data_path),
                ("--data-args-path", _words(data.data_args_path, "--data-args-path")),
                ("--train-data", () if data.valid_data or data.test_data else data.train_data),
            )
            if values
        ]
        own = self._own(data)
        if len(shared) + bool(own) > 1:
            given = [flag for flag, _ in shared] + [blend.flag for blend in own.values()]
            raise ConfigError(
                f"{' and '.join(dict.fromkeys(given))} both name data: files that --split shares "
                "out (--data-path, --data-args-path, or --train-data alone) and files for each "
                "part (--train-data-path, --valid-data-path, ...) exclude each other"
            )
        if own and data.split != DataConfig.split:
            flags = ", ".join(dict.fromkeys(blend.flag for blend in own.values()))
            raise ConfigError(
                f"--split {data.split} would change nothing: {flags} names whole files for a part; "
                "PREFIX@FIRST:LAST takes a range of one"
            )
        if not shared:
            return Parts(
                next((blend for (part, _), blend in own.items() if part == "train"), None),
                {name: blend for (part, name), blend in own.items() if part == "valid"},
                {name: blend for (part, name), blend in own.items() if part == "test"},
            )
        flag, values = shared[0]
        sources = self._named(values, flag) if flag == "--train-data" else self._paths(values, flag)
        shares = parse_split(data.split)
        if not shares[0]:
            raise ConfigError(f"--split {data.split} leaves nothing for training")
        blends = [Blend(flag, sources, data.split, part) for part in range(3)]
        return Parts(
            blends[0],
            {"valid": self._for_evaluation(blends[1])} if shares[1] else {},
            {"test": self._for_evaluation(blends[2])} if shares[2] else {},
        )

    def _own(self, data: DataConfig) -> dict[tuple[str, str], Blend]:
        """Blends of files that belong to one part, by part and name."""
        found: dict[tuple[str, str], Blend] = {}
        per_split = _per_split(data.per_split_data_args_path)
        for part in PARTS:
            names = getattr(data, f"{part}_data") if data.valid_data or data.test_data else ()
            paths = getattr(data, f"{part}_data_path")
            flag = f"--{part}-weighted-split-paths"
            groups = getattr(data, f"{part}_weighted_split_paths")
            in_file = getattr(data, f"{part}_weighted_split_paths_path")
            blends = {
                f"--{part}-data": {part: self._named(names, f"--{part}-data")},
                f"--{part}-data-path": {part: self._paths(paths, f"--{part}-data-path")},
                "--per-split-data-args-path": {
                    part: self._paths(per_split.get(part, ()), "--per-split-data-args-path")
                },
                flag: self._groups(groups, flag),
                f"{flag}-path": self._groups(_words(in_file, f"{flag}-path"), f"{flag}-path"),
            }
            given = {
                name: {key: sources for key, sources in named.items() if sources}
                for name, named in blends.items()
                if any(named.values())
            }
            if len(given) > 1:
                raise ConfigError(f"{' and '.join(given)} name the same data: give one of them")
            for name, named in given.items():
                if part == "train" and len(named) > 1:
                    raise ConfigError(f"{name}: training has one group, not {', '.join(named)}")
                for key, sources in named.items():
                    blend = Blend(name, sources)
                    found[part, key] = blend if part == "train" else self._for_evaluation(blend)
        return found

    def _for_evaluation(self, blend: Blend) -> Blend:
        if self.eval_text_key is None:
            return blend
        key = self.eval_text_key
        sources = (replace(s, text_key=s.text_key or key) for s in blend.sources)
        return replace(blend, sources=tuple(sources))

    def _paths(self, values: Sequence[str], flag: str) -> tuple[Source, ...]:
        """`PREFIX`, or `WEIGHT PREFIX WEIGHT PREFIX ...`; a prefix may end in `@FIRST:LAST`."""
        return tuple(
            replace(self._source(path, flag), weight=weight)
            for weight, path in weighted(values, flag, _PAIRS)
        )

    def _named(self, values: Sequence[str], flag: str) -> tuple[Source, ...]:
        """`NAME NAME ...` or `WEIGHT NAME WEIGHT NAME ...` of the corpora file."""
        if not values:
            return ()
        is_weighted = any(map(is_weight, values))
        form = "give NAME NAME ..., or WEIGHT NAME pairs with a weight before every name"
        pairs = weighted(values, flag, form) if is_weighted else [(None, name) for name in values]
        found = [each for weight, name in pairs for each in self.corpora.find(name, weight, flag)]
        names = [corpus.name for corpus, _ in found]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"{flag} {' '.join(values)} names {twice} twice, perhaps within a group: it would "
                "be trained on twice"
            )
        return tuple(
            Source(
                corpus.files, corpus.type or self.kind_of(corpus.files[0]), share, corpus.share,
                corpus.text_key,
            )
            for corpus, share in found
        )  # fmt: skip

    def _groups(self, groups: Sequence[str], flag: str) -> dict[str, tuple[Source, ...]]:
        """BLOOM's `NAME: WEIGHT FIRST:LAST PATH, WEIGHT FIRST:LAST PATH, ...`."""
        found: dict[str, tuple[Source, ...]] = {}
        for group in groups:
            name, colon, rest = group.partition(":")
            entries = [entry.split() for entry in rest.split(",")]
            if not colon or not name.strip() or any(len(entry) != 3 for entry in entries):
                raise ConfigError(
                    f"{flag} {group!r}: give 'NAME: WEIGHT FIRST:LAST PATH, ...' such as "
                    "'train: 0.7 0:0.95 data/books_text_document, 0.3 0:0.95 data/code'"
                )
            if name.strip() in found:
                raise ConfigError(f"{flag} names the group {name.strip()} twice")
            found[name.strip()] = tuple(
                replace(self._source(f"{path}@{share}", flag), weight=number(weight, flag))
                for weight, share, path in entries
            )
        return found

    def _source(self, text: str, flag: str) -> Source:
        match = _SHARE.fullmatch(text)
        path = match["path"] if match else text
        share = (
            parse_share(match["first"], match["last"], f"{flag} {text}") if match else (0.0, 1.0)
        )
        return Source((path,), self.kind_of(path), share=share)


def weighted(
    values: Sequence[str], flag: str, form: str
) -> list[tuple[float, str]] | list[tuple[None, str]]:
    """One word without a weight, or words that have a weight before each.

    Raises:
        ConfigError: the values have neither form, or a weight is not above 0.
    """
    if len(values) < 2:
        return [(None, value) for value in values]
    weights, words = values[::2], values[1::2]
    if len(weights) != len(words) or not all(map(is_weight, weights)):
        raise ConfigError(f"{flag} {' '.join(values)}: {form}")
    return [(number(weight, flag), word) for weight, word in zip(weights, words, strict=True)]


def number(text: str, flag: str) -> float:
    """A weight.

    Raises:
        ConfigError: it is not a finite number above 0.
    """
    value = _number(text)
    if value is None or not 0 < value < float("inf"):
        raise ConfigError(
            f"{flag}: the weight {text} is not a finite number above 0; leave out a dataset that "
            "is not wanted"
        )
    return value


def is_weight(word: str) -> bool:
    """Whether a word among names or paths is a number."""
    return _number(word) is not None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _words(path: str | None, flag: str) -> tuple[str, ...]:
    """The words of a file, quoted as on a command line."""
    if path is None:
        return ()
    words = tuple(shlex.split(_text(path, flag), comments=True))
    if not words:
        raise ConfigError(f"{flag} {path} is empty; give what the command line would have")
    return words


def _per_split(path: str | None) -> dict[str, tuple[str, ...]]:
    """Megatron's JSON of `{"train": [...], "valid": [...], "test": [...]}`."""
    if path is None:
        return {}
    flag = "--per-split-data-args-path"
    try:
        content = json.loads(_text(path, flag))
    except ValueError as error:
        raise ConfigError(f"{flag} {path} is not JSON: {error}") from None
    good = isinstance(content, dict) and content and set(content) <= set(PARTS)
    if not good or not all(isinstance(values, list) for values in content.values()):
        raise ConfigError(
            f"{flag} {path}: it must be an object of lists under train, valid and test, each as "
            "--data-path would be given it"
        )
    return {part: tuple(map(str, values)) for part, values in content.items()}


def _text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from None
