"""Samples and batches of preferences: by hand, against a plain loop, and against trl."""

import logging
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.gpt_batch import GPTBatch
from megatron.data.index_cache import IndexCache
from megatron.data.texts import ScoredText
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.preference.records import PreferenceExamples
from megatron.features.preference.samples import (
    PreferenceBatch,
    PreferenceCollator,
    PreferenceDataset,
    PreferenceRecipe,
    PreferenceSample,
    WholeRows,
    other_prompts,
)

from ..instruction.conftest import CHATML, Built

EOD = "<|endoftext|>"
WORDS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune and the large".split()


def texts(count: int, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)

    def some(most: int) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(1, most)))

    return [
        {"prompt": f"{n}: {some(8)}", "chosen": " " + some(12), "rejected": " " + some(12)}
        for n in range(count)
    ]


def chats(count: int) -> list[dict]:
    def message(role: str, content: str) -> list[dict]:
        return [{"role": role, "content": content}]

    return [
        {
            "prompt": message("user", record["prompt"]),
            "chosen": message("assistant", record["chosen"]),
            "rejected": message("assistant", record["rejected"]),
        }
        for record in texts(count)
    ]


def open_examples(
    built: Built, path: str, judged: bool = False, cache: IndexCache | None = None, **flags
) -> PreferenceExamples:
    encoder = ExampleEncoder(InstructionConfig(**flags), built.tokenizer, built.config)
    return PreferenceExamples.open(path, encoder, judged, cache)


def build(
    examples: PreferenceExamples, samples: int = 1, capacity: int = 300, name: str = "train", **how
) -> PreferenceDataset:
    recipe = PreferenceRecipe(capacity, 5, **how)
    return recipe.build(examples, range(recipe.units(examples)), samples, name, IndexCache(None))


def shown(built: Built, row: ScoredText) -> tuple[str, str]:
    detokenize = built.tokenizer.detokenize
    return detokenize(row.context.tolist()), detokenize(row.continuation.tolist())


def test_rows_by_hand(gpt2: Built, with_template, write) -> None:
    pair = {"prompt": "Mercury, Venus,", "chosen": " Earth", "rejected": " Mars, Saturn"}
    (first, second), *rest = build(open_examples(gpt2, write([pair])))[0]
    assert shown(gpt2, first) == ("Mercury, Venus,", f" Earth{EOD}")
    assert shown(gpt2, second) == ("Mercury, Venus,", f" Mars, Saturn{EOD}")
    assert rest == [None, None, None]
    alpaca = {"instruction": "Name a planet", "chosen": "Earth", "rejected": "Mars"}
    (first, _), *_ = build(open_examples(gpt2, write([alpaca], "a.jsonl")))[0]
    assert shown(gpt2, first)[0].endswith("### Instruction:\nName a planet\n\n### Response:\n")
    assert shown(gpt2, first)[1] == f"Earth{EOD}"
    built = with_template(CHATML)
    ((chat,), path) = chats(1), write(chats(1), "chat.jsonl")
    (first, second), *_ = build(open_examples(built, path))[0]
    prompt = f"<|im_start|>user\n{chat['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    # As in trl the answer ends where the text of the template does.
    assert shown(built, first) == (prompt, f"{chat['chosen'][0]['content']}<|im_end|>\n")
    assert shown(built, second) == (prompt, f"{chat['rejected'][0]['content']}<|im_end|>\n")


def test_an_answer_of_several_messages_needs_a_template(gpt2: Built, with_template, write) -> None:
    (record,) = chats(1)
    record["chosen"] = [*record["chosen"], *record["prompt"], *record["rejected"]]
    path = write([record])
    with pytest.raises(ValueError, match=r"line 1: --prompt-format alpaca has no form for an"):
        open_examples(gpt2, path)
    built = with_template(CHATML)
    (first, second), *_ = build(open_examples(built, path))[0]
    assert shown(built, first)[1].count("<|im_end|>\n") == 3
    assert first.context.tolist() == second.context.tolist()


