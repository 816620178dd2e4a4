"""GGUF files that are damaged or say what they do not have, their tokenizers, and the command."""

import struct
import sys
from pathlib import Path

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
sys.path.insert(0, str(Path(__file__).parent))

from gguf_models import LLAMA_KEYS, MODELS, SIZES, text, theirs, write_llama  # noqa: E402
from samples import sampled  # noqa: E402
from tool_modules import load_program  # noqa: E402
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast  # noqa: E402

from megatron.checkpoint.files import CheckpointError  # noqa: E402
from megatron.checkpoint.source import locate_checkpoint, open_checkpoint  # noqa: E402
from megatron.formats.gguf.source import GGUFModel  # noqa: E402


@pytest.fixture(scope="module")
def llama():
    return theirs("llama")


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def header(tensors=0, keys=0, rest=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


NAMED = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def described(*dims, kind=0, offset=0):
    return text("x") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


DAMAGED = {
    "empty": (b"", "cannot be read"),
    "another file": (b"PK\3\4" + bytes(60), "does not begin with GGUF"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
    "version": (header(version=1), "version 1; versions 2 and 3"),
    "keys": (header(keys=2**61), "says that it has 2,305,843,009,213,693,952 keys"),
    "tensors": (header(tensors=2**40), "says that it has 1,099,511,627,776 tensors"),
    "key's length": (header(keys=1, rest=struct.pack("<Q", 2**62) + bytes(9)),
                     "the name of a key is a text of 4,611,686,018,427,387,904 bytes"),
    "ends": (header(keys=1, rest=NAMED[:-2]), "ends within the value of 'general.architecture'"),
    "twice": (header(keys=2, rest=NAMED + NAMED), "the key 'general.architecture' twice"),
    "not UTF-8": (header(keys=1, rest=text(b"\xff\xfe") + bytes(9)), "is not UTF-8"),
    "array": (header(keys=1, rest=text("a") + struct.pack("<IIQ", 9, 8, 2**50)), "an array of"),
    "array of strings": (header(keys=1, rest=text("a") + struct.pack("<IIQ", 9, 8, 2**20)),
                         "1,048,576 elements of the value of 'a'"),
    "array in an array": (header(keys=1, rest=text("a") + struct.pack("<IIQ", 9, 9, 1)),
                          "the type 9"),
    "type of a value": (header(keys=1, rest=text("a") + struct.pack("<I", 77)), "the type 77"),
    "dimensions": (header(1, 0, described(*[1] * 9)), "'x' has 9 dimensions"),
    "size": (header(1, 0, described(2**40, 2**20)), "'x' .* needs .* bytes .* truncated"),
    "type of a tensor": (header(1, 0, described(4, kind=99)), "'x' has the type 99"),
    "blocks": (header(1, 0, described(33, kind=8)), "rows of 'x' are 33 elements"),
    "place": (header(1, 0, described(4, offset=7) + bytes(99)), "'x' begins at 7"),
    "far": (header(1, 0, described(4, offset=2**50) + bytes(99)), "'x' .* truncated"),
    "shared": (header(2, 0, described(4) + text("y") + described(4)[9:] + bytes(99)), "share byte"),
    "no architecture": (header(), "general.architecture is None; expected one of llama"),
}  # fmt: skip


@pytest.mark.parametrize("why", DAMAGED)
def test_damaged_files_are_refused(why, tmp_path):
    content, message = DAMAGED[why]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"m.gguf.*{message}"):
        open_checkpoint(tmp_path / "m.gguf")


WRONG = {
    "missing": ({"change": without("blk.1.ffn_up.weight")}, r"lacks blk\.1\.ffn_up\.weight"),
    "superfluous": ({"change": lambda t: t | {"blk.0.x.weight": t["blk.0.ffn_up.weight"]}},
                    r"contains 'blk\.0\.x\.weight'"),
    "shape": ({"change": lambda t: t | {"blk.0.ffn_up.weight": t["blk.0.ffn_up.weight"][:5]}},
              r"blk\.0\.ffn_up\.weight has the shape \(5, 32\); .* make it \(64, 32\)"),
    "no key": ({"keys": {k: v for k, v in LLAMA_KEYS.items() if k != "context_length"}},
               "has no llama.context_length"),
    "no number": ({"keys": LLAMA_KEYS | {"block_count": 0}}, "llama.block_count is 0: expected a"),
    "blocks": ({"keys": LLAMA_KEYS | {"block_count": 2**31}}, "the file has 21 tensors"),
    "heads": ({"keys": LLAMA_KEYS | {"attention.head_count_kv": 3}}, "num_key_value_heads is 3"),
    "unknown": ({"keys": LLAMA_KEYS | {"attention.softcap": 3}},
                "llama.attention.softcap is 3: its effect"),
    "part of a head": ({"keys": LLAMA_KEYS | {"rope.dimension_count": 4}},
                       "llama.rope.dimension_count is 4: expected 8"),
    "factors": ({"change": lambda t: t | {"rope_freqs.weight": t["output_norm.weight"][:4]}},
                "rope_freqs.weight: its factors"),
    "no tensors": ({"change": without("token_embd.weight")}, "has no token_embd.weight"),
}  # fmt: skip


@pytest.mark.parametrize("why", sampled(WRONG, lambda why: why in ("missing", "shape", "unknown")))
def test_models_that_are_not_whole_are_refused(why, llama, tmp_path):
    changes, message = WRONG[why]
    write_llama(tmp_path / "m.gguf", llama, **changes)
    with pytest.raises(CheckpointError, match=f"m.gguf.*{message}"):
        open_checkpoint(tmp_path / "m.gguf")


def test_every_truncated_file_is_refused(llama, tmp_path):
    write_llama(tmp_path / "whole.gguf", llama)
    content = (tmp_path / "whole.gguf").read_bytes()
    for length in [*range(0, 2400, 97), len(content) - 33]:
        (tmp_path / "m.gguf").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="m.gguf"):
            GGUFModel(tmp_path / "m.gguf")


