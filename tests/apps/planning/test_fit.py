"""A run that memory has no room for is refused before its model is built."""

from types import SimpleNamespace

import pytest
import torch

from megatron.apps.planning import fit
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser
from megatron.families import spec_of
from megatron.model.layer_list import LayerStack
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import run_of

PARSER = FlagParser(*FLAG_CLASSES)
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--lr 1 --train-iters 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 127"
)
CPU = torch.device("cpu")


@pytest.fixture
def judged(monkeypatch):
    """Judges a run on a machine with so many free bytes, all of whose ranks are on it."""

    def judge(words: str, free: float, ranks: int = 1, pipeline: int = 1) -> None:
        run = run_of(PARSER.settings(f"{MODEL} {words}".split()), ranks)
        monkeypatch.setattr(fit, "free_memory", lambda: free)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        tensor = run.config.parallel.tensor_model_parallel_size
        sizes = {"pipeline": pipeline, "data": ranks // pipeline // tensor, "tensor": tensor}
        world = SimpleNamespace(rank=0, size=ranks)
        mesh = SimpleNamespace(pipeline=SimpleNamespace(rank=0), sizes=sizes, world=world)
        fit.check_fits(run.config, run.content, mesh, CPU)

    return judge


def parameters(words: str = "") -> int:
    """Numbers in the tensors of the model itself, on the CPU."""
    config = run_of(PARSER.settings(f"{MODEL} {words}".split()), 1).config
    stack = LayerStack(
        spec_of(config.model, config.parallel).layers(TensorParallel()), config.parallel
    )
    return sum({id(param): param.numel() for param in stack.parameters()}.values())


@pytest.mark.parametrize(
    ("words", "ranks", "bytes_each", "pipeline"),
    [
        ("", 1, 4 + 8, 1),  # float32: weights, two moments
        ("", 2, 2 * (4 + 8), 1),  # replicas share the machine
        ("--zero-stage 1", 2, 2 * 4 + 12, 1),  # main weights and moments divided
        ("--zero-stage 3", 2, 4 + 12, 1),
        ("--bf16 --zero-stage 1", 1, 2 + 12, 1),
        ("--optimizer sgd", 1, 4 + 4, 1),
        ("--skip-train", 1, 4, 1),
        ("--pipeline-model-parallel-size 2", 2, 4 + 8, 2),
    ],
)
def test_weights_and_moments_are_the_bound(judged, words, ranks, bytes_each, pipeline):
    count = parameters()
    if pipeline == 2:  # the tied embedding is on both stages
        count += 128 * 64
    judged(words, bytes_each * count + 1, ranks, pipeline)
    with pytest.raises(ConfigError, match="weights and the optimizer state of this model need"):
        judged(words, bytes_each * count - 1, ranks, pipeline)


def test_the_message_says_what_helps(judged):
    with pytest.raises(ConfigError) as refused:
        judged("", 1000, ranks=2)
    for words in (
        "for its 2 ranks",
        "--zero-stage 3 divides it over the 2 data-parallel ranks",
        "--tensor-model-parallel-size",
        "--use-precision-aware-optimizer",
        "--qlora",
        "tools/plan.py",
        "MEGATRON_IGNORE_MEMORY=1",
    ):
        assert words in str(refused.value)
    assert "offload" not in str(refused.value)  # to where it is already
    with pytest.raises(ConfigError) as refused:
        judged("--zero-stage 3", 1000, ranks=2)
    assert "--zero-stage 3 divides" not in str(refused.value)


def test_a_user_may_start_it_all_the_same(judged, monkeypatch, caplog):
    monkeypatch.setenv(fit.IGNORE, "1")
    judged("", 1000)
    assert "weights and the optimizer state" in caplog.text


def test_what_may_not_fit_is_a_warning(judged, caplog):
    judged("", 12 * parameters() + 1000)
    assert "with gradients and activations" in caplog.text
    caplog.clear()
    judged("", 1e12)
    assert not caplog.text


def test_the_memory_of_a_container_counts(tmp_path, monkeypatch):
    for name, value in (("max", "3000"), ("current", "1000"), ("endless", "max\n")):
        (tmp_path / name).write_text(value)
    files = [(str(tmp_path / "max"), str(tmp_path / "current")), ("/no/such", "/file")]
    monkeypatch.setattr(fit, "_CGROUPS", files)
    assert fit.free_memory() == 2000
    monkeypatch.setattr(fit, "_CGROUPS", [(str(tmp_path / "endless"), str(tmp_path / "current"))])
    assert fit.free_memory() > 2000


def test_local_ranks_beyond_those_of_the_run_are_not_counted(monkeypatch):
    """LOCAL_WORLD_SIZE can be left over from another launcher."""
    run = run_of(PARSER.settings(MODEL.split()), 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    one = SimpleNamespace(rank=0, size=1)
    mesh = SimpleNamespace(pipeline=one, world=one, sizes={"pipeline": 1, "data": 1, "tensor": 1})
    fit.check_fits(run.config, run.content, mesh, CPU)
