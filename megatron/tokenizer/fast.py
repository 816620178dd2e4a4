"""Batches of text on fastokens, where it is installed: the ids of tiktoken, in a fraction of time.

fastokens keeps the words it has seen, in tables of bounded size. Building them from a vocabulary
costs as much time as tiktoken needs for some megabytes of text, so batches begin with tiktoken.
Where fastokens is missing or fails, they stay there.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import orjson

from megatron.tokenizer.byte_level import CHARACTER_OF_BYTE, Merges
from megatron.tokenizer.protocol import TokenIds
from megatron.tokenizer.ranked import RankedEncoding

# Characters that one tokenizer encodes with tiktoken before fastokens is built: a fifth to a third
# of the time that building takes, for 50,000 merges.
WORTH_BUILDING = 2_000_000


class FastEncoding:
    """Encodes with fastokens; its ids, the ranks, are mapped to the vocabulary's ids."""

    def __init__(self, merges: Merges, special: str | None, id_of_rank: TokenIds) -> None:
        """For what `RankedEncoding` is made from, and its `id_of_rank`.

        Raises:
            ImportError: fastokens is not installed.
        """
        # Read once, when the first text is encoded. Processes are the parallelism, and a process
        # that has no threads can be forked, as torch's loader does.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        import fastokens

        self._made_from = (merges, special, id_of_rank)
        self._id_of_rank = id_of_rank
        self._tokenizer = fastokens.Tokenizer.from_json_str(_description(merges, special))

    def __reduce__(self) -> tuple[type[FastEncoding], tuple[Merges, str | None, TokenIds]]:
        return FastEncoding, self._made_from

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text, as views of one array.

        Raises:
            UnicodeEncodeError: a lone surrogate.
        """
        ranks, ends = self._tokenizer.encode_batch_flat(list(texts))
        ids = self._id_of_rank[np.frombuffer(ranks, "<u4")]
        bounds = np.frombuffer(ends, "<u8").tolist()
        return [ids[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


class BatchEncoder:
    """Encodes batches with another encoding, and from some amount of text on with fastokens."""

    def __init__(self, ranked: RankedEncoding, merges: Merges, special: str | None) -> None:
        """`ranked` has the ids that are wanted."""
        self._made_from = (merges, special, ranked.id_of_rank)
        self._fast: FastEncoding | None = None
        # Characters still to go; None: fastokens is not to be used.
        self._to_go: int | None = WORTH_BUILDING
        if importlib.util.find_spec("fastokens") is None:
            self._to_go = None

    def encode(self, texts: Sequence[str], slowly: Callable[[str], TokenIds]) -> list[TokenIds]:
        """Ids of each text; `slowly` encodes one text, and raises what cannot be encoded."""
        if self._fast is not None:
            try:
                return self._fast.encode_batch(texts)
            except UnicodeEncodeError:
                raise
            except Exception as error:
                self._give_up(f"failed ({type(error).__name__}: {error})")
        wanted = [slowly(text) for text in texts]
        if self._to_go is not None:
            self._to_go -= sum(map(len, texts))
            if self._to_go <= 0:
                self._build(texts, wanted)
        return wanted

    def _build(self, texts: Sequence[str], wanted: list[TokenIds]) -> None:
        """Builds fastokens, if it gives what is wanted for the texts."""
        try:
            fast = FastEncoding(*self._made_from)
            if all(map(np.array_equal, fast.encode_batch(texts), wanted)):
                self._to_go, self._fast = None, fast
            else:
                self._give_up("gives other ids")
        except Exception as error:
            self._give_up(f"cannot be used ({type(error).__name__}: {error})")

    def _give_up(self, why: str) -> None:
        self._to_go = self._fast = None
        warnings.warn(f"fastokens {why}: tiktoken encodes instead, more slowly", stacklevel=4)


def _description(merges: Merges, special: str | None) -> str:
    """The encoding as a tokenizer.json whose ids are the ranks of `RankedEncoding`."""
    tokens = [*CHARACTER_OF_BYTE, *(left + right for left, right in merges)]
    added = [] if special is None else [_added_token(special, len(tokens))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    byte_level["trim_offsets"] = True
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: rank for rank, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    return orjson.dumps(description).decode()


def _added_token(content: str, rank: int) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": rank, "content": content, **flags, "special": True}
