"""SentencePiece models: Megatron's two ways of using them, and Llama 2's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError

from megatron.config import TokenizerConfig
from megatron.features.tokenizers.sentence_piece_model import (
    SPACE,
    RankedPieces,
    as_tokenizers,
    check_kind,
    ranked_pieces,
    read_model,
)
from megatron.tokenizer.base import (
    SpecialIds,
    TokenIds,
    Tokenizer,
    WordStarts,
    byte_of_piece,
    read_vocabulary_file,
    refuse_extra_ids,
    required,
    sentinel_ids,
    sentinel_names,
    write_pretrained,
    write_text,
)


class SentencePieceTokenizer(Tokenizer):
    """Gives the ids of `sentencepiece.SentencePieceProcessor.encode`. With `specials`, these keep
    their ids in a text, and the text between them is encoded separately; without, no text contains
    a special token, and detokenizing leaves them out."""

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        ids: SpecialIds,
        specials: dict[str, int] | None = None,
        add_bos: bool = False,
        source: str = "the SentencePiece model",
    ) -> None:
        """`specials` are ids of tokens that texts may contain; `source` names the model. `add_bos`
        puts the beginning of text before each text."""
        self._processor, self._specials = processor, specials or {}
        self._name_of_special = {i: token for token, i in self._specials.items()}
        vocab_size = 1 + max([len(processor) - 1, *self._specials.values()])
        super().__init__(source, vocab_size, ids, hint=" (it is fixed when the model is trained)")
        self._find_specials = re.compile(
            f"({'|'.join(map(re.escape, self._specials))})" if self._specials else "(?!)"
        )
        self._begin = np.array([self.bos] if add_bos else [], np.int32)
        self._ranked: RankedPieces | None = ranked_pieces(processor)

    @classmethod
    def from_file(cls, path: str | Path, extra_ids: int = 0) -> SentencePieceTokenizer:
        """Megatron's SentencePieceTokenizer: appends special tokens that the model lacks.

        In this order: `<CLS>`, `<SEP>`, `<EOD>`, `<MASK>`, then `<PAD>`, `<BOS>` and `<EOS>` where
        the model names no such id, then `<extra_id_0>`, `<extra_id_1>` and on.

        Raises FileNotFoundError; ValueError if it is not a SentencePiece model.
        """
        processor = load_processor(path)
        vocab = {processor.id_to_piece(i): i for i in range(len(processor))}
        own = {
            "PAD": processor.pad_id(), "BOS": processor.bos_id(), "EOS": processor.eos_id()
        }  # fmt: skip
        names = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
        names += [f"<{n}>" if i < 0 else processor.id_to_piece(i) for n, i in own.items()]
        specials = {}
        for name in names + sentinel_names(extra_ids):
            specials[name] = vocab.setdefault(name, len(vocab))
        keys = ("cls", "sep", "eod", "mask", "pad", "bos", "eos")
        given = {key: specials[name] for key, name in zip(keys, names, strict=True)}
        ids = SpecialIds(**given, sentinels=sentinel_ids(vocab))
        return cls(processor, ids, specials, source=f"--tokenizer-model {path}")

    @classmethod
    def gpt_from_file(cls, path: str | Path, add_bos: bool = False) -> SentencePieceTokenizer:
        """The model as it is; a document ends with its end of text. Raises FileNotFoundError;
        ValueError if it is not a SentencePiece model, or lacks what `add_bos` needs."""
        processor, source = load_processor(path), f"--tokenizer-model {path}"
        return cls(processor, _own_ids(processor), add_bos=add_bos, source=source)

    @classmethod
    def gpt_from_model(cls, model: bytes) -> SentencePieceTokenizer:
        """As `gpt_from_file`, from the content of a valid file."""
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        return cls(processor, _own_ids(processor))

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> SentencePieceTokenizer:
        """From --tokenizer-model; each text of Llama2Tokenizer begins with `<s>`."""
        if config.tokenizer_type == "SentencePieceTokenizer":
            return cls.from_file(model_path(config), config.vocab_extra_ids)
        refuse_extra_ids(config)
        add_bos = config.tokenizer_type == "Llama2Tokenizer"
        return cls.gpt_from_file(model_path(config), add_bos)

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        for text in texts:
            text.encode()  # a lone surrogate is a ValueError that says so, not a RuntimeError
        if not self._specials and not len(self._begin):
            return self._pieces(texts)
        split = [self._find_specials.split(text) for text in texts]
        plain = self._pieces([part for parts in split for part in parts[::2]])
        rows, start = [], 0
        for parts in split:
            row = [self._begin]
            for n, part in enumerate(parts):
                if n % 2:
                    row.append(np.array([self._specials[part]], np.int32))
                else:
                    row.append(plain[start])
                    start += 1
            rows.append(row[1] if len(row) == 2 and not len(row[0]) else np.concatenate(row))
        return rows

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids. With `specials`, these are put between spaces; without, control symbols give
        no text, as with `sentencepiece`."""
        self._check_ids(ids)
        parts: list[str] = []
        pending: list[int] = []
        for i in ids:
            if i in self._name_of_special:
                parts += [self._processor.decode(pending), self._name_of_special[i]]
                pending = []
            else:
                pending.append(int(i))
        parts.append(self._processor.decode(pending))
        return " ".join(part for part in parts if part) if len(parts) > 1 else parts[0]

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes tokenizer.model, the model itself, and tokenizer.json, which `transformers` reads.
        In transformers' own library ids are the same but for rare characters that it normalizes in
        another way (docs/guides/tokenizers.md)."""
        directory = Path(directory)
        begin = self.bos if len(self._begin) else None
        encoding = as_tokenizers(self._processor, self._specials, begin)
        name = {i: encoding.id_to_token(i) or "" for i in range(self._vocab_size)}
        named = self.special_ids.tokens(name) | {"unk_token": name[self._processor.unk_id()]}
        write_text(directory / "tokenizer.model", self._processor.serialized_model_proto())
        write_pretrained(
            directory,
            encoding,
            tokenizer_class="PreTrainedTokenizerFast",
            clean_up_tokenization_spaces=False,
            split_special_tokens=not self._specials,
            **named,
        )

    def _find_word_starts(self) -> WordStarts:
        processor = self._processor
        marks = np.zeros(self._vocab_size, np.bool_)
        marks[len(processor) :] = True
        for i in range(len(processor)):
            marks[i] = processor.is_control(i) or processor.id_to_piece(i).startswith(SPACE)
        for i in self._specials.values():
            marks[i] = True
        return marks

    def _find_token_bytes(self) -> list[bytes]:
        tokens = super()._find_token_bytes()
        for i in self.byte_pieces:
            tokens[i] = byte_of_piece(self._processor.id_to_piece(i))
        return tokens

    def _find_special_tokens(self) -> frozenset[int]:
        model = self._processor
        own = (i for i in range(len(model)) if model.is_control(i) or model.is_unknown(i))
        return super()._find_special_tokens().union(own, self._specials.values())

    def _find_byte_pieces(self) -> frozenset[int]:
        return frozenset(filter(self._processor.is_byte, range(len(self._processor))))

    def _encode(self, text: str) -> TokenIds:
        return self.tokenize_batch([text])[0]

    def _pieces(self, texts: Sequence[str]) -> list[TokenIds]:
        if self._ranked is not None:
            return [self._ranked.encode(text) for text in texts]
        encoded = self._processor.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(ids, np.int32) for ids in encoded]


def _own_ids(processor: sentencepiece.SentencePieceProcessor) -> SpecialIds:
    vocab = {processor.id_to_piece(i): i for i in range(len(processor))}
    ids = {
        "pad": processor.pad_id(), "bos": processor.bos_id(),
        "eos": processor.eos_id(), "eod": processor.eos_id(),
    }  # fmt: skip
    known = {name: i for name, i in ids.items() if i >= 0}
    return SpecialIds(**known, sentinels=sentinel_ids(vocab))


def load_processor(path: str | Path) -> sentencepiece.SentencePieceProcessor:
    """Reads the model of --tokenizer-model. Raises FileNotFoundError; ValueError if it is not a
    SentencePiece model that `transformers` can run."""
    path = Path(path)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "is no ordinary file"
        problem = problem if path.exists() else "does not exist"
        raise FileNotFoundError(
            f"--tokenizer-model {path} {problem}; it must be a SentencePiece model "
            "(python tools/train_tokenizer.py --tokenizer-type SentencePieceTokenizer trains one)"
        )
    content = read_vocabulary_file(path, "--tokenizer-model")
    try:
        # Of no bytes the library makes a model without pieces, and says nothing.
        processor = sentencepiece.SentencePieceProcessor(model_proto=content or b"?")
        processor.encode("a")
        for i in range(len(processor)):
            processor.id_to_piece(i)
        read_model(processor)
    except (RuntimeError, UnicodeDecodeError, DecodeError) as error:
        raise ValueError(f"--tokenizer-model {path} is not a SentencePiece model") from error
    try:
        check_kind(processor)
    except ValueError as error:
        raise ValueError(f"--tokenizer-model {path} {error}") from None
    return processor


def model_path(config: TokenizerConfig, new: bool = False) -> str:
    """The path of --tokenizer-model, or the same with `.model` appended, as in 2019. Where neither
    exists it is the path as given; with `new`, the one to write a model to."""
    path = required(config, "tokenizer_model", "a SentencePiece model")
    with_ending = f"{path.removesuffix('.model')}.model"
    if Path(path).exists():
        return path
    return with_ending if new or Path(with_ending).is_file() else path
