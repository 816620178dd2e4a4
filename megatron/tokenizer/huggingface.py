"""Any tokenizer of `transformers`, from a local folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config import TokenizerConfig
from megatron.tokenizer.files import refuse_extra_ids, required
from megatron.tokenizer.protocol import TokenIds


class HFTokenizer:
    """The tokenizer of a folder, with its own settings.

    Ids are those of `AutoTokenizer.from_pretrained(folder)(text)`: where the folder says that a
    text begins with a beginning-of-sequence token (Llama), it does so here as well.
    """

    def __init__(self, directory: str | Path) -> None:
        """Loads the folder, and nothing from the network.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: `transformers` cannot make a tokenizer of it.
        """
        directory = Path(directory)
        if not directory.is_dir():
            found = "is a file" if directory.exists() else "does not exist"
            raise FileNotFoundError(
                f"--tokenizer-model {directory} {found}; it must be a local folder with the files "
                "of a Hugging Face tokenizer (tokenizer.json, tokenizer_config.json)"
            )
        from transformers import AutoTokenizer  # seconds: only for whoever needs it

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # transformers raises many kinds, some of them bare Exception
            names = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
            raise ValueError(
                f"--tokenizer-model {directory} is no tokenizer that transformers can read "
                f"(the folder holds {names}): {error}"
            ) from error
        if self._tokenizer.is_fast:  # what transformers sets before each of its own calls
            backend = self._tokenizer.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = self._tokenizer.split_special_tokens
        self._directory = directory
        self._vocab_size = max(self._tokenizer.get_vocab().values()) + 1

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> HFTokenizer:
        """From --tokenizer-model."""
        refuse_extra_ids(config)
        return cls(required(config, "tokenizer_model", "a folder with a Hugging Face tokenizer"))

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included."""
        return self._vocab_size

    @property
    def eod(self) -> int:
        """The folder's end-of-sequence token."""
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                f"--tokenizer-model {self._directory} names no eos_token, so it has no end of "
                "document; set eos_token in its tokenizer_config.json"
            )
        return eos

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text."""
        return self._encode([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text; fast tokenizers use all cores unless TOKENIZERS_PARALLELISM=false."""
        return [np.array(ids, np.int32) for ids in self._encode(texts)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        for i in ids:
            if not 0 <= i < self._vocab_size:
                raise ValueError(f"token id {i} is outside the vocabulary of {self._vocab_size}")
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the tokenizer files by `transformers`."""
        self._tokenizer.save_pretrained(directory)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            text.encode()  # a lone surrogate is a ValueError that says so, not a TypeError
        if not texts:
            return []
        if self._tokenizer.is_fast:  # without the masks, offsets and length warnings of the rest
            encoded = self._tokenizer.backend_tokenizer.encode_batch_fast(list(texts))
            return [encoding.ids for encoding in encoded]
        return self._tokenizer(list(texts), verbose=False)["input_ids"]