def test_the_answers_start_where_either_joins_the_prompt(gpt2: Built, write) -> None:
    """A token across the border is the first of both answers."""
    text = "Uranus and Neptune."
    ids = gpt2.tokenizer.tokenize(text)
    place = next(k for k, i in enumerate(ids) if k and len(gpt2.tokenizer.detokenize([i])) > 2)
    border = len(gpt2.tokenizer.detokenize(ids[:place])) + 1
    record = {"prompt": text[:border], "chosen": text[border:], "rejected": "\n"}
    examples = open_examples(gpt2, write([record]))
    prompt, (chosen, rejected) = examples.document(0)
    assert prompt.tolist() == ids[:place]
    assert chosen.tolist() == [*ids[place:], gpt2.tokenizer.eod]
    whole = gpt2.tokenizer.tokenize(text[:border] + "\n")
    assert [*prompt, *rejected] == [*whole, gpt2.tokenizer.eod]


def test_every_epoch_has_each_example_once(gpt2: Built, write) -> None:
    made = texts(20)
    examples = open_examples(gpt2, write(made))
    data = build(examples, 50)
    numbers = [data.origin(i)[0].sequence for i in range(len(data))]
    assert len(numbers) == 60 and len({tuple(numbers[i : i + 20]) for i in (0, 20, 40)}) == 3
    for start in (0, 20, 40):
        assert sorted(numbers[start : start + 20]) == list(range(20))
    for index, number in enumerate(numbers):
        for row, key in zip(data[index].rows, ("chosen", "rejected"), strict=True):
            text = made[number]["prompt"] + made[number][key]
            whole = [*gpt2.tokenizer.tokenize(text), gpt2.tokenizer.eod]
            assert [*row.context, *row.continuation] == whole
            assert data.origin(index)[key == "rejected"].stop == len(whole)
    half = PreferenceRecipe(300, 5).build(examples, range(5, 9), 4, "valid", IndexCache(None))
    assert sorted(half.origin(i)[0].sequence for i in range(4)) == [5, 6, 7, 8]
    with pytest.raises(IndexError):
        data[60]
    there = pickle.loads(pickle.dumps(data))
    assert there[3].rows[1].continuation.tolist() == data[3].rows[1].continuation.tolist()
    assert len(pickle.dumps(examples)) < 1000


@pytest.mark.parametrize("skip", [True, False])
def test_long_examples(skip: bool, gpt2: Built, write, caplog) -> None:
    made = [
        {"prompt": "Mars", "chosen": " Earth" * 200, "rejected": " Mars"},  # cut
        {"prompt": "Mars" * 200, "chosen": " Earth", "rejected": " Mars"},  # no space
        {"prompt": "Mars", "chosen": " Earth", "rejected": " Venus"},
    ]
    examples = open_examples(gpt2, write(made))
    with caplog.at_level(logging.WARNING):
        data = build(examples, 4, capacity=17, skip_long=skip)
    assert set(data.documents) == ({2} if skip else {0, 2})
    counts = "0 are cut off there, 2 left out" if skip else "1 are cut off there, 1 left out"
    assert (
        f"of 3 examples 2 are longer than 17 tokens (--seq-length); {counts} (1 of" in caplog.text
    )
    for i in range(len(data)):
        for row in data[i].rows:
            assert len(row.context) + len(row.continuation) <= 17
    assert data.rows(0)[0].context.tolist() == gpt2.tokenizer.tokenize("Mars")
    if not skip:
        assert data[0].length == 16 or data[1].length == 16
    with pytest.raises(ValueError, match="none of the 3 examples for train has a prompt that"):
        build(examples, capacity=1)


def test_cache_depends_on_what_is_read(gpt2: Built, write, monkeypatch) -> None:
    path = write(texts(5))
    open_examples(gpt2, path)
    with monkeypatch.context() as patch:
        name = "megatron.features.preference.records._arrays"
        patch.setattr(name, lambda *_: pytest.fail())
        open_examples(gpt2, path)
    open_examples(gpt2, path, judged=True)
    open_examples(gpt2, path, prompt_format="alpaca")
    Path(path).touch()
    open_examples(gpt2, path)
    entries = [p for p in (Path(path).parent / "index-cache").iterdir() if p.is_dir()]
    assert len(entries) >= 4


