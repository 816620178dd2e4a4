"""Weights trained next to adapters, or saved with them: the merged model computes what peft's does
before it merges, and so does peft with what is written again."""

import json

import pytest
import torch
from hf_cases import CASES
from safetensors.torch import load_file, save_file
from samples import sampled

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import open_checkpoint
from megatron.features.adapters.peft import write_adapters
from megatron.formats.conversion.commands import export_hf
from megatron.formats.inspection import model_of
from megatron.model.layer_list import LayerState
from megatron.tokenizer.plain import NullTokenizer

peft = pytest.importorskip("peft", reason="the numbers are peft's")

SIZE = 61
TOKENS = torch.arange(20).view(2, 10) * 3
EMBEDDING, HEAD = ["embed_tokens"], ["lm_head"]
SOME = [3, 5, 60]
ENSURED = {"ensure_weight_tying": True}
LORA = ["q_proj", "v_proj"]

# By name: whether the base is tied, what is trained, and whether the merged model is tied.
WHOLE = {
    "embedding, tied": (True, {"modules_to_save": EMBEDDING}, False),
    "embedding": (False, {"modules_to_save": EMBEDDING}, False),
    "head, tied": (True, {"modules_to_save": HEAD}, False),
    "head": (False, {"modules_to_save": HEAD}, False),
    "both, tied": (True, {"modules_to_save": EMBEDDING + HEAD}, False),
    "both, ensured": (True, {"modules_to_save": EMBEDDING + HEAD} | ENSURED, True),
    "embedding, ensured": (True, {"modules_to_save": EMBEDDING} | ENSURED, True),
    "head, ensured": (True, {"modules_to_save": HEAD} | ENSURED, True),
    "ensured without a tie": (False, {"modules_to_save": EMBEDDING} | ENSURED, False),
    "tokens, tied": (True, {"trainable_token_indices": SOME}, True),
    "tokens": (False, {"trainable_token_indices": SOME}, False),
    "tokens of both": (
        False, {"trainable_token_indices": {"lm_head": [3, 5], "embed_tokens": [7]}}, False),
    "equal tokens of both, tied": (
        True, {"trainable_token_indices": {"lm_head": [3, 5], "embed_tokens": [3, 5]}}, True),
    "tokens of both, tied": (
        True, {"trainable_token_indices": {"lm_head": [7], "embed_tokens": [3, 5]}}, False),
    "tokens of the head, tied": (True, {"trainable_token_indices": {"lm_head": [7]}}, False),
    "norms": (True, {"modules_to_save": ["norm", "input_layernorm"]}, True),
    "a part of a fused layer": (True, {"modules_to_save": ["k_proj", "down_proj"]}, True),
    "norms and embedding, tied": (True, {"modules_to_save": ["norm", *EMBEDDING]}, False),
    "more tokens, tied": (True, {"resize": 70}, True),
    "more tokens": (False, {"resize": 70}, False),
    "fewer tokens, tied": (True, {"resize": 60}, True),
    "fewer tokens": (False, {"resize": 60}, False),
    "a multiple": (True, {"resize": 70, "pad_to_multiple_of": 64}, True),
    "saved as they were, tied": (True, {"save_embedding_layers": True}, True),
    "saved as they were": (False, {"save_embedding_layers": True}, False),
    "more tokens, embedding, tied": (True, {"resize": 70, "modules_to_save": EMBEDDING}, False),
    "more tokens, embedding": (False, {"resize": 70, "modules_to_save": EMBEDDING}, False),
    "more tokens, both": (False, {"resize": 70, "modules_to_save": EMBEDDING + HEAD}, False),
    "more tokens, embedding, ensured": (
        True, {"resize": 70, "modules_to_save": EMBEDDING} | ENSURED, True),
    "new tokens, tied": (
        True, {"resize": 63, "trainable_token_indices": [61, 62]}, True),
    "new tokens": (False, {"resize": 63, "trainable_token_indices": [61, 62]}, False),
    "additions to the embedding, tied": (True, {"target_modules": LORA + EMBEDDING}, False),
    "additions to the embedding": (False, {"target_modules": LORA + EMBEDDING}, False),
    "additions to the head, tied": (
        True, {"target_modules": LORA + HEAD, "use_rslora": True}, False),
    "additions to both, ensured": (True, {"target_modules": LORA + EMBEDDING} | ENSURED, True),
}  # fmt: skip
FEW = ("embedding, tied", "head, ensured", "tokens of both, tied", "more tokens, tied",
       "a part of a fused layer", "more tokens, embedding, ensured",
       "additions to the embedding, tied")  # fmt: skip


