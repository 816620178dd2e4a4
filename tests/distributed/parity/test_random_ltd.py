"""Layers that drop tokens: loss and every gradient of every layout against one process, in float64,
whole trainings, and resumes bit for bit."""

import json

import numpy as np
import pytest
from against_one_process import check_training, difference
from graph_counts import graphs_alone
from samples import sampled
from training_jobs import LAYOUTS, TINY, train

from megatron.apps.parity.layouts import flags_for, parse_layout

LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
).split()
DOCUMENTS = "--reset-position-ids --reset-attention-mask".split()
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
BERT = "--model-family bert --short-seq-prob 0.5 --max-position-embeddings 16".split()


def dropping(total=4, layers=(1, 2), steps=6, kind="decoder", **sections):
    """The flags of layers that keep 4 of 16 tokens at first."""
    schedule = {
        "min_value": 4, "max_value": 16, "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": steps, "seq_per_step": 4},
    }  # fmt: skip
    random_ltd = {
        "enabled": True, "total_layer_num": total, "random_ltd_layer_num": len(layers),
        "random_ltd_layer_id": list(layers), "model_mask_name": "attention_mask",
        "model_type": kind, "hidden_state_order": "seq_batch_dim", "random_ltd_schedule": schedule,
    }  # fmt: skip
    routing = {"enabled": True, "random_ltd": random_ltd}
    section = {"enabled": True, "seed": 1, "data_routing": routing, **sections}
    return ["--random-ltd", "--data-efficiency", json.dumps(section)]


MODELS = {
    "gpt2": [],
    "llama-documents": [*LLAMA, *DOCUMENTS, "--num-query-groups", "2"],
    "recompute": [*LLAMA, "--recompute-granularity", "full"],
    "selective": ["--recompute-activations", *LLAMA, "--num-query-groups", "1"],
    "dropout": [],
    "experts": [
        *LLAMA, *"--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16".split(),
        *"--moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01".split(),
    ],
    "latent": [
        *LLAMA, "--multi-latent-attention",
        *"--kv-lora-rank 16 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 8".split(),
    ],
    "bert": BERT,
    "bert-documents": [*BERT, "--recompute-granularity", "full"],
}  # fmt: skip
EXPERT = {"ep2": 2, "ep2-tp2-sp": 4}
SAMPLE = {("tp2-sp", "llama-documents"), ("pp2", "recompute"), ("tp2-sp", "bert")}


def layout_of(name):
    """Processes, flags and the smallest batch of a layout."""
    if name in EXPERT:
        flags = ["--expert-model-parallel-size", "2"]
        tensor = "--tensor-model-parallel-size 2 --sequence-parallel".split()
        return EXPERT[name], flags + tensor * (EXPERT[name] > 2), 8
    parsed = parse_layout(name)
    fewest = parsed.fewest_micro_batches
    return parsed.processes, flags_for(parsed), 2 * fewest * parsed.data * (1 + (fewest == 1))


def depth(name):
    """Blocks of a model: one for each stage, at least four."""
    return 4 if name in EXPERT else max(4, parse_layout(name).pipeline * parse_layout(name).chunks)


def cells():
    for layout in (*LAYOUTS, *EXPERT):
        for model in MODELS:
            masks = layout in EXPERT or parse_layout(layout).dropout != "all"
            if (layout in EXPERT) == (model == "experts") and not (masks and model == "dropout"):
                yield layout, model


@pytest.mark.parametrize(("layout", "model"), sampled(cells(), lambda cell: cell in SAMPLE))
def test_gradients_against_one_process(pool, layout, model):
    processes, flags, batch = layout_of(layout)
    kind, layers = "encoder" if model.startswith("bert") else "decoder", depth(layout)
    argv = [*TINY, "--micro-batch-size", "2", "--train-iters", "1", *MODELS[model]]
    argv += ["--num-layers", str(layers), "--global-batch-size", str(batch)]
    argv += [*dropping(layers, range(1, layers - 1), kind=kind)]
    argv += NO_DROPOUT if model != "dropout" else []
    assert difference(pool, processes, argv, flags) is None


