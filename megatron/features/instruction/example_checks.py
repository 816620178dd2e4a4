"""Warnings about probable mistakes in the training examples of a run, based on a few of them.

Some mistakes cause no error: a template without an end token, answers that never count in the loss,
token ids that the model does not have, a format unknown to the base model. The resulting model
never stops, learns nothing, or has forgotten how to answer. Each finding names a remedy and shows a
sample.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.checkpoint.files import CheckpointError
from megatron.config.features import file_kinds
from megatron.data.loader import TrainingData
from megatron.data.pipeline import DataPipeline, kind_named
from megatron.data.samples import PackedSample, SampleDataset
from megatron.data.texts import ScoredRows
from megatron.families import family_of
from megatron.features.instruction.chat_process import read_template
from megatron.features.instruction.conversations import Example
from megatron.features.instruction.example_encoder import ChatTemplate, ExampleEncoder
from megatron.features.instruction.flags import InstructionConfig
from megatron.run.run import Run
from megatron.tokenizer import Tokenizer
from megatron.training.resume import find_origin
from megatron.util.json_text import parse_json
from megatron.util.processes import is_main_process

LOOKED_AT = 32
"""Number of samples that are checked."""
_LOOKED_AT_ENDINGS, _MOSTLY = 64, 0.5
"""Number of samples whose answer endings are counted, and the fraction of answers that must share
an ending."""
_SHOWN = 400
_ENDING = 3
"""Number of final tokens of an answer in which an end token is expected, because line breaks may
follow it."""


class Finding(NamedTuple):
    """Probable mistake.

    Attributes:
        problem: what is wrong, its consequence, and the remedy.
        sample: text of an example that shows the problem.
    """

    problem: str
    sample: str

    def __str__(self) -> str:
        return f"{self.problem}\n    | " + "\n    | ".join(self.sample.splitlines() or [""])


class Base(NamedTuple):
    """Base model from which training starts.

    Attributes:
        vocabulary: number of rows of its token embedding; None if unknown.
        template: its chat template; None if it has none.
    """

    vocabulary: int | None = None
    template: str | None = None


def check_examples(
    data: DataPipeline,
    train: SampleDataset[Any],
    base: Base = Base(),  # noqa: B008  # immutable
) -> list[Finding]:
    """Return probable mistakes in the training samples of a run, if they are instructions or
    preferences. Only a few samples are read, and only one rank needs to call this."""
    items = (train[number] for number in range(min(LOOKED_AT, len(train))))
    samples = [sample for item in items for sample in getattr(item, "samples", [item])]
    kept = [s for s in samples if isinstance(s, PackedSample | ScoredRows)]
    if not kept:
        return []
    warnings = [
        _without_loss(data, kept),
        _without_end(data, kept),
        _outside_of_table(data, kept, base.vocabulary),
        _other_format(data, base.template),
    ]
    return [finding for finding in warnings if finding is not None]


class _Answer(NamedTuple):
    """Tokens [L] of one document of a sample, with a mask of the tokens in the loss."""

    tokens: npt.NDArray[np.int64]
    counted: npt.NDArray[np.bool_]
    whole: bool
    """False if the document may have been truncated."""


def _answers(data: DataPipeline, sample: PackedSample | ScoredRows) -> Iterator[_Answer]:
    if isinstance(sample, ScoredRows):
        for row in sample.rows:
            tokens = np.concatenate((row.context, row.continuation))
            counted = np.arange(len(tokens)) >= len(row.context)
            yield _Answer(tokens, counted, len(tokens) < data.seq_length)
        return
    counted_T = np.concatenate(([False], sample.loss_mask_S > 0))
    documents_T = np.append(sample.document_ids_S, sample.document_ids_S[-1])
    capacity = data.seq_length + 1
    for document in np.unique(documents_T):
        places = np.flatnonzero(documents_T == document)
        if counted_T[places].any():
            whole = len(places) < capacity
            yield _Answer(sample.tokens_T[places], counted_T[places], whole)


def _without_loss(
    data: DataPipeline, samples: Sequence[PackedSample | ScoredRows]
) -> Finding | None:
    empty = [s for s in samples if isinstance(s, PackedSample) and not (s.loss_mask_S > 0).any()]
    if not empty:
        return None
    return Finding(
        f"{len(empty)} of the first {len(samples)} samples have no token that counts in the loss, "
        "and the model learns nothing from them: look at the answers in the data, at the chat "
        "template and at --loss-on",
        _shown(data, empty[0]),
    )


def _without_end(
    data: DataPipeline, samples: Sequence[PackedSample | ScoredRows]
) -> Finding | None:
    """Return a finding if no answer ends with a token that ordinary text never contains."""
    ends = np.array(sorted(possible_ends(data.tokenizer)), np.int64)
    answers = ((s, answer) for s in samples for answer in _answers(data, s) if answer.whole)
    first = None
    for sample, (tokens, counted, _) in answers:
        last = np.flatnonzero(counted)[-_ENDING:]
        if np.isin(tokens[last], ends).any():
            return None
        first = first or sample
    if first is None:
        return None
    return Finding(
        "no answer ends with a special token that counts in the loss, so that the model will not "
        "learn to stop: let the chat template write the end token after an answer, inside of "
        "{% generation %} where it has that mark (--chat-template FILE)",
        _shown(data, first),
    )


def possible_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that may end an answer: special tokens, which never occur in ordinary
    text."""
    ends = set(tokenizer.special_tokens)
    for name in ("eod", "eos"):
        try:
            ends.add(getattr(tokenizer, name))
        except ValueError:
            continue
    fast = getattr(tokenizer, "transformers_tokenizer", None)
    if fast is not None:
        ends |= set(fast.added_tokens_decoder)
    return frozenset(ends)


