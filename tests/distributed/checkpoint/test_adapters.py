"""Checkpoints of adapters: a run with --lora continues bitwise, and at any other layout."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import sampled
from training_jobs import TINY

from megatron.apps.parity.runs import RunRecord, watched_trainer
from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import locate_checkpoint, open_checkpoint
from megatron.config import ConfigError
from megatron.engine.environment import distributed
from megatron.engine.state import owned_slices
from megatron.features.adapters.checkpoint import BaseRecord, check_base
from megatron.features.adapters.peft import write_peft
from megatron.run.run import parse_run

STOP, END = 3, 6
MODEL = (
    "--num-layers 4 --num-query-groups 2 --swiglu --position-embedding-type rope "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2"
).split()
BASE = [*TINY, *MODEL]
LORA = "--lora --lora-rank 3 --lora-alpha 5 --lora-targets q_proj v_proj down_proj up_proj".split()
FLAGS = [*BASE, *LORA, "--train-iters", str(END)]
FP16 = "--zero-stage 1 --fp16 --initial-loss-scale 65536"
LAYOUTS = {
    "dp1-zero0": (1, ""),
    "dp2-zero0-fp16": (2, "--zero-stage 0 --fp16 --initial-loss-scale 65536"),
    "dp2-zero1": (2, "--zero-stage 1"),
    "dp2-zero2-bf16": (2, "--zero-stage 2 --bf16"),
    "dp2-zero3": (2, "--zero-stage 3"),
    "dp2-zero3-bf16": (2, "--zero-stage 3 --bf16"),
    "tp2-sp-zero1": (2, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1"),
    "tp4-zero1-bf16": (4, "--tensor-model-parallel-size 4 --zero-stage 1 --bf16"),
    "tp2-dp2-zero3": (4, "--tensor-model-parallel-size 2 --zero-stage 3"),
    "pp2-zero1-fp16": (2, f"--pipeline-model-parallel-size 2 {FP16}"),
    "pp2-interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "pp2-dualpipev-bf16": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipev --zero-stage 1 --bf16",
    ),
    "tp2-pp2-zero1": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1",
    ),
}
MORE = {
    "dora-dp2-zero2-bf16": (2, "--zero-stage 2 --bf16 --use-dora"),
    "dora-tp2-sp-zero3": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3 --use-dora --use-rslora",
    ),
    "dropout-tp2-pp2": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --lora-dropout 0.3",
    ),
    "async": (2, "--zero-stage 1 --async-save"),
}
RESUMED = {"tp2-sp-zero1"}
PAIRS = [(one, other) for one in LAYOUTS for other in LAYOUTS]
SAMPLE = {("tp2-sp-zero1", "dp2-zero3-bf16")}


def run(argv):
    """The steps of a run, with what the optimizer has after them; for the pool."""
    record, parsed = RunRecord(), parse_run(None, argv)
    with distributed(parsed.config.parallel) as mesh:
        trainer = watched_trainer(parsed, mesh, record.add)
        begin = state(trainer.engine)
        trainer.fit()
        return record, begin, state(trainer.engine)


def state(engine):
    """A rank's share by name, kind and start; flat."""
    return {
        (own.name, kind, own.slice.start): own.get(kind).detach().flatten().numpy().copy()
        for own in owned_slices(engine)
        for kind in own.kinds
    }


@pytest.fixture(scope="module")
def base(pool, tmp_path_factory):
    """A model that was trained for a step."""
    folder = tmp_path_factory.mktemp("base")
    pool.run(1, run, [*BASE, "--train-iters", "1", "--save", str(folder)])
    return folder


@pytest.fixture(scope="module")
def saved(pool, base, tmp_path_factory):
    """By layout: a run without a stop, and the folder of the same one that stopped."""
    made = {}

    def make(name):
        if name not in made:
            size, layout = (LAYOUTS | MORE)[name]
            flags = [*FLAGS, "--pretrained-checkpoint", str(base), *layout.split()]
            folder = tmp_path_factory.mktemp(name)
            whole = pool.run(size, run, [flag for flag in flags if flag != "--async-save"])
            stop = ["--save", str(folder), "--exit-interval", str(STOP)]
            made[name] = whole, pool.run(size, run, [*flags, *stop]), folder
        return made[name]

    return make


