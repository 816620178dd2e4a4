"""What a teacher says, from disk: equal to the teacher itself if all of its tokens are kept, and
found in whatever order and length a run meets the samples."""

import contextlib
import io
import json
from unittest.mock import patch

import numpy as np
import pytest
from finetune_cases import save_blank
from safetensors.torch import load_file, save_file
from samples import sampled
from training_jobs import TINY, train

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.config import ConfigError
from megatron.features.distillation import teacher as teachers
from megatron.features.distillation.teacher import TeacherCache, identity_of

STEPS = 4
STUDENT = [*TINY, "--train-iters", str(STEPS), "--num-layers", "4"]
STUDENT += "--hidden-dropout 0 --attention-dropout 0 --eval-iters 1 --eval-interval 2".split()
TERMS = "--kd --kd-beta-ce 2 --kd-temp 2".split()
ALL = "100"
"""Tokens of the vocabulary."""


@pytest.fixture(scope="module")
def teacher(pool, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("teacher"))
    sizes = ["--hidden-size", "48", "--num-layers", "4"]
    pool.run(1, train, [*TINY, *sizes, "--train-iters", "4", "--save", folder])
    return [*TERMS, "--load-teacher", folder]


def examples(folder, count=40):
    """Instructions of several lengths, and a tokenizer of bytes."""
    path = folder / "alpaca.json"
    rows = [
        {"instruction": "x" * (3 + n % 5), "output": f"{n} " * (1 + n % 4)} for n in range(count)
    ]
    path.write_text(json.dumps(rows))
    mine = ["--data-path", str(path), "--sft", "--tokenizer-type", "ByteLevelTokenizer"]
    mine += [
        "--vocab-size",
        "259",
        "--seq-length",
        "256",
        "--max-position-embeddings",
        "256",
        "--split",
        "80,20,0",
    ]
    return mine


def curriculum(folder):
    path = folder / "curriculum.json"
    path.write_text(json.dumps({"curriculum_learning": {
        "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 8},
    }}))  # fmt: skip
    return ["--deepspeed_config", str(path)]


@pytest.mark.parametrize(
    ("layout", "data"),
    sampled(
        [(layout, "text") for layout in ("dp1", "dp2", "tp2-sp", "pp2", "tp2-pp2-interleaved")]
        + [("dp2", "curriculum"), ("pp2-interleaved", "documents"), ("cp2-tp2-sp", "text")],
        lambda case: case == ("pp2", "text"),
    ),
)
def test_all_tokens_are_the_teacher(pool, teacher, tmp_path, layout, data):
    parsed = parse_layout(layout)
    argv = [*STUDENT, *teacher, *flags_for(parsed)]
    if data == "curriculum":
        argv += curriculum(tmp_path)
    if data == "documents":
        argv += "--reset-position-ids --reset-attention-mask".split()
    online = pool.run(parsed.processes, train, argv)[0]
    cache = ["--kd-cache", str(tmp_path / "cache"), "--kd-top-k", ALL]
    for _ in range(2):  # it is filled, then read
        cached = pool.run(parsed.processes, train, [*argv, *cache])[0]
        np.testing.assert_allclose(cached.losses, online.losses, rtol=2e-6)
        np.testing.assert_allclose(cached.norms, online.norms, rtol=1e-4)


@pytest.mark.proof
@pytest.mark.parametrize("more", ["padded", "packed"])
def test_instructions(pool, tmp_path, more):
    argv = [word for word in STUDENT if word != "--mock-data"] + examples(tmp_path)
    argv += ["--packing"] if more == "packed" else []
    teacher = str(tmp_path / "teacher")
    pool.run(1, train, [*argv, "--hidden-size", "48", "--train-iters", "2", "--save", teacher])
    argv += [*TERMS, "--load-teacher", teacher, "--sft-loss-weights", "tokens"]
    online = pool.run(1, train, argv)[0]
    cache = ["--kd-cache", str(tmp_path / "cache"), "--kd-top-k", "300"]
    (cached,) = pool.run(1, train, [*argv, *cache])
    np.testing.assert_allclose(cached.losses, online.losses, rtol=2e-6)


@pytest.mark.proof
def test_experts_of_a_teacher_meet_in_every_batch(pool, tmp_path):
    """33 samples do not divide among two ranks, whose experts exchange tokens."""
    experts = "--num-experts 2 --disable-moe-token-dropping --moe-loss-coeff 0".split()
    argv = [word for word in STUDENT if word != "--mock-data"] + examples(tmp_path, 33)
    argv += [*experts, "--split", "100,0,0", "--eval-iters", "0", "--train-iters", "10"]
    teacher = str(tmp_path / "teacher")
    pool.run(1, train, [*argv, "--hidden-size", "48", "--train-iters", "2", "--save", teacher])
    argv += [*TERMS, "--load-teacher", teacher, "--num-experts-teacher", "2", "2", "2", "2"]
    argv += flags_for(parse_layout("ep2"))
    online = pool.run(2, train, argv, timeout=300)[0]
    cache = ["--kd-cache", str(tmp_path / "cache"), "--kd-top-k", "300"]
    cached = pool.run(2, train, [*argv, *cache], timeout=300)[0]
    np.testing.assert_allclose(cached.losses, online.losses, rtol=2e-6)


def without_a_teacher(argv):
    """Trains where the model of the teacher cannot be built."""
    with patch.object(teachers.FoundTeacher, "start", None):
        return train(argv).losses


def refused(argv):
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(ConfigError) as error:
        train(argv)
    return str(error.value)


def test_a_few_tokens_and_other_runs(pool, teacher, tmp_path):
    """Another learning rate and batch size meet the same samples, without the teacher in memory;
    another temperature, teacher or number of tokens is refused."""
    cache = ["--kd-cache", str(tmp_path / "cache"), "--kd-top-k", "5"]
    argv = [*STUDENT, *teacher, *cache]
    (first,) = pool.run(1, train, argv)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    again = pool.run(2, without_a_teacher, argv)[0]
    np.testing.assert_allclose(again, first.losses, rtol=1e-5)
    other = [*argv, "--lr", "1e-3", "--global-batch-size", "2", "--train-iters", "8"]
    (losses,) = pool.run(1, without_a_teacher, other)
    assert np.isfinite(losses).all()
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    for flag, value, word in (("--kd-temp", "1", "temperature"), ("--kd-top-k", "6", "tokens")):
        (message,) = pool.run(1, refused, [*argv, flag, value])
        assert "--kd-cache" in message and word in message and "another folder" in message


def test_teachers_with_the_same_norms_differ(tmp_path, monkeypatch):
    """As those of which adapters were merged, whose smallest weights are the same."""
    from megatron.checkpoint.source import locate_checkpoint

    monkeypatch.setattr("megatron.features.distillation.teacher._DIGESTED", 3)

    found = []
    for name in "ab":
        folder = save_blank(tmp_path / name)
        if found:
            path = folder / "model.safetensors"
            weights = load_file(path)
            weights["model.embed_tokens.weight"] += 1
            save_file(weights, path, {"format": "pt"})
        found.append(identity_of(locate_checkpoint(folder).open(), 5, 1.0))
    one, other = found
    assert one["weights"] == other["weights"] and one["files"] != other["files"]
    TeacherCache(str(tmp_path / "cache"), one, None)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "teacher.json").write_text(json.dumps(one))
    TeacherCache(str(tmp_path / "cache"), one, None)
    with pytest.raises(ConfigError, match="is of another teacher: files"):
        TeacherCache(str(tmp_path / "cache"), other, None)
