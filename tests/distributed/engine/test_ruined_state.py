"""A state that is not finite is in no checkpoint: every layout, dtype and format; and what a run
says when it ends for it."""

import json
import re
from unittest import mock

import pytest
from samples import sampled
from training_jobs import SAVED_LAYOUTS, TINY, run

from megatron.checkpoint.folder import complete_tags
from megatron.checkpoint.source import open_checkpoint
from megatron.engine.state import owned_slices
from megatron.engine.train_engine import TrainEngine
from megatron.engine.update.optimizer import owned
from megatron.parallel.mesh import MODEL

STEPS, BAD = 6, 4
FLAGS = [*TINY, "--train-iters", str(STEPS), "--save-interval", "2", "--keep-last", "1"]
FLAGS += ["--check-replicas-interval", "0"]  # which would find and name it first
ASYNC = ["--async-save"]
FOLDERS = ["--checkpoint-format", "deepspeed"]
PRECISE = ["--use-precision-aware-optimizer", "--bf16", "--exp-avg-sq-dtype", "bf16"]
LAYOUTS = {
    **SAVED_LAYOUTS,
    "offloaded": (2, []),
    "precision-aware": (2, ["--zero-stage", "1", *PRECISE]),
}
FORMATS = {"own": [], "async": ASYNC, "deepspeed": FOLDERS, "universal": ["--save-universal"]}
CASES = [
    (layout, form, kind)
    for layout in LAYOUTS
    for form in FORMATS
    for kind in ("weight", "exp_avg_sq")
    if (layout, form) != ("precision-aware", "deepspeed")
]
SAMPLE = {
    ("zero0-dp2", "deepspeed", "exp_avg_sq"),
    ("zero1-tp2", "async", "weight"),
    ("zero3-dp2", "own", "exp_avg_sq"),
}


def ruined(kind, rank):
    """One element of one rank's first slice is NaN after a step; at stage 0 the first rank's, whose
    copy is the one that is saved."""
    real, done = TrainEngine.train_step, iter(range(1, STEPS + 1))

    def train_step(self, *args):
        result = real(self, *args)
        if next(done) == BAD:
            own = next(  # not padding of the vocabulary, nor what another rank writes
                own
                for own in owned_slices(self)
                if own.slice.numel and owned(own.param, self.mesh, MODEL)
            )
            if self.mesh.world.rank == (rank if self.stage else 0):
                values = own.get(kind).detach().clone()
                values[0] = float("nan")
                own.set(kind, values)
        return result

    return mock.patch.object(TrainEngine, "train_step", train_step)


@pytest.mark.parametrize("layout, form, kind", sampled(CASES, lambda case: case in SAMPLE))
def test_one_element_of_one_rank_refuses_the_save_on_all(pool, tmp_path, layout, form, kind):
    """The older checkpoint stays whole and is the one that `latest` names."""
    size, flags = LAYOUTS[layout]
    if layout == "offloaded":
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        flags = ["--deepspeed_config", str(tmp_path.with_suffix(".json"))]
        tmp_path.with_suffix(".json").write_text(json.dumps({"zero_optimization": zero}))
    flags = [*FLAGS, *flags, *FORMATS[form], "--save", str(tmp_path)]
    flags += ["--no-check-for-nan-in-loss-and-grad"] if form == "async" else []
    results = pool.run(size, run, flags, ruined, kind, size - 1)
    where = r"[\w.-]+" + ("" if kind == "weight" else rf"\.{kind}")
    said = rf"{where} has 1 of [\d,]+ elements that are not finite"
    by = "" if size == 1 else f"rank {0 if layout == 'zero0-dp2' else size - 1}: "
    for _, error in results:
        assert re.search(f"after iteration {BAD}: {by}.*{said}", error), error
        assert f"the last good checkpoint is {tmp_path}/global_step2" in error
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert not [path.name for path in tmp_path.glob("*global_step[46]*")]
    source = open_checkpoint(tmp_path)
    assert source.state["iteration"] == 2
    for name in source.names():
        assert all(bool(source.tensor(name, each).isfinite().all()) for each in source.kinds(name))


@pytest.mark.proof
@pytest.mark.parametrize("mode", [["--lora"], ["--lora", "--qlora"]])
def test_adapters_that_are_not_finite_are_not_saved(pool, tmp_path, mode):
    base, save = tmp_path / "base", tmp_path / "save"
    pool.run(1, run, [*TINY, "--train-iters", "1", "--save", str(base)])
    lora = [*mode, "--lora-rank", "2", "--pretrained-checkpoint", str(base)]
    _, error = pool.run(1, run, [*FLAGS, *lora, "--save", str(save)], ruined, "weight", 0)[0]
    assert re.search(rf"after iteration {BAD}: .*lora.* not finite", error), error
    assert f"the last good checkpoint is {save}/global_step2" in error
    assert (save / "latest").read_text() == "global_step2"


def test_a_step_that_ruins_the_weights_leaves_the_older_checkpoint(pool, tmp_path):
    flags = [*TINY, "--save", str(tmp_path), "--save-interval", "1", "--train-iters"]
    pool.run(2, run, [*flags, "2", "--zero-stage", "1"])
    ruin = ["--lr", "inf", "--load", str(tmp_path), "--keep-last", "1", "--zero-stage", "1"]
    for _, error in pool.run(2, run, [*flags, "5", *ruin]):
        assert re.search(r"after iteration 3: rank \d: .*3,200 of 3,200 elements", error), error
        assert f"the last good checkpoint is {tmp_path}/global_step2" in error
    assert complete_tags(tmp_path) == ["global_step1", "global_step2"]
    assert (tmp_path / "latest").read_text() == "global_step2"
    # Found at the next step, where none is saved.
    flags[flags.index("--save-interval") + 1] = "9"
    error = pool.run(1, run, [*flags, "5", *ruin])[0][1]
    assert "the loss is nan at iteration 4, samples 12 to 15; the model was ruined before" in error
    assert f"the last good checkpoint is {tmp_path}/global_step2" in error


def test_a_run_that_only_skips_steps_fails(pool, tmp_path):
    flags = [*TINY, "--no-check-for-nan-in-loss-and-grad", "--init-method-std", "1e30"]
    flags += ["--save", str(tmp_path), "--train-iters"]
    assert "all 5 steps were skipped" in pool.run(1, run, [*flags, "5"])[0][1]
    error = pool.run(1, run, [*flags, "50", "--max-skipped-steps", "7"])[0][1]
    assert "7 steps in a row were skipped (--max-skipped-steps 7): the loss is nan" in error
    assert "at iteration 7, samples 24 to 27; the weights are as they were before it" in error
    assert complete_tags(tmp_path) == []


@pytest.mark.parametrize("stage", sampled(range(4), lambda stage: stage == 1))
def test_the_last_overflow_of_fp16_is_named(pool, tmp_path, stage):
    flags = [*TINY, "--fp16", "--zero-stage", str(stage), "--train-iters", "50"]
    scale = ["--initial-loss-scale", "131072", "--min-loss-scale", "65536"]
    for _, error in pool.run(2, run, [*flags, *scale, "--init-method-std", "2"]):
        assert re.search(r"gradients are not finite in float16 at iteration \d, samples", error)
        assert "and the loss scale, 65536, is already the smallest" in error
