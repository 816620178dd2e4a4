"""GGUF files, read and written, against transformers, which reads the same files, against files
that the package gguf writes, and against llama.cpp itself where it is installed (xllamacpp)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
sys.path.insert(0, str(Path(__file__).parent))

from gguf_models import DECODERS, MODELS, theirs, write_llama  # noqa: E402
from samples import sampled  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402
from transformers.integrations.gguf.dequant import GGML_NAME, dequantize  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from megatron.checkpoint.source import locate_checkpoint  # noqa: E402
from megatron.formats.gguf.container import GGUFFile, StoredTensor  # noqa: E402
from megatron.formats.gguf.rope import write_factors  # noqa: E402
from megatron.formats.gguf.source import GGUFModel  # noqa: E402
from megatron.formats.gguf.writer import write_gguf  # noqa: E402
from megatron.formats.huggingface.source import HuggingFaceFolder  # noqa: E402

IDS = [3, 17, 42, 5, 60, 1, 33, 8, 9, 50, 21, 4, 11, 2, 3]
UNREAD = {"gptneox", "mistral", "mixtral", "llama,biases", "falcon,40b"} | (
    DECODERS.keys() - {"starcoder2", "stablelm", "nemotron", "minimax-m2"}
)
"""Files that transformers does not read, or reads as a Llama without experts or biases, without the
order of Falcon's queries, keys and values, or gpt-oss by names of experts that llama.cpp does not
have. llama.cpp reads them (below)."""


def folder_of(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path / "hf")
    return model, HuggingFaceFolder(tmp_path / "hf")


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits


@pytest.mark.parametrize("name", sampled(MODELS, lambda name: name in ("llama", "gpt-oss")))
def test_what_is_written_is_what_transformers_reads(name, tmp_path):
    """Its logits with the file are those of the model that was written, bit by bit."""
    model, source = folder_of(name, tmp_path)
    write_gguf(source, tmp_path / "model.gguf", "f32")
    back = GGUFModel(tmp_path / "model.gguf")
    # Norms are stored as 1 + weight in float32.
    allowed = 1.2e-7 if name.startswith(("gemma", "nemotron")) else 0.0
    for each in source.names():
        assert (back.tensor(each) - source.tensor(each)).abs().max() <= allowed, each
    if name in UNREAD:
        return
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=model.config, dtype=torch.float32,
        attn_implementation="eager",
    )  # fmt: skip
    if allowed:
        torch.testing.assert_close(logits(read), logits(model), rtol=1.3e-6, atol=3e-5)
    else:
        assert torch.equal(logits(read), logits(model))


@pytest.mark.parametrize("parts", [{}, {"split_max_tensors": 7}])
def test_a_file_of_the_package_gguf(parts, tmp_path):
    """In one file and in several, of which any may be named."""
    model, source = folder_of("llama", tmp_path)
    write_llama(tmp_path / "m.gguf", model, **parts)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == (3 if parts else 1)
    for where in (files[0], files[-1]):
        actual = locate_checkpoint(where)
        back = actual.open()
        assert back.model == source.model or back.model.hf_architecture == "llama"
        for each in source.names():
            assert torch.equal(back.tensor(each), source.tensor(each)), each
            assert back.dtype(each) == "float32"


@pytest.mark.parametrize("kind", sampled(["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"], "Q8_0".__eq__))
def test_quantised_weights_of_the_package_gguf(kind, tmp_path):
    """They are what the package dequantises, in the rows of transformers."""
    model, source = folder_of("llama", tmp_path)
    form = gguf.GGMLQuantizationType[kind]
    write_llama(tmp_path / "m.gguf", model, form)
    back = GGUFModel(tmp_path / "m.gguf")
    assert back.dtype("layers.0.mlp.up.weight") == {"F16": "float16", "BF16": "bfloat16"}.get(
        kind, "float32"
    )
    for each in source.names():
        values = source.tensor(each)
        if values.ndim > 1:
            packed = gguf.quants.quantize(values.numpy(), form)
            values = torch.from_numpy(gguf.quants.dequantize(packed, form)).float()
        assert torch.equal(back.tensor(each), values), each


@pytest.mark.parametrize("number", sampled(sorted(GGML_NAME), lambda number: number in (8, 12)))
def test_types_against_transformers(number, tmp_path):
    """Random bytes of every type that transformers dequantises, by torch; scales are finite."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    draw = torch.Generator().manual_seed(number)
    data = torch.randint(256, (6, 2 * size), dtype=torch.uint8, generator=draw)
    file = object.__new__(GGUFFile)
    file.tensors = {
        "w": StoredTensor(tmp_path, number, (6, 2 * elements), memoryview(data.numpy()).cast("B"))
    }
    expected = dequantize(data, number).reshape(6, -1)
    both = expected.isfinite() & file.tensor("w").isfinite()
    assert both.float().mean() > 0.8
    torch.testing.assert_close(file.tensor("w")[both], expected[both], rtol=2e-6, atol=0)