FLAGS = [*TINY, *LLAMA, *DOCUMENTS, *NO_DROPOUT, *"--num-layers 4 --train-iters 8".split()]
LENGTHS = {
    "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 16,
    "schedule_type": "fixed_discrete", "enabled": True,
    "schedule_config": {"difficulty": [8, 16], "max_step": [4]},
}  # fmt: skip
RUNS = {
    "dp2-zero1": (2, "--zero-stage 1"),
    "dp2-zero2": (2, "--zero-stage 2"),
    "dp2-zero3": (2, "--zero-stage 3"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2-dualpipev": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipev"),
}


@pytest.mark.proof
@pytest.mark.parametrize("curriculum", [False, True])
@pytest.mark.parametrize("layout", RUNS)
def test_trainings_against_plain_torch(pool, layout, curriculum):
    """While both lengths grow, at every ZeRO stage."""
    flags = [*FLAGS, *dropping()]
    flags += ["--curriculum-learning", json.dumps(LENGTHS)] * curriculum
    size, more = RUNS[layout]
    check_training(pool, size, flags, more.split(), fall=None)


CASES = {
    "zero1-dp2": (2, "--zero-stage 1"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "ramp": (1, "--rampup-batch-size 2 2 12 --recompute-granularity full"),
}


@pytest.mark.parametrize("case", sampled(CASES, lambda case: case == "ramp"))
def test_resume_is_bitwise(pool, tmp_path, case):
    size, more = CASES[case]
    argv = [*TINY, *LLAMA, *"--num-layers 4 --train-samples 32".split(), *dropping(), *more.split()]
    whole = pool.run(size, train, [*argv, "--save", str(tmp_path), "--save-interval", "3"])
    second = pool.run(size, train, [*argv, "--load", str(tmp_path), "--load-tag", "3"])
    for before, after in zip(whole, second, strict=True):
        assert after.losses == before.losses[3:] and len(after.losses) > 3
        assert after.state.keys() == before.state.keys()
        assert all(np.array_equal(after.state[key], before.state[key]) for key in after.state)


def compiled(argv):
    with graphs_alone():
        return train(argv)


@pytest.mark.proof
def test_compiled_layers(pool):
    """Every kept length is another graph, of the same numbers."""
    argv = [*FLAGS, *dropping()]
    plain = pool.run(1, train, argv)[0]
    record = pool.run(1, compiled, [*argv, "--torch-compile", "on"], timeout=300)[0]
    np.testing.assert_allclose(record.losses, plain.losses, rtol=1e-5)


@pytest.mark.proof
def test_what_a_run_leaves(pool, tmp_path):
    """Lengths in the metrics and under Megatron-DeepSpeed's tags; the state in checkpoints."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = [*FLAGS, *dropping(), "--log-interval", "1", "--save", str(tmp_path / "saved")]
    pool.run(1, train, [*argv, "--tensorboard-dir", str(tmp_path / "events")])
    kept = [4, 4, 8, 8, 12, 12, 16, 16]
    mean = [(2 * 16 + 2 * each) // 4 for each in kept]
    lines = (tmp_path / "saved" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    assert [row["random_ltd_reserved_length"] for row in rows] == kept
    assert [row["actual_seq_length"] for row in rows] == mean
    assert rows[-1]["consumed_tokens"] == 4 * sum(mean)
    for folder, ending in (("", ""), ("vs_samples", " vs samples"), ("vs_tokens", " vs tokens")):
        events = EventAccumulator(str(tmp_path / "events" / folder))
        events.Reload()
        for name, values in (("random_ltd_reserved_length", kept), ("actual_seq_length", mean)):
            assert [e.value for e in events.Scalars(f"seqlen/{name}{ending}")] == values
    (state,) = tmp_path.glob("saved/global_step8/**/state.json")
    assert json.loads(state.read_text())["random_ltd"] == {
        "consumed_layer_tokens": 4 * sum(2 * each + 2 * 16 for each in kept),
        "current_steps": 7, "current_value": 16, "min_value": 4, "max_value": 16,
    }  # fmt: skip