def test_labels_without_a_pair_are_refused(gpt2: Built, write) -> None:
    path = write([{"prompt": "a", "completion": "b", "label": True}])
    with pytest.raises(ValueError, match="line 1: an answer with a label.* --preference kto"):
        open_examples(gpt2, path)


def test_judged_answers_and_others(gpt2: Built, write) -> None:
    made = texts(6)
    examples = open_examples(gpt2, write(made), judged=True)
    data = build(examples)
    answers = [(n, key) for n in range(6) for key in ("chosen", "rejected")]
    for index in range(len(data)):
        sample, (own, other) = data[index], data.origin(index)
        number, key = answers[own.sequence]
        # Both answers of a pair have one prompt: the nearest other one is that of the pair before.
        assert answers[other.sequence] == ((number - 1) % 6, "rejected")
        assert sample.desirable is (key == "chosen") and sample.margin is None
        assert shown(gpt2, sample.rows[0]) == (made[number]["prompt"], made[number][key] + EOD)
        before = made[number - 1]
        assert shown(gpt2, sample.rows[1]) == (made[number]["prompt"], before["rejected"] + EOD)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_other_prompts_by_a_plain_search(prompts: list[int]) -> None:
    found = other_prompts(np.array(prompts, np.uint64)).tolist()
    count = len(prompts)
    for place in range(count):
        before = [(place - step) % count for step in range(1, count + 1)]
        others = [other for other in before if prompts[other] != prompts[place]]
        assert found[place] == (others or before)[0]


def test_batches() -> None:
    def row(prompt: int, answer: int) -> ScoredText:
        return ScoredText(np.arange(1, prompt + 1), np.arange(10, 10 + answer))

    samples = [
        PreferenceSample((row(3, 2), row(3, 1)), (-1.5, -2.5), None, 0.5),
        PreferenceSample((row(2, 1), row(2, 4)), (-3.5, -4.5), None, None),
    ]
    batch = PreferenceCollator(GPTBatch.scoring, 4, 10)(samples)
    assert batch.answers.tokens_BS.tolist() == [
        [1, 2, 3, 10, 0, 0, 0, 0],
        [1, 2, 3, 0, 0, 0, 0, 0],
        [1, 2, 0, 0, 0, 0, 0, 0],
        [1, 2, 10, 11, 12, 0, 0, 0],
    ]
    assert batch.answers.loss_mask_BS.sum(1).tolist() == [2, 1, 1, 4]
    assert batch.answers.positions_BP.tolist() == [
        [2, 3, 0, 1], [2, 0, 1, 3], [1, 0, 2, 3], [1, 2, 3, 4]
    ]  # fmt: skip
    assert batch.reference_R.tolist() == [-1.5, -2.5, -3.5, -4.5]
    assert batch.desirable_R is None and batch.margin_R.tolist() == [0.5, 0.5, 0, 0]
    judged = [sample._replace(reference=None, desirable=n == 0) for n, sample in enumerate(samples)]
    batch = PreferenceCollator(GPTBatch.scoring, 9, 10)(judged)
    assert batch.answers.tokens_BS.shape == (4, 9) and batch.reference_R is None
    assert batch.desirable_R.tolist() == [True, True, False, False]
    assert batch.to("cpu").desirable_R.dtype == torch.bool
    assert batch.weights_2.tolist() == [1, 8]
    longer = batch.lengthened(12)
    assert longer.tokens_BS.shape == (4, 12) and longer.tokens_BS[:, :9].equal(batch.tokens_BS)
    assert longer.answers.loss_mask_BS.sum(1).tolist() == [2, 1, 1, 4]
    assert PreferenceCollator(GPTBatch.scoring, 4, 6)(judged).tokens_BS.shape == (4, 6)


def test_whole_rows() -> None:
    """For a head that reads the last token."""
    rows = tuple(ScoredText(np.arange(1, 3), np.arange(10, 10 + n)) for n in (1, 3))
    collate = PreferenceCollator(WholeRows(GPTBatch.ended), 1, 9, whole=True)
    batch = collate([PreferenceSample(rows)])
    assert batch.tokens_BS.tolist() == [[1, 2, 10, 0, 0], [1, 2, 10, 11, 12]]
    assert batch.answers.positions_BP.tolist() == [[2], [4]]
    assert batch.weights_2.tolist() == [1, 2]


