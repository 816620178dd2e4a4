"""tools/merge_mp_partitions.py as Megatron-LM's script calls it."""

import pytest
import torch
from rank_files import rank_file

from megatron.checkpoint.source import open_checkpoint
from megatron.formats.conversion.commands import export_megatron
from megatron.formats.conversion.megatron_programs import merge


@pytest.fixture(scope="module")
def halves(tmp_path_factory, gpt_config, random_gpt, write_checkpoint):
    """A folder with the checkpoint of two partitions ``tp2``, and its model's configuration."""
    folder = tmp_path_factory.mktemp("merge")
    config = gpt_config()
    write_checkpoint(folder / "save", config, random_gpt(config))
    export_megatron(open_checkpoint(folder / "save"), folder / "tp2", (2, 1), checking=False)
    return folder, config.model


def joined(folder):
    """The weights of two partitions by Megatron's rule: columns are cut along the first dimension,
    rows along the second."""
    first, second = (
        rank_file(folder / "iter_0000010" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")["model"]
        for rank in (0, 1)
    )
    return _joined(first["language_model"], second["language_model"])


def _joined(first, second, name=""):
    if isinstance(first, dict):
        return {key: _joined(first[key], second[key], f"{name}.{key}") for key in first}
    rows = name.endswith(("dense.weight", "dense_4h_to_h.weight"))
    whole = (
        "norm" in name or "position" in name or name.endswith(("dense.bias", "dense_4h_to_h.bias"))
    )
    return first if whole else torch.cat([first, second], 1 if rows else 0)


def flat(tree, name=""):
    if isinstance(tree, dict):
        return {k: v for key in tree for k, v in flat(tree[key], f"{name}.{key}").items()}
    return {name: tree}


def test_two_partitions_become_one(halves, capsys, monkeypatch):
    folder, model = halves
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = model.flags()
    sizes = {
        "--num-layers": flags.num_layers, "--hidden-size": flags.hidden_size,
        "--num-attention-heads": flags.num_attention_heads, "--seq-length": 16,
        "--max-position-embeddings": flags.max_position_embeddings,
    }  # fmt: skip
    words = [str(word) for pair in sizes.items() for word in pair]
    named = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "vocab.json"]
    load = ["--model-type", "GPT", "--tensor-model-parallel-size", "2", *named, "--load"]
    merge(None, [*load, str(folder / "tp2"), *words])
    assert "read back and equal, bit by bit" in capsys.readouterr().out
    ranks = folder / "tp2" / "merged" / "iter_0000010"
    assert [path.name for path in ranks.glob("mp_rank_*")] == ["mp_rank_00"]
    content = rank_file(ranks / "mp_rank_00" / "model_optim_rng.pt")
    assert content["args"].tensor_model_parallel_size == 1
    own, wanted = flat(content["model"]["language_model"]), flat(joined(folder / "tp2"))
    assert own.keys() == wanted.keys()
    for name, weight in own.items():
        rows = len(weight) if "word_embeddings" in name else None  # fewer rows of padding
        assert torch.equal(weight, wanted[name][:rows]), name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model-type GPT", "--load is missing"),
        ("--load LOAD", "--model-type is missing"),
        ("--model-type BERT --load LOAD", "--model-type BERT: .* is a gpt; its type is GPT"),
        ("--model-type GPT --load LOAD --save LOAD", "is the folder of --load"),
        ("--model-type GPT --load LOAD --num-layers 7", "--num-layers 7: .* has"),
        ("--model-type GPT --load LOAD --model-parallel-size 4", "size 4: .* has 2 partitions"),
        ("--model-type GPT --load nowhere", "nowhere"),
        ("--model-type GPT --load LOAD --save /proc/none", "--save /proc/none.*: cannot write"),
    ],
)
def test_what_does_not_fit_is_named(words, said, halves):
    with pytest.raises(ValueError, match=said):
        merge(None, words.replace("LOAD", str(halves[0] / "tp2")).split())


def test_a_head_has_its_own_types(tmp_path, gpt_config, random_gpt, write_checkpoint):
    shape = {"family": "bert", "untie_embeddings_and_output_weights": False}
    config = gpt_config(**shape, head="classification", num_labels=3)
    write_checkpoint(tmp_path / "save", config, random_gpt(config))
    source = open_checkpoint(tmp_path / "save")
    for wrong in ("BERT", "RACE"):
        with pytest.raises(ValueError, match="head classification; its type is MNLI or QQP"):
            merge(None, ["--model-type", wrong, "--load", str(tmp_path / "save")])
    export_megatron(source, tmp_path / "tp2", (2, 1), checking=False)
    merge(None, ["--model-type", "MNLI", "--load", str(tmp_path / "tp2")])
    merged = open_checkpoint(tmp_path / "tp2" / "merged")
    assert (merged.model.head, merged.model.num_labels) == ("classification", 3)
    for name in source.names():
        assert torch.equal(merged.tensor(name), source.tensor(name)), name
