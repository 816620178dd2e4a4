"""Universal checkpoints and DeepSpeed's own folders, against stock DeepSpeed."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from family_models import FAMILIES, MODELS, NO_DROPOUT, blocks
from gpt_forward import forward
from stock_gpt import DECAY, FLAGS, RATE, VOCABULARY, continue_plainly, continue_training, tokens
from training_jobs import TINY, train

from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import open_checkpoint
from megatron.families import build_model
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.deepspeed_folders.folder import DeepSpeedFolder
from megatron.formats.deepspeed_folders.universal import UniversalFolder, save_universal

KINDS = ("weight", "exp_avg", "exp_avg_sq")
STEPS = 4
RUN = [*TINY, *FLAGS, "--train-iters", str(STEPS)]


def tensors(source):
    """Everything that a checkpoint holds, by ``name/kind``."""
    return {
        f"{name}/{kind}": source.tensor(name, kind)
        for name in source.names()
        for kind in source.kinds(name)
    }


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert torch.equal(found[key], values), key


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A checkpoint of the stock network, trained here."""
    save = tmp_path_factory.mktemp("saved")
    pool.run(2, train, [*RUN, "--zero-stage", "1", "--save", str(save)])
    return open_checkpoint(save)


@pytest.mark.parametrize(
    ("stage", "size", "tp", "rows", "steps"),
    [
        pytest.param(1, 2, 1, 100, 4, id="zero1-dp2"),
        pytest.param(2, 2, 1, 104, 4, id="zero2-dp2", marks=pytest.mark.proof),
        pytest.param(3, 2, 1, 104, 4, id="zero3-dp2"),
        pytest.param(1, 2, 2, 100, 4, id="zero1-tp2", marks=pytest.mark.proof),
        pytest.param(1, 4, 2, 112, 4, id="zero1-tp2-dp2"),
    ],
)
def test_stock_deepspeed_loads_universal(pool, saved, tmp_path, stage, size, tp, rows, steps):
    folder = save_universal(saved, tmp_path, stage)
    results = pool.run(size, continue_training, str(folder), stage, rows, tp, steps)
    wanted = tensors(saved)
    for rank in range(size):
        for key, values in results[rank][1].items():
            assert torch.equal(values, share_of(wanted[key], key, rows, tp, rank % tp)), key
    losses, _ = continue_plainly(wanted, STEPS, steps, rows)
    assert results[0][0] == pytest.approx(losses, rel=2e-6)


def share_of(whole, key, rows, tp, rank):
    """How Megatron's layers cut a parameter, written out."""
    if "word_embeddings" in key:
        padded = torch.cat([whole, whole.new_zeros(rows - len(whole), whole.shape[1])])
        return padded.chunk(tp)[rank]
    if "qkv" in key:
        return torch.cat([part.chunk(tp)[rank] for part in whole.split([32, 16, 16])])
    if ".up." in key:
        return torch.cat([part.chunk(tp)[rank] for part in whole.chunk(2)])
    if "proj.weight" in key or "down.weight" in key:
        return whole.chunk(tp, 1)[rank]
    return whole


def train_and_save(argv, save):
    """Trains, and saves the same state in both formats; for the pool."""
    from megatron.apps.parity.runs import watched_trainer
    from megatron.engine.environment import distributed
    from megatron.formats.deepspeed_folders.engine_writer import EngineFolderWriter
    from megatron.run.run import parse_run
    from megatron.training.checkpoints import CheckpointManager

    run = parse_run(None, [*argv, "--save", save])
    with distributed(run.config.parallel) as groups:
        trainer = watched_trainer(run, groups, lambda result: None)
        trainer.fit()
        engine = trainer.engine
        options = dataclasses.replace(engine.config.checkpoint, save=f"{save}/deepspeed")
        engine.config = dataclasses.replace(engine.config, checkpoint=options)
        checkpoints = next(c for c in trainer.callbacks if isinstance(c, CheckpointManager))
        writer = EngineFolderWriter(engine, run.content, run.tokenizer.save_pretrained)
        writer.save(STEPS, checkpoints.counters(trainer.consumed_samples))
        (result,) = writer.close()
        assert result.error is None, result.error