def answer_ends(
    dataset: SampleDataset[Any], tokenizer: Tokenizer, of_base: Sequence[int]
) -> frozenset[int]:
    """Return the tokens that end an answer: the tokenizer's end tokens, the base model's end tokens
    ``of_base`` if they are special tokens, and the special token that ends most answers in the
    data."""
    items = (dataset[number] for number in range(min(_LOOKED_AT_ENDINGS, len(dataset))))
    samples = (sample for item in items for sample in getattr(item, "samples", [item]))
    # Only special tokens qualify. Otherwise the full stop, which ends most answers, would.
    known = possible_ends(tokenizer)
    answers = (answer for sample in samples for answer in _answer_endings(sample))
    last = Counter(next((i for i in reversed(each) if i in known), None) for each in answers)
    ends = tokenizer.ends | tokenizer.special_tokens.intersection(of_base)
    if last:
        token, times = last.most_common(1)[0]
        if token is not None and times > _MOSTLY * last.total():
            ends |= {token}
    return ends


def _answer_endings(sample: Any) -> Iterator[list[int]]:
    """Yield the last tokens in the loss of each example that the sample does not truncate."""
    if isinstance(sample, ScoredRows):
        yield from (row.continuation[-_ENDING:].tolist() for row in sample.rows)
    if not isinstance(sample, PackedSample):
        return
    counted_S, documents_S = sample.loss_mask_S > 0, sample.document_ids_S
    for document in np.unique(documents_S[counted_S]):
        places = np.flatnonzero(counted_S & (documents_S == document))
        if places[-1] < len(counted_S) - 1:
            yield sample.tokens_T[places[-_ENDING:] + 1].tolist()


def _outside_of_table(
    data: DataPipeline,
    samples: Sequence[PackedSample | ScoredRows],
    vocabulary: int | None,
) -> Finding | None:
    size = data.tokenizer.vocab_size
    if vocabulary is None or size <= vocabulary:
        return None
    used = [
        (sample, token)
        for sample in samples
        for answer in _answers(data, sample)
        for token in np.unique(answer.tokens[answer.tokens >= vocabulary]).tolist()
    ]
    text = (
        f"the tokenizer has {size} tokens and the base's table {vocabulary}: "
        f"ids from {vocabulary} on have no trained weights"
    )
    if not used:
        unused = "; the samples that were looked at have none of them"
        return Finding(text + unused, _shown(data, samples[0]))
    names = [repr(data.tokenizer.detokenize([t])) for t in sorted({t for _, t in used})[:5]]
    return Finding(
        f"{text}, and samples contain {', '.join(names)}: use a chat template of tokens that the "
        "base knows, or extend its table in transformers (resize_token_embeddings) and train all "
        "weights",
        _shown(data, used[0][0]),
    )


def _other_format(data: DataPipeline, template: str | None) -> Finding | None:
    """Return a finding if an example in the run's format differs from the base model's own
    template."""
    example = _first_example(data)
    if template is None or example is None:
        return None
    config = data.config.section(InstructionConfig)
    try:
        ours = ExampleEncoder(config, data.tokenizer, data.config.tokenizer).text_of(example)
        theirs = ChatTemplate(data.tokenizer, template).text_of(example)
    except ValueError:
        return None  # reported when the example is encoded
    if ours.rstrip() == theirs.rstrip():
        return None
    return Finding(
        "the base answers in a chat template of its own, and the examples are in another format, "
        "which it has to learn first: --prompt-format chat uses the template of the tokenizer, "
        "--chat-template FILE another",
        f"{_start(ours)}\n--- the base's own template:\n{_start(theirs)}",
    )


def _first_example(data: DataPipeline) -> Example | None:
    """Return the first conversation of the training files, or None."""
    train, kinds = data.parts.train, file_kinds()
    for source in train.sources if train is not None else ():
        if source.kind in kinds:
            kind = kind_named(kinds[source.kind])
            example: Example | None = kind.conversation(data.config, source.paths[0])
            if example is not None:
                return example
    return None


def template_in(folder: Path) -> str | None:
    """Return the chat template of a Hugging Face folder. Return None if it has none, or several
    named ones without a default."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return read_template(own, str(own))
    settings = folder / "tokenizer_config.json"
    if not settings.is_file():
        return None
    content = parse_json(settings.read_bytes(), str(settings), lenient=True)
    template = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(template, list):
        several = (each for each in template if isinstance(each, dict))
        template = {each.get("name"): each.get("template") for each in several}.get("default")
    return template if isinstance(template, str) else None


def _shown(data: DataPipeline, sample: PackedSample | ScoredRows) -> str:
    return _start(data.views(sample, data.seq_length)[0].text)


def _start(text: str) -> str:
    more = len(text) - _SHOWN
    return text if more <= 0 else f"{text[:_SHOWN]}... ({more} characters more)"


logger = logging.getLogger(__name__)


def warn_of_examples(run: Run, data: TrainingData) -> None:
    """Log probable mistakes in the examples, each with a sample, on the main process."""
    train = data.datasets.train
    if train is None or not is_main_process():
        return
    pipeline = family_of(run.config.model.family).data(run.config, run.tokenizer)
    for finding in check_examples(pipeline, train, base_of(run)):
        logger.warning("%s", finding)


def base_of(run: Run) -> Base:
    """Return the base model; empty if the run continues another one or starts from scratch."""
    try:
        origin = find_origin(run.config.checkpoint)
        if origin is None or origin.continues:
            return Base()
        source = origin.found.open(verify=False)
        return Base(source.model.vocabulary.size, template_in(source.folder))
    except (CheckpointError, ValueError, OSError):
        return Base()  # loading the checkpoint reports the error
