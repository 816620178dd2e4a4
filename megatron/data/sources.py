"""Files of each split of the data, from the flags that name them."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from megatron.config import ConfigError, DataConfig, RunConfig
from megatron.config.features import features
from megatron.data.corpora import INDEXED, DataSource, parse_range
from megatron.util.json_text import parse_json

PARTS = ("train", "valid", "test")
_LONGEST_QUOTED = 1 << 17
"""Maximum number of characters in a flag file with quotation marks, because shlex takes time
quadratic in a word's length."""
_QUOTING = re.compile("""['"\\\\]""")
_COMMENT = re.compile("#.*")
_DIVIDED = ({"--train-data", "--valid-data"}, {"--train-data", "--test-data"})

_RANGE = re.compile(r"(?P<path>.+)@(?P<first>[\d.eE+-]*):(?P<last>[\d.eE+-]*)")
_PAIRS = (
    "give one PREFIX, or WEIGHT PREFIX pairs such as 0.7 data/books_text_document 0.3 "
    "data/code_text_document"
)


@dataclass(frozen=True)
class Blend:
    flag: str
    """Flag that names the sources, for messages."""
    sources: tuple[DataSource, ...]
    split: str | None = None
    """Value of --split if the splits share documents, else None."""
    part: int = 0
    """Index of this split in the value of --split."""

    @property
    def is_plain(self) -> bool:
        """True for one path without a weight. Its samples are used directly, as in Megatron."""
        source = self.sources[0]
        return len(self.sources) == 1 and len(source.paths) == 1 and source.weight is None


class Parts(NamedTuple):
    """Blends by split. Validation and test may have several by name, evaluated separately."""

    train: Blend | None = None
    valid: Mapping[str, Blend] = {}
    test: Mapping[str, Blend] = {}

    def blends(self) -> list[Blend]:
        train = [self.train] if self.train else []
        return [*train, *self.valid.values(), *self.test.values()]


def parts_of(config: RunConfig) -> Parts:
    """Return the blends of a run. Raises ConfigError if flags contradict each other or files that
    they name cannot be read."""
    data, kinds = config.data, [kind for kind in config.kinds if kind.files is not None]

    def kind_of(path: str) -> str:
        named = [kind for kind in kinds if kind.reads_all]
        if not named and not Path(f"{path}.idx").is_file():
            named = [kind for kind in kinds if path.endswith(kind.endings)]
        return named[0].files or INDEXED if named else INDEXED

    named = (feature.named_sources(config, kind_of) for feature in features().values())
    by_name = next((sources for sources in named if sources is not None), None)
    eval_text_key = next(filter(None, (kind.eval_text_key for kind in kinds)), None)
    return BlendReader(kind_of, eval_text_key, by_name).parts(data)


