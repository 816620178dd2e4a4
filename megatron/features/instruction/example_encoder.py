"""Encoding of examples into token ids and a loss mask: as plain text, with or without Alpaca's
headings, or with a chat template."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError, TokenizerConfig
from megatron.features.instruction.chat_process import (
    Rendered,
    TemplateProcess,
    read_template,
    special_variables,
)
from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import (
    ANSWER,
    REASONING,
    Example,
    Turn,
    plain_texts,
)
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.raw_text.encoder import refused, tokenizer_identity
from megatron.formats.transformers_folder import load_folder
from megatron.tokenizer import Tokenizer
from megatron.util.errors import rust_errors

_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_FORMS = {
    "tools": r"\btools\b",
    "tool_calls": r"\btool_calls\b",
    REASONING[0]: rf"\b({'|'.join(REASONING)})\b",
    "name": r"\bmessages?(\[[^\]]*\])?(\.name\b|\[['\"]name['\"]\]|\.get\(['\"]name)",
}
"""Patterns by which chat templates are found to write message keys other than the content."""
_KNOWS_NULL = re.compile(r"(?<!\w)content(['\"]\])?\s+is\s+(not\s+)?none", re.IGNORECASE)

_STAND_IN = "An answer of the model."
Messages = list[dict[str, Any]]
Item = TypeVar("Item")
Found = TypeVar("Found")
PromptAnswer = tuple[str, str]
"""A prompt and the answer that follows."""


class EncodedExample(NamedTuple):
    """Encoded example of L tokens."""

    tokens: npt.NDArray[np.int32]
    """Token ids, [L]."""
    counted: npt.NDArray[np.bool_]
    """Loss mask, [L]: whether the prediction of each token counts. Always False for the first
    token, which is not predicted."""


class Continued(NamedTuple):
    """Encoded conversation of L tokens, which consists of a prompt and its continuation."""

    tokens: npt.NDArray[np.int32]
    """Token ids, [L]."""
    start: int
    """Index of the first token that differs from the prompt encoded alone."""


class ExampleEncoder:
    """Encoder of examples in the format set by --prompt-format, --chat-template and --loss-on.
    Raises ConfigError if the flags contradict each other or the tokenizer, and FileNotFoundError if
    the chat template does not exist."""

    def __init__(
        self, config: InstructionConfig, tokenizer: Tokenizer, tokenizer_config: TokenizerConfig
    ) -> None:
        """Create an encoder. `tokenizer_config` identifies the tokenizer in cache keys."""
        self._config, self._tokenizer, self._tokenizer_config = config, tokenizer, tokenizer_config
        self._template: str | None = None
        if config.chat_template is not None:
            if config.prompt_format not in ("auto", "chat"):
                raise ConfigError(
                    f"--prompt-format {config.prompt_format} and --chat-template "
                    f"{config.chat_template} contradict each other: give one of them"
                )
            self._template = read_template(
                config.chat_template, f"--chat-template {config.chat_template}"
            )
        elif config.prompt_format in ("auto", "chat"):
            of_transformers = getattr(tokenizer, "transformers_tokenizer", None)
            if of_transformers is not None and of_transformers.chat_template:
                self._template = of_transformers.get_chat_template()
            if config.prompt_format == "chat" and self._template is None:
                raise ConfigError(
                    "--prompt-format chat: the tokenizer has no chat template; give "
                    "--chat-template FILE"
                )

    @property
    def identity(self) -> dict[str, Any]:
        """Everything on which the tokens of an example depend, as JSON values for cache keys."""
        return {
            "tokenizer": tokenizer_identity(self._tokenizer_config),
            "format": self._config.prompt_format,
            "template": self._template,
            "loss on": self._config.loss_on,
            "columns": self.columns.identity,
        }

    @property
    def columns(self) -> RecordColumns:
        """Columns set by flags."""
        return RecordColumns.of(self._config)

    def __call__(self, examples: Sequence[tuple[str, Example]]) -> list[EncodedExample]:
        """Encode (location, example) pairs. Locations are for error messages. Raises ValueError if
        an example cannot be written in the format or tokenized."""
        encoded: dict[int, EncodedExample] = {}
        plain: dict[int, list[PromptAnswer]] = {}
        for number, (place, example) in enumerate(examples):
            kind = self.format_of(example)
            try:
                self._check(example, kind)
                if kind == "chat":
                    encoded[number] = _encoded(*self._chat.encode(example, self._config.loss_on))
                    continue
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            plain[number] = list(plain_texts(example, alpaca=kind == "alpaca"))
        places = [examples[number][0] for number in plain]
        counts = [_counts(examples[number][1]) for number in plain]
        texts = list(zip(plain.values(), counts, strict=True))
        tokens = _naming(places, self._encode_plain, texts)
        encoded.update(zip(plain, tokens, strict=True))
        return [encoded[number] for number in range(len(examples))]

    def text_of(self, example: Example) -> str:
        """Return the text that is tokenized, without the end token of plain text. Raises ValueError
        if the example cannot be written in the format."""
        kind = self.format_of(example)
        if kind == "chat":
            return self._chat.text_of(example)
        return "".join(p + a for p, a in plain_texts(example, alpaca=kind == "alpaca"))

    def format_of(self, example: Example) -> str:
        """Return the format of an example: chat, alpaca or plain."""
        if self._config.prompt_format != "auto":
            return self._config.prompt_format
        if example.is_pair:
            return "plain"
        return "alpaca" if self._template is None else "chat"

    def continued(self, examples: Sequence[tuple[str, Example, int]]) -> list[Continued]:
        """Encode whole examples with their end tokens, given as (location, example, number of
        prompt turns). The turns after the prompt must be a single answer, except with a chat
        template. Raises like ``__call__``."""
        encoded: dict[int, Continued] = {}
        plain: dict[int, list[PromptAnswer]] = {}
        for number, (place, example, count) in enumerate(examples):
            kind = self.format_of(example)
            try:
                self._check(example, kind)
                if kind == "chat":
                    encoded[number] = self._chat.continued(example, count)
                    continue
                if [turn.role for turn in example.turns[count:]] != [ANSWER]:
                    raise ValueError(
                        f"--prompt-format {kind} has no form for an answer of several messages; "
                        "give --prompt-format chat, and --chat-template FILE if the tokenizer has "
                        "none"
                    )
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            plain[number] = list(plain_texts(example, alpaca=kind == "alpaca"))
        places = [examples[number][0] for number in plain]
        tokenized = _naming(places, self._tokenized, list(plain.values()))
        for number, parts in zip(plain, tokenized, strict=True):
            *before, (last, start) = parts
            tokens = np.concatenate([*(tokens for tokens, _ in before), last])
            start += sum(len(tokens) for tokens, _ in before)
            encoded[number] = Continued(np.asarray(tokens, np.int32), start)
        return [encoded[number] for number in range(len(examples))]

    def prompts(self, examples: Sequence[tuple[str, Example]]) -> list[npt.NDArray[np.int32]]:
        """Encode (location, example) pairs as prompts: up to where the model answers, including the
        text that the format puts before an answer. Raises like ``__call__``."""
        encoded: dict[int, npt.NDArray[np.int32]] = {}
        plain: dict[int, list[PromptAnswer]] = {}
        for number, (place, example) in enumerate(examples):
            kind = self.format_of(example)
            try:
                self._check(example, kind)
                if kind == "chat":
                    encoded[number] = np.asarray(self._chat.prompt(example), np.int32)
                    continue
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            asked = replace(example, turns=(*example.turns, Turn(ANSWER, "")))
            plain[number] = list(plain_texts(asked, alpaca=kind == "alpaca"))
        places = [examples[number][0] for number in plain]
        tokenized = _naming(places, self._tokenized, [parts[:-1] for parts in plain.values()])
        asked_last = _naming(
            places, self._tokenizer.tokenize_batch, [parts[-1][0] for parts in plain.values()]
        )
        for number, before, last in zip(plain, tokenized, asked_last, strict=True):
            answered = [np.asarray(tokens, np.int32) for tokens, _ in before]
            encoded[number] = np.concatenate([*answered, np.asarray(last, np.int32)])
        return [encoded[number] for number in range(len(examples))]

    def following(self, example: Example) -> list[int]:
        """Return the token ids between the last answer of a conversation and the model's next one.
        With a chat template they begin with the text that ends the answer. Raises ValueError if the
        example cannot be written in the format."""
        kind = self.format_of(example)
        self._check(example, kind)
        if kind == "chat":
            return self._chat.following(example)
        turns = (*example.turns, Turn(ANSWER, ""))
        *_, (text, _) = plain_texts(Example(turns), alpaca=kind == "alpaca")
        return list(self._tokenizer.tokenize(text))

    def _check(self, example: Example, kind: str) -> None:
        """Raise ValueError if the format would omit part of an example, or contradicts its
        weights."""
        if kind != "chat":
            for key in _beyond_text(example):
                raise _unwritten(f"--prompt-format {kind}", key, example)
        if self._config.loss_on == "everything" and not all(turn.counts for turn in example.turns):
            raise ValueError(
                "--loss-on everything, and a message that does not count in the loss (its weight "
                "is 0): give --loss-on all or last"
            )

    @cached_property
    def _chat(self) -> ChatTemplate:
        assert self._template is not None
        return ChatTemplate(self._tokenizer, self._template)

    def _encode_plain(
        self, examples: Sequence[tuple[Sequence[PromptAnswer], Sequence[bool]]]
    ) -> list[EncodedExample]:
        loss_on = self._config.loss_on
        encoded = []
        tokenized = self._tokenized([parts for parts, _ in examples])
        for parts, (_, trained) in zip(tokenized, examples, strict=True):
            counted = []
            for place, (whole, start) in enumerate(parts):
                counts = np.arange(len(whole)) >= start
                if loss_on == "everything":
                    counts[:] = True
                elif not trained[place] or (loss_on == "last" and place < len(parts) - 1):
                    counts[:] = False
                counted.append(counts)
            tokens = np.concatenate([whole for whole, _ in parts])
            encoded.append(_encoded(tokens, np.concatenate(counted)))
        return encoded

    def _tokenized(
        self, examples: Sequence[Sequence[PromptAnswer]]
    ) -> list[list[tuple[np.ndarray, int]]]:
        """Return, for each (prompt, answer) pair, the tokens of its text and the index of the
        answer's first token. The pair is tokenized as one text. The first token that differs from
        the prompt alone belongs to the answer."""
        texts = [t for e in examples for p, a in e for t in (p, p + a)]
        ids = iter(self._tokenizer.tokenize_batch(texts))
        eod = self._tokenizer.eod if texts else -1
        tokenized = []
        for pairs in examples:
            parts = []
            for _ in pairs:
                prompt, whole = np.asarray(next(ids)), np.asarray(next(ids))
                start = shared_tokens(prompt, whole)
                if not len(whole) or whole[-1] != eod:
                    whole = np.append(whole, eod)
                parts.append((whole, start))
            tokenized.append(parts)
        return tokenized


def _counts(example: Example) -> list[bool]:
    """Return, for each answer, whether it counts in the loss."""
    return [
        turn.counts and number >= example.context
        for number, turn in enumerate(example.turns)
        if turn.role == ANSWER
    ]


def _beyond_text(example: Example) -> Iterator[str]:
    """Yield the names of the non-text parts of an example, which a format may omit. The name of a
    tool message is excluded, because it repeats that of the call."""
    yield from (key for key, value in example.variables if value not in ("", [], {}))
    for turn in example.turns:
        names = {key for key, _ in turn.fields} - {"tool_call_id"}
        yield from sorted(names - ({"name"} if turn.role == "tool" else set()))


def _unwritten(what: str, key: str, example: Example) -> ValueError:
    is_variable = key != "tools" and key in dict(example.variables)
    column = "chat_template_kwargs" if is_variable else key
    return ValueError(
        f'{what} does not write "{key}": give a chat template that does (--prompt-format chat, '
        f"--chat-template FILE), or leave it out by --ignore-columns {column}"
    )


def shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the common prefix of two token sequences."""
    shared = min(len(first), len(second))
    differs = np.flatnonzero(first[:shared] != second[:shared])
    return int(differs[0]) if len(differs) else shared


