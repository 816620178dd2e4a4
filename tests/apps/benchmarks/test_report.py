"""The arithmetic of the tables, against numbers made by hand."""

import pytest
from contestants.report import disagreements, ratios, shape_of, summary
from contestants.setting import Setting


def setting(**changes) -> Setting:
    values = {
        "layers": 2,
        "hidden_size": 8,
        "heads": 2,
        "kv_heads": 2,
        "ffn_hidden_size": 32,
        "seq_length": 16,
        "vocab_size": 100,
        "micro_batch": 3,
        "micro_batches": 5,
        "architecture": "gpt2",
        "dtype": "bf16",
        "threads": 1,
        "warmup": 1,
        "steps": 4,
        "folder": "",
    }
    return Setting(**(values | changes))


def rounds(*seconds: float, clock: str = "cpu_seconds") -> list[dict]:
    return [{"wall_seconds": 9.0, clock: s, "peak_bytes": int(100 * s)} for s in seconds]


# By hand, of a token, forward: a block's matrices have 4 h^2 + 8 h^2 = 768 weights, two blocks
# 1536; the head 800; so 2 x 2336 FLOPs. Attention: 2 blocks x 2 products x 2 x 8 x keys, where a
# query sees 16 keys, or 8 causally. All of it three times, forward and backward.
WHOLE = 3 * (2 * 2336 + 2 * 2 * 2 * 8 * 16)
CAUSAL = 3 * (2 * 2336 + 2 * 2 * 2 * 8 * 8)


def test_flops_by_hand():
    assert shape_of(setting()).flops_per_token(causal=False) == WHOLE
    assert shape_of(setting()).flops_per_token(causal=True) == CAUSAL


def test_flops_of_a_llama_by_hand():
    shape = shape_of(setting(architecture="llama", kv_heads=1))
    # q and proj 2 h^2, k and v 2 h^2 / 2, gate, up and down 3 x 8 x 32.
    block = 2 * 64 + 64 + 3 * 256
    assert shape.flops_per_token(causal=False) == 3 * (2 * (2 * block + 800) + 1024)


def test_summary():
    result = {"rounds": rounds(4.0, 12.0, 8.0), "losses": [5.0, 4.0, 3.0]}
    found = summary(result, setting(), peak_flops=1e6)
    assert found is not None
    assert found["seconds_per_step"] == 2.0 and found["range"] == [1.0, 3.0]
    assert found["wall_seconds_per_step"] == 9 / 4
    assert found["tokens_per_second"] == 3 * 5 * 16 / 2.0
    assert found["mfu_whole"] == pytest.approx(3 * 5 * 16 * WHOLE / 2.0 / 1e6)
    assert found["mfu_causal"] == pytest.approx(3 * 5 * 16 * CAUSAL / 2.0 / 1e6)
    assert found["peak_bytes"] == 1200
    assert (found["first_loss"], found["last_loss"]) == (5.0, 3.0)


def test_utilisation_is_of_the_threads_share_on_a_cpu_and_of_all_on_a_gpu():
    result = {"rounds": rounds(4.0), "losses": [1.0]}
    one, two = (summary(result, setting(threads=n), 1e6) for n in (1, 2))
    assert two["mfu_whole"] == pytest.approx(2 * one["mfu_whole"])
    result = {"rounds": rounds(8.0, clock="gpu_seconds"), "losses": [1.0]}
    gpu = summary(result, setting(threads=2), 1e6)
    assert gpu["seconds_per_step"] == 2.0
    assert gpu["mfu_whole"] == pytest.approx(3 * 5 * 16 * WHOLE / 2.0 / 1e6)


def test_ratio_is_the_median_of_the_rounds():
    results = {
        "ours-zero1": {"rounds": rounds(1.0, 20.0, 3.0)},
        # By round 0.5, 2, 0.75; of the medians it would be 3 / 4, of the sums 24 / 16.
        "plain": {"rounds": rounds(2.0, 10.0, 4.0)},
        "hf-trainer": {"rounds": []},
        "ours-zero2": {"rounds": rounds(1.0, 1.0, 1.0)},
    }
    assert ratios(results, setting()) == {
        "ours-zero1": {"plain": pytest.approx(0.75)},
        "ours-zero2": {"plain": pytest.approx(0.25)},
    }
    results["plain"]["rounds"][2]["cpu_seconds"] = 1.0
    assert ratios(results, setting())["ours-zero1"]["plain"] == pytest.approx(2.0)


def test_a_contestant_without_rounds_has_no_summary():
    assert summary({"rounds": [], "missing": "x"}, setting(), 1.0) is None


def test_disagreements():
    some = rounds(1.0)
    results = {
        "ours-zero1": {"rounds": some, "losses": [5.0, 4.0, 3.0]},
        "plain": {"rounds": some, "losses": [5.0, 4.04, 3.0]},
        "hf-trainer": {"rounds": some, "losses": [5.0, 4.0, float("nan")]},
        "hf-deepspeed": {"rounds": some, "losses": [5.2, 4.0, 3.0]},
        "matmuls": {"rounds": some, "losses": [None] * 3},
        "plain-compiled": {"rounds": [], "losses": [9.0]},
    }
    lines = disagreements(results, 0.02)
    assert lines == [
        "hf-trainer: its loss at step 3 is nan, the median 3.0000",
        "hf-deepspeed: its loss at step 1 is 5.2000, the median 5.0000",
    ]
