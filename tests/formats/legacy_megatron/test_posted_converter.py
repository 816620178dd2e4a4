"""tools/convert_megatron_gpt2_checkpoint.py as Hugging Face's pages call transformers' script."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tool_modules import load_program
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from megatron.formats.legacy_megatron.reader import MegatronCheckpoint
from megatron.formats.legacy_megatron.writer import write_megatron
from megatron.tokenizer.gpt2_bpe import CHARACTER_OF_BYTE

GOLDEN = Path(__file__).parents[2] / "golden" / "megatron_gpt2" / "golden.json"
FILE = "model_optim_rng.pt"
TOKENS = torch.arange(20).reshape(2, 10)


@pytest.fixture(scope="module")
def tool():
    return load_program("tools/convert_megatron_gpt2_checkpoint.py")


@pytest.fixture
def vocabulary():
    """Writes the vocab.json and merges.txt of single bytes and <|endoftext|>."""

    def write(folder):
        words = {character: i for i, character in enumerate(CHARACTER_OF_BYTE)} | {
            "<|endoftext|>": 256
        }
        folder.mkdir(exist_ok=True)
        (folder / "vocab.json").write_text(json.dumps(words))
        (folder / "merges.txt").write_text("#version: 0.2\n")

    return write


def logits_of(folder, tokens=TOKENS, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        return model.eval()(tokens).logits


def contents(folder):
    return sorted(path.name for path in folder.iterdir())


MODEL = ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("archive", [False, True])
def test_logits_are_those_of_transformers_script(archive, tool, ours, tmp_path):
    """golden.json has what the script itself computed from this file."""
    golden = json.loads(GOLDEN.read_text())
    written = write_megatron(ours, tmp_path / "export") / "mp_rank_00" / FILE
    folder = tmp_path / "megatron-codeparrot-small"
    folder.mkdir()
    path = folder / FILE  # as the post copies it, without its folders
    shutil.copy(written, path)
    if archive:
        path.unlink()
        path = folder / "checkpoint.zip"
        with zipfile.ZipFile(path, "w") as packed:
            packed.write(written, f"release/mp_rank_00/{FILE}")
    tool.main([str(path)])
    actual = logits_of(folder, torch.tensor(golden["tokens"]))[..., :61]
    torch.testing.assert_close(actual, torch.tensor(golden["logits"]), rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize(("version", "tensor"), [(None, 1), (0, 2), (2, 1), (3, 2)])
def test_every_version_and_all_ranks(
    version, tensor, tool, tmp_path, legacy_model, random_weights, write_legacy
):
    model = legacy_model()
    weights = random_weights(model)
    written = write_legacy(tmp_path / "save", weights, model, version, tensor)
    path = written / "mp_rank_00" / FILE
    tool.main([str(path)])
    assert contents(path.parent) == sorted([*MODEL, FILE])
    stored = load_file(path.parent / "model.safetensors")
    for name, theirs in (("attn.c_attn", "attention.qkv"), ("mlp.c_proj", "mlp.down")):
        whole = weights[f"layers.1.{theirs}.weight"].T
        assert torch.equal(stored[f"transformer.h.1.{name}.weight"], whole)
    assert "lm_head.weight" not in stored, "it is tied"


def test_nvidias_archive(
    tool, tmp_path, legacy_model, random_weights, write_legacy, archived, capsys
):
    """No arguments, no version, half precision, blocks of a transformer."""
    model = legacy_model(
        num_layers=1, hidden_size=64, num_attention_heads=1, num_query_groups=1, kv_channels=64,
        ffn_hidden_size=256, unpadded_vocab_size=50257, padded_vocab_size=50304,
    )  # fmt: skip
    write_legacy(
        tmp_path / "save", random_weights(model, dtype=torch.float16), model, None, iteration=None,
        arguments=None, spelling=("transformer", "attention"), zipped=False,
    )  # fmt: skip
    (tmp_path / "hf").mkdir()
    path = archived(tmp_path / "save", tmp_path / "hf" / "megatron_gpt2_345m_v0_0.zip")
    tool.main([str(path), "--print-checkpoint-structure"])
    out = capsys.readouterr().out
    assert "no arguments: 1 heads of 64" in out and "in float16; logits of" in out
    assert "# transformer.wte.weight" in out and ": torch.Size([50257, 64])" in out
    assert f"put the model's vocab.json and merges.txt into {path.parent}" in out
    config = json.loads((path.parent / "config.json").read_text())
    assert config["eos_token_id"] == config["bos_token_id"] == 50256  # known by the size
    assert config["activation_function"] == "gelu_new" and config["torch_dtype"] == "float16"
    assert contents(path.parent) == sorted([*MODEL, path.name])


@pytest.fixture
def codeparrot(tmp_path, legacy_model, random_weights, write_legacy, vocabulary):
    """A checkpoint whose arguments name vocab.json and merges.txt of the current folder."""
    vocabulary(tmp_path)
    model = legacy_model(unpadded_vocab_size=272, padded_vocab_size=272)
    named = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "vocab.json"}
    written = write_legacy(
        tmp_path / "checkpoints", random_weights(model), model, iteration=150000,
        arguments=named | {"merge_file": "merges.txt"},
    )  # fmt: skip
    return written / "mp_rank_00"


@pytest.mark.parametrize("where", ["arguments", "next to"])
def test_the_tokenizer(where, tool, codeparrot, tmp_path, monkeypatch, capsys):
    """Files that the arguments name, from the folder of the run, or of those next to it."""
    if where == "arguments":
        monkeypatch.chdir(tmp_path)
    else:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(tmp_path / name, codeparrot / name)
    tool.main([str(codeparrot / FILE)])
    out = capsys.readouterr().out
    assert "no tokenizer" not in out and "pipeline('text-generation'" in out
    tokenizer = AutoTokenizer.from_pretrained(codeparrot)
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"
    assert tokenizer.eos_token_id == 256
    generate = pipeline("text-generation", model=str(codeparrot))
    (actual,) = generate("ab", max_new_tokens=4, do_sample=False)
    assert actual["generated_text"].startswith("ab")


def test_again(tool, codeparrot, tmp_path, monkeypatch):
    """An earlier model is replaced only if asked for, a failure leaves it as it was."""
    monkeypatch.chdir(tmp_path)
    tool.main([str(codeparrot / FILE)])
    before = {path.name: path.read_bytes() for path in codeparrot.iterdir()}
    with pytest.raises(SystemExit, match="has a model already .*give --overwrite to replace it"):
        tool.main([str(codeparrot / FILE)])
    (codeparrot / "pytorch_model.bin").write_bytes(b"of transformers' script")
    shutil.copy(codeparrot / FILE, tmp_path / FILE)
    (codeparrot / FILE).write_bytes(b"damaged")
    with pytest.raises(SystemExit, match=f"{FILE} is not a file that torch.save wrote"):
        tool.main([str(codeparrot / FILE), "--overwrite"])
    shutil.copy(tmp_path / FILE, codeparrot / FILE)
    assert contents(codeparrot) == sorted([*before, "pytorch_model.bin"])
    tool.main([str(codeparrot / FILE), "--overwrite"])
    assert {path.name: path.read_bytes() for path in codeparrot.iterdir()} == before


def test_files_of_another_tokenizer(tool, codeparrot, vocabulary):
    vocabulary(codeparrot)
    words = json.loads((codeparrot / "vocab.json").read_text())
    words |= {f"{'a' * n}": 255 + n for n in range(2, 40)}
    (codeparrot / "vocab.json").write_text(json.dumps(words))
    (codeparrot / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{'a' * n} a\n" for n in range(1, 39))
    )
    with pytest.raises(SystemExit, match="vocab.json, .*: 295 tokens, but .* has 272 rows"):
        tool.main([str(codeparrot / FILE)])
    assert contents(codeparrot) == ["merges.txt", FILE, "vocab.json"]


CONFIG = {"model_type": "gpt2", "n_positions": 12, "n_embd": 16, "n_layer": 4, "n_head": 4,
          "n_inner": 24, "vocab_size": 61}  # fmt: skip


@pytest.mark.parametrize("arguments", [None, ()])
def test_config_file(arguments, tool, tmp_path, legacy_model, random_weights, write_legacy):
    """It describes a checkpoint without arguments, and must not contradict them."""
    model = legacy_model()
    weights = random_weights(model)
    written = write_legacy(tmp_path / "save", weights, model, 2, arguments=arguments)
    path = written / "mp_rank_00" / FILE
    if arguments is None:
        with pytest.raises(SystemExit, match="has no args, and is not a published GPT-2"):
            tool.main([str(path)])
    given = tmp_path / "given.json"
    given.write_text(json.dumps(CONFIG | {"n_head": 2}))
    if arguments is not None:
        with pytest.raises(SystemExit, match="given.json has num_attention_heads 2, but .* 4; "):
            tool.main([str(path), "--config_file", str(given)])
    given.write_text(json.dumps(CONFIG))
    tool.main([str(path), "--config_file", str(given)])
    stored = load_file(path.parent / "model.safetensors")
    assert torch.equal(
        stored["transformer.h.3.attn.c_attn.weight"], weights["layers.3.attention.qkv.weight"].T
    )
    assert stored["transformer.wte.weight"].shape == (61, 16)


def test_what_is_not_one(tool, tmp_path, legacy_model, random_weights, bert_weights, write_legacy):
    def refused(path, message):
        before = contents(tmp_path)
        with pytest.raises(SystemExit, match=message):
            tool.main([str(path)])
        assert contents(tmp_path) == before

    refused(tmp_path / "none.zip", "none.zip does not exist; give a zip archive or the file model_")
    refused(tmp_path, "is a folder; give a zip archive or")
    (tmp_path / "cut.zip").write_bytes(b"PK\x03\x04 half")
    refused(tmp_path / "cut.zip", "cut.zip is not a zip archive; is its download complete")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme.txt", "")
    refused(tmp_path / "other.zip", f"has no release/mp_rank_00/{FILE}, .* it has readme.txt")
    torch.save({"args": shutil.rmtree}, tmp_path / "evil.pt")
    refused(tmp_path / "evil.pt", "it names shutil.rmtree, which no checkpoint needs")

    model = legacy_model()
    weights = random_weights(model)
    written = write_legacy(tmp_path / "save", weights, model, 3, 2)
    shutil.copy(written / "mp_rank_00" / FILE, tmp_path / FILE)
    refused(tmp_path / FILE, "is the file of one of 2 ranks: leave it in its folder")
    bert = legacy_model(family="bert")
    written = write_legacy(tmp_path / "bert", bert_weights(bert), bert, 3)
    refused(written / "mp_rank_00" / FILE, "a model of the family bert, not a GPT-2; tools/convert")
    assert contents(written / "mp_rank_00") == [FILE]


def test_a_file_alone_is_a_checkpoint_for_everything(
    tmp_path, legacy_model, random_weights, write_legacy
):
    model = legacy_model()
    written = write_legacy(tmp_path / "save", random_weights(model), model)
    shutil.copy(written / "mp_rank_00" / FILE, tmp_path / FILE)
    assert MegatronCheckpoint.locate(tmp_path / FILE, None) == tmp_path / FILE
    assert MegatronCheckpoint.locate(tmp_path / "absent" / FILE, None) is None
    assert len(MegatronCheckpoint(tmp_path / FILE).names()) == len(random_weights(model))