def _naming(
    places: Sequence[str], encode: Callable[[list[Item]], list[Found]], items: list[Item]
) -> list[Found]:
    """Encode items. If this fails, the error names the location of the first bad item."""
    try:
        return encode(items)
    except ValueError:
        for number, refusal in refused(encode, items):
            raise ValueError(f"{places[number]}: {refusal}") from refusal
        raise


def _encoded(tokens: npt.ArrayLike, counted: npt.NDArray[np.bool_]) -> EncodedExample:
    counted[:1] = False
    return EncodedExample(np.asarray(tokens, np.int32), counted)


class ChatTemplate:
    """Chat template and the tokenizer for its output.

    If the template marks the model's text with {% generation %}, that text is the answer. Otherwise
    an answer is the text that it adds to the conversation so far, without trailing whitespace. This
    includes the token that ends the turn, but not the line break after that token.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """Load the tokenizer. Raises ValueError if it cannot map tokens to text offsets."""
        fast = getattr(tokenizer, "transformers_tokenizer", None)
        if fast is None:
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                fast = load_folder(Path(folder))
        if not fast.is_fast:
            raise ValueError(
                "--prompt-format chat needs a tokenizer with a tokenizer.json (a fast one of "
                f"transformers); {type(fast).__name__} is not"
            )
        self._tokenizer, self._template = fast, template
        self._variables = special_variables(fast) | {"documents": None, "tools": None}
        self._process = TemplateProcess()
        self._marks_answers = bool(_MARKS_ANSWERS.search(template))

    def encode(self, example: Example, loss_on: str) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """Return the token ids, and a mask of those that count in the loss according to
        ``loss_on``. Raises ValueError if the template rejects the conversation or omits part of it,
        or if answers cannot be located in its output."""
        if self._marks_answers and loss_on != "everything":
            return self._by_marks(example, loss_on)
        text = self.text_of(example)
        ids, offsets = self._with_offsets(text)
        if loss_on == "everything":
            return ids, np.ones(len(ids), np.bool_)
        counted = np.zeros(len(ids), np.bool_)
        answers = [n for n, turn in enumerate(example.turns) if turn.role == ANSWER]
        trained = dict(zip(answers, _counts(example), strict=True))
        for number in answers if loss_on == "all" else answers[-1:]:
            if trained[number]:
                start, end = self._span(example, number, text)
                counted |= (offsets[:, 0] >= start) & (offsets[:, 0] < end)
        return ids, counted

    def text_of(self, example: Example) -> str:
        """Return the conversation rendered by the template. Raises ValueError if the template
        rejects the conversation or omits part of it."""
        return self._rendered(example).text

    def prompt(self, example: Example) -> list[int]:
        """Return the token ids up to where the model answers. Raises like :meth:`text_of`."""
        return self._with_offsets(self._prompt(example, len(example.turns)))[0]

    def following(self, example: Example) -> list[int]:
        """Return the token ids after the last answer, up to where the model answers again. Raises
        ValueError if the template omits that answer."""
        # Locate the answer by a placeholder, because the template may change the answer's text.
        turns = list(example.turns)
        last = max(number for number, turn in enumerate(turns) if turn.role == ANSWER)
        turns[last] = Turn(ANSWER, _STAND_IN)
        text = self._prompt(replace(example, turns=tuple(turns)), len(turns))
        _, mark, rest = text.rpartition(_STAND_IN)
        if not mark:
            raise ValueError("the chat template leaves out the answer before the last messages")
        return self._with_offsets(rest)[0]

    def continued(self, example: Example, count: int) -> Continued:
        """Return the token ids of the conversation, and the index of the first token that differs
        from the prompt, which is the first ``count`` turns. Raises like :meth:`text_of`."""
        prompt, whole = (
            np.asarray(self._with_offsets(text)[0])
            for text in (self._prompt(example, count), self.text_of(example))
        )
        return Continued(whole.astype(np.int32), shared_tokens(prompt, whole))

    def _by_marks(self, example: Example, loss_on: str) -> tuple[list[int], npt.NDArray[np.bool_]]:
        rendered = self._rendered(example)
        ids, offsets = self._with_offsets(rendered.text)
        counted = np.zeros(len(ids), np.bool_)
        trained, marks = _counts(example), rendered.marks
        if all(trained):
            trained = [True] * len(marks)
        elif len(marks) != len(trained):
            raise ValueError(
                f"the chat template marks {len(marks)} parts by {{% generation %}} and the "
                f"conversation has {len(trained)} answers, of which some do not count"
            )
        elif loss_on == "last":
            trained[:-1] = [False] * (len(trained) - 1)
        for (start, end), counts in zip(marks, trained, strict=True):
            counted |= counts & (offsets[:, 1] > start) & (offsets[:, 0] < end)
        if loss_on == "last" and counted.any():
            last = np.flatnonzero(counted)[-1]
            before = np.flatnonzero(~counted[:last])
            counted[: before[-1] + 1 if len(before) else 0] = False
        return ids, counted

    def _span(self, example: Example, number: int, text: str) -> tuple[int, int]:
        """Return the start and end of answer `number` in the text of the whole conversation."""
        before = self._prompt(example, number)
        until = self._text(example.turns[: number + 1], example)
        if not text.startswith(until):
            until = self._until_next(example, number)
        if not until.startswith(before) or not text.startswith(until):
            raise ValueError(
                f"the chat template writes message {number + 1} in another way once others follow "
                "it, so that its position is unknown: mark the answers in the template by "
                "{% generation %} and {% endgeneration %} (--chat-template FILE), or give "
                "--loss-on last or --loss-on everything"
            )
        return len(before), len(before) + len(until[len(before) :].rstrip())

    def _until_next(self, example: Example, number: int) -> str:
        """Return the text up to the end of an answer that is followed by another message, found by
        removing what the next message adds to the conversation without the answer. Return an empty
        string if this is impossible, or if the template omits part of the answer."""
        turns = example.turns
        following = turns[number + 1 : number + 2]
        if not following or REASONING[0] in dict(turns[number].fields):
            return ""
        before = self._text(turns[:number], example)
        without_answer = self._text((*turns[:number], *following), example)
        with_answer = self._text(turns[: number + 2], example)
        added = without_answer.removeprefix(before)
        if added in ("", without_answer) or not with_answer.endswith(added):
            return ""
        until = with_answer.removesuffix(added)
        return until if turns[number].text.strip() in until[len(before) :] else ""

    def _text(self, turns: Sequence[Turn], example: Example) -> str:
        return self.text_of(replace(example, turns=tuple(turns)))

    def _prompt(self, example: Example, count: int) -> str:
        """Return the text of the first ``count`` turns, up to where the model answers."""
        return self._rendered(replace(example, turns=example.turns[:count]), True).text

    def _rendered(self, example: Example, add_generation_prompt: bool = False) -> Rendered:
        for key in _beyond_text(example):
            if not re.search(_FORMS.get(key, rf"\b{re.escape(key)}\b"), self._template):
                raise _unwritten("the chat template", key, example)
        conversation = {
            **dict(example.variables),
            "messages": [self._message(turn) for turn in example.turns],
            "add_generation_prompt": add_generation_prompt,
        }
        return self._process.render_marked(self._template, self._variables | conversation)

    def _message(self, turn: Turn) -> dict[str, Any]:
        """Return a message as templates expect it. Missing content next to tool calls becomes null
        if the template checks for null, else an empty text."""
        fields = dict(turn.fields)
        is_null = not turn.text and "tool_calls" in fields and _KNOWS_NULL.search(self._template)
        if REASONING[0] in fields:
            fields["thinking"] = fields[REASONING[0]]
        return {"role": turn.role, "content": None if is_null else turn.text, **fields}

    def _with_offsets(self, text: str) -> tuple[list[int], npt.NDArray[np.int64]]:
        """Return the token ids, and the character range of each token, [L, 2]."""
        with rust_errors("the tokenizer cannot encode a conversation"):
            encoded = self._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        return encoded["input_ids"], np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
