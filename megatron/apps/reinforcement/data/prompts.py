"""Files of prompts with the columns that reward functions use, and the order of prompts in groups.

A prompt is tokenized once, stored with its record in the index cache, and memory-mapped from there.
A group consists of the G = ``--num-generations`` completions of one prompt: G consecutive samples
of a run, as in trl's sampler (1.16, ``RepeatSampler``).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import torch
from torch import Tensor

from megatron.apps.reinforcement.episodes import Message, Prompt
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.samples import Documents, Piece, SampleDataset, checked_index
from megatron.features.instruction.columns import CONVERSATIONS, NO_FLAGS, RecordColumns, keys_of
from megatron.features.instruction.conversations import (
    ANSWER,
    Example,
    Turn,
    messages_in,
    prompt_of,
    read_records,
    template_variables,
    turns_of,
    with_system,
)
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.examples import TokenizedExamples, offsets_of, shuffled_epochs
from megatron.util.digests import digest, hash64

logger = logging.getLogger(__name__)

# Version of the arrays, part of each cache key. Increment it when their meaning changes.
INDEX_VERSION = 1
_AT_ONCE = 1000
_NAMED = 5
_PROMPT = "prompt"
_LAYOUTS = (
    'a record has "prompt" (a text or messages), or "messages", "question", "query" or '
    '"instruction"; --prompt-column and --messages-column name other columns'
)


class PromptRecord(NamedTuple):
    """Prompt as a conversation, with the text and columns that reward functions use; see
    :class:`Prompt`."""

    example: Example
    text: str | tuple[Message, ...]
    columns: Mapping[str, Any]


def read_prompts(
    path: str, columns: RecordColumns = NO_FLAGS
) -> Iterator[tuple[str, PromptRecord]]:
    """Yield each record of a file, preceded by its location for messages. Raises ValueError if a
    record is malformed."""
    return read_records(path, lambda record: parse_prompt(record, columns))


def parse_prompt(record: Any, columns: RecordColumns = NO_FLAGS) -> PromptRecord:
    """Parse a record in any of the supported layouts, keeping all columns except the prompt's.
    Raises ValueError if the record has no prompt, or if the prompt ends with an answer."""
    fields = columns.record(record)
    variables = template_variables(fields)
    is_text = is_list = False
    if _PROMPT in fields and "instruction" not in columns.names:
        # As in trl, a column such as "input" is left to the reward functions if there is a
        # "prompt".
        key, is_text = _PROMPT, True
        value = messages_in(fields.take(key), key)
        is_list = isinstance(value, list)
        turns = turns_of(value, key, fields.ignored) if is_list else [_user(value, key)]
        turns = list(with_system(fields, turns))
    elif (conversation := fields.first(CONVERSATIONS)) is not None:
        key, is_list = columns.names.get("messages", (conversation,))[0], True
        turns = turns_of(fields.take(conversation), key, fields.ignored)
        while turns and turns[-1].role == ANSWER:
            turns.pop()
        turns = list(with_system(fields, turns))
    else:
        stated = prompt_of(fields)
        if stated is None:
            raise ValueError(f"no prompt (its keys: {keys_of(record)}); {_LAYOUTS}")
        turns, is_list, is_text = list(stated.turns), stated.is_list, stated.is_text
        key = columns.names.get("instruction", (stated.column,))[0]
    if not turns or not any(turn.text for turn in turns):
        raise ValueError(f'"{key}" is an empty prompt')
    if turns[-1].role == ANSWER:
        raise ValueError(f'"{key}" ends with an answer; a prompt ends where the model answers')
    kept = {name: v for name, v in record.items() if name != key and name not in columns.ignored}
    is_text = is_text and not is_list and len(turns) == 1 and not variables
    text: str | tuple[Message, ...] = turns[0].text
    if is_list or len(turns) > 1:
        text = tuple({"role": t.role, "content": t.content, **dict(t.fields)} for t in turns)
    return PromptRecord(Example(tuple(turns), is_text, variables), text, kept)


def _user(value: Any, key: str) -> Turn:
    if not isinstance(value, str):
        raise ValueError(f'"{key}" must be a text or a list of messages, not {value!r:.40}')
    return Turn("user", value)


class PromptExamples(TokenizedExamples):
    """Tokenized prompts of a file, one document each. Pickles as the path of its cache entry."""

    @classmethod
    def open(
        cls, path: str, encoder: ExampleEncoder, cache: IndexCache | None = None
    ) -> PromptExamples:
        """Tokenize the prompts of a file, folder or glob, or read them from the cache (by default
        `index-cache/` next to the data). Raises FileNotFoundError if no file matches, and
        ValueError if a record is malformed or no record is found."""
        known = path, "prompts", encoder, {"prompts": INDEX_VERSION}
        arrays = partial(_arrays, encoder=encoder)
        return cls(path, cls.stored(*known, read_prompts, arrays, cache))

    @cached_property
    def content_digest(self) -> str:
        """Return a digest of everything that the samples depend on."""
        parts = (self._index[name] for name in ("tokens", "offsets", "records"))
        return digest(b"".join(digest(np.ascontiguousarray(p).data).encode() for p in parts))

    def prompt(self, number: int) -> Prompt:
        """Return the prompt of record ``number`` with its text and columns."""
        start, stop = self._index["record_offsets"][number : number + 2].tolist()
        text, columns = orjson.loads(self._index["records"][start:stop].tobytes())
        text = tuple(text) if isinstance(text, list) else text
        return Prompt(number, self.get(number).astype(np.int64), text, columns)

    def verify(self) -> None:
        offsets, records = self._index["record_offsets"], self._index["records"]
        counts = {len(self), len(self.prompt_hashes), len(offsets) - 1}
        rising = offsets[0] == 0 and (np.diff(offsets) > 0).all() and offsets[-1] == len(records)
        self.check("prompts", len(counts) == 1 and bool(rising))


def _arrays(
    records: Iterator[tuple[str, PromptRecord]], encoder: ExampleEncoder
) -> dict[str, np.ndarray]:
    tokens: list[np.ndarray] = []
    packed, lengths, hashes = [], [], []
    while batch := list(islice(records, _AT_ONCE)):
        encoded = encoder.prompts([(place, record.example) for place, record in batch])
        for (place, record), ids in zip(batch, encoded, strict=True):
            if not len(ids):
                raise ValueError(f"{place}: the prompt has no token")
            try:
                packed.append(orjson.dumps((record.text, record.columns), default=str))
            except TypeError as error:
                raise ValueError(f"{place}: a column cannot be kept as JSON: {error}") from None
        tokens += encoded
        lengths += [len(ids) for ids in encoded]
        hashes += [hash64(ids.tobytes()) for ids in encoded]
    return {
        "tokens": np.concatenate([np.empty(0, np.int32), *tokens]),
        "offsets": offsets_of(lengths),
        "prompt_hashes": np.array(hashes, np.uint64),
        "records": np.frombuffer(b"".join(packed), np.uint8),
        "record_offsets": offsets_of([len(record) for record in packed]),
    }


@dataclass(frozen=True)
class PromptRecipe:
    """Recipe for a dataset of prompts in which each prompt occurs once per epoch. Each epoch is
    shuffled depending on the seed, the split ``name`` and the epoch number."""

    longest: int
    """Maximum number of tokens in a prompt."""
    seed: int
    by_prompt: bool = False
    """Split the data by a hash of the prompt, so that equal prompts are in the same split, rather
    than by consecutive records."""
    skip_long: bool = False
    """Leave out prompts that are too long, as trl did (0.27), instead of truncating them on the
    left."""

    def units(self, documents: Documents) -> int:
        return len(documents)

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> PromptDataset:
        """Build a dataset of at least `num_samples` prompts from the records `units`. Their order
        may be read from the cache. Raises ValueError if the documents are not prompts, or if all
        are too long."""
        if not isinstance(documents, PromptExamples):
            raise ValueError(
                f"{documents.prefix} contains documents and no prompts; --rl needs files of "
                "prompts (JSON, JSON lines, Parquet, CSV)"
            )
        depends_on = {
            "version": INDEX_VERSION,
            "content": documents.content_digest,
            "records": [units.start, units.stop],
            "part": name,
            "longest": self.longest,
            "samples": num_samples,
            "seed": self.seed,
            "split by prompt": self.by_prompt,
            "skip long": self.skip_long,
        }

        def arrays() -> dict[str, np.ndarray]:
            usable = self._usable(documents, documents.part(units, self.by_prompt, name), name)
            order = shuffled_epochs(len(usable), num_samples, self.seed, name)
            return {"usable": usable, "order": order}

        index = cache.arrays(f"prompts-{name}", depends_on, arrays)
        return PromptDataset(documents, index, self.longest)

    def _usable(
        self, documents: PromptExamples, numbers: npt.NDArray[np.int64], name: str
    ) -> npt.NDArray[np.int64]:
        is_long = documents.sequence_lengths[numbers] > self.longest
        if not is_long.any():
            return numbers
        shown = ", ".join(
            f"{number + 1} ({documents.sequence_lengths[number]})"
            for number in numbers[is_long][:_NAMED].tolist()
        )
        more = ", ..." * bool(is_long.sum() > _NAMED)
        problem = (
            f"{documents.prefix}, {name}: of {len(numbers)} prompts {is_long.sum()} are longer "
            f"than {self.longest} tokens (--max-prompt-length): records (tokens) {shown}{more}"
        )
        if not self.skip_long:
            logger.warning(
                "%s; their beginning is cut off, --on-long-example skip leaves them out", problem
            )
            return numbers
        if is_long.all():
            raise ValueError(f"{problem}: give a larger one, and --seq-length")
        logger.warning("%s; they are left out", problem)
        return numbers[~is_long]


class PromptDataset:
    """Shuffled prompts of one split, with at most ``longest`` tokens each."""

    def __init__(self, examples: PromptExamples, index: StoredArrays, longest: int) -> None:
        self.examples, self._index, self.longest = examples, index, longest

    def __len__(self) -> int:
        return len(self._index["order"])

    def __getitem__(self, index: int, /) -> PromptSample:
        return PromptSample(self.prompt(self._number(index)), index)

    def prompt(self, number: int) -> Prompt:
        """Return the prompt of a record, truncated to its last ``longest`` tokens."""
        prompt = self.examples.prompt(number)
        return dataclasses.replace(prompt, tokens=prompt.tokens[-self.longest :])

    @property
    def usable(self) -> npt.NDArray[np.int64]:
        """Record numbers of the split that are used, in ascending order."""
        return self._index["usable"]

    def origin(self, index: int, /) -> list[Piece]:
        number = self._number(index)
        length = int(self.examples.sequence_lengths[number])
        return [Piece(self.examples.prefix, number, max(0, length - self.longest), length)]

    def _number(self, index: int) -> int:
        return int(self.usable[self._index["order"][checked_index(index, len(self))]])


class PromptSample(NamedTuple):
    """A prompt for one completion.

    Attributes:
        number: number of the sample in the run, the same in every layout.
    """

    prompt: Prompt
    number: int


class RepeatedPrompts:
    """Dataset that repeats each prompt of another dataset ``group`` times in a row. Records are
    numbered across all files, in the order of the command line.

    Attributes:
        parts: the repeated prompts of each dataset in a blend.
        files: the prompts of each file, keyed by the number of the file's first record.
    """

    def __init__(self, dataset: SampleDataset[PromptSample], group: int) -> None:
        self.dataset, self.group = dataset, group
        self.files: dict[int, PromptDataset] = {}
        self._first: dict[str, int] = {}
        records = 0
        blended: Sequence[Any] = getattr(dataset, "parts", [])
        self.parts = [RepeatedPrompts(part, group) for part in blended] or [self]
        files: Sequence[Any] = blended or [dataset]
        for part in files:
            if part.examples.prefix not in self._first:
                self._first[part.examples.prefix] = records
                self.files[records] = part
                records += len(part.examples)
        self.records: int = records
        """Number of records in all files."""

    def __len__(self) -> int:
        return len(self.dataset) * self.group

    def __getitem__(self, index: int, /) -> PromptSample:
        index = checked_index(index, len(self))
        prompt = self.dataset[index // self.group].prompt
        (piece,) = self.dataset.origin(index // self.group)
        number = self._first[piece.source] + prompt.number
        return PromptSample(dataclasses.replace(prompt, number=number), index)

    def origin(self, index: int, /) -> Sequence[Piece]:
        return self.dataset.origin(checked_index(index, len(self)) // self.group)


class PromptBatch(NamedTuple):
    """Micro batch of prompts for the policy to answer.

    Attributes:
        numbers: sample numbers, see :class:`PromptSample`.
    """

    prompts: tuple[Prompt, ...]
    numbers: tuple[int, ...]

    @property
    def tokens_BS(self) -> Tensor:
        """Token ids of the prompts, int64, padded on the right with 0."""
        rows = [torch.from_numpy(prompt.tokens) for prompt in self.prompts]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PromptBatch:
        """Return the batch unchanged, because prompts stay on the CPU."""
        return self


def collate_prompts(samples: Sequence[PromptSample]) -> PromptBatch:
    """Collate samples into a micro batch."""
    prompts, numbers = zip(*samples, strict=True)
    return PromptBatch(prompts, numbers)
