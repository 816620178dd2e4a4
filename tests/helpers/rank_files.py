"""Megatron's checkpoint files, as the tests write and compare them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

VOCABULARY = ("word_embeddings", "output_layer", "lm_head.bias")
"""Tensors whose last rows may be padding."""


def rank_file(path: Path) -> dict[str, Any]:
    """The content of a rank's file, which has nothing but tensors, plain values and a Namespace of
    arguments."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, weights_only=True)


def assert_same_tree(here: Any, there: Any, place: str = "") -> None:
    """The same dictionaries and tensors. Padding is 7 in ``here``, as the tests write it, and 0 in
    ``there``; each tensor of that file has a storage of its own size."""
    if isinstance(here, dict):
        assert sorted(here) == sorted(there), place
        for key in here:
            assert_same_tree(here[key], there[key], f"{place}.{key}")
        return
    if any(name in place for name in VOCABULARY):
        padding = here.eq(7).reshape(len(here), -1).all(1)
        assert torch.equal(here[~padding], there[~padding]) and not there[padding].any(), place
    else:
        assert torch.equal(here, there), place
    assert here.dtype == there.dtype and there.untyped_storage().nbytes() == here.nbytes, place