@dataclass(frozen=True)
class BlendReader:
    """Parser of blends from flags. `kind_of` returns a path's kind of data. `by_name` returns the
    sources for the words of a flag such as --train-data, given the words and the flag."""

    kind_of: Callable[[str], str] = lambda path: INDEXED
    eval_text_key: str | None = None
    by_name: Callable[[Sequence[str], str], tuple[DataSource, ...]] | None = None

    def parts(self, data: DataConfig) -> Parts:
        """Return the blends of a run. Raises ConfigError if flags contradict each other or files
        that they name cannot be read."""
        flags = {
            "--data-path": data.data_path,
            "--data-args-path": _words(data.data_args_path, "--data-args-path"),
            "--train-data": () if data.valid_data or data.test_data else data.train_data,
        }
        shared = [(flag, values) for flag, values in flags.items() if values]
        own = self._own(data)
        if len(shared) + bool(own) > 1:
            given = [flag for flag, _ in shared] + [blend.flag for blend in own.values()]
            raise ConfigError(
                f"{' and '.join(dict.fromkeys(given))} both name data: files that --split divides "
                "(--data-path, --data-args-path, or --train-data alone) and files for each part "
                "(--train-data-path, --valid-data-path, ...) exclude each other"
            )
        given = list(dict.fromkeys(blend.flag for blend in own.values()))
        divided = data.split != DataConfig.split and set(given) in _DIVIDED
        if own and data.split != DataConfig.split and not divided:
            raise ConfigError(
                f"--split {data.split} would change nothing: {', '.join(given)} names whole files "
                "for a part; PREFIX@FIRST:LAST uses a range of one"
            )
        if not (shared or divided):
            train, valid, test = (
                {name: blend for (of, name), blend in own.items() if of == part} for part in PARTS
            )
            return Parts(next(iter(train.values()), None), valid, test)
        flag, values = shared[0] if shared else ("--train-data", data.train_data)
        with _naming(data.data_args_path if flag == "--data-args-path" else None):
            find = self._named if flag == "--train-data" else self._paths
            sources = find(values, flag)
        named = {part for part, _ in own}  # as in 2019, other splits share --train-data
        shares = [
            0.0 if part in named - {"train"} else share
            for part, share in zip(PARTS, parse_split(data.split), strict=True)
        ]
        if not shares[0]:
            raise ConfigError(f"--split {data.split} leaves nothing for training")
        split = ",".join(map(repr, shares)) if divided else data.split
        blends = [Blend(flag, sources, split, part) for part in range(3)]
        valid, test = (
            {name: blend for (of, name), blend in own.items() if of == PARTS[part]}
            or ({PARTS[part]: self._for_evaluation(blends[part])} if shares[part] else {})
            for part in (1, 2)
        )
        return Parts(blends[0], valid, test)

    def _own(self, data: DataConfig) -> dict[tuple[str, str], Blend]:
        by_part: dict[tuple[str, str], Blend] = {}
        per_split = _per_split(data.per_split_data_args_path)
        for part in PARTS:
            names = getattr(data, f"{part}_data") if data.valid_data or data.test_data else ()
            paths = getattr(data, f"{part}_data_path")
            flag = f"--{part}-weighted-split-paths"
            groups = getattr(data, f"{part}_weighted_split_paths")
            in_file = getattr(data, f"{part}_weighted_split_paths_path")
            several = part == "valid" and data.multiple_validation_sets
            by_path = {
                f"--{part}-data-path": paths,
                "--per-split-data-args-path": per_split.get(part, ()),
            }
            blends = {f"--{part}-data": {part: self._named(names, f"--{part}-data")}}
            for name, values in by_path.items():
                with _naming(data.per_split_data_args_path if values is not paths else None):
                    blends[name] = (
                        self._separate(values, name, data.validation_set_names)
                        if several
                        else {part: self._paths(values, name)}
                    )
            blends[flag] = self._groups(groups, flag)
            with _naming(in_file):
                words = _words(in_file, f"{flag}-path")
                blends[f"{flag}-path"] = self._groups(words, f"{flag}-path")
            given = {
                name: {key: sources for key, sources in named.items() if sources}
                for name, named in blends.items()
                if any(named.values())
            }
            if len(given) > 1:
                raise ConfigError(f"{' and '.join(given)} name the same data: give one of them")
            if several and not given.keys() & by_path.keys():
                raise ConfigError(
                    "--multiple-validation-sets: the sets are the paths of --valid-data-path (or "
                    "of --per-split-data-args-path); give them"
                )
            for name, named in given.items():
                if part == "train" and len(named) > 1:
                    raise ConfigError(f"{name}: training has one group, not {', '.join(named)}")
                for key, sources in named.items():
                    blend = Blend(name, sources)
                    by_part[part, key] = blend if part == "train" else self._for_evaluation(blend)
        return by_part

    def _for_evaluation(self, blend: Blend) -> Blend:
        key = self.eval_text_key
        if key is None:
            return blend
        sources = (replace(s, text_key=s.text_key or key) for s in blend.sources)
        return replace(blend, sources=tuple(sources))

    def _paths(self, values: Sequence[str], flag: str) -> tuple[DataSource, ...]:
        """Parse `PREFIX`, or `WEIGHT PREFIX WEIGHT PREFIX ...`. Each may end in `@FIRST:LAST`."""
        return tuple(
            replace(self._source(path, flag), weight=weight)
            for weight, path in weighted_words(values, flag, _PAIRS)
        )

    def _named(self, values: Sequence[str], flag: str) -> tuple[DataSource, ...]:
        """Return the sources of named corpora, which a feature defines."""
        if values and self.by_name is None:
            raise ConfigError(f"{flag} {' '.join(values)}: no corpora have names; give --data-path")
        return self.by_name(values, flag) if values and self.by_name is not None else ()

    def _separate(
        self, values: Sequence[str], flag: str, names: Sequence[str]
    ) -> dict[str, tuple[DataSource, ...]]:
        """Return the source of each path for --multiple-validation-sets, by the set's name."""
        shown = f"{flag} {' '.join(values)}"
        numbers = [word for word in values if number_of(word) is not None]
        if numbers:
            raise ConfigError(
                f"{shown}: with --multiple-validation-sets the paths have no weights; leave out "
                f"{' '.join(numbers)}"
            )
        named = list(names) or [os.path.basename(path) for path in values]
        if values and len(named) != len(values):
            raise ConfigError(
                f"--validation-set-names {' '.join(names)}: {len(names)} names for the "
                f"{len(values)} paths of {shown}"
            )
        twice = next((name for name in named if named.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"{shown}: two validation sets have the name {twice}; give "
                "--validation-set-names, each once"
            )
        pairs = zip(named, values, strict=False)
        return {name: (self._source(path, flag),) for name, path in pairs}

    def _groups(self, groups: Sequence[str], flag: str) -> dict[str, tuple[DataSource, ...]]:
        """Parse BLOOM's `NAME: WEIGHT FIRST:LAST PATH, WEIGHT FIRST:LAST PATH, ...`."""
        corpora: dict[str, tuple[DataSource, ...]] = {}
        for group in groups:
            name, colon, rest = group.partition(":")
            entries = [entry.split() for entry in rest.split(",")]
            if not colon or not name.strip() or any(len(entry) != 3 for entry in entries):
                raise ConfigError(
                    f"{flag} {group!r}: give 'NAME: WEIGHT FIRST:LAST PATH, ...' such as "
                    "'train: 0.7 0:0.95 data/books_text_document, 0.3 0:0.95 data/code'"
                )
            if name.strip() in corpora:
                raise ConfigError(f"{flag} names the group {name.strip()} twice")
            corpora[name.strip()] = tuple(
                replace(self._source(f"{path}@{share}", flag), weight=_weight(weight, flag))
                for weight, share, path in entries
            )
        return corpora

    def _source(self, text: str, flag: str) -> DataSource:
        return source_of(text, flag, self.kind_of)


def source_of(text: str, flag: str, kind_of: Callable[[str], str]) -> DataSource:
    """Return the source for `PATH` or `PATH@FIRST:LAST`. Raises ConfigError for a bad range."""
    match = _RANGE.fullmatch(text)
    if not match:
        return DataSource((text,), kind_of(text))
    path = match["path"]
    share = parse_range(match["first"], match["last"], f"{flag} {text}")
    return DataSource((path,), kind_of(path), share=share)


def parse_split(split: str) -> tuple[float, float, float]:
    """Return the shares in a `--split` string, normalised to a sum of 1. Omitted shares are 0.
    Raises ConfigError unless the string has one to three numbers >= 0, of which one is > 0."""
    try:
        shares = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    total = sum(shares)
    if not (1 <= len(shares) <= 3 and min(shares) >= 0 and 0 < total < math.inf):
        raise ConfigError(
            f"--split {split!r}: give up to three shares >= 0 (training, validation, test) "
            "with commas between them, such as 969,30,1"
        )
    train, valid, test = (share / total for share in shares + [0.0] * (3 - len(shares)))
    return train, valid, test


def split_documents(split: str, num_documents: int) -> tuple[range, range, range]:
    """Return the document ranges of training, validation and test, contiguous and in file order. As
    in Megatron each share of the documents is rounded, and the surplus of the sum is subtracted
    from every boundary after the first. A boundary that would become negative is 0 (Megatron would
    read documents from the end of the file). Raises like `parse_split`."""
    counts = (round(share * num_documents) for share in parse_split(split))
    bounds = list(accumulate(counts, initial=0))
    surplus = bounds[-1] - num_documents
    bounds[1:] = [max(bound - surplus, 0) for bound in bounds[1:]]
    train, valid, test = (range(start, max(start, stop)) for start, stop in pairwise(bounds))
    return train, valid, test


def weighted_words(
    values: Sequence[str], flag: str, form: str
) -> list[tuple[float, str]] | list[tuple[None, str]]:
    """Return (weight, word) pairs from alternating words. A single word has the weight None."""
    if len(values) < 2:
        return [(None, value) for value in values]
    weights, words = values[::2], values[1::2]
    if len(weights) != len(words) or any(number_of(weight) is None for weight in weights):
        raise ConfigError(f"{flag} {' '.join(values)}: {form}")
    return [(_weight(weight, flag), word) for weight, word in zip(weights, words, strict=True)]


def _weight(text: str, flag: str) -> float:
    value = number_of(text)
    if value is None or not 0 < value < math.inf:
        raise ConfigError(
            f"{flag}: the weight {text} is not a finite number above 0; leave out a dataset that "
            "is not wanted"
        )
    return value


def number_of(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@contextmanager
def _naming(path: str | None) -> Iterator[None]:
    """Add ``path`` to ConfigErrors about the file's content."""
    try:
        yield
    except ConfigError as error:
        if path is None or path in str(error):
            raise
        raise ConfigError(f"{error} (in {path})") from None


def _words(path: str | None, flag: str) -> tuple[str, ...]:
    if path is None:
        return ()
    text = _text(path, flag)
    quoted = _QUOTING.search(text) is not None
    if quoted and len(text) > _LONGEST_QUOTED:
        raise ConfigError(
            f"{flag} {path} has {len(text)} characters, quotation marks or backslashes among them; "
            f"such a file may have {_LONGEST_QUOTED}: a longer one must do without them"
        )
    try:
        words = shlex.split(text, comments=True) if quoted else _COMMENT.sub("", text).split()
    except ValueError as error:  # an unclosed quotation
        raise ConfigError(f"{flag} {path}: {error}") from None
    if not words:
        raise ConfigError(f"{flag} {path} is empty; write into it what the command line would have")
    return tuple(words)


def _per_split(path: str | None) -> dict[str, tuple[str, ...]]:
    """Read Megatron's JSON file `{"train": [...], "valid": [...], "test": [...]}`."""
    if path is None:
        return {}
    flag = "--per-split-data-args-path"
    try:
        content = parse_json(_text(path, flag), f"{flag} {path}")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    good = isinstance(content, dict) and content and set(content) <= set(PARTS)
    if not good or not all(isinstance(values, list) for values in content.values()):
        raise ConfigError(
            f"{flag} {path}: it must be an object of lists under train, valid and test, each as "
            "for --data-path"
        )
    return {part: tuple(map(str, values)) for part, values in content.items()}


def _text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from None
