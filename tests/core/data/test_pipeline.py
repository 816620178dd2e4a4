"""All kinds of files in one run, and how their samples are shown."""

import dataclasses
import json

import numpy as np
import pytest
from configs import model_config, run_config

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.config import ConfigError, DataConfig, RunConfig, TokenizerConfig
from megatron.data.samples import PackedSample
from megatron.families.gpt import GPTData
from megatron.features.curriculum.flags import CurriculumConfig
from megatron.features.fill_in_the_middle.flags import FimConfig
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.masked.bert import BertData
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.t5 import T5Data
from megatron.features.raw_text.flags import RawTextConfig
from megatron.tokenizer import build_tokenizer

TOKENIZER = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=99)


def config(**fields) -> RunConfig:
    return run_config(
        model=model_config(seq_length=8), data=DataConfig(**fields), tokenizer=TOKENIZER
    )


def gpt(run: RunConfig) -> GPTData:
    return GPTData(run, build_tokenizer(TOKENIZER))


@pytest.fixture
def corpora(tmp_path):
    """A file of tokens, one of text, one of questions and answers, and their names."""
    with IndexedDatasetWriter(tmp_path / "tokens", "uint16") as writer:
        for number in range(20):
            writer.add_document([np.full(9, number)])
    texts = [{"body": " ".join([str(30 + n)] * 9)} for n in range(20)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(t) + "\n" for t in texts))
    pairs = [{"prompt": f"{60 + n} 1", "completion": " 97 98"} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    file = tmp_path / "corpora.json"
    corpora = {
        "tokens": {"files": "tokens"},
        "text": {"files": "text.jsonl", "text_key": "body"},
        "pairs": {"files": "pairs.jsonl", "type": "instruction"},
    }
    file.write_text(json.dumps(corpora))
    return str(file)


def test_kinds_of_files_are_blended(corpora):
    names = ("2", "tokens", "1", "text", "1", "pairs")
    data = gpt(config(train_data=names, corpora_file=corpora, split="1,0,0"))
    train = data.datasets((40, 0, 0)).train
    assert train is not None and len(train) == 40
    kinds = {"tokens": 0, "text": 0, "pairs": 0}
    batch = data.collator()([train[i] for i in range(40)])
    for i in range(40):
        sample, (piece, *_) = train[i], train.origin(i)
        kind = piece.source.rsplit("/")[-1].removesuffix(".jsonl")
        kinds[kind] += 1
        assert isinstance(sample, PackedSample) == (kind == "pairs")
        low, high = {"tokens": (0, 20), "text": (30, 51), "pairs": (60, 81)}[kind]
        assert low <= int(batch.tokens_BS[i][0]) < high or int(batch.tokens_BS[i][0]) == 99
        assert (batch.loss_mask_BS[i].sum() == 8) == (kind != "pairs")
    assert kinds == {"tokens": 20, "text": 10, "pairs": 10}


def test_what_the_loss_asks_for_is_shown(corpora):
    data = gpt(config(train_data=("pairs",), corpora_file=corpora, split="1,0,0"))
    train = data.datasets((20, 0, 0)).train
    assert train is not None
    view = data.view(train[0], 8)
    first = int(view.tokens_S[0])
    assert view.tokens_S.tolist() == [first, 1, 97, 98]
    assert view.loss_mask_S.tolist() == [0, 1, 1, 1]
    assert view.text.splitlines()[0] == f"[[{first} 1]]97 98<eod>".replace("<eod>", " <eod>")
    assert data.view(train[0], 3).tokens_S.tolist() == [first, 1, 97]


def test_plain_text_has_no_brackets_unless_masked(corpora):
    run = config(train_data=("tokens",), corpora_file=corpora, split="1,0,0")
    data = gpt(run)
    train = data.datasets((20, 0, 0)).train
    assert train is not None
    assert "[[" not in data.view(train[0], 8).text
    masked = gpt(dataclasses.replace(run, data=dataclasses.replace(run.data, eod_mask_loss=True)))
    assert masked.collator().eod_mask_loss


@pytest.mark.parametrize("family", [GPTData, BertData, T5Data])
def test_mock_data_is_for_every_family(family):
    data = family(config(mock_data=True), build_tokenizer(TOKENIZER))
    train = data.datasets((8, 0, 0)).train
    assert train is not None and len(train) == 8
    assert data.view(train[0], 8).text and train.origin(0)[0].source == "--mock-data"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (InstructionConfig(packing=True), "--packing would change nothing: this run has no instr"),
        (RawTextConfig(text_key="x"), "--text-key would change nothing: this run has no raw text"),
        (MaskedDataConfig(mask_prob=0.2), "--mask-prob would change nothing"),
        (FimConfig(fim_rate=0.9), "--fim-rate would change nothing: it needs"),
    ],
)
def test_flags_that_no_data_follow(corpora, changed, message):
    run = config(train_data=("tokens",), corpora_file=corpora, split="1,0,0")
    with pytest.raises(ConfigError, match=message):
        gpt(run.with_sections(changed)).datasets((8, 0, 0))


def test_a_curriculum_of_lengths_does_not_cut_answers_off(corpora):
    schedule = {
        "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 8,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 2, "difficulty_step": 8},
    }  # fmt: skip
    run = config(train_data=("pairs",), corpora_file=corpora, split="1,0,0")
    growing = CurriculumConfig(curriculum_learning=json.dumps(schedule))
    with pytest.raises(ConfigError, match="would cut instructions and answers"):
        gpt(run.with_sections(growing)).datasets((8, 0, 0))
