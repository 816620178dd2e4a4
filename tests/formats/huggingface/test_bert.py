"""BERT's folders: what published files have besides the table, and what the export is used for."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from configs import run_config
from hf_cases import CASES
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer, pipeline

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import open_checkpoint
from megatron.families import build_model, spec_of
from megatron.features.masked.heads import HEAD_NAMES, LabelledText, collate_labelled
from megatron.features.tokenizers.wordpiece import WordPieceTokenizer
from megatron.formats.conversion.commands import export_hf, from_hf
from megatron.formats.huggingface.compare import compare_logits
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.inspection import model_of

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on mat ##s .".split()
HEAD = "cls.predictions"
TYPES = "bert.embeddings.token_type_embeddings.weight"


@pytest.fixture
def bert_folder(hf_folder):
    def save(case="pretraining", model_type="bert", **changes):
        return hf_folder(model_type, **CASES[model_type][case] | changes)

    return save


@pytest.fixture
def saved(tmp_path, write_checkpoint):
    """A checkpoint of a BERT whose weights are far from each other."""

    def save(tokenizer=None, **flags):
        config = run_config()
        model = dataclasses.replace(
            config.model.flags(), family="bert", num_tokentypes=None, **flags
        ).resolve()
        model = model.with_vocabulary(len(WORDS))
        network = build_model(model)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for _, param in network.canonical_parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
        config = dataclasses.replace(config, model=model)
        return CheckpointReader(write_checkpoint(tmp_path / "save", config, network, tokenizer))

    return save


def rewrite(folder, change, **config):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    tensors = {name: values.contiguous() for name, values in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(content))


def weights_of(folder):
    source = HuggingFaceFolder(folder)
    return {name: source.tensor(name) for name in source.names()}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_names_of_the_first_files(bert_folder):
    """As Google's files have them: gamma and beta, the tied tensors twice, a buffer."""
    folder = bert_folder()
    expected = weights_of(folder)

    def older(tensors):
        for name in [name for name in tensors if "LayerNorm" in name]:
            other = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors[other.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)
        table = tensors["bert.embeddings.word_embeddings.weight"]
        tensors[f"{HEAD}.decoder.weight"] = table.clone()
        tensors[f"{HEAD}.decoder.bias"] = tensors[f"{HEAD}.bias"].clone()
        tensors["bert.embeddings.position_ids"] = torch.arange(40)[None]

    rewrite(folder, older)
    assert_equal(weights_of(folder), expected)
    rewrite(folder, lambda tensors: tensors.pop(f"{HEAD}.bias"))
    assert_equal(weights_of(folder), expected)
    rewrite(folder, lambda tensors: tensors[f"{HEAD}.decoder.weight"][3, 4].add_(1e-3))
    with pytest.raises(CheckpointError, match="decoder.weight differs from bert.embeddings.word"):
        HuggingFaceFolder(folder)


def test_the_tensors_decide_whether_there_is_a_second_head(bert_folder):
    """The published bert-base-uncased has it, and names BertForMaskedLM."""
    folder = bert_folder()
    expected = weights_of(folder)
    rewrite(folder, lambda tensors: None, architectures=["BertForMaskedLM"])
    assert HuggingFaceFolder(folder).model.bert_binary_head
    assert_equal(weights_of(folder), expected)
    rewrite(folder, lambda tensors: [tensors.pop(f"cls.seq_relationship.{kind}") for kind in
                                     ("weight", "bias")])  # fmt: skip
    with pytest.raises(CheckpointError, match=r"contains bert.pooler.dense.bias, bert.pooler"):
        HuggingFaceFolder(folder)


def test_without_token_types_a_row_of_zeros_is_written(saved, tmp_path):
    source = saved(bert_binary_head=False, bias_gelu_fusion=False)
    assert source.model.token_types == 0
    (tmp_path / "hf").mkdir()
    write_model(source, tmp_path / "hf", "float32", 10**9)
    assert not load_file(tmp_path / "hf" / "model.safetensors")[TYPES].any()
    ours = model_of(source, torch.float32, torch.device("cpu"))
    assert compare_logits(ours, tmp_path / "hf", source.model).agree
    back = HuggingFaceFolder(tmp_path / "hf")
    assert back.model.token_types == 0
    assert_equal(weights_of(tmp_path / "hf"), {n: source.tensor(n) for n in source.names()})
    rewrite(tmp_path / "hf", lambda tensors: tensors[TYPES].add_(1.0))
    assert HuggingFaceFolder(tmp_path / "hf").model.token_types == 1


