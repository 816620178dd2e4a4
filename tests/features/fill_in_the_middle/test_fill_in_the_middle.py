"""Fill in the middle: undone, it is the text; rates; and the same sample wherever it is made."""

import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.config import ConfigError, TokenizerConfig
from megatron.data.gpt_dataset import GPTRecipe
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset
from megatron.features.fill_in_the_middle.flags import FimConfig
from megatron.features.fill_in_the_middle.kind import FimDataset, FimRecipe, FimTokens
from megatron.features.raw_text.encoder import TextEncoder, TextSettings
from megatron.features.tokenizers.train import train_byte_level_bpe

SPECIALS = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file_sep>"]
CODE = (
    "def area(width, height):\n    return width * height  # été, 面积\n\n"
    "class Box:\n    def __init__(self, size):\n        self.size = size\n\n"
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_byte_level_bpe([CODE, "<|endoftext|>"], 380, 2).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS})
    tokenizer.save_pretrained(folder)
    config = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))
    return TextEncoder(TextSettings(config, append_eod=True))


@pytest.fixture(scope="module")
def tokens(encoder: TextEncoder) -> FimTokens:
    return FimTokens.of(FimConfig(fim_split_sample="<file_sep>"), encoder.tokenizer)


class Samples:
    """Samples that are given, and their recipe."""

    def __init__(self, samples: Sequence[np.ndarray]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.samples[index]

    def build(self, *arguments: object) -> "Samples":
        return self


def sample(encoder: TextEncoder, texts: Sequence[str], room: int = 0) -> np.ndarray:
    """Documents, the last one without an end, and `room` more documents of one token."""
    ends = encoder.tokenizer.eod
    ids = [i for text in texts for i in (*encoder.tokenizer.tokenize(text), ends)][:-1]
    return np.array([*ids, *([ends] * room)], np.int64)


def make(
    encoder: TextEncoder, samples: Sequence[np.ndarray], name: str = "train", **flags
) -> FimDataset:
    recipe = FimRecipe.from_config(Samples(samples), FimConfig(**flags), encoder, seed=3)
    return recipe.build(None, range(0), 0, name, None)  # type: ignore[arg-type]


def undone(ids: Sequence[int], tokens: FimTokens, encoder: TextEncoder) -> tuple[str, str]:
    """Order of a document ("plain", "PSM" or "SPM") and the text it was."""
    ids = list(ids)
    text = encoder.tokenizer.detokenize
    if tokens.prefix not in ids:
        assert tokens.middle not in ids and tokens.suffix not in ids
        return "plain", text(ids)
    assert ids[0] == tokens.prefix
    s, m = ids.index(tokens.suffix), ids.index(tokens.middle)
    assert s < m and Counter(ids)[tokens.prefix] == 1
    if s == 1:
        # Prefix and middle lie together behind the suffix (with an empty prefix PSM looks alike).
        return "SPM", text(ids[m + 1 :]) + text(ids[s + 1 : m])
    return "PSM", text(ids[1:s]) + text(ids[m + 1 :]) + text(ids[s + 1 : m])


def documents_of(ids: np.ndarray, eod: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for i in ids.tolist():
        if i == eod:
            found.append([])
        else:
            found[-1].append(i)
    return found


def test_undone_it_is_the_text(encoder: TextEncoder, tokens: FimTokens) -> None:
    texts = [CODE, CODE[30:80], "x", CODE[10:]]
    original = sample(encoder, texts, room=60)
    dataset = make(encoder, [original] * 200, fim_rate=1.0)
    orders: Counter[str] = Counter()
    for i in range(200):
        made = dataset[i]
        assert made.shape == original.shape and made.dtype == np.int64
        for text, ids in zip(texts, documents_of(made, tokens.eod), strict=False):
            order, back = undone(ids, tokens, encoder)
            assert back == text
            orders[order] += 1
    assert orders["plain"] == 0
    # 800 cuts, half of them SPM; PSM with an empty prefix counts as SPM: of the text "x" in 3 of
    # 4. 5 standard deviations are 71.
    expected = 800 * 0.5 + 200 * 0.5 * 0.75
    assert abs(orders["SPM"] - expected) < 71


@pytest.mark.parametrize(("rate", "spm_rate"), [(0.0, 0.5), (0.3, 0.0), (0.5, 0.8), (1.0, 1.0)])
def test_rates(rate: float, spm_rate: float, encoder: TextEncoder, tokens: FimTokens) -> None:
    original = sample(encoder, [CODE, CODE], room=60)
    dataset = make(encoder, [original] * 400, fim_rate=rate, fim_spm_rate=spm_rate)
    orders: Counter[str] = Counter()
    for i in range(400):
        for ids in documents_of(dataset[i], tokens.eod)[:2]:
            orders[undone(ids, tokens, encoder)[0]] += 1
    cut = orders["PSM"] + orders["SPM"]
    assert abs(cut / 800 - rate) <= 5 * (rate * (1 - rate) / 800) ** 0.5
    if cut:
        # Empty prefixes: two cuts of len(CODE) + 1 places, one of them the first.
        empty = 2 / (len(CODE) + 1)
        looks_spm = spm_rate + (1 - spm_rate) * empty
        bound = 5 * (looks_spm * (1 - looks_spm) / cut) ** 0.5 + 1e-9
        assert abs(orders["SPM"] / cut - looks_spm) <= bound
    if rate == 0:
        assert all(np.array_equal(dataset[i], original) for i in range(400))


def test_cuts_are_uniform(encoder: TextEncoder, tokens: FimTokens) -> None:
    """Length of the middle of a text of 9 characters, against the two cuts counted out."""
    text = "def area("
    original = sample(encoder, [text], room=12)
    dataset = make(encoder, [original] * 3000, fim_rate=1.0, fim_spm_rate=0.0)
    found: Counter[int] = Counter()
    for i in range(3000):
        ids = documents_of(dataset[i], tokens.eod)[0]
        found[len(encoder.tokenizer.detokenize(ids[ids.index(tokens.middle) + 1 :]))] += 1
    expected = Counter(abs(a - b) for a in range(10) for b in range(10))
    for length, ways in expected.items():
        share = ways / 100
        assert abs(found[length] / 3000 - share) < 5 * (share * (1 - share) / 3000) ** 0.5


def test_length_is_kept(encoder: TextEncoder, tokens: FimTokens) -> None:
    """A sample that grows loses its end; one that shrinks is filled up with padding."""
    full = sample(encoder, [CODE])
    made = make(encoder, [full] * 20, fim_rate=1.0)
    assert all(len(made[i]) == len(full) and tokens.pad not in made[i] for i in range(20))
    by_byte = [i for c in CODE for i in encoder.tokenizer.tokenize(c)]  # fewer tokens when joined
    long = np.array(by_byte, np.int64)
    made = make(encoder, [long] * 20, fim_rate=1.0)
    for i in range(20):
        padding = int((made[i] == tokens.pad).sum())
        assert padding > 0 and len(made[i]) == len(long)
        ids = made[i][: len(long) - padding]
        assert undone(ids.tolist(), tokens, encoder)[1] == CODE


def test_order_is_a_function_of_seed_part_and_number(encoder: TextEncoder) -> None:
    samples = [sample(encoder, [CODE, CODE])] * 8
    train, again = make(encoder, samples), make(encoder, samples)
    backwards = [train[i] for i in reversed(range(8))][::-1]
    assert all(np.array_equal(again[i], backwards[i]) for i in range(8))
    assert len({train[i].tobytes() for i in range(8)}) > 4
    valid = make(encoder, samples, name="valid")
    assert any(not np.array_equal(train[i], valid[i]) for i in range(8))


def test_fragments(encoder: TextEncoder, tokens: FimTokens) -> None:
    """Fragments keep their places and what lies between; one with the given beginning is left."""
    fragments = [CODE[:40], "class Box", CODE[40:90]]
    text = "<file_sep>".join(fragments)
    original = sample(encoder, [text], room=30)
    flags = {"fim_rate": 0.5, "fim_split_sample": "<file_sep>", "fim_fragment_rate": 1.0}
    dataset = make(encoder, [original] * 200, fim_no_prefix="class", **flags)
    cut = 0
    for i in range(200):
        (ids, *_) = documents_of(dataset[i], tokens.eod)
        assert tokens.split is not None
        parts = documents_of(np.array(ids), tokens.split)
        found = [undone(part, tokens, encoder) for part in parts]
        assert [back for _, back in found] == fragments
        kinds = [order == "plain" for order, _ in found]
        assert kinds in ([True] * 3, [False, True, False])
        cut += kinds[0] is False
    assert abs(cut - 100) <= 5 * 50**0.5


def test_a_document_that_ends_inside_a_character_is_not_cut(
    encoder: TextEncoder, tokens: FimTokens
) -> None:
    ids = np.array(encoder.tokenizer.tokenize("面" * 9)[1:], np.int64)
    assert "\ufffd" in encoder.tokenizer.detokenize(ids.tolist())
    dataset = make(encoder, [ids] * 20, fim_rate=1.0)
    assert all(np.array_equal(dataset[i], ids) for i in range(20))


def test_over_documents_and_in_another_process(
    encoder: TextEncoder, tokens: FimTokens, tmp_path: Path
) -> None:
    with IndexedDatasetWriter(tmp_path / "a", encoder.dtype) as writer:
        for (document,) in encoder([CODE, CODE[20:], CODE[:50]] * 10):
            writer.add_document([document])
    documents, gpt = IndexedDataset(tmp_path / "a"), GPTRecipe(64, 5)
    recipe = FimRecipe.from_config(gpt, FimConfig(), encoder, 5)
    assert recipe.units(documents) == 30
    cache = IndexCache(tmp_path / "cache")
    made = recipe.build(documents, range(30), 40, "train", cache)
    plain = gpt.build(documents, range(30), 40, "train", cache)
    there = pickle.loads(pickle.dumps(made))
    assert len(made) == len(plain)
    for i in range(len(made)):
        assert np.array_equal(made[i], there[i])
        assert made.origin(i) == plain.origin(i)
    assert any(tokens.middle in made[i] for i in range(len(made)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"fim_rate": 1.5}, r"--fim-rate 1.5 must be in \[0, 1\]"),
        ({"fim_spm_rate": -1.0}, "--fim-spm-rate -1.0 must be"),
        ({"fim_fragment_rate": 0.5}, "--fim-fragment-rate 0.5 needs --fim-split-sample"),
    ],
)
def test_flags_that_cannot_be_used(flags: dict, message: str, encoder: TextEncoder) -> None:
    with pytest.raises(ConfigError, match=message):
        make(encoder, [], **flags)


