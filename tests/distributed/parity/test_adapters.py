"""Low-rank additions in every layout: loss and every gradient of a step against one process in
float64, and trainings through the engine, at every ZeRO stage, against plain torch."""

import pytest
from against_one_process import check_training, difference, reference
from samples import sampled
from training_jobs import CONTEXT_LAYOUTS, LAYOUTS, TINY, depth

from megatron.apps.parity.layouts import flags_for, parse_layout

FLAGS = [*TINY, "--lora", "--lora-rank", "3", "--lora-alpha", "5"]
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
).split()
GEMMA2 = (
    "--position-embedding-type rope --normalization RMSNorm --apply-layernorm-1p --post-norm "
    "--scale-embeddings --glu-activation geglu --disable-bias-linear --sliding-window 5 "
    "--window-attn-skip-freq 2 --attn-logit-softcapping 2 --final-logit-softcapping 3 "
    "--num-query-groups 2"
).split()
MODELS = {
    "gpt2": [],
    "fused-kv1": ["--num-query-groups", "1"],
    "llama-kv1": [*LLAMA, "--num-query-groups", "1"],
    "llama-kv2": [*LLAMA, "--num-query-groups", "2"],
    "gemma2": GEMMA2,
    "latent": [
        *(*LLAMA, "--multi-latent-attention", "--qk-layernorm", "--q-lora-rank", "12"),
        *"--kv-lora-rank 8 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 8".split(),
    ],
    "gated": [
        *(*LLAMA, "--attention-output-gate", "--num-query-groups", "1"),
        *("--attention-chunk-size", "5", "--no-rope-freq", "2"),
    ],
}
"""Of a fused one with fewer key heads than ranks, B is two parameters."""
KINDS = {
    "lora": [],
    "rslora": ["--use-rslora"],
    "dora": ["--use-dora"],
    "some": ["--lora-targets", "attention.qkv", "mlp.down"],
    "dropout": ["--lora-dropout", "0.2"],
    "dora-dropout": ["--lora-dropout", "0.2", "--use-dora"],
    "recompute-selective": ["--recompute-activations"],
    "recompute-full": ["--recompute-granularity", "full"],
}
SAMPLE = {
    ("tp4-sp", "llama-kv1", "dora"),
    ("tp2-sp-pp2-dualpipev", "gemma2", "lora"),
    ("tp4", "fused-kv1", "dora"),
    ("pp2-interleaved-dp2", "gpt2", "dora-dropout"),
    ("pp2", "llama-kv2", "recompute-selective"),
}
"""What the normal run has."""


def flags(layout: str, model: str, kind: str) -> tuple[int, list[str]]:
    parsed = parse_layout(layout)
    argv = [*FLAGS, *depth(layout), "--micro-batch-size", "2", "--train-iters", "1"]
    argv += [*MODELS[model], *KINDS[kind], *NO_DROPOUT]
    samples = 2 * parsed.fewest_micro_batches * parsed.data
    return parsed.processes, [*argv, "--global-batch-size", str(samples)]


def cells():
    for layout in (*LAYOUTS, *CONTEXT_LAYOUTS):
        for model in MODELS:
            for kind in KINDS:
                # The masks of others are drawn by rank: megatron/config/layouts.py.
                if "dropout" not in kind or parse_layout(layout).dropout == "all":
                    yield layout, model, kind


@pytest.mark.parametrize(("layout", "model", "kind"), sampled(cells(), lambda cell: cell in SAMPLE))
def test_gradients_against_one_process(pool, layout, model, kind):
    processes, argv = flags(layout, model, kind)
    expected = reference(*argv)
    trained = {each.name.rpartition(".")[2] for each in expected.gradients}
    assert trained and all(name.startswith("lora_") for name in trained)
    assert ("magnitude" in " ".join(trained)) == ("dora" in kind)
    assert difference(pool, processes, argv, flags_for(parse_layout(layout))) is None


def test_dropout_of_additions_acts():
    (_, dry), (_, wet) = flags("pp4", "gpt2", "lora"), flags("pp4", "gpt2", "dropout")
    assert abs(reference(*dry).loss - reference(*wet).loss) > 1e-3 * reference(*dry).loss


STEPS = 10


def training(kind: str, layers: int):
    argv = [*FLAGS, *MODELS["llama-kv2"], *KINDS[kind], "--num-layers", str(layers)]
    return [*argv, "--global-batch-size", "8", "--train-iters", str(STEPS), *NO_DROPOUT]


def trainings():
    for layout in (*LAYOUTS, "cp2", "cp2-dp2", "cp2-tp2-sp", "cp2-pp2"):
        parsed = parse_layout(layout)
        for stage in (0, 1) if parsed.pipeline > 1 else (0, 1, 2, 3):
            for kind in ("lora", "dora", "dropout"):
                if kind != "dropout" or parsed.dropout == "all":
                    yield f"{layout}-zero{stage}-{kind}"


@pytest.mark.proof
@pytest.mark.parametrize("cell", trainings())
def test_training_against_plain_torch(pool, cell):
    layout, _, kind = cell.rpartition("-")
    parsed = parse_layout(layout)
    argv = training(kind, max(2, parsed.pipeline * parsed.chunks))
    records = check_training(pool, parsed.processes, argv, flags_for(parsed), fall=0.02)
    owned = {key.partition("/")[0] for record in records for key in record.state}
    assert owned and all(".lora_" in name for name in owned), "frozen parameters have no state"
