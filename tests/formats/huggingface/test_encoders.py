"""Encoders next to BERT: what the commands do with their folders, in float64, and what only they
have. The first case of each architecture against transformers is in test_against_hf.py."""

import json

import pytest
import torch
from hf_cases import T5_11
from hf_encoder_cases import ENCODER_CASES
from safetensors.torch import load_file, save_file
from samples import sampled
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast, UMT5ForConditionalGeneration

from megatron.checkpoint.files import CheckpointError
from megatron.formats.conversion.commands import from_hf, to_hf
from megatron.formats.huggingface.compare import compare_logits
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.formats.inspection import model_of

ALL = [(model_type, case) for model_type, cases in ENCODER_CASES.items() for case in cases]


def agreed(folder):
    """Our logits are those of transformers in float64, to 1e-10."""
    source = HuggingFaceFolder(folder)
    ours = model_of(source, torch.float32, torch.device("cpu"))
    result = compare_logits(ours, folder, source.model)
    assert result.agree and result.largest < 1e-10, result
    return source


@pytest.mark.parametrize(
    ("model_type", "case"), sampled(ALL, lambda case: case == ("roberta", "gelu_new"))
)
def test_there_and_back_by_the_commands(model_type, case, hf_folder, tmp_path):
    folder = hf_folder(model_type, **ENCODER_CASES[model_type][case])
    agreed(folder)
    saved, back = tmp_path / "saved", tmp_path / "back"
    from_hf(["--input", str(folder), "--output", str(saved)])
    to_hf(["--load", str(saved), "--output", str(back)])
    assert json.loads((back / "config.json").read_text())["model_type"] == model_type
    first, second = (load_file(each / "model.safetensors") for each in (folder, back))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    agreed(back)


@pytest.mark.proof
def test_a_tied_mt5(hf_folder, tmp_path):
    """transformers 5 says of every mT5 that it is tied, transformers 4 of none."""
    folder = hf_folder("mt5", **T5_11 | {"tie_word_embeddings": True})
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    source = agreed(folder)
    assert source.model.embedding.tied and not source.model.embedding.scale_head_input
    to_hf(["--load", str(folder), "--output", str(tmp_path / "back")])
    tensors = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["shared.weight"])
    assert not json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"]
    assert agreed(tmp_path / "back").model.embedding.tied


@pytest.mark.proof
@pytest.mark.parametrize("model_type", ["bart", "mbart"])
def test_bias_of_the_logits(model_type, hf_folder, tmp_path):
    """A buffer of transformers, which old files lack: a parameter here where it is not zero."""
    folder = hf_folder(model_type, **ENCODER_CASES[model_type]["tied"])
    path, name = folder / "model.safetensors", "final_logits_bias"
    tensors = load_file(path)
    assert not tensors[name].any()
    bias = {name: torch.randn(1, 61, generator=torch.Generator().manual_seed(7))}
    for further, biased in ((bias, True), ({}, False)):
        del tensors[name]
        save_file(tensors | further, path)
        assert agreed(folder).model.embedding.lm_head_bias is biased
        back = tmp_path / f"back{biased}"
        to_hf(["--load", str(folder), "--output", str(back)])
        tensors = load_file(back / "model.safetensors")
        assert torch.equal(tensors[name], bias[name] if biased else torch.zeros(1, 61))
        assert agreed(back).model.embedding.lm_head_bias is biased


@pytest.mark.proof
def test_heads_of_umt5(hf_folder, tmp_path):
    """transformers 4 scales the input of tied heads alone, transformers 5 that of all: a file that
    says it is not tied is one of transformers 4, whose logits are larger."""
    folder = hf_folder("umt5", **ENCODER_CASES["umt5"]["untied"])
    path = folder / "config.json"
    content = json.loads(path.read_text())
    for tied in (True, False):
        path.write_text(json.dumps(content | {"tie_word_embeddings": tied}))
        source = agreed(folder)
        assert not source.model.embedding.tied
        assert source.model.embedding.scale_head_input is tied
        back = tmp_path / f"back{tied}"
        to_hf(["--load", str(folder), "--output", str(back)])
        assert agreed(back).model == source.model
        inputs = source.architecture.task.inputs(source.model, 3)
        state = model_of(source, torch.float32, torch.device("cpu"))(inputs.ours)
        theirs = UMT5ForConditionalGeneration.from_pretrained(back).eval()
        with torch.no_grad():
            expected = theirs(**inputs.theirs).logits * (1 if tied else 32**0.5)
        torch.testing.assert_close(state.hidden[..., :61], expected)


def test_special_tokens_of_roberta(hf_folder, tmp_path):
    """Padding is the row before the first position; texts begin and end as the tokenizer says. With
    padding in front of its last tokens a text's logits are those without."""
    folder = hf_folder("roberta", **ENCODER_CASES["roberta"]["tied"])
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "the", "cat", "sat"]
    backend = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="<s>", pad_token="<pad>", sep_token="</s>",
        unk_token="<unk>", mask_token="<mask>", bos_token="<s>", eos_token="</s>",
    ).save_pretrained(folder)  # fmt: skip
    to_hf(["--load", str(folder), "--output", str(tmp_path / "back")])
    content = json.loads((tmp_path / "back" / "config.json").read_text())
    tokens = [content[f"{name}_token_id"] for name in ("bos", "pad", "eos")]
    assert tokens == [0, 1, 2]
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "back").eval()
    text = torch.tensor([[0, 5, 6, 7, 2]])
    padded = torch.nn.functional.pad(text, (0, 3), value=1)
    with torch.no_grad():
        plain, longer = model(text).logits, model(padded, (padded != 1).long()).logits
    torch.testing.assert_close(longer[:, :5], plain)


def test_tensors_that_are_wrong(hf_folder):
    """Each file and tensor is named: one is missing, one more, one of another shape, and a pooler
    that a model with another head still has is not one."""
    folder = hf_folder("roberta", **ENCODER_CASES["roberta"]["tied"])
    path = folder / "model.safetensors"
    right = load_file(path)
    pooler = {f"roberta.pooler.dense.{kind}": torch.zeros(1) for kind in ("weight", "bias")}
    save_file(right | pooler, path)
    HuggingFaceFolder(folder)
    name = "roberta.encoder.layer.1.attention.self.key.weight"
    for tensors, message in (
        (
            {key: value for key, value in right.items() if key != name},
            f"{path} lacks {name}; a mod",
        ),
        (right | {"roberta.adapter": torch.zeros(3)}, f"{path} contains roberta.adapter; a model"),
        (right | {name: right[name][:7].clone()}, f"{path}: {name} has the shape"),
    ):
        save_file(tensors, path)
        with pytest.raises(CheckpointError, match=message):
            HuggingFaceFolder(folder)
    content = path.read_bytes()
    for header in (b"\xff" * 8, (10**9).to_bytes(8, "little"), content[:8]):
        path.write_bytes(header + content[8:200])
        with pytest.raises(CheckpointError, match=str(path)):
            HuggingFaceFolder(folder)
