"""Samples of instruction data: against the examples themselves and plain packing."""

import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from gpt_forward import forward
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import TokenizerConfig
from megatron.data.blend import BlendedDataset
from megatron.data.gpt_batch import GPTCollator, best_fit
from megatron.data.gpt_dataset import GPTRecipe
from megatron.data.index_cache import IndexCache
from megatron.data.samples import PackedSample
from megatron.features.instruction.batches import ExampleCollator
from megatron.features.instruction.example_encoder import EncodedExample, ExampleEncoder
from megatron.features.instruction.examples import InstructionExamples, InstructionRecipe
from megatron.features.instruction.flags import InstructionConfig
from megatron.parallel.loss_head import Targets
from megatron.tokenizer import build_tokenizer

from .conftest import Built

PAD = 399


def loss_of(model, batch):
    targets = Targets(batch.labels_BS, batch.loss_mask_BS)
    positions, documents = batch.position_ids_BS, batch.document_ids_BS
    return forward(model, batch.tokens_BS, positions, documents, targets=targets)


def records(count: int, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    words = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune and the large".split()

    def text(most: int) -> str:
        return " ".join(rng.choice(words, rng.integers(1, most)))

    return [{"prompt": f"{n}: {text(8)}", "completion": " " + text(12)} for n in range(count)]


def open_examples(
    built: Built, path: str, cache: IndexCache | None = None, **flags
) -> InstructionExamples:
    encoder = ExampleEncoder(InstructionConfig(**flags), built.tokenizer, built.config)
    return InstructionExamples.open(path, encoder, cache)


def recipe(**settings) -> InstructionRecipe:
    return InstructionRecipe(**{"seq_length": 64, "seed": 5, "pad_token": PAD, **settings})


def build(examples: InstructionExamples, how: InstructionRecipe, samples: int, name="train"):
    return how.build(examples, range(len(examples)), samples, name, IndexCache(None))


def test_examples_hold_what_was_encoded(gpt2: Built, write) -> None:
    made = records(30)
    path = write(made)
    examples = open_examples(gpt2, path)
    assert len(examples) == 30 and examples.document_indices.tolist() == list(range(31))
    for n, record in enumerate(made):
        whole = gpt2.tokenizer.tokenize(record["prompt"] + record["completion"])
        assert examples.get(n).tolist() == [*whole, gpt2.tokenizer.eod]
        answer = examples.get(n)[examples.counted(n)].tolist()
        assert gpt2.tokenizer.detokenize(answer) == record["completion"] + "<|endoftext|>"
        assert examples.first_counted[n] == len(whole) + 1 - len(answer)
        assert np.array_equal(examples.get(n, 2, 3), examples.get(n)[2:5])
    for arguments in ((30,), (-1,), (0, -1), (0, 0, 1000)):
        with pytest.raises(IndexError, match=r"data\.jsonl"):
            examples.get(*arguments)
    again = pickle.loads(pickle.dumps(examples))
    assert len(pickle.dumps(examples)) < 1000
    assert np.array_equal(again.get(7), examples.get(7))


@pytest.mark.parametrize(
    "change", [{"loss_on": "everything"}, {"prompt_format": "alpaca"}, {"date": True}], ids=str
)
def test_cache_depends_on(change: dict, gpt2: Built, write, monkeypatch) -> None:
    path = write(records(5))
    open_examples(gpt2, path)
    with monkeypatch.context() as patch:
        patch.setattr("megatron.features.instruction.examples._encoded", lambda *_: pytest.fail())
        open_examples(gpt2, path)
    if "date" in change:
        Path(path).touch()
    open_examples(gpt2, path, **{k: v for k, v in change.items() if k != "date"})
    entries = [p for p in (Path(path).parent / "index-cache").iterdir() if p.is_dir()]
    assert len(entries) == 2


def test_no_examples(gpt2: Built, write) -> None:
    with pytest.raises(ValueError, match=r"data\.jsonl contains no example"):
        open_examples(gpt2, write([]))


def check_sample(sample: PackedSample, examples: InstructionExamples, numbers: list[int]) -> None:
    """By a plain loop: tokens, loss and document of each place."""
    size = len(sample.tokens_T)
    tokens, counted, documents = [], [], []
    for document, number in enumerate(numbers):
        part = examples.get(number).tolist()[:size]
        tokens += part
        counted += [bool(c) and k > 0 for k, c in enumerate(examples.counted(number)[:size])]
        documents += [document] * len(part)
    padding = size - len(tokens)
    assert padding >= 0
    assert sample.tokens_T.tolist() == tokens + [PAD] * padding
    assert sample.loss_mask_S.tolist() == (counted + [False] * padding)[1:]
    assert sample.document_ids_S.tolist() == (documents + [len(numbers)] * padding)[:-1]
    assert [a.dtype for a in sample] == [np.int64, np.float32, np.int64]
    assert sample.loss_mask_S.any()


@pytest.mark.parametrize("packing", [True, False])
def test_every_epoch_holds_each_example_once(packing: bool, gpt2: Built, write) -> None:
    examples = open_examples(gpt2, write(records(40)))
    dataset = build(examples, recipe(packing=packing), 120)
    assert len(dataset) >= 120
    seen: list[int] = []
    orders = []
    for i in range(len(dataset)):
        numbers = [piece.sequence for piece in dataset.origin(i)]
        assert packing or len(numbers) == 1
        check_sample(dataset[i], examples, numbers)
        seen += numbers
        if len(seen) % 40 == 0:
            orders.append(seen[-40:])
            assert sorted(orders[-1]) == list(range(40))  # no epoch's sample reaches into the next
    assert len(seen) % 40 == 0
    assert len({tuple(order) for order in orders}) == len(orders) >= 2
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_order_is_a_function_of_seed_part_and_number(gpt2: Built, write, tmp_path: Path) -> None:
    examples = open_examples(gpt2, write(records(40)))
    how = recipe(packing=True)
    first, longer = build(examples, how, 10), build(examples, how, 100)
    cached = [
        how.build(examples, range(40), 10, "train", IndexCache(tmp_path / "c")) for _ in range(2)
    ]
    for i in range(len(first)):
        for other in (longer, *cached):
            assert all(np.array_equal(a, b) for a, b in zip(first[i], other[i], strict=True))
    for other in (build(examples, recipe(packing=True, seed=6), 10), build(examples, how, 10, "x")):
        assert first.origin(0) != other.origin(0) or first.origin(1) != other.origin(1)
    half = how.build(examples, range(10, 20), 10, "valid", IndexCache(None))
    used = {piece.sequence for i in range(len(half)) for piece in half.origin(i)}
    assert used == set(range(10, 20))


@pytest.mark.parametrize("skip", [True, False])
def test_long_examples(skip: bool, gpt2: Built, write, caplog) -> None:
    made = [
        {"prompt": "Mars", "completion": " Earth" * 200},  # cut
        {"prompt": "Mars" * 200, "completion": " Earth"},  # its answer is cut off
        {"prompt": "Mars", "completion": " Earth"},
    ]
    examples = open_examples(gpt2, write(made))
    with caplog.at_level(logging.WARNING):
        dataset = build(examples, recipe(seq_length=16, skip_long=skip), 4)
    used = {piece.sequence for i in range(len(dataset)) for piece in dataset.origin(i)}
    assert used == ({2} if skip else {0, 2})
    counts = "0 are cut off there, 2 left out" if skip else "1 are cut off there, 1 left out"
    assert f"of 3 examples 2 are longer than --seq-length 16; {counts} (1 of them" in caplog.text
    for i in range(len(dataset)):
        check_sample(dataset[i], examples, [dataset.origin(i)[0].sequence])


def test_answer_at_the_very_end(gpt2: Built, write) -> None:
    """An answer of which one token is left counts; with none left the example is of no use."""
    examples = open_examples(gpt2, write([{"prompt": "Mars and Venus", "completion": " Earth"}]))
    first = int(examples.first_counted[0])
    dataset = build(examples, recipe(seq_length=first), 1)
    assert dataset[0].loss_mask_S.tolist() == [0] * (first - 1) + [1]
    with pytest.raises(ValueError, match=f"none of the 1 examples .* --seq-length {first - 1}"):
        build(examples, recipe(seq_length=first - 1), 1)


def test_other_documents_are_refused(tmp_path: Path) -> None:
    from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
    from megatron.data.indexed import IndexedDataset

    with IndexedDatasetWriter(tmp_path / "a", "uint16") as writer:
        writer.add_document([[1, 2, 3]])
    with pytest.raises(ValueError, match="without a loss mask; --sft needs files"):
        recipe().build(IndexedDataset(tmp_path / "a"), range(1), 1, "train", IndexCache(None))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(20, 30), st.integers())