PIPELINE = ["--pipeline-model-parallel-size", "2", "--num-layers", "4"]
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-ffn-hidden-size 12"
).split()
"""Layers of experts with a buffer each."""
LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 6 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --position-embedding-type rope "
    "--num-query-groups 4"
).split()
LAYOUTS = {
    "latent-zero1-tp2-sp": (
        2,
        [*LATENT, "--zero-stage", "1", "--tensor-model-parallel-size", "2", "--sequence-parallel"],
    ),
    "latent-zero3-dp2": (2, [*LATENT, "--zero-stage", "3"]),
    "zero0-dp2": (2, ["--zero-stage", "0"]),
    "zero0-dp2-fp16": (2, ["--zero-stage", "0", "--fp16", "--initial-loss-scale", "1024"]),
    "zero1-dp2": (2, ["--zero-stage", "1"]),
    "zero1-dp2-bf16": (2, ["--zero-stage", "1", "--bf16"]),
    "zero1-bf16-fp32-sums": (
        2,
        ["--zero-stage", "1", "--bf16", "--accumulate-allreduce-grads-in-fp32"],
    ),
    "zero1-dp2-fp16": (2, ["--zero-stage", "1", "--fp16", "--initial-loss-scale", "1024"]),
    "zero2-dp2": (2, ["--zero-stage", "2"]),
    "zero3-dp2": (2, ["--zero-stage", "3"]),
    "zero3-cp2": (2, ["--zero-stage", "3", "--context-parallel-size", "2"]),
    "zero1-cp2-dp2-bf16": (4, ["--zero-stage", "1", "--bf16", "--context-parallel-size", "2"]),
    "zero1-tp2-sp": (
        2,
        ["--zero-stage", "1", "--tensor-model-parallel-size", "2", "--sequence-parallel"],
    ),
    "zero1-tp2-shared-kv": (
        2,
        ["--zero-stage", "1", "--tensor-model-parallel-size", "2", "--num-query-groups", "1"],
    ),
    "zero1-tp4-shared-kv": (
        4,
        ["--zero-stage", "1", "--tensor-model-parallel-size", "4", "--num-query-groups", "2"],
    ),
    "zero1-tp2-shared-keys-as-values": (
        2,
        [
            *"--zero-stage 1 --tensor-model-parallel-size 2 --num-query-groups 1".split(),
            *"--sliding-window 5 --window-attn-skip-freq 2 --global-keys-as-values".split(),
        ],
    ),
    "zero3-tp2-dp2": (4, ["--zero-stage", "3", "--tensor-model-parallel-size", "2"]),
    "zero0-pp2": (2, [*PIPELINE, "--zero-stage", "0"]),
    "zero1-pp2": (2, [*PIPELINE, "--zero-stage", "1"]),
    "zero1-pp2-untied": (
        2,
        [*PIPELINE, "--zero-stage", "1", "--untie-embeddings-and-output-weights"],
    ),
    "zero0-pp2-fp16": (2, [*PIPELINE, *"--zero-stage 0 --fp16 --loss-scale 1024".split()]),
    "zero0-pp2-interleaved": (
        2,
        [*PIPELINE, "--zero-stage", "0", "--num-layers-per-virtual-pipeline-stage", "1"],
    ),
    "zero1-pp2-interleaved": (
        2,
        [*PIPELINE, "--zero-stage", "1", "--num-layers-per-virtual-pipeline-stage", "1"],
    ),
    "zero1-tp2-pp2": (4, [*PIPELINE, "--zero-stage", "1", "--tensor-model-parallel-size", "2"]),
    "zero1-pp2-dp2": (4, [*PIPELINE, "--zero-stage", "1"]),
    "zero0-pp2-experts": (2, [*PIPELINE, *EXPERTS, "--zero-stage", "0"]),
    "zero1-pp2-experts": (2, [*PIPELINE, *EXPERTS, "--zero-stage", "1"]),
    "zero1-tp2-experts": (
        2,
        [*EXPERTS, *"--zero-stage 1 --tensor-model-parallel-size 2 --sequence-parallel".split()],
    ),
    "zero1-tp2-experts-apart": (
        2,
        [
            *(*EXPERTS, "--zero-stage", "1", "--tensor-model-parallel-size", "2"),
            *"--expert-model-parallel-size 2 --expert-tensor-parallel-size 1".split(),
            "--sequence-parallel",
        ],
    ),
}


@pytest.fixture(scope="module")
def both(pool, tmp_path_factory):
    """A checkpoint in this project's format and one of DeepSpeed's, of the same state."""
    made = {}

    def make(layout):
        if layout not in made:
            size, flags = LAYOUTS[layout]
            save = tmp_path_factory.mktemp(layout)
            pool.run(size, train_and_save, [*RUN, *flags], str(save))
            made[layout] = open_checkpoint(save), save / "deepspeed" / "global_step4"
        return made[layout]

    return make


