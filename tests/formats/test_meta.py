"""Meta's files give the logits of Meta's own program, and the tensors and configuration of
transformers' own script (tests/golden/meta_llama/make.py ran both)."""

import base64
import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpt_forward import forward

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import locate_checkpoint, open_checkpoint
from megatron.formats.huggingface.llama import LLAMA
from megatron.formats.inspection import model_of
from megatron.formats.meta import MetaFolder, tokenizer_of_file

GOLDEN = Path(__file__).parents[1] / "golden" / "meta_llama"
sys.path.insert(0, str(GOLDEN))
import meta_files  # noqa: E402

CASES = json.loads((GOLDEN / "golden.json").read_text())["cases"]


@pytest.mark.parametrize("case", [case for case in CASES if "logits" in CASES[case]])
def test_logits_of_metas_program(case, tmp_path):
    source = open_checkpoint(meta_files.write(case, tmp_path / "meta"))
    model = model_of(source, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        logits = forward(model, meta_files.tokens())[1, :, : meta_files.VOCABULARY]
    assert logits.std() > 0.3
    expected = torch.tensor(CASES[case]["logits"])
    torch.testing.assert_close(logits, expected, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_tensors_of_transformers_script(case, tmp_path):
    source = open_checkpoint(meta_files.write(case, tmp_path / "meta"))
    actual = {
        name: hashlib.sha256(values.numpy().tobytes()).hexdigest()
        for name, values in LLAMA.to_hf(source.model, source.tensor)
    }
    assert actual == CASES[case]["tensors"]
    assert source.dtype(source.names()[0]) == "bfloat16"


@pytest.mark.parametrize("case", CASES)
def test_configuration_of_transformers_script(case, tmp_path):
    source = MetaFolder(meta_files.write(case, tmp_path / "meta"))
    theirs = CASES[case]["config"]
    ours = LLAMA.config(source.model)
    assert (ours.get("rope_scaling") or None) == theirs["rope_scaling"]
    for name in (
        "vocab_size", "tie_word_embeddings", "hidden_size", "intermediate_size", "rope_theta",
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
        "hidden_act", "max_position_embeddings", "attention_bias", "mlp_bias",
    ):  # fmt: skip
        assert ours[name] == theirs[name], name
    assert LLAMA.model(theirs | {"hf_architecture": None}, Path("config.json")) == source.model


def same(here, there):
    assert here.names() == there.names()
    return all(torch.equal(here.tensor(name), there.tensor(name)) for name in here.names())


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("case", ["llama2-grouped", "llama3"])
def test_any_number_of_ranks(case, ranks, tmp_path):
    two = open_checkpoint(meta_files.write(case, tmp_path / "two"))
    files = meta_files.shares(case, ranks)
    if ranks == 4:  # more ranks than key heads: neighbours have the same head
        for n in range(2):
            for name in ("attention.wk", "attention.wv"):
                key = f"layers.{n}.{name}.weight"
                heads = meta_files.weights(case)[key].chunk(2)
                for rank, tensors in enumerate(files):
                    tensors[key] = heads[rank // 2].clone()
    folder = meta_files.write(case, tmp_path / "other", ranks)
    for rank, tensors in enumerate(files):
        torch.save(tensors, folder / f"consolidated.{rank:02d}.pth")
    assert same(two, open_checkpoint(folder))


def test_one_safetensors_file_of_mistral(tmp_path):
    """Mistral's own form: explicit widths, a window, one file."""
    from safetensors.torch import save_file

    whole = meta_files.write("llama2-grouped", tmp_path / "whole", 1)
    folder = tmp_path / "mistral"
    folder.mkdir()
    tensors = meta_files.shares("llama2-grouped", 1)[0]
    del tensors["rope.freqs"]
    save_file(tensors, folder / "consolidated.safetensors")
    params = {
        "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "norm_eps": 1e-5,
        "hidden_dim": tensors["layers.0.feed_forward.w1.weight"].shape[0], "vocab_size": 40,
        "sliding_window": 16,
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    source = open_checkpoint(folder)
    assert same(open_checkpoint(whole), source)
    assert source.model.attention.sliding_window == 16
    assert source.model.hf_architecture == "mistral"


def test_where_it_is_found(tmp_path):
    folder = meta_files.write("llama3.2", tmp_path / "original")
    for path in (folder, folder / "params.json", folder / "consolidated.00.pth"):
        assert locate_checkpoint(path)[:2] == (MetaFolder, folder)
    with pytest.raises(CheckpointError, match="has no 7"):
        locate_checkpoint(folder, "7")
    assert any("taken as 131,072 tokens" in note for note in open_checkpoint(folder).notes)


def damaged(case, tmp_path, change):
    folder = meta_files.write(case, tmp_path / "meta")
    params = json.loads((folder / "params.json").read_text())
    files = [dict(each) for each in meta_files.shares(case)]
    change(params, files)
    (folder / "params.json").write_text(json.dumps(params))
    for rank, tensors in enumerate(files):
        torch.save(tensors, folder / f"consolidated.{rank:02d}.pth")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params, files: params.pop("dim"), r"params\.json has no dim"),
        (lambda params, files: params.update(n_heads="4"), "n_heads is '4', expected a positive"),
        (
            lambda params, files: params.update(quantization_args={"spinquant": True}),
            r"quantization_args = .*cannot be represented",
        ),
        (
            lambda params, files: params.update(model=dict(params), lora_args={"rank": 16}),
            r"lora_args = .*cannot be represented",
        ),
        (lambda params, files: params.update(qk_norm=True), "qk_norm = True: such a Llama"),
        (
            lambda params, files: params.update(use_scaled_rope=1),
            "use_scaled_rope is 1, expected true or false",
        ),
        (
            lambda params, files: params.update(multiple_of=64),
            r"layers\.0\.feed_forward\.w1\.weight has the shape \(48, 32\) in 2 files; "
            r"params\.json makes it \(128, 32\)",
        ),
        (
            lambda params, files: files[1].pop("layers.1.ffn_norm.weight"),
            r"consolidated\.01\.pth lacks layers\.1\.ffn_norm\.weight",
        ),
        (
            lambda params, files: files[0].update({"layers.0.gate.weight": torch.ones(2)}),
            r"consolidated\.00\.pth contains layers\.0\.gate\.weight",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(damaged("llama", tmp_path, change))


def test_a_missing_file_is_named(tmp_path):
    folder = meta_files.write("llama", tmp_path / "meta", 4)
    (folder / "consolidated.01.pth").unlink()
    with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth is missing"):
        open_checkpoint(folder)


def test_opening_needs_no_transformers(tmp_path):
    folder = meta_files.write("llama3.1", tmp_path / "meta")
    code = (
        "import sys; from megatron.checkpoint.source import open_checkpoint; "
        "open_checkpoint(sys.argv[1]); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, folder], check=True)


def test_texts_of_llama_3_end_with_a_turn_too(tmp_path):
    """As `stop_tokens` of Meta's tokenizer: the second and the tenth of the tokens after the
    ranks."""
    source = open_checkpoint(meta_files.write(next(iter(CASES)), tmp_path / "meta"))
    assert source.generation == {}
    lines = (f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256))
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    source.tokenizer = tokenizer_of_file(tmp_path / "tokenizer.model")
    source.model = source.model.with_vocabulary(512)
    assert source.generation == {"eos_token_id": [257, 265]}
    assert source.copy_tokenizer(tmp_path / "copied")
    copied = json.loads((tmp_path / "copied/generation_config.json").read_text())
    assert copied == source.generation


def test_checksums_of_meta(tmp_path):
    folder = meta_files.write("llama3.1", tmp_path / "meta")
    path = folder / "consolidated.00.pth"
    sums = [(hashlib.md5(path.read_bytes()).hexdigest(), path.name), ("0" * 32, "tokenizer.model")]
    (folder / "checklist.chk").write_text("".join(f"{digest}  {name}\n" for digest, name in sums))
    open_checkpoint(folder)
    content = bytearray(path.read_bytes())
    content[-3000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth is damaged: its MD5 sum"):
        open_checkpoint(folder)


def test_code_in_a_file_is_not_run(tmp_path):
    folder = meta_files.write("llama3.1", tmp_path / "meta")
    gone = tmp_path / "gone"

    class Harm:
        def __reduce__(self):
            return (Path.touch, (gone,))

    torch.save({"output.weight": Harm()}, folder / "consolidated.00.pth", pickle_module=pickle)
    with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth cannot be opened"):
        open_checkpoint(folder)
    assert not gone.exists()