def test_two_forms_of_gelu_are_approximated_and_said(saved, tmp_path, capsys):
    """Megatron's MLP computes it by tanh, its output head exactly."""
    source = saved()
    assert (source.model.mlp.activation, source.model.head_activation) == ("gelu_tanh", "gelu_erf")
    (tmp_path / "hf").mkdir()
    assert "agree" in export_hf(source, tmp_path / "hf", 10**9)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "approximated" in line]
    assert "--lm-head-activation gelu_tanh trains such a model" in line
    assert 1e-5 < float(line.rsplit(" ", 1)[1]) < 1e-2
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["hidden_act"] == "gelu_new"
    assert HuggingFaceFolder(tmp_path / "hf").model.head_activation == "gelu_tanh"


@pytest.mark.parametrize("post_norm", [False, True])
def test_fill_mask(post_norm, saved, tmp_path):
    tokenizer = WordPieceTokenizer({word: n for n, word in enumerate(WORDS)}, lower_case=True)
    source = saved(
        tokenizer,
        bias_gelu_fusion=False,
        apply_residual_connection_post_layernorm=post_norm,
    )
    folder = tmp_path / "hf"
    folder.mkdir()
    write_model(source, folder, "float32", 10**9)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded("The CATS [MASK] .")["input_ids"] == [2, 5, 6, 10, 4, 11, 3]
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] == 0
    assert not (folder / "generation_config.json").exists()
    filled = pipeline("fill-mask", model=str(folder), tokenizer=loaded, top_k=3)("The cat [MASK].")
    ours = model_of(source, torch.float32, torch.device("cpu"))
    model, report = AutoModelForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    inputs = loaded("The cat [MASK].", return_tensors="pt")
    logits = AutoModelForMaskedLM.from_pretrained(folder)(**inputs).logits
    torch.testing.assert_close(model(**inputs).prediction_logits, logits)
    scores, tokens = logits[0, 3].softmax(-1).topk(3)
    assert [each["token"] for each in filled] == tokens.tolist()
    assert [each["score"] for each in filled] == pytest.approx(scores.tolist(), rel=1e-4)
    assert compare_logits(ours, folder, source.model).agree


@pytest.mark.parametrize("name", ["embedding.tokentype_embeddings.weight", "pooler.dense.bias",
                                  "embedding.word_embeddings.bias", "lm_head.norm.bias",
                                  "embedding.position_embeddings.weight"])  # fmt: skip
def test_comparison_notices_each_part(name, bert_folder):
    folder = bert_folder()
    source = HuggingFaceFolder(folder)
    ours = model_of(source, torch.float32, torch.device("cpu"))
    assert compare_logits(ours, folder, source.model).agree
    last = source.shape(name)[0] - 1
    with torch.no_grad():
        values = dict(ours.canonical_parameters())[name]
        values[(last, 3) if values.ndim == 2 else last] += 1e-2
    assert not compare_logits(ours, folder, source.model).agree


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "is 'relative_key' .*must be learned"),
        ({"is_decoder": True}, "is_decoder is True .*cannot be represented"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu' .*expected one of gelu"),
        ({"embedding_size": 16}, "embedding_size = 16 .*is not known"),
    ],
)
def test_what_is_refused(config, message, bert_folder):
    folder = bert_folder()
    rewrite(folder, lambda tensors: None, **config)
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceFolder(folder)


def test_the_family_of_a_folder(bert_folder):
    assert HuggingFaceFolder.family(bert_folder()) == "bert"


