"""What benchmarks/gpu.py plans for models that no GPU of 80 GB can train by itself."""

import os

import pytest
import train
from contestants.command import setting_of
from contestants.process import environment
from contestants.registry import is_ours
from contestants.setting import Setting
from gpu_suite.plan import PARTS, SCALES, Job, jobs, turned_off

WORK = jobs(SCALES["full"], PARTS, lambda name: f"/{name}.json")
CARD, LARGE_CARD = 80e9, 141e9
"""Bytes of an H100 and of an H200."""


def setting(job: Job) -> Setting:
    return setting_of(train.parser().parse_args(job.command[2:]), "")


def parameters(of: Setting) -> int:
    kv = 2 * of.hidden_size**2 * of.kv_heads // of.heads
    llama = of.architecture == "llama"
    mlp = (3 if llama else 2) * of.hidden_size * of.ffn_hidden_size
    head = of.vocab_size * of.hidden_size
    return of.layers * (2 * of.hidden_size**2 + kv + mlp) + head * (2 if llama else 1)


@pytest.mark.parametrize("model", ["124M", "350M", "1.3B", "3B", "7B"])
def test_the_optimizer_is_on_the_cpu_too_where_a_card_has_no_room_for_it(model):
    """bf16 weights and gradients, float32 weights and two moments: 16 bytes a parameter."""
    needed = {}
    for job in WORK:
        if job.part in ("sizes", "sequences") and (job.model, job.variant) == (model, "bf16"):
            of = setting(job)
            # The update's float32 copy of the gradients; or activations, of each token some 16 rows
            # of the hidden size in every layer in bf16 (compiled; eagerly more).
            kept = 32 * of.micro_batch * of.seq_length * of.hidden_size * of.layers
            needed[job.seq_length] = 16 * parameters(of) + max(4 * parameters(of), kept)
    offloaded = any("on the CPU" in j.variant for j in WORK if j.model == model)
    assert offloaded == (needed[1024 if model in ("124M", "350M") else 2048] > CARD)
    assert len(needed) >= 3 and max(needed.values()) < LARGE_CARD


def test_offloaded_runs_make_the_same_steps_on_all_cores():
    on_cpu = [j for j in WORK if "on the CPU" in j.variant]
    cases = [(j.part, j.model, j.seq_length) for j in on_cpu]
    assert cases == [("sizes", "7B", 2048)] * 2 + [("sequences", "7B", 8192)] * 2
    (other,) = (j for j in WORK if (j.part, j.model, j.variant) == ("sizes", "7B", "bf16"))
    for job in on_cpu:
        assert setting(job).tokens_per_step == setting(other).tokens_per_step
        assert setting(job).threads == len(os.sched_getaffinity(0))
        assert setting(other).threads == 1
        assert job.contestant.endswith("+deepspeed_config=/offload.json")


def test_only_the_products_stand_beside_what_peers_cannot_train():
    beside: dict[str, set[str]] = {}
    for job in WORK:
        if job.model and not is_ours(job.contestant):
            beside.setdefault(job.model, set()).add(job.contestant)
    assert beside.pop("7B") == {"matmuls"}
    assert all(len(peers) == 4 for peers in beside.values()) and len(beside) == 4


def test_each_optimisation_is_taken_from_the_same_base():
    """No flag twice, no variant twice."""
    base = SCALES["full"].base
    names = [name for _, name in turned_off(base)]
    assert names[0] == base and len(set(names)) == len(names)
    for name in names:
        flags = [flag.partition("=")[0] for flag in name.split("+")]
        assert len(set(flags)) == len(flags), name


@pytest.mark.parametrize(
    ("given", "seen"), [(None, "0"), ("", ""), ("3,1", "3"), ("GPU-8932f937", "GPU-8932f937")]
)
def test_a_contestant_sees_one_gpu(monkeypatch, given, seen):
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert environment(setting(WORK[0]), tuned_malloc=False)["CUDA_VISIBLE_DEVICES"] == seen