def test_best_fit_against_a_plain_one(lengths: list[int], capacity: int, seed: int) -> None:
    order = np.random.default_rng(abs(seed)).permutation(len(lengths))
    sample_of = best_fit(np.array(lengths), order, capacity)
    spaces: list[int] = []
    for number in order.tolist():
        fitting = [space for space in spaces if space >= lengths[number] and space > 0]
        space = min(fitting, default=None)
        if space is None:
            spaces.append(capacity)
            space = capacity
        # Of equally full samples the tool takes the one filled last: compare spaces, not samples.
        spaces[spaces.index(space)] -= lengths[number]
    sizes = np.bincount(sample_of, np.array(lengths)[order])
    assert sorted(sizes) == sorted(capacity - space for space in spaces)
    assert len(sample_of) == len(lengths) and np.bincount(sample_of).all()


class WithPad:
    pad, eod = 3, 2


class WithoutPad:
    eod = 2

    @property
    def pad(self) -> int:
        raise ValueError


def test_padding_token() -> None:
    config = InstructionConfig(packing=True, on_long_example="skip")
    made = InstructionRecipe.from_config(config, 64, 1, WithPad())  # type: ignore[arg-type]
    assert made == InstructionRecipe(64, 1, 3, packing=True, skip_long=True)
    assert InstructionRecipe.from_config(config, 64, 1, WithoutPad()).pad_token == 2


