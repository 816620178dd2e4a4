"""Layers of the decoders of today in layouts: gradients against one process in float64, and models
of transformers that are trained over ranks and exported again.

That the layers equal those of `transformers` is tested in tests/formats/huggingface.
"""

import pytest
import torch
from against_one_process import difference
from safetensors.torch import load_file
from samples import sampled
from training_jobs import LAYOUTS, TINY, train
from transformers import AutoModelForCausalLM

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.checkpoint.source import open_checkpoint
from megatron.formats.conversion.commands import to_hf
from megatron.formats.huggingface import architecture_of

ROPE = "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
LLAMA = f"{ROPE} --normalization RMSNorm".split()
MODELS = {
    "olmo": f"{ROPE} --normalization PlainLayerNorm --swiglu --clip-qkv 0.1".split(),
    "cohere": [
        *f"{ROPE} --normalization UnbiasedLayerNorm --swiglu --parallel-residual".split(),
        *"--shared-parallel-norm --rotary-interleaved --logits-scaling 4".split(),
        *"--qk-layernorm --qk-layernorm-per-head --num-query-groups 1".split(),
    ],
    "nanochat": [
        *f"{ROPE} --normalization PlainRMSNorm --squared-relu --embed-layernorm".split(),
        *"--qk-l2-norm --num-query-groups 2 --final-logit-softcapping 9".split(),
    ],
    "apertus": [*LLAMA, "--xielu", "--qk-layernorm"],
    "bitnet": [*LLAMA, *"--sub-norm --glu-activation squared_reglu --num-query-groups 2".split()],
    "ministral3": [
        *LLAMA, "--swiglu", *"--attention-temperature 0.5 --attention-temperature-floor 3".split(),
        "--attention-temperature-rotary",
    ],
    "gemma4_text": [
        *LLAMA, *"--glu-activation geglu --post-norm --scale-embeddings --qk-layernorm".split(),
        *"--value-norm --block-scalar --query-pre-attn-scalar 1 --num-query-groups 2".split(),
        *"--sliding-window 5 --window-attn-skip-freq 2 --rotary-base-local 100".split(),
        *"--global-kv-channels 12 --global-num-query-groups 1 --global-keys-as-values".split(),
    ],
    "seed_oss": [*LLAMA, "--swiglu", "--add-qkv-bias", "--add-mlp-bias"],
}  # fmt: skip
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
SAMPLE = {("tp4-sp", "cohere"), ("tp2", "apertus"), ("tp2-sp", "bitnet"), ("pp2", "nanochat")}
"""Cells of the normal run; `make proof` has the rest."""


CELLS = [(layout, model) for layout in LAYOUTS for model in MODELS]


@pytest.mark.parametrize(("layout", "model"), sampled(CELLS, lambda each: each in SAMPLE))
def test_gradients_against_one_process(pool, layout, model):
    check(pool, layout, MODELS[model])


def test_gates_of_heads_whose_keys_are_values(pool):
    check(pool, "tp2-sp", [*MODELS["gemma4_text"], "--attention-output-gate"])


def check(pool, layout, model):
    parsed = parse_layout(layout)
    argv = [*TINY, "--num-layers", "8", "--micro-batch-size", "2", *model, *NO_DROPOUT]
    batch = 2 * parsed.fewest_micro_batches * parsed.data
    argv += ["--global-batch-size", str(batch), "--train-iters", "1"]
    assert difference(pool, parsed.processes, argv, flags_for(parsed)) is None


TRAINED = [(each, model) for each in ("tp2-zero1", "pp2-zero1", "dp2-zero3") for model in MODELS]


@pytest.mark.parametrize(
    ("layout", "model"), sampled(TRAINED, lambda each: each == ("tp2-zero1", "cohere"))
)
def test_what_ranks_have_trained_is_exported(pool, tmp_path, capsys, layout, model):
    """The exporter compares logits with transformers."""
    parsed = parse_layout(layout)
    argv = [*TINY, *MODELS[model], *NO_DROPOUT, "--train-iters", "2"]
    pool.run(parsed.processes, train, [*argv, *flags_for(parsed), "--save", str(tmp_path / "ours")])
    assert architecture_of(open_checkpoint(tmp_path / "ours").model).model_type == model
    to_hf(["--load", str(tmp_path / "ours"), "--output", str(tmp_path / "theirs")])
    assert "tokens agree" in capsys.readouterr().out
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    stored = load_file(tmp_path / "theirs/model.safetensors")
    assert all(torch.equal(stored[name], param) for name, param in theirs.named_parameters())