CONVERTED = ("zero1-tp2-shared-kv",)
READ = (
    *CONVERTED,
    "zero1-tp2-shared-keys-as-values",
    "zero0-pp2-fp16",
    "zero3-tp2-dp2",
)
"""Samples of every test run; `make proof` converts all that DeepSpeed does (it has no stage 0)."""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in READ else pytest.mark.proof) for name in LAYOUTS],
)
def test_engine_folder_reads_bitwise(both, layout):
    own, folder = both(layout)
    source = DeepSpeedFolder(folder)
    assert_same(tensors(source), tensors(own))
    assert source.state == own.state


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=() if name in CONVERTED else pytest.mark.proof)
        for name in LAYOUTS
        if "zero0" not in name
    ],
)
def test_stock_converter_takes_engine_folders(both, tmp_path, layout):
    """DeepSpeed's own ds_to_universal, strict, and what it wrote read back."""
    own, folder = both(layout)
    universal = tmp_path / "global_step4_universal"
    command = "-m deepspeed.checkpoint.ds_to_universal --num_extract_workers 1"
    subprocess.run(
        [
            *(sys.executable, *command.split(), "--num_merge_workers", "1"),
            *("--input_folder", str(folder), "--output_folder", str(universal)),
        ],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    source = UniversalFolder(UniversalFolder.locate(tmp_path, None))
    assert_same(tensors(source), tensors(own))
    assert source.state == own.state
    assert source.run.model == own.model


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_round_trip_is_bitwise(saved, tmp_path, stage):
    folder = save_universal(saved, tmp_path, stage)
    assert (tmp_path / "latest_universal").read_text().strip() == folder.name
    UniversalFolder.verify(folder)
    source = UniversalFolder(UniversalFolder.locate(tmp_path, "4"))
    back = CheckpointReader(write_checkpoint(tmp_path / "own", source))
    assert_same(tensors(back), tensors(saved))
    assert back.state == {k: v for k, v in saved.state.items() if k != "world_size"}
    assert back.config.model == saved.config.model


ENGINE = ["--checkpoint-format", "deepspeed"]
DRY = ["--attention-dropout", "0", "--hidden-dropout", "0"]
"""Masks differ with sequence parallelism."""
LONG = [*TINY, *FLAGS, "--train-iters", "8", "--num-layers", "4", *DRY]
RESUMED = ("zero1-pp2-interleaved",)
"""Sample of every test run."""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in RESUMED else pytest.mark.proof) for name in LAYOUTS],
)
def test_resume_from_engine_folders_is_bitwise(pool, tmp_path, layout):
    size, flags = LAYOUTS[layout]
    saved, again = tmp_path / "saved", tmp_path / "again"
    argv = [*LONG, *flags, *ENGINE, "--save"]
    whole = pool.run(size, train, [*argv, str(saved), "--save-interval", "3"])
    load = [str(again), "--load", str(saved), "--load-tag", "global_step3"]
    second = pool.run(size, train, [*argv, *load])
    assert (again / "latest").read_text().strip() == "global_step8"
    assert not [*saved.glob(".*incomplete"), *again.glob(".*incomplete")]
    for rank in range(size):
        assert second[rank].losses == whole[rank].losses[3:]
        for key, values in whole[rank].state.items():
            assert np.array_equal(second[rank].state[key], values), key


MOVES = [
    pytest.param("zero1-dp2", "zero1-pp2", marks=pytest.mark.proof),
    ("zero3-dp2", "zero1-tp2-sp"),
    pytest.param("zero1-pp2", "zero3-dp2", marks=pytest.mark.proof),
    pytest.param("zero0-pp2", "zero2-dp2", marks=pytest.mark.proof),
    pytest.param("zero3-cp2", "zero1-pp2", marks=pytest.mark.proof),
]


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_resume_from_engine_folders_at_another_layout(pool, tmp_path, source, target):
    argv = [*LONG, *LAYOUTS[source][1], *ENGINE, "--save", str(tmp_path), "--save-interval", "3"]
    whole = pool.run(LAYOUTS[source][0], train, argv)
    size, flags = LAYOUTS[target]
    load = ["--load", str(tmp_path), "--load-tag", "global_step3"]
    moved = pool.run(size, train, [*LONG, *flags, *load])
    assert moved[0].losses == pytest.approx(whole[0].losses[3:], rel=2e-5)


def test_save_universal_and_resume_from_it(pool, tmp_path):
    argv = [*RUN, "--zero-stage", "1", "--save", str(tmp_path), "--save-universal"]
    pool.run(2, train, [*argv, "--exit-interval", "2"])
    folder = UniversalFolder.locate(tmp_path, None)
    assert folder.name == "global_step2_universal"
    own = open_checkpoint(tmp_path)
    assert_same(tensors(UniversalFolder(folder)), tensors(own))
    load = ["--zero-stage", "3", "--load", str(tmp_path)]
    there = pool.run(2, train, [*RUN, *load])
    for tag in (["--universal-checkpoint"], ["--load-tag", "global_step2_universal"]):
        resumed = pool.run(2, train, [*RUN, *load, *tag])
        assert resumed[0].losses == there[0].losses