def test_blend_with_text_elsewhere(gpt2: Built, write, tmp_path: Path) -> None:
    """In another process, blended with samples of plain text."""
    from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
    from megatron.data.indexed import IndexedDataset

    with IndexedDatasetWriter(tmp_path / "text", "uint16") as writer:
        for n in range(50):
            writer.add_document([np.arange(1, 30) + n])
    cache = IndexCache(tmp_path / "cache")
    text = IndexedDataset(tmp_path / "text")
    plain = GPTRecipe(64, 5).build(text, range(50), 20, "train", cache)
    examples = open_examples(gpt2, write(records(40)))
    tuned = recipe(packing=True).build(examples, range(40), 20, "train", cache)
    blend = BlendedDataset.build([plain, tuned], [0.5, 0.5], 12, cache, "train")
    pickled = pickle.dumps(blend)
    assert len(pickled) < 4000
    there = pickle.loads(pickled)
    for number in range(0, 12, 4):
        batch, same = (
            ExampleCollator(GPTCollator())([samples[i] for i in range(number, number + 4)])
            for samples in (blend, there)
        )
        assert all(a.equal(b) for a, b in zip(batch[:5], same[:5], strict=True))
    kinds = [type(blend[i]) for i in range(12)]
    assert kinds.count(PackedSample) == 6


@pytest.mark.parametrize("llama", [False, True])
def test_packed_examples_train_as_if_alone(llama: bool, gpt_config, random_gpt) -> None:
    """Loss and gradients of a packed sample are the token-weighted mean of its examples' own."""
    rng = np.random.default_rng(2)
    encoded = [
        EncodedExample(rng.integers(0, 61, length), np.arange(length) >= first)
        for length, first in ((9, 4), (3, 1), (8, 5))
    ]
    tokens = np.concatenate([np.concatenate([e.tokens for e in encoded]), np.zeros(5, np.int64)])
    counted = np.concatenate([np.concatenate([e.counted for e in encoded]), np.zeros(5, bool)])
    documents = np.repeat([0, 1, 2, 3], [9, 3, 8, 5])
    packed = PackedSample(tokens, counted[1:].astype(np.float32), documents[:-1])
    config = gpt_config(llama=llama)
    model = random_gpt(config).double()

    def run(sample: PackedSample) -> tuple[float, dict[str, torch.Tensor], float]:
        batch = ExampleCollator(GPTCollator())([sample])
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        return loss.item(), gradients, batch.loss_mask_BS.sum().item()

    together = run(packed)
    alone = []
    for example in encoded:
        mask = example.counted[1:].astype(np.float32)
        length = len(example.tokens) - 1
        alone.append(run(PackedSample(example.tokens, mask, np.zeros(length, np.int64))))
    total = sum(weight for *_, weight in alone)
    assert together[2] == total == counted.sum()
    assert together[0] == pytest.approx(sum(loss * w for loss, _, w in alone) / total, rel=1e-12)
    largest = max(g.abs().max() for g in together[1].values())
    for name, gradient in together[1].items():
        mean = sum(g[name] * w for _, g, w in alone) / total
        assert (gradient - mean).abs().max() <= 1e-12 * largest, name


def test_batch_without_a_counted_token_gives_zero(gpt_config, random_gpt) -> None:
    config = gpt_config()
    model = random_gpt(config)
    sample = PackedSample(np.arange(9), np.zeros(8, np.float32), np.zeros(8, np.int64))
    batch = ExampleCollator(GPTCollator())([sample])
    loss = loss_of(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.realdata
def test_alpaca_packs_tightly(realdata: Path, tmp_path: Path) -> None:
    """The padding that docs/guides/instruction-data.md states."""
    config = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(realdata / "gpt2_bpe" / "gpt2-vocab.json"),
        merge_file=str(realdata / "gpt2_bpe" / "gpt2-merges.txt"),
    )
    built = Built(config, build_tokenizer(config))
    examples = open_examples(
        built, str(realdata / "sft" / "alpaca_en_demo.json"), IndexCache(tmp_path)
    )
    assert len(examples) == 999
    padding = {}
    for packing in (True, False):
        dataset = build(examples, recipe(seq_length=2048, packing=packing), 1)
        used = sum(p.stop for i in range(len(dataset)) for p in dataset.origin(i))
        padding[packing] = 1 - used / (len(dataset) * 2049)
    assert padding[False] == pytest.approx(0.899, abs=5e-4)
    assert padding[True] < 0.012
