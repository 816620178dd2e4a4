"""Decoders of today, besides their first shape: other heads, biases, RoPE and windows in
float64, the commands both ways, and files of older versions; all against transformers."""

import json
from pathlib import Path

import pytest
import torch
from hf_inputs import pair
from hf_modern_cases import DYNAMIC, LINEAR, MODERN, SIZES, YARN, shapes
from safetensors.torch import load_file
from samples import sampled
from test_against_hf import LENGTH, SHORT, gradients_of, meaning, ours_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from megatron.formats.conversion.commands import from_hf, to_hf
from megatron.formats.huggingface import architecture_named
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.parallel.shard import shard_of

SHAPES = [(name, shape) for name in MODERN for shape in shapes(name)]
EXACT = {"rtol": 1e-10, "atol": 1e-10}
FIRST = [("cohere", "qk_norm,odd"), ("bitnet", "odd_heads"), ("nanochat", "odd_groups")]
"""Shapes of layers that no relative of Llama has."""


@pytest.fixture
def wide(monkeypatch):
    """Makes a model of transformers again in float64: its norms and frequencies convert to float32,
    which means float64 here."""

    def again(theirs):
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        theirs.config.dtype = torch.float64
        copy = type(theirs)(theirs.config).double().eval()
        copy.load_state_dict(theirs.state_dict())
        return copy

    before = torch.get_default_dtype()
    with monkeypatch.context() as patch:
        yield again
    torch.set_default_dtype(before)


@pytest.mark.parametrize(("model_type", "shape"), sampled(SHAPES, lambda each: each in FIRST))
def test_float64_against_hf(model_type, shape, hf_model, tmp_path, wide):
    """Logits at two lengths, and gradients; then the files, which are what was read."""
    theirs = hf_model(model_type, **shapes(model_type)[shape])
    folder, back = tmp_path / "theirs", tmp_path / "back"
    theirs.save_pretrained(folder)
    source = HuggingFaceFolder(folder)
    back.mkdir()
    write_model(source, back, "float32", 10**9)
    actual, expected = (load_file(path / "model.safetensors") for path in (back, folder))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert HuggingFaceFolder(back).model == source.model
    if shape != "alpha":  # which is written as the base that it means
        assert meaning(back) == meaning(folder)
    ours = ours_of(source).double()
    theirs = wide(theirs)
    for length in (SHORT, LENGTH):
        inputs = pair(source.model, length)
        with torch.no_grad():
            logits = ours(inputs.ours.changed(targets=None)).hidden[..., : SIZES["vocab_size"]]
            torch.testing.assert_close(logits, theirs(**inputs.theirs).logits, **EXACT)
    sum(ours(inputs.ours).losses.values()).backward()
    inputs.loss(theirs(**inputs.theirs)).backward()
    gradients = {
        name: shard_of(param).join([param.grad]) for name, param in ours.canonical_parameters()
    }
    expected = gradients_of(theirs, tmp_path / "gradients")
    for parameter in source.architecture.parameters(source.model):
        if parameter.ours not in gradients:
            assert parameter.ours.endswith(".scalar")  # a buffer of Gemma 4
            continue
        for name, gradient in parameter.to_hf(gradients[parameter.ours]).items():
            torch.testing.assert_close(gradient, expected[name], **EXACT, msg=f"{name} {{}}".format)


@pytest.mark.parametrize("model_type", sampled(MODERN, lambda name: name == "apertus"))
def test_a_checkpoint_between_them_is_bitwise(model_type, hf_folder, tmp_path, capsys):
    """By the commands, which compare logits with transformers on both ways; the tokenizer, and how
    it generates, are kept."""
    theirs = hf_folder(model_type, **MODERN[model_type])
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(61)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(theirs)
    GenerationConfig(temperature=0.3, top_k=7, do_sample=True).save_pretrained(theirs)
    ours, back = tmp_path / "ours", tmp_path / "back"
    from_hf(["--input", str(theirs), "--output", str(ours)])
    to_hf(["--load", str(ours), "--output", str(back)])
    assert capsys.readouterr().out.count("tokens agree") == 2
    actual, expected = (load_file(folder / "model.safetensors") for folder in (back, theirs))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    written = GenerationConfig.from_pretrained(back)
    assert (written.temperature, written.top_k, written.do_sample) == (0.3, 7, True)
    tokenizer = AutoTokenizer.from_pretrained(back)
    assert tokenizer("w5 w60 w7")["input_ids"] == [5, 60, 7] and tokenizer.eos_token_id == 2


def read(model_type, content):
    sizes = {key: SIZES[key] for key in ("hidden_size", "num_attention_heads")}
    sizes |= {"num_hidden_layers": 4, "num_key_value_heads": 2}
    path, content = Path("config.json"), {"model_type": model_type, **sizes} | content
    return architecture_named(content, path).model(content, path)


OLDER = [
    ("olmo3", {"rope_theta": 5.0, "rope_scaling": YARN | {"rope_theta": 5.0}},
     {"rope_parameters": {"full_attention": YARN | {"rope_theta": 5.0},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 5.0}}}),
    ("glm", {"rope_theta": 5000.0, "rope_scaling": LINEAR, "partial_rotary_factor": 0.25},
     {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.25}}),
    ("cohere2", {"sliding_window_pattern": 2},
     {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types":
                 ["sliding_attention"] * 3 + ["full_attention"]}, {}),
    ("smollm3", {"no_rope_layer_interval": 2}, {"no_rope_layers": [1, 0, 1, 0]}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, {}),
    ("granite", {"rope_theta": 10000.0, "rope_scaling": DYNAMIC}, {"rope_parameters": DYNAMIC}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "older", "newer"), OLDER)
def test_older_files_are_read_alike(model_type, older, newer):
    assert read(model_type, older) == read(model_type, newer)


NO_DEFAULT = ("granitemoehybrid", "cohere_compass_text")
"""Architectures of which the default is refused: layers of Mamba; no RoPE."""


@pytest.mark.parametrize("model_type", sampled(
    [name for name in MODERN if name not in NO_DEFAULT],
    lambda name: name in ("cwm", "olmo3"),
))  # fmt: skip
def test_defaults_are_those_of_transformers(model_type):
    """A file with nothing but sizes is what the configuration class makes of it."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64,
             "num_hidden_layers": 5}  # fmt: skip
    if model_type == "gemma4_text":
        sizes["hidden_size_per_layer_input"] = 0
    content = json.loads(AutoConfig.for_model(model_type, **sizes).to_json_string())
    plain = {key: content[key] for key in ("model_type", *sizes)}
    assert read(model_type, plain) == read(model_type, content | sizes)
