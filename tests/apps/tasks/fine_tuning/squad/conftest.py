"""What the tests of SQuAD share: files next to them, a small vocabulary."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from squad_files import vocabulary  # noqa: E402

from megatron.features.tokenizers.wordpiece import WordPieceTokenizer  # noqa: E402


@pytest.fixture(scope="session")
def pieces() -> WordPieceTokenizer:
    """Lower case; half of the words, and letters."""
    return WordPieceTokenizer({token: i for i, token in enumerate(vocabulary())}, True)


@pytest.fixture(scope="session")
def whole() -> WordPieceTokenizer:
    """Lower case; every word is one token."""
    return WordPieceTokenizer({token: i for i, token in enumerate(vocabulary(False))}, True)
