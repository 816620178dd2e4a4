"""Batches of text on fastokens, if it is requested: the ids of tiktoken, in a fraction of the time.

fastokens keeps the words it has seen, in tables of bounded size: on OpenWebText it is twelve times
as fast as tiktoken where it knows the words. Building the tables costs as much time as tiktoken
needs for some megabytes of text, so batches begin with tiktoken, and stay there if fastokens
fails. Some texts are encoded by both as long as it is used.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import orjson

from megatron.config import ConfigError
from megatron.tokenizer.base import TokenIds
from megatron.util.errors import rust_errors

# Characters that one tokenizer encodes with tiktoken before fastokens is built: a fifth to a third
# of the time that building takes, for 50,000 merges.
WORTH_BUILDING = 2_000_000


_COMPARED_EVERY = 64
"""Interval of batches in which one text is also encoded by tiktoken."""


def require_fastokens() -> None:
    """Raises ConfigError if fastokens is not installed."""
    if importlib.util.find_spec("fastokens") is None:
        raise ConfigError(
            "--bpe-library fastokens is not installed: run pip install -e '.[fast]' in the "
            "checkout, or leave the flag out"
        )


class FastEncoding:
    """Encodes with fastokens; its ids, the ranks, are mapped to the vocabulary's ids."""

    def __init__(self, description: str, id_of_rank: TokenIds) -> None:
        """`description` is a tokenizer.json; raises ImportError if fastokens is not installed."""
        # Read once, when the first text is encoded. Processes are the parallelism, and a process
        # that has no threads can be forked, as torch's loader does.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        import fastokens

        self._description, self._id_of_rank = description, id_of_rank
        self._tokenizer = fastokens.Tokenizer.from_json_str(description)

    def __reduce__(self) -> tuple[type[FastEncoding], tuple[str, TokenIds]]:
        return FastEncoding, (self._description, self._id_of_rank)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text, as views of one array; UnicodeEncodeError for a lone surrogate."""
        ranks, ends = self._tokenizer.encode_batch_flat(list(texts))
        ids = self._id_of_rank[np.frombuffer(ranks, "<u4")]
        bounds = np.frombuffer(ends, "<u8").tolist()
        return [ids[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


class BatchEncoder:
    """Encodes batches with another encoding, and from some amount of text on with fastokens."""

    def __init__(
        self,
        tokens: list[str],
        merges: list[tuple[str, str]],
        special: str | None,
        id_of_rank: TokenIds,
    ) -> None:
        """`tokens` in the order of their ranks, `special` after them; `id_of_rank` of all."""
        self._made_from = (tokens, merges, special)
        self._id_of_rank = id_of_rank
        self._fast: FastEncoding | None = None
        # Characters until fastokens is built; None: it is not to be used.
        self._to_go: int | None = WORTH_BUILDING
        self._batches = 0

    def encode(self, texts: Sequence[str], slowly: Callable[[str], TokenIds]) -> list[TokenIds]:
        """Ids of each text; `slowly` encodes one text, and raises what cannot be encoded. Raises
        ValueError if fastokens gives other ids than before."""
        if self._fast is not None:
            try:
                with rust_errors("fastokens"):
                    encodings = self._fast.encode_batch(texts)
            except UnicodeEncodeError:
                raise
            except Exception as error:
                self._give_up(f"failed ({type(error).__name__}: {error})")
            else:
                self._compare(texts, encodings, slowly)
                return encodings
        wanted = [slowly(text) for text in texts]
        if self._to_go is not None:
            self._to_go -= sum(map(len, texts))
            if self._to_go <= 0:
                self._build(texts, wanted)
        return wanted

    def _compare(
        self, texts: Sequence[str], found: list[TokenIds], slowly: Callable[[str], TokenIds]
    ) -> None:
        self._batches += 1
        if self._batches % _COMPARED_EVERY or not texts:
            return
        number = self._batches // _COMPARED_EVERY % len(texts)
        if not np.array_equal(found[number], slowly(texts[number])):
            raise ValueError(
                "--bpe-library fastokens gives other ids than tiktoken; remove what was written "
                f"with it, and leave the flag out. The text begins with {texts[number][:60]!r}"
            )

    def _build(self, texts: Sequence[str], wanted: list[TokenIds]) -> None:
        """Builds fastokens, and keeps it if it gives the wanted ids for the texts."""
        try:
            with rust_errors("fastokens"):
                fast = FastEncoding(_description(*self._made_from), self._id_of_rank)
                fits = all(map(np.array_equal, fast.encode_batch(texts), wanted))
            if fits:
                self._to_go, self._fast = None, fast
            else:
                self._give_up("gives other ids")
        except Exception as error:
            self._give_up(f"cannot be used ({type(error).__name__}: {error})")

    def _give_up(self, why: str) -> None:
        self._to_go = self._fast = None
        warnings.warn(f"fastokens {why}: tiktoken encodes instead, more slowly", stacklevel=4)


def _description(tokens: list[str], merges: list[tuple[str, str]], special: str | None) -> str:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"id": len(tokens), "content": special, **flags, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    byte_level["trim_offsets"] = True
    unused = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    model = {
        "type": "BPE",
        **dict.fromkeys(unused),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "vocab": {token: rank for rank, token in enumerate(tokens)},
        "merges": merges,
    }
    description = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [] if special is None else [added],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": model,
    }
    return orjson.dumps(description).decode()