def continue_same_module(folder, steps):
    """Loads an engine's folder by stock DeepSpeed into a module of the same layers, and trains on;
    for the pool."""
    from megatron.engine.environment import prepare_deepspeed

    prepare_deepspeed()
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = build_model(DeepSpeedFolder(Path(folder)).model)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    settings = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    path, client = engine.load_checkpoint(str(Path(folder).parent))
    assert path is not None and client["iteration"] == 4
    held = {
        f"{name}/weight": safe_get_full_fp32_param(param).clone()
        for name, param in model.canonical_parameters()
    }
    for group, decay in zip(optimizer.param_groups, (DECAY, 0.0), strict=True):
        group["lr"], group["weight_decay"] = RATE, decay
    losses = []
    for step in range(steps):
        batch = tokens(step).chunk(2)[dist.get_rank()]
        logits = forward(engine, batch[:, :-1])[..., :VOCABULARY]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(float(total) / 2)
    engine.destroy()
    return losses, held


def test_stock_deepspeed_resumes_from_engine_folders(pool, tmp_path):
    flags = [*DRY, "--zero-stage", "1", "--clip-grad", "0", *ENGINE]
    pool.run(2, train, [*RUN, *flags, "--save", str(tmp_path)])
    folder = tmp_path / "global_step4"
    wanted = tensors(DeepSpeedFolder(folder))
    results = pool.run(2, continue_same_module, str(folder), 4)
    for key, values in results[0][1].items():
        assert torch.equal(values, share_of(wanted[key], key, 104, 1, 0)), key
    losses, _ = continue_plainly(wanted, STEPS, 4, 104)
    assert results[0][0] == pytest.approx(losses, rel=2e-6)


def loaded_unpartitioned(folder):
    """Main weights, Adam's count and the loss scale that stock DeepSpeed loads from an engine's
    folder of fp16 at stage 0; for the pool."""
    from megatron.engine.deepspeed_patches import allow_fp16
    from megatron.engine.environment import prepare_deepspeed

    prepare_deepspeed()
    allow_fp16()
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = build_model(DeepSpeedFolder(Path(folder)).model)
    names = {param: name for name, param in model.canonical_parameters()}
    params = [[p for p in names if p.dim() > 1], [p for p in names if p.dim() == 1]]
    optimizer = torch.optim.AdamW([{"params": group} for group in params], lr=RATE)
    settings = {"train_batch_size": 4, "fp16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    path, _ = engine.load_checkpoint(str(Path(folder).parent))
    assert path is not None
    wrapper = engine.optimizer
    held = {
        f"{names[param]}/{kind}": values.detach().clone()
        for group, mains in zip(params, wrapper.fp32_groups, strict=True)
        for param, main in zip(group, mains, strict=True)
        for kind, values in {"weight": main, **optimizer.state[main]}.items()
    }
    engine.destroy()
    return held, wrapper.loss_scale, wrapper.loss_scale_config.cur_iter


@pytest.mark.proof
def test_stock_deepspeed_resumes_from_fp16_at_stage_0(pool, tmp_path):
    scale = ["--initial-loss-scale", "1024", "--loss-scale-window", "2"]
    flags = [*DRY, "--zero-stage", "0", "--fp16", *scale, *ENGINE]
    pool.run(2, train, [*RUN, *flags, "--save", str(tmp_path)])
    folder = tmp_path / "global_step4"
    held, loss_scale, count = pool.run(2, loaded_unpartitioned, str(folder))[0]
    source = DeepSpeedFolder(folder)
    for key, values in tensors(source).items():
        assert torch.equal(held[key], share_of(values, key, 104, 1, 0)), key
    scaler = source.state["loss_scaler"]
    assert (loss_scale, count) == (scaler["cur_scale"], scaler["cur_iter"]) == (2048, 4)
    assert all(int(values) == 4 for key, values in held.items() if key.endswith("/step"))


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("bert", "post-norm"), ("t5", "relative"),
        pytest.param("retro", "learned", marks=pytest.mark.proof),
    ],
)  # fmt: skip
def test_other_families(pool, tmp_path, family, model):
    """A pipeline's folder, and the universal checkpoint of it, continue on one process."""
    flags = [*FAMILIES[family], *MODELS[family][model], *blocks(family, 2), *NO_DROPOUT]
    flags += "--global-batch-size 4 --train-iters 4 --lr-decay-style constant".split()
    save = "--checkpoint-format deepspeed --save-interval 2 --save".split()
    pipeline = ["--zero-stage", "1", "--pipeline-model-parallel-size", "2"]
    whole = pool.run(2, train, [*flags, *pipeline, *save, str(tmp_path)])[0]
    folder = tmp_path / "global_step2"
    found = pool.run(1, train, [*flags, "--load", str(folder)])[0]
    np.testing.assert_allclose(found.losses, whole.losses[2:], rtol=5e-6)
    universal = save_universal(open_checkpoint(folder), tmp_path, 1)
    again = pool.run(1, train, [*flags, "--load", str(universal)])[0]
    assert again.losses == found.losses
