"""Examples to token ids and the tokens that count in the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError, TokenizerConfig
from megatron.config.kinds.instruction import InstructionConfig
from megatron.data.kinds.instruction.chat import ChatTemplate, chat_template, own_template
from megatron.data.kinds.instruction.headings import Exchange, alpaca_exchanges, plain_exchanges
from megatron.data.kinds.instruction.records import Example
from megatron.data.kinds.raw_text.encode import tokenizer_identity
from megatron.tokenizer import Tokenizer


class EncodedExample(NamedTuple):
    """An example of L tokens."""

    tokens: npt.NDArray[np.int32]
    """[L]."""
    counted: npt.NDArray[np.bool_]
    """[L]: whether the prediction of a token counts in the loss. Never that of the first one,
    which nothing predicts."""


class ExampleEncoder:
    """Encodes examples in the format of --prompt-format, --chat-template and --loss-on.

    Raises:
        ConfigError: the flags contradict each other or the tokenizer.
        FileNotFoundError: there is no such chat template.
    """

    def __init__(
        self, config: InstructionConfig, tokenizer: Tokenizer, tokenizer_config: TokenizerConfig
    ) -> None:
        """`tokenizer_config` is what the tokenizer was made of; it identifies it in the cache."""
        self._config, self._tokenizer, self._tokenizer_config = config, tokenizer, tokenizer_config
        if config.chat_template is not None:
            if config.prompt_format not in ("auto", "chat"):
                raise ConfigError(
                    f"--prompt-format {config.prompt_format} and --chat-template "
                    f"{config.chat_template} contradict each other: give one of them"
                )
            if not Path(config.chat_template).is_file():
                raise FileNotFoundError(f"--chat-template {config.chat_template} is no file")
            self._template: str | None = Path(config.chat_template).read_text("utf-8")
        elif config.prompt_format in ("auto", "chat"):
            self._template = own_template(tokenizer)
            if config.prompt_format == "chat" and self._template is None:
                raise ConfigError(
                    "--prompt-format chat: the tokenizer brings no chat template; give "
                    "--chat-template FILE"
                )
        else:
            self._template = None

    @property
    def identity(self) -> dict[str, Any]:
        """All that the tokens of an example depend on, as JSON values."""
        return {
            "tokenizer": tokenizer_identity(self._tokenizer_config),
            "format": self._config.prompt_format,
            "template": self._template,
            "loss on": self._config.loss_on,
        }

    def __call__(self, examples: Sequence[tuple[str, Example]]) -> list[EncodedExample]:
        """Encodes (place, example) pairs; places are for messages.

        Raises:
            ValueError: an example cannot be put into the format or tokenized; names its place.
        """
        encoded: dict[int, EncodedExample] = {}
        exchanges: dict[int, list[Exchange]] = {}
        for number, (place, example) in enumerate(examples):
            by_headings = self._headings(example)
            if by_headings is not None:
                exchanges[number] = by_headings(example)
                continue
            try:
                ids, counted = self._chat.encode(example, self._config.loss_on)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            encoded[number] = _example(np.array(ids, np.int32), counted)
        try:
            found = self._encode_exchanges(list(exchanges.values()))
        except ValueError:
            for number, of_example in exchanges.items():
                try:
                    self._encode_exchanges([of_example])
                except ValueError as error:
                    raise ValueError(f"{examples[number][0]}: {error}") from error
            raise
        encoded.update(zip(exchanges, found, strict=True))
        return [encoded[number] for number in range(len(examples))]

    def _headings(self, example: Example) -> Callable[[Example], list[Exchange]] | None:
        """What puts an example into plain text; None where the chat template does."""
        kind = self._config.prompt_format
        if kind == "auto":
            otherwise = "alpaca" if self._template is None else "chat"
            kind = "plain" if example.is_pair else otherwise
        return {"plain": plain_exchanges, "alpaca": alpaca_exchanges}.get(kind)

    @cached_property
    def _chat(self) -> ChatTemplate:
        assert self._template is not None
        return chat_template(self._tokenizer, self._template)

    @cached_property
    def _eod(self) -> int:
        return self._tokenizer.eod

    def _encode_exchanges(self, examples: Sequence[Sequence[Exchange]]) -> list[EncodedExample]:
        """An exchange is tokenized whole, so that prompt and answer join as in any text. The first
        token that the prompt alone would not have is the first of the answer."""
        texts = [t for e in examples for p, a in e for t in (p, p + a)]
        ids = iter(self._tokenizer.tokenize_batch(texts))
        loss_on = self._config.loss_on
        encoded = []
        for exchanges in examples:
            tokens, counted = [], []
            for place in range(len(exchanges)):
                prompt, whole = np.asarray(next(ids)), np.asarray(next(ids))
                shared = min(len(prompt), len(whole))
                differs = np.flatnonzero(prompt[:shared] != whole[:shared])
                start = int(differs[0]) if len(differs) else shared
                if not len(whole) or whole[-1] != self._eod:
                    whole = np.append(whole, self._eod)
                counts = np.arange(len(whole)) >= start
                if loss_on == "everything":
                    counts[:] = True
                elif loss_on == "last" and place < len(exchanges) - 1:
                    counts[:] = False
                tokens.append(whole)
                counted.append(counts)
            encoded.append(_example(np.concatenate(tokens), np.concatenate(counted)))
        return encoded


def _example(tokens: np.ndarray, counted: npt.NDArray[np.bool_]) -> EncodedExample:
    counted[:1] = False
    return EncodedExample(tokens.astype(np.int32), counted)
