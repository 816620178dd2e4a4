"""Names of pieces that several kinds of vocabularies share: T5's sentinels, and single bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SENTINEL = re.compile(r"<extra_id_([0-9]{1,6})>")


def byte_of_piece(piece: str) -> bytes:
    """Return the byte that a SentencePiece byte piece such as `<0xE6>` represents."""
    return bytes.fromhex(piece[3:5])


def sentinel_ids(vocab: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids of `<extra_id_0>`, `<extra_id_1>`, ... up to the first one missing."""
    sentinels = {int(m[1]): i for token, i in vocab.items() if (m := _SENTINEL.fullmatch(token))}
    ids: list[int] = []
    while len(ids) in sentinels:
        ids.append(sentinels[len(ids)])
    return tuple(ids)


def sentinel_names(count: int) -> list[str]:
    return [f"<extra_id_{n}>" for n in range(count)]