@pytest.mark.parametrize("name", sampled(LAYOUTS | MORE, lambda name: name in RESUMED))
@pytest.mark.proof
def test_resume_is_bitwise(pool, saved, name):
    size, layout = (LAYOUTS | MORE)[name]
    whole, first, folder = saved(name)
    save = ["--save", str(folder)] if "async" in layout else []
    # A job that starts again gives all its flags again, those of its first start too.
    started = ["--load-adapter", str(folder)]
    again = [*FLAGS, *layout.split(), "--load", str(folder), *save, *started]
    second = pool.run(size, run, again)
    for rank in range(size):
        expected, begun, ended = whole[rank][0], first[rank][0], second[rank][0]
        assert begun.losses + ended.losses == expected.losses
        assert begun.norms + ended.norms == expected.norms
        assert whole[rank][2].keys() == second[rank][2].keys()
        for key, values in whole[rank][2].items():
            assert np.array_equal(second[rank][2][key], values), key


@pytest.mark.parametrize(("one", "other"), sampled(PAIRS, lambda pair: pair in SAMPLE))
def test_any_layout_continues_in_any_other(pool, saved, one, other):
    size, layout = LAYOUTS[other]
    whole, _, folder = saved(one)
    source = open_checkpoint(folder).additions
    results = pool.run(size, run, [*FLAGS, *layout.split(), "--load", str(folder)])
    half = any(word in LAYOUTS[name][1] for name in (one, other) for word in ("--bf16", "--fp16"))
    for record, begin, _ in results:
        expected = whole[0][0].losses[STOP:]
        np.testing.assert_allclose(record.losses, expected, rtol=5e-3 if half else 1e-5)
        for (name, kind, _), values in begin.items():
            stored = source.tensor(name, kind).flatten().numpy()
            assert np.isin(values[values != 0], stored).all(), name


def test_a_checkpoint_has_adapters_alone_and_is_the_merged_model(base, saved):
    _, _, folder = saved("tp2-sp-zero1")
    source = open_checkpoint(folder)
    own, before = source.additions, open_checkpoint(base)
    assert isinstance(own, CheckpointReader)
    assert all(re.search(r"\.lora_(\w+_)?[ab]$", name) for name in own.names())
    assert set(own.kinds(own.names()[0])) == {"weight", "exp_avg", "exp_avg_sq"}
    assert list(source.names()) == list(before.names())
    changed = {n for n in source.names() if not torch.equal(source.tensor(n), before.tensor(n))}
    linear = ("attention.qkv", "mlp.up", "mlp.down")
    assert changed == {f"layers.{n}.{layer}.weight" for n in range(4) for layer in linear}
    weight, first = (
        source.tensor("layers.2.attention.qkv.weight"),
        before.tensor("layers.2.attention.qkv.weight"),
    )
    a, b = (own.tensor(f"layers.2.attention.qkv.lora_v_{kind}") for kind in "ab")
    torch.testing.assert_close(weight[-16:], first[-16:] + 5 / 3 * b @ a)
    assert torch.equal(weight[32:48], first[32:48])  # the keys


@pytest.mark.proof
def test_dora_begins_with_the_lengths_of_rows(pool, base):
    """And so with the outputs of the base."""
    flags = [*FLAGS, "--pretrained-checkpoint", str(base), "--train-iters", "1"]
    before = open_checkpoint(base)
    (plain,) = pool.run(1, run, flags)
    tensor = "--tensor-model-parallel-size 2 --zero-stage 1".split()
    for size, layout in ((1, ["--zero-stage", "3"]), (2, tensor)):
        results = pool.run(size, run, [*flags, "--use-dora", *layout])
        weight = before.tensor("layers.1.attention.qkv.weight")
        lengths = torch.linalg.vector_norm(weight, dim=1)[:32].numpy()
        found = [begin["layers.1.attention.qkv.lora_q_magnitude", "weight", 0]
                 for _, begin, _ in results]  # fmt: skip
        np.testing.assert_allclose(np.concatenate(found), lengths, rtol=1e-6)
        np.testing.assert_allclose(results[0][0].losses, plain[0].losses, rtol=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["--zero-stage 3", "--zero-stage 1 --bf16"])