def test_parts_belong_together(llama, tmp_path):
    write_llama(tmp_path / "m.gguf", llama, split_max_tensors=7)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert locate_checkpoint(tmp_path).open().model.num_layers == 2
    parts[1].rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="m-00002-of-00003.gguf is missing"):
        open_checkpoint(parts[2])
    (tmp_path / "away").rename(parts[1])
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(CheckpointError, match="m-00002.* part 0 of 3"):
        open_checkpoint(tmp_path)


def test_a_folder_of_several_models_names_them(llama, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write_llama(tmp_path / name, llama)
    with pytest.raises(CheckpointError, match="several GGUF models: name one of a.gguf, b.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "b.gguf").rename(tmp_path / "mmproj-b.gguf")
    assert open_checkpoint(tmp_path).folder == tmp_path / "a.gguf"


def saved(tmp_path, tokenizer, **settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SIZES | {"vocab_size": len(tokenizer), "num_hidden_layers": 1} | settings
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")


TEXTS = ("def f(x):\n\treturn x  # 1024", "It's naïve 東京", " a  b<|endoftext|>c", "")


def converted(tmp_path, *flags):
    command = load_program("tools/convert_checkpoint.py").main
    argv = ["to-gguf", "--load", str(tmp_path / "hf"), "--output", str(tmp_path / "m.gguf")]
    command([*argv, *flags])
    return tmp_path / "m.gguf"


@pytest.mark.proof
def test_the_command_writes_byte_level_tokens(trained_folder, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(trained_folder)
    saved(tmp_path, tokenizer)
    path = converted(tmp_path, "--type", "q8_0")
    assert "read back and equal" in capsys.readouterr().out
    back = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert GGUFModel(path).copy_tokenizer(tmp_path / "tokenizer")
    ours = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for each in TEXTS:
        ids = tokenizer(each)["input_ids"]
        assert back(each)["input_ids"] == ids and ours(each)["input_ids"] == ids
        assert ours.decode(ids) == tokenizer.decode(ids)
    assert ours.eos_token == tokenizer.eos_token
    with pytest.raises(SystemExit, match="exists; give --overwrite"):
        converted(tmp_path)
    assert not list(tmp_path.glob(".*")), "a temporary file is left"


def test_sentencepiece_tokens(tmp_path, capsys):
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581", *"abcdef",
             "ab", "\u2581ab", "cd", "abcd", "\u2581abcd", "ef"]  # fmt: skip
    merges = [("a", "b"), ("\u2581", "ab"), ("c", "d"), ("ab", "cd"), ("\u2581ab", "cd"),
              ("\u2581", "abcd"), ("e", "f")]  # fmt: skip
    tokenizer = LlamaTokenizer(vocab={token: n for n, token in enumerate(vocab)}, merges=merges)
    saved(tmp_path, tokenizer)
    path = converted(tmp_path, "--type", "f32")
    assert "no tokenizer" not in capsys.readouterr().out
    assert GGUFModel(path).copy_tokenizer(tmp_path / "tokenizer")
    ours = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for each in ("abcdef cdab", "fab é ab", "abc"):
        assert ours(each)["input_ids"] == tokenizer(each)["input_ids"]
    assert gguf.GGUFReader(path).get_field("tokenizer.ggml.model").contents() == "llama"


def test_a_tokenizer_of_another_kind_is_left_out(tmp_path, capsys):
    import tokenizers

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    )
    saved(tmp_path, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"))
    converted(tmp_path)
    assert "no tokenizer in the file: GGUF has no name" in capsys.readouterr().out


def test_multi_token_prediction_is_left_out(
    gpt_config, random_gpt, write_checkpoint, tmp_path, capsys
):
    config = gpt_config(llama=True, mtp_num_layers=2)
    write_checkpoint(tmp_path / "hf", config, random_gpt(config))
    source, back = open_checkpoint(tmp_path / "hf"), GGUFModel(converted(tmp_path, "--type", "f32"))
    assert "left out: 2 further token(s)" in capsys.readouterr().out
    assert any(name.startswith("mtp.1.") for name in source.names())
    assert {*source.names()} - {*back.names()} == {
        name for name in source.names() if name.startswith("mtp.")
    }
    assert all(torch.equal(back.tensor(name), source.tensor(name)) for name in back.names())


MISFITS = {
    "a window": ("mistral", {"sliding_window": 7}, "llama cannot say sliding_window = 7"),
    "an activation": ("llama", {"hidden_act": "gelu_pytorch_tanh"}, "cannot say glu_activation"),
    "scaled RoPE": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
                    "GGUF files have no such scaling"),
    "wide heads": ("olmo2", {"head_dim": 12}, "attention.key_length is 12: expected 8"),
    "biases": ("arcee", {"attention_bias": True, "mlp_bias": True}, "cannot say add_bias_linear"),
    "norms": ("command-r", {"use_qk_norm": True}, "cannot say qk_layernorm = True"),
    "a pattern": ("smollm3", {"no_rope_layers": [0, 1, 1, 1], "pad_token_id": None},
                  "cannot say no_rope_freq"),
    "no name": ("nanochat", {}, "nanochat cannot be written as GGUF; expected one of llama"),
}  # fmt: skip


@pytest.mark.parametrize("why", sampled(MISFITS, lambda why: why == "a window"))
def test_what_llama_cpp_cannot_say_is_refused(why, tmp_path):
    name, settings, message = MISFITS[why]
    model_type, sizes = MODELS.get(name, (name, SIZES))
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **sizes | settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    with pytest.raises(SystemExit, match=message):
        converted(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