HEADS = {
    "classification": {"head": "classification", "num_labels": 3},
    "multiple_choice": {"head": "multiple_choice"},
    "span": {"head": "span"},
}


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_heads_for_labelled_text(head, post_norm, saved, tmp_path, capsys):
    """To a folder of Hugging Face and back, by what the tool runs."""
    names = ("yes", "no", "maybe") if head == "classification" else ()
    source = saved(
        label_names=names, bert_binary_head=not post_norm,
        apply_residual_connection_post_layernorm=post_norm, **HEADS[head],
    )  # fmt: skip
    folder = tmp_path / "hf"
    folder.mkdir()
    assert "logits of 2 texts agree" in export_hf(source, folder, 10**9)
    assert "approximated" not in capsys.readouterr().out  # no activation but the MLP's
    back = HuggingFaceFolder(folder)
    assert back.model.head == head and back.model.label_names == names
    assert_equal(weights_of(folder), {n: source.tensor(n) for n in source.names()})
    from_hf(["--input", str(folder), "--output", str(tmp_path / "back")])
    assert f"with tasks/main.py --load {tmp_path / 'back'}" in capsys.readouterr().out
    again = open_checkpoint(tmp_path / "back")
    assert again.model.num_labels == source.model.num_labels
    assert_equal({n: again.tensor(n) for n in again.names()}, weights_of(folder))
    ours = model_of(source, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        dict(ours.canonical_parameters())[f"{HEAD_NAMES[head]}.weight"][-1, 3] += 1e-2
    assert not compare_logits(ours, folder, source.model).agree


def test_text_classification(saved, tmp_path):
    tokenizer = WordPieceTokenizer({word: n for n, word in enumerate(WORDS)}, lower_case=True)
    names = ("yes", "no", "maybe")
    source = saved(
        tokenizer, bias_gelu_fusion=False, head="classification", num_labels=3, label_names=names,
        seq_length=16, max_position_embeddings=16,
    )  # fmt: skip
    (tmp_path / "hf").mkdir()
    write_model(source, tmp_path / "hf", "float32", 10**9)
    classify = pipeline("text-classification", model=str(tmp_path / "hf"), top_k=None)
    actual = classify({"text": "the cat sat .", "text_pair": "cats on the mat"})
    texts = ["the cat sat .", "cats on the mat"]
    first, second = (np.array(tokenizer.tokenize(text)) for text in texts)
    tokens = np.array([2, *first, 3, *second, 3])
    types = np.array([0] * (len(first) + 2) + [1] * (len(second) + 1))
    batch = collate_labelled([LabelledText((tokens,), (types,), 0)], pad=0)
    ours = model_of(source, torch.float32, torch.device("cpu"))
    logits = ours(spec_of(source.model).begin(batch).changed(targets=None)).pooled
    expected = dict(zip(names, logits[0].softmax(0).tolist(), strict=True))
    assert {each["label"]: each["score"] for each in actual} == pytest.approx(expected, rel=1e-4)


def test_files_of_a_head_for_spans_may_have_a_pooler(bert_folder):
    """Folders of transformers 3 do."""
    folder = bert_folder("span")
    expected = weights_of(folder)
    pooler = {
        "bert.pooler.dense.weight": torch.ones(36, 36),
        "bert.pooler.dense.bias": torch.ones(36),
    }
    rewrite(folder, lambda tensors: tensors.update(pooler))
    assert_equal(weights_of(folder), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"problem_type": "multi_label_classification"}, "has one for each text"),
        ({"problem_type": "regression"}, "a head with 3 labels has one for each text"),
        ({"classifier_dropout": 0.5}, "classifier_dropout is 0.5 .*hidden_dropout_prob"),
        ({"id2label": {"1": "a", "2": "b", "3": "c"}}, "expected the numbers from 0"),
        ({"id2label": {"0": "a", "1": "b"}}, "classifier.weight has the shape"),
        ({"architectures": ["BertForTokenClassification"]}, "its head cannot be represented"),
        ({"architectures": ["BertForMultipleChoice"]}, "classifier.weight has the shape"),
    ],
)
def test_heads_that_are_refused(config, message, bert_folder):
    folder = bert_folder("labels")
    rewrite(folder, lambda tensors: None, **config)
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceFolder(folder)