def test_adapters_to_begin_with(pool, base, saved, tmp_path, layout):
    """Of a checkpoint of this project, and of the same in peft's form."""
    folder = saved("tp2-sp-zero1")[2]
    source = open_checkpoint(folder)
    write_peft(source, tmp_path)
    flags = [*FLAGS, "--pretrained-checkpoint", str(base), "--train-iters", "1", *layout.split()]
    for place in (folder, tmp_path):
        ((_, begin, _),) = pool.run(1, run, [*flags, "--load-adapter", str(place)])
        assert len(begin) == len(source.additions.names())
        for (name, kind, _), values in begin.items():
            stored = source.additions.tensor(name, kind).flatten().numpy()
            assert np.array_equal(values, stored), name
    with pytest.raises(CheckpointError, match="other adapters"):
        run([*flags, "--lora-rank", "4", "--load-adapter", str(tmp_path)])
    with pytest.raises(CheckpointError, match="neither a folder of peft"):
        run([*flags, "--load-adapter", str(base)])


@pytest.mark.proof
def test_a_whole_model_continues_from_merged_weights(pool, base, saved):
    folder = saved("dp1-zero0")[2]
    ((_, begin, _),) = pool.run(
        1, run, [*BASE, "--train-iters", "1", "--pretrained-checkpoint", str(folder)]
    )
    source, name = open_checkpoint(folder), "layers.0.mlp.down.weight"
    assert np.array_equal(begin[name, "weight", 0], source.tensor(name).flatten().numpy())
    assert not torch.equal(source.tensor(name), open_checkpoint(base).tensor(name))


@pytest.fixture
def moved(base, saved, tmp_path):
    """Adapters and base in places where they can be damaged."""
    folder, place = tmp_path / "adapters", tmp_path / "base"
    shutil.copytree(saved("dp1-zero0")[2], folder)
    shutil.copytree(base, place)
    return folder, place


def test_a_base_that_is_gone_is_named(pool, moved):
    folder, place = moved
    step = folder / "global_step3"
    record = json.loads((step / "base.json").read_text())
    record["path"] = str(place / "gone")
    (step / "base.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"gone, which is not there.*--pretrained-checkpoint"):
        locate_checkpoint(folder).open(verify=False)
    found = locate_checkpoint(folder)._replace(base=str(place))
    assert found.open(verify=False).base.folder.parent == place


def test_a_base_that_changed_is_refused(moved):
    folder, place = moved
    file = next((place / "global_step1").glob("weights-*.safetensors"))
    tensors = load_file(file)
    tensors["layers.1.mlp.down.weight"][3, 5] += 1e-6
    save_file(tensors, file)
    found = locate_checkpoint(folder)._replace(base=str(place))
    with pytest.raises(CheckpointError, match=r"damaged|differ"):
        found.open()
    source = found.open(verify=False)
    with pytest.raises(CheckpointError, match=r"another model.*layers.1.mlp.down.weight differ"):
        check_base(BaseRecord.read(found.folder), source.base, found.folder)


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        ([*FLAGS, "--load", "{whole}"], CheckpointError, "not saved with --lora"),
        ([*BASE, "--train-iters", "9", "--load", "{adapters}"], CheckpointError, "without"),
        (
            [*FLAGS, "--lora-rank", "4", "--load", "{adapters}"],
            CheckpointError,
            "other adapters.*--lora-rank 3",
        ),
        (
            [*FLAGS, "--lora-targets", "q_proj", "--load", "{adapters}"],
            CheckpointError,
            "other adapters.*q_proj v_proj",
        ),
        ([*FLAGS, "--save", "{new}"], ConfigError, "--pretrained-checkpoint"),
        (
            [
                *FLAGS,
                *"--lora-alpha 6 --pretrained-checkpoint {whole} --load-adapter".split(),
                "{adapters}",
            ],
            CheckpointError,
            "multiplied by 1.66667, this run's by 2. Its flags are .*--lora-alpha 5",
        ),
    ],
    ids=["whole-model", "without-lora", "rank", "targets", "no-base", "alpha"],
)
def test_refused(base, saved, tmp_path, flags, error, words):
    folder = saved("dp1-zero0")[2]
    places = {"whole": base, "adapters": folder, "new": tmp_path / "new"}
    with pytest.raises(error, match=words):
        run([flag.format(**places) for flag in flags])