@pytest.mark.parametrize("kind", sampled(["f16", "bf16", "q8_0"], "q8_0".__eq__))
def test_types_that_are_written(kind, tmp_path):
    """Matrices are rounded to the type, vectors are exact; rows that are no whole blocks are
    float16, as llama.cpp's converter writes them."""
    _, source = folder_of("llama", tmp_path)
    write_gguf(source, tmp_path / "m.gguf", kind)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.0.ffn_down.weight"] == kind.upper()
    assert (
        reader.get_field("general.file_type").contents() == {"f16": 1, "bf16": 32, "q8_0": 7}[kind]
    )
    back, form = GGUFModel(tmp_path / "m.gguf"), gguf.GGMLQuantizationType[kind.upper()]
    for each in source.names():
        values = source.tensor(each)
        if values.ndim > 1:
            packed = gguf.quants.quantize(values.numpy(), form)
            values = torch.from_numpy(gguf.quants.dequantize(packed, form)).float()
        assert torch.equal(back.tensor(each), values), each


def test_factors_of_scaled_rope_against_transformers():
    """Frequencies that are divided by the factors of Llama 3, of short, middle and long waves."""
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    config = LlamaConfig(head_dim=128, rope_parameters=scaling, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = write_factors({"rope_scaling": scaling, "rope_theta": 500000.0, "head_dim": 128})
    plain = 1 / 500000.0 ** (torch.arange(0, 128, 2).double() / 128)
    actual = plain / factors["rope_freqs.weight"].double()
    torch.testing.assert_close(actual.float(), scaled, rtol=1e-5, atol=0)
    assert len(set(factors["rope_freqs.weight"].tolist())) > 5


def test_rows_that_are_not_blocks_are_float16(tmp_path):
    _, source = folder_of("llama,tied,head_dim", tmp_path)
    write_gguf(source, tmp_path / "m.gguf", "q8_0")
    kinds = {name: each.kind for name, each in GGUFFile(tmp_path / "m.gguf").tensors.items()}
    assert kinds["blk.0.attn_output.weight"] == 1  # rows of 48
    assert kinds["blk.0.attn_q.weight"] == 8


_RUN = """
import json, sys, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.n_predict, p.warmup, p.n_gpu_layers = sys.argv[1], 64, 1, False, 0
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = p.n_parallel = 1
p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
request = {"prompt": json.loads(sys.argv[2]), "n_predict": 1, "n_probs": 61, "temperature": -1.0}
answer = xllamacpp.Server(p).handle_completions(request)
answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
tops = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
print("RESULT" + json.dumps({each["id"]: each["logprob"] for each in tops}))
"""
_GELU = ("gpt2", "gptneox", "falcon,7b", "falcon,40b", "bloom", "gemma2", "gemma3",
         "starcoder2", "phi2", "gemma", "mpt")  # fmt: skip
"""llama.cpp has GELU as a table of float16."""


@pytest.mark.proof
@pytest.mark.parametrize("name", [name for name in MODELS if name != "phi3,longrope"])
def test_llama_cpp_computes_the_same(name, tmp_path, monkeypatch):
    """Log-probabilities of the next token. (Of LongRoPE it chooses the factors by the memory that
    it was given, transformers by the length of the text.)"""
    pytest.importorskip("xllamacpp", reason="xllamacpp, which contains llama.cpp, is not installed")
    vocabulary = {
        "model": "llama", "tokens": ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, 61))],
        "scores": [-float(i) for i in range(61)], "token_type": [2, 3, 3] + [1] * 58,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": False,
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    monkeypatch.setattr("megatron.formats.gguf.writer.tokenizer_metadata", lambda *_: keys)
    model, source = folder_of(name, tmp_path)
    write_gguf(source, tmp_path / "m.gguf", "f32")
    command = [sys.executable, "-c", _RUN, tmp_path / "m.gguf", json.dumps(IDS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    actual = json.loads(run.stdout.partition("RESULT")[2].splitlines()[0])
    expected = logits(model)[0, -1].log_softmax(-1)
    assert len(actual) == 61
    allowed = 3e-3 if name in _GELU else 5e-6
    for token, probability in actual.items():
        assert abs(expected[int(token)].item() - probability) < allowed