@pytest.mark.parametrize("name", ["prefix", "middle", "suffix", "pad", "eod"])
def test_token_that_is_missing(name: str, encoder: TextEncoder) -> None:
    with pytest.raises(ValueError, match=f"--fim-{name}-token <none>: the vocabulary has no such"):
        make(encoder, [], **{f"fim_{name}_token": "<none>"})


def test_tokenizers_that_cannot_do_it(encoder: TextEncoder) -> None:
    null = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)
    with pytest.raises(ValueError, match="--fim-prefix-token <fim_prefix>: the vocabulary has no"):
        make(TextEncoder(TextSettings(null)), [])

    class Spaced:
        """Puts a space between pieces, as SentencePiece does; with a token before each text."""

        eod = 0

        def tokenize(self, text: str) -> list[int]:
            return [1] + ([2] if text in SPECIALS else [ord(c) for c in " " + text if text])

        def detokenize(self, ids: Sequence[int]) -> str:
            return SPECIALS[0] if ids == [2] else "".join(map(chr, ids)).strip()

    names = {f"fim_{n}_token": SPECIALS[0] for n in ("prefix", "middle", "suffix", "pad")}
    spaced = TextEncoder(TextSettings(null), Spaced())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--fim-data: the tokenizer makes 'a b' of the pieces"):
        make(spaced, [], **names)