def prepared_by_trl(name: str, records: list[dict], built: Built, max_length: int) -> list[dict]:
    """What trl's trainer makes of records before it collates them."""
    pytest.importorskip("trl", reason="trl says which tokens an answer has")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer import dpo_trainer, kto_trainer

    trainer = {"dpo": dpo_trainer.DPOTrainer, "kto": kto_trainer.KTOTrainer}[name]
    tokenizer = AutoTokenizer.from_pretrained(built.config.tokenizer_model)
    arguments = SimpleNamespace(
        dataset_num_proc=None,
        max_length=max_length,
        truncation_mode="keep_start",
        per_device_train_batch_size=1000,
    )
    itself = SimpleNamespace(
        _tokenizer=tokenizer, calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.0
    )
    data = Dataset.from_list(records)
    return list(trainer._prepare_dataset(itself, data, tokenizer, arguments, "train"))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("form", "length"), [("text", 200), ("text", 24), ("chat", 200), ("chat", 58)]
)
def test_pairs_against_trl(form: str, length: int, with_template, write) -> None:
    """Tokens, masks and what is left out: trl's trainer and collator on the same file."""
    built = with_template(CHATML)
    records = texts(30) if form == "text" else chats(30)
    theirs = prepared_by_trl("dpo", records, built, length)
    data = build(open_examples(built, write(records)), capacity=length)
    assert len(data.documents) == len(theirs) and (length == 200) == (len(theirs) == 30)
    samples = [PreferenceSample(data.rows(place)) for place in range(len(theirs))]
    batch = PreferenceCollator(GPTBatch.scoring, 1, 1000)(samples)
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    other = DataCollatorForPreference(pad_token_id=0, max_length=length)(theirs)
    assert_rows_equal(batch, other["input_ids"].chunk(2), other["completion_mask"].chunk(2))


@pytest.mark.proof
def test_judged_answers_against_trl(with_template, write) -> None:
    """Those for the reference point too, where neighbours have different prompts."""
    built = with_template(CHATML)
    records = [
        {"prompt": r["prompt"], "completion": r["chosen"], "label": n % 3 == 0}
        for n, r in enumerate(texts(20))
    ]
    theirs = prepared_by_trl("kto", records, built, 200)
    data = build(open_examples(built, write(records), judged=True), 20, capacity=200)
    samples = {data.origin(i)[0].sequence: data[i] for i in range(20)}
    batch = PreferenceCollator(GPTBatch.scoring, 1, 1000)([samples[n] for n in range(20)])
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    other = DataCollatorForUnpairedPreference(pad_token_id=0)(theirs)
    width = batch.answers.tokens_BS.shape[1] + 1
    ids, masks = (
        [torch.nn.functional.pad(o, (0, width - o.shape[1])) for o in each]
        for each in (
            (other["input_ids"], other["KL_input_ids"]),
            (other["completion_mask"], other["KL_completion_mask"]),
        )
    )
    assert_rows_equal(batch, ids, masks)
    assert batch.desirable_R[0::2].tolist() == other["label"].tolist()


def assert_rows_equal(batch: PreferenceBatch, ids, masks) -> None:
    """Every other row of ours against the two blocks of theirs."""
    for first in (0, 1):
        tokens_BS = batch.answers.tokens_BS[first::2]
        labels_BS = batch.answers.labels_BS[first::2]
        mask_BS = batch.answers.loss_mask_BS[first::2]
        assert torch.equal(mask_BS.long(), masks[first][:, 1:])
        assert torch.equal(tokens_BS, ids[first][:, :-1] * (mask_after(masks[first]) > 0))
        assert torch.equal(labels_BS, ids[first][:, 1:])


def mask_after(mask: torch.Tensor) -> torch.Tensor:
    """Where a token is followed by one of the answer, sooner or later: the last is only a label."""
    return mask[:, 1:].flip(1).cummax(1).values.flip(1)
