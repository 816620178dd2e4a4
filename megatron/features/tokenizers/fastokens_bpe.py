"""Optional encoding of text batches with fastokens, which returns tiktoken's ids in a fraction of
the time.

fastokens caches the words it has seen in tables of bounded size. On OpenWebText, it encodes cached
words twelve times as fast as tiktoken. Building its tables takes as long as encoding some megabytes
of text with tiktoken, so encoding starts with tiktoken, and stays with it if fastokens fails. While
fastokens is used, some texts are encoded by both and compared.
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

# Number of characters that a tokenizer encodes with tiktoken before it builds fastokens. This takes
# a fifth to a third of the time for building fastokens with 50,000 merges.
WORTH_BUILDING = 2_000_000


_COMPARED_EVERY = 64
"""Number of batches after which one text is encoded with tiktoken too, to compare the ids."""


def require_fastokens() -> None:
    """Check that fastokens is installed. Raises ConfigError if it is not."""
    if importlib.util.find_spec("fastokens") is None:
        raise ConfigError(
            "--bpe-library fastokens is not installed: run pip install -e '.[fast]' in the "
            "checkout, or leave the flag out"
        )


class FastEncoding:
    """Encoder that uses fastokens and maps its ids (merge ranks) to the vocabulary's ids."""

    def __init__(self, description: str, id_of_rank: TokenIds) -> None:
        """Build the encoder from `description`, a tokenizer.json as text. `id_of_rank` has the
        vocabulary's id of each rank. Raises ImportError if fastokens is not installed."""
        # fastokens reads this variable once, when it encodes the first text. Processes already work
        # in
        # parallel, and only a process without threads can safely be forked by torch's data loader.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        import fastokens

        self._description, self._id_of_rank = description, id_of_rank
        self._tokenizer = fastokens.Tokenizer.from_json_str(description)

    def __reduce__(self) -> tuple[type[FastEncoding], tuple[str, TokenIds]]:
        return FastEncoding, (self._description, self._id_of_rank)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return each text's ids as views of one array. A lone surrogate raises
        UnicodeEncodeError."""
        ranks, ends = self._tokenizer.encode_batch_flat(list(texts))
        ids = self._id_of_rank[np.frombuffer(ranks, "<u4")]
        bounds = np.frombuffer(ends, "<u8").tolist()
        return [ids[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


class BatchEncoder:
    """Encoder of text batches that starts with a given slow encoder and switches to fastokens after
    `WORTH_BUILDING` characters."""

    def __init__(
        self,
        tokens: list[str],
        merges: list[tuple[str, str]],
        special: str | None,
        id_of_rank: TokenIds,
    ) -> None:
        """Store the vocabulary. `tokens` are ordered by rank and followed by the token `special`.
        `id_of_rank` has the id of each, including `special`."""
        self._made_from = (tokens, merges, special)
        self._id_of_rank = id_of_rank
        self._fast: FastEncoding | None = None
        # Number of characters left until fastokens is built. None once it was built or has failed.
        self._to_go: int | None = WORTH_BUILDING
        self._batches = 0

    def encode(self, texts: Sequence[str], slowly: Callable[[str], TokenIds]) -> list[TokenIds]:
        """Return the ids of each text. `slowly` encodes one text and raises an error for text
        that cannot be encoded. Raises ValueError if its ids and those of fastokens are found to
        differ."""
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
        """Build fastokens, and use it from now on if its ids for `texts` equal `wanted`. Otherwise
        warn and stay with the slow encoder."""
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
