"""Special tokens: what a vocabulary has of them, and what is said of those that it lacks."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens that a vocabulary has."""

    cls: int | None = None
    """begins a sequence of BERT's"""
    sep: int | None = None
    """separates and ends the sentences of a sequence of BERT's"""
    pad: int | None = None
    """fills up a sequence"""
    mask: int | None = None
    """stands for a token to be predicted"""
    bos: int | None = None
    """begins a text"""
    eos: int | None = None
    """ends a text"""
    eod: int | None = None
    """ends a document"""
    sentinels: tuple[int, ...] = ()
    """`<extra_id_0>`, `<extra_id_1>` and on: stand for the spans that T5 predicts"""

    def tokens(self, token_of_id: Mapping[int, str]) -> dict[str, str]:
        """As tokenizer_config.json of `transformers` names them: "pad_token" and so on."""
        ids = {name: getattr(self, name) for name in ("pad", "bos", "eos", "cls", "sep", "mask")}
        return {f"{name}_token": token_of_id[i] for name, i in ids.items() if i is not None}


_ROLE = {field.name: field.name for field in fields(SpecialIds)} | {
    "cls": "start of sequence (cls)",
    "sep": "separator (sep)",
    "pad": "padding (pad)",
    "mask": "mask (mask)",
    "bos": "beginning of text (bos)",
    "eos": "end of text (eos)",
    "eod": "end of document (eod)",
}


class SpecialTokens(ABC):
    """The special ids of a tokenizer, each as an attribute; one that is absent is a ValueError.

    The families of tokenizers derive from this.
    """

    def __init__(self, source: str, ids: SpecialIds, hint: str = "") -> None:
        """`source` names the vocabulary in messages, `hint` says where it would have more."""
        self._source, self._special_ids, self._hint = source, ids, hint
        self._word_starts: npt.NDArray[np.bool_] | None = None

    @property
    def cls(self) -> int:
        """Id of the token that begins a sequence of BERT's."""
        return self._special("cls")

    @property
    def sep(self) -> int:
        """Id of the token that ends each sentence in a sequence of BERT's."""
        return self._special("sep")

    @property
    def pad(self) -> int:
        """Id of the token that fills up a sequence."""
        return self._special("pad")

    @property
    def mask(self) -> int:
        """Id of the token that stands for one to be predicted."""
        return self._special("mask")

    @property
    def bos(self) -> int:
        """Id of the token that begins a text."""
        return self._special("bos")

    @property
    def eos(self) -> int:
        """Id of the token that ends a text."""
        return self._special("eos")

    @property
    def eod(self) -> int:
        """Id of the token that ends a document."""
        return self._special("eod")

    @property
    def sentinels(self) -> list[int]:
        """Ids of `<extra_id_0>`, `<extra_id_1>` and on; empty where there are none."""
        return list(self._special_ids.sentinels)

    @property
    def word_starts(self) -> npt.NDArray[np.bool_]:
        """Whether a token begins a word, [vocab_size]."""
        if self._word_starts is None:
            self._word_starts = self._find_word_starts()
            self._word_starts.flags.writeable = False
        return self._word_starts

    @abstractmethod
    def _find_word_starts(self) -> npt.NDArray[np.bool_]:
        """Whether a token begins a word, [vocab_size]; asked for once."""

    def _special(self, name: str) -> int:
        value = getattr(self._special_ids, name)
        if value is None:
            raise ValueError(f"{self._source} has no token for the {_ROLE[name]}{self._hint}")
        return value


def sentinel_ids(vocab: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of `<extra_id_0>`, `<extra_id_1>` and on in a vocabulary, up to the first one missing."""
    found = {int(m[1]): i for token, i in vocab.items() if (m := _SENTINEL.fullmatch(token))}
    ids: list[int] = []
    while len(ids) in found:
        ids.append(found[len(ids)])
    return tuple(ids)


def sentinel_names(count: int) -> list[str]:
    """`<extra_id_0>` to `<extra_id_{count - 1}>`."""
    return [f"<extra_id_{n}>" for n in range(count)]
