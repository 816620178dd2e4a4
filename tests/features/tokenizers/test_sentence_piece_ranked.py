"""The fast way of a SentencePiece byte-pair encoding, against sentencepiece, on random models."""

import random

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as model_pb2

from megatron.features.tokenizers.sentence_piece import as_tokenizers, ranked_pieces

SPACE = "\u2581"
ALPHABET = ["a", "b", "é", "中", "\U0001f600", SPACE]


def processor_of(pieces: dict[str, float], **changes) -> sentencepiece.SentencePieceProcessor:
    """A model of these pieces and scores in Llama 2's form; `changes` are of its settings."""
    model = model_pb2.ModelProto()
    kinds = model_pb2.ModelProto.SentencePiece
    for token, kind in (("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)):
        model.pieces.add(piece=token, type=kind)
    for byte in range(256):
        model.pieces.add(piece=f"<0x{byte:02X}>", type=kinds.BYTE)
    for piece, score in pieces.items():
        model.pieces.add(piece=piece, score=score, type=kinds.NORMAL)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = 2, True
    normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = True, False
    for name, value in changes.items():
        spec = trainer if hasattr(trainer, name) else normalizer
        setattr(spec, name, value)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def random_pieces(rng: random.Random) -> dict[str, float]:
    """Pieces of earlier pieces, in that order of scores or any other: pieces that are made in
    several ways, merges that are never reached."""
    pieces, runs = [*ALPHABET], {SPACE * n for n in range(2, rng.randrange(2, 6))}
    for _ in range(rng.randrange(2, 25)):
        piece = rng.choice(pieces) + rng.choice(pieces)
        if SPACE not in piece.lstrip(SPACE) and piece.strip(SPACE) and piece not in pieces:
            pieces.append(piece)
    pieces = [*pieces[len(ALPHABET) :], *sorted(runs)]
    if rng.random() < 0.3:
        rng.shuffle(pieces)
    scores = {piece: -float(n) for n, piece in enumerate(pieces)}
    if rng.random() < 0.5:
        scores |= dict.fromkeys(runs, -1e9)
    return scores | {c: -100.0 - n for n, c in enumerate(ALPHABET)}


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices([*ALPHABET, " ", "c", "ë", "丮", "\U0001f601", "\x00"], k=40))


def test_against_sentencepiece_on_random_models():
    rng = random.Random(0)
    exact = 0
    for _ in range(400):
        processor = processor_of(random_pieces(rng))
        ranked = ranked_pieces(processor)
        if ranked is None:
            continue
        exact += 1
        for text in ["", " ", "   ", SPACE, *(random_text(rng) for _ in range(20))]:
            ids = ranked.encode(text)
            assert ids.dtype == np.int32 and ids.tolist() == processor.encode(text), repr(text)
    assert exact > 100


def test_against_sentencepiece_on_long_runs():
    pieces = {SPACE * n: -1e9 for n in range(2, 17)} | {c: -float(n) for n, c in enumerate("ab▁")}
    processor = processor_of(pieces | {"ab": 0.0, "▁a": 1.0})
    ranked, saved = ranked_pieces(processor), as_tokenizers(processor, {}, None)
    assert ranked is not None
    for n in range(70):
        for text in (" " * n, " " * n + "ab", "ab" + " " * n + "b" + " " * n):
            assert ranked.encode(text).tolist() == processor.encode(text)
            assert saved.encode(text).ids == processor.encode(text)
    text = "ab" * 3000  # tiktoken has another way for long pieces
    assert ranked.encode(text).tolist() == processor.encode(text)


PIECES = {"a": -8.0, "b": -9.0, SPACE: -7.0, "ab": 0.0, "▁a": -1.0, "▁▁": -2.0, "▁▁▁": -3.0}


@pytest.mark.parametrize(
    "pieces, changes",
    [
        pytest.param({"ba": 0.0}, {}, id="two-words-tie"),
        pytest.param({"▁▁": -1.0}, {}, id="word-and-run-tie"),
        pytest.param({"▁▁": -9.5, "▁▁▁▁": -9.5, "▁▁▁": -2.0}, {}, id="some-runs-tie"),
        pytest.param({"▁▁": 1.0, "▁▁▁": 1.0}, {}, id="runs-tie-above-words"),
        pytest.param({"a▁b": -5.0}, {}, id="across-a-space"),
        pytest.param({"ac": -5.0}, {}, id="of-a-character-that-is-no-piece"),
        pytest.param({"▁ba": -5.0}, {}, id="never-merged"),
        pytest.param({}, {"model_type": 1}, id="unigram"),
        pytest.param({}, {"remove_extra_whitespaces": True}, id="spaces-removed"),
        pytest.param({}, {"add_dummy_prefix": False}, id="no-space-in-front"),
        pytest.param({}, {"escape_whitespaces": False}, id="spaces-not-marked"),
    ],
)
def test_not_where_it_is_not_exact(pieces, changes):
    assert ranked_pieces(processor_of(PIECES)) is not None
    assert ranked_pieces(processor_of(PIECES | pieces, **changes)) is None