@pytest.fixture
def trained(hf_model, tmp_path):
    """Makes a base and adapters of peft on it, in folders of their own; returns peft's model, and
    what makes the base again."""

    def make(tied, resize=None, save_embedding_layers="auto", pad_to_multiple_of=None, **settings):
        case = CASES["llama"]["kv_heads=2,untied"] | {"tie_word_embeddings": tied}
        hf_model("llama", **case).save_pretrained(tmp_path / "base")

        def base():
            theirs = hf_model("llama", **case)
            theirs.name_or_path = theirs.config._name_or_path = str(tmp_path / "base")
            if resize is not None:
                theirs.resize_token_embeddings(resize, pad_to_multiple_of, mean_resizing=False)
            return theirs

        config = peft.LoraConfig(
            r=3, lora_alpha=7, task_type="CAUSAL_LM", **({"target_modules": LORA} | settings)
        )
        model = peft.get_peft_model(base(), config).eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param += 0.1 * torch.randn(param.shape, generator=generator)
        model.save_pretrained(tmp_path / "adapters", save_embedding_layers=save_embedding_layers)
        return model, base

    return make


@torch.no_grad()
def logits_of(source):
    positions = torch.arange(10).expand(2, 10)
    state = model_of(source, torch.float32, torch.device("cpu"))(
        LayerState(TOKENS, position_ids=positions)
    )
    return state.hidden[..., : source.model.vocabulary.size]


@pytest.mark.parametrize("name", sampled(list(WHOLE), lambda name: name in FEW))
def test_merged_is_what_peft_computes(name, trained, tmp_path, monkeypatch):
    tied, settings, expected_tied = WHOLE[name]
    theirs, base = trained(tied, **settings)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    source = open_checkpoint(tmp_path / "adapters")
    assert source.model.embedding.tied == expected_tied
    assert source.model.vocabulary.size == expected.shape[-1]
    torch.testing.assert_close(logits_of(source), expected, rtol=2e-6, atol=2e-5)

    (tmp_path / "again").mkdir()
    write_adapters(source, tmp_path / "again")
    modes = {path.stat().st_mode for path in (tmp_path / "again").iterdir()}
    assert len(modes) == 1  # that of adapter_config.json
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "again").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, expected, rtol=2e-6, atol=2e-5)


def test_an_export_is_compared_with_peft(trained, tmp_path, monkeypatch):
    """A wrong reading, which the export repeats, is refused: the head of a tied base as the trained
    embedding."""
    theirs, _ = trained(True, modules_to_save=EMBEDDING)
    (tmp_path / "right").mkdir()
    export_hf(open_checkpoint(tmp_path / "adapters"), tmp_path / "right", 10**9)
    exported = type(theirs.get_base_model()).from_pretrained(tmp_path / "right")
    with torch.no_grad():
        torch.testing.assert_close(
            exported(TOKENS).logits, theirs(TOKENS).logits, rtol=2e-6, atol=2e-5
        )
    monkeypatch.setattr(
        "megatron.features.adapters.peft_tensors.PeftTensors._stay_tied", lambda self: True
    )
    (tmp_path / "wrong").mkdir()
    with pytest.raises(CheckpointError, match="peft computes other logits with .*adapters than"):
        export_hf(open_checkpoint(tmp_path / "adapters"), tmp_path / "wrong", 10**9)
    assert not any((tmp_path / "wrong").iterdir())


def change(folder, **tensors):
    file = folder / "adapter_model.safetensors"
    content = load_file(file) | {f"base_model.model.{name}": v for name, v in tensors.items()}
    save_file({name: values for name, values in content.items() if values is not None}, file)


def test_an_embedding_without_its_head(trained, tmp_path):
    trained(False, resize=70)
    change(tmp_path / "adapters", **{"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"embedding of 70 tokens and a head of 61.*save_emb"):
        open_checkpoint(tmp_path / "adapters")


def test_a_head_that_differs_from_its_embedding(trained, tmp_path):
    trained(True, save_embedding_layers=True)
    change(tmp_path / "adapters", **{"lm_head.weight": torch.zeros(SIZE, 32)})
    source = open_checkpoint(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.we"):
        source.tensor("embedding.word_embeddings.weight")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainable_token_indices": [3, 99, 5]}, r"3 rows for the tokens \[3, 99, 5\] .* of 61"),
        ({"trainable_token_indices": [3, 5]}, r"3 rows for the tokens \[3, 5\]"),
        ({"trainable_token_indices": None}, r"3 rows for the tokens \[\]"),
        ({"trainable_token_indices": "all"}, r"adapter_config.json: trainable_token_indices is 'a"),
        ({"trainable_token_indices": {"embed_tokens": [True]}}, "expected a list of tokens"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'; expected a list of names"),
    ],
)
def test_settings_that_do_not_fit(settings, message, trained, tmp_path):
    trained(False, trainable_token_indices=SOME)
    path = tmp_path / "adapters" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "adapters").tensor("embedding.word_embeddings.weight")


def test_a_norm_of_another_width(trained, tmp_path):
    trained(False, modules_to_save=["norm"])
    change(tmp_path / "adapters", **{"model.norm.weight": torch.ones(31)})
    source = open_checkpoint(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match=r"model.norm.weight .*\(31,\); .*base makes it \(32"):
        source.tensor("final_norm.norm.weight")


def test_the_tokenizer_is_that_of_the_adapters(trained, tmp_path):
    trained(True, resize=70)
    NullTokenizer(69).save_pretrained(tmp_path / "adapters")
    assert open_checkpoint(tmp_path / "adapters").tokenizer.tokenizer_model == str(
        tmp_path / "adapters"
    )
