"""Which layers multiply in 8 bits, on which devices, and what it does to training."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from configs import model_config, run_config
from gpt_forward import forward

from megatron.config import ConfigError, ParallelConfig, TrainingConfig
from megatron.config.engine import FastPathsConfig
from megatron.engine import build as build_module
from megatron.engine import compilation
from megatron.engine.build import build_engine
from megatron.families import build_model
from megatron.features.float8 import kernels
from megatron.features.float8.kernels import check_float8, use_float8
from megatron.features.float8.linear import Float8
from megatron.features.float8.state import Float8State
from megatron.model.layer_list import LayerStack, initialise
from megatron.parallel.layers import ColumnParallelLinear
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import Init
from megatron.parallel.tensor_parallel import TensorParallel

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LENGTH, VOCAB = 32, 64
MODEL = model_config(
    num_layers=3, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2,
    kv_channels=8, seq_length=LENGTH, max_position_embeddings=LENGTH, padded_vocab_size=VOCAB,
    unpadded_vocab_size=VOCAB, attention_dropout=0.0, hidden_dropout=0.0, swiglu=True,
    normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False,
)  # fmt: skip


def build(recompute: str | None = None, **fast: object) -> LayerStack:
    method = "uniform" if recompute == "full" else None
    parallel = ParallelConfig(recompute_granularity=recompute, recompute_method=method)
    stack = build_model(MODEL, parallel)
    for name, param in stack.canonical_parameters():
        initialise(name, param, 1)
    config = run_config(model=MODEL, fast_paths=FastPathsConfig(**fast))
    use_float8(stack.blocks(), config)
    return stack


def layers(stack: LayerStack) -> set[str]:
    return {name for name, module in stack.named_modules() if getattr(module, "kernel", None)}


LINEARS = ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")


def test_the_four_linear_layers_of_every_block():
    stack = build(fp8_format="hybrid")
    assert layers(stack) == {f"{n}.{name}" for n in (2, 3, 4) for name in LINEARS}
    assert stack.blocks()[0].mlp.up.kernel == Float8(hybrid=True, recipe="tensorwise")
    rows = build(fp8_format="e4m3", fp8_recipe="rowwise").blocks()[0].mlp.up.kernel
    assert rows == Float8(hybrid=False, recipe="rowwise")
    assert not layers(build())


@pytest.mark.parametrize("inputs, outputs", [(32, 16 + 8), (24, 32)])
def test_layers_of_features_with_other_sizes_are_refused(inputs, outputs):
    stack = build()
    bias = {"bias": False, "init": Init(0.1), "tp": TensorParallel()}
    stack.blocks()[1].attention.in_proj = ColumnParallelLinear(inputs, (outputs,), **bias)
    config = run_config(model=MODEL, fast_paths=FastPathsConfig(fp8_format="hybrid"))
    text = f"multiples of 16: the weight of attention.in_proj in block 1 is {outputs} x {inputs};"
    with pytest.raises(ConfigError, match=text):
        use_float8(stack.blocks(), config)


def test_first_and_last_blocks_stay_in_bf16():
    flags = {"fp8_format": "hybrid", "first_last_layers_bf16": True}
    assert layers(build(**flags)) == {f"3.{name}" for name in LINEARS}
    found = layers(build(**flags, num_layers_at_start_in_bf16=0))
    assert found == {f"{n}.{name}" for n in (2, 3) for name in LINEARS}


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_what_the_gpu_must_have(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    config = run_config(model=MODEL, fast_paths=FastPathsConfig(fp8_format="e4m3"))
    if capability >= (8, 9):
        return check_float8(config, GPU)
    with pytest.raises(ConfigError, match=r"capability 8\.9 or more .* a card has 8\.0"):
        check_float8(config, GPU)
    monkeypatch.setattr(build_module, "PlainBackend", None)  # before a model is made
    with pytest.raises(ConfigError, match=r"capability 8\.9"):
        build_engine(config, {}, None, Mesh(), GPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "cuda"), [((8, 9), "12.9"), ((9, 0), "12.6"), ((10, 0), "13.0")]
)
def test_where_blocks_cannot_be_multiplied(monkeypatch, capability, cuda):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    fast = FastPathsConfig(fp8_format="e4m3", fp8_recipe="blockwise")
    with pytest.raises(ConfigError, match=r"capability 9 \(Hopper\) .* a card has .* for 1"):
        check_float8(run_config(model=MODEL, fast_paths=fast), GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    check_float8(run_config(model=MODEL, fast_paths=fast), GPU)


def test_without_a_compiler_it_is_said_to_be_slow(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "missing_compiler", lambda kind: "no C compiler found")
    fast = FastPathsConfig(fp8_format="e4m3")
    check_float8(run_config(model=MODEL, fast_paths=fast), GPU)
    assert "no C compiler found; casts run operator by operator" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("compiled", "iterations", "ranks", "words"),
    [
        ("on", 10, 1, None),
        ("auto", 200, 1, None),
        ("auto", 199, 1, "--torch-compile auto: 199 iterations .* --torch-compile on compiles"),
        ("off", 200, 1, "--torch-compile off; casts are kernels of their own, .*-compile on com"),
        ("on", 200, 2, None),
    ],
)
def test_blocks_that_are_not_compiled_whole_are_said_to_be_slow(
    monkeypatch, capsys, compiled, iterations, ranks, words
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in (kernels, compilation):
        monkeypatch.setattr(module, "missing_compiler", lambda kind: None)
    config = run_config(
        model=MODEL,
        fast_paths=FastPathsConfig(fp8_format="hybrid", torch_compile=compiled),
        parallel=ParallelConfig(tensor_model_parallel_size=ranks),
        training=TrainingConfig(train_iters=iterations),
    )
    check_float8(config, GPU)
    said = capsys.readouterr().out
    assert said.count("\n") == (words is not None)
    assert words is None or re.search(f"^--fp8-format hybrid: {words}", said)


def test_on_a_cpu_it_is_said_to_be_slow(capsys):
    fast = FastPathsConfig(fp8_format="hybrid")
    check_float8(run_config(model=MODEL, fast_paths=fast), CPU)
    assert "slower than others" in capsys.readouterr().out
    check_float8(run_config(model=MODEL), CPU)
    assert not capsys.readouterr().out


def batches(steps: int) -> list[torch.Tensor]:
    """Texts in which a token tells its successor, most of the time."""
    generator = torch.Generator().manual_seed(3)
    following = torch.randperm(VOCAB, generator=generator)
    found = []
    for _ in range(steps):
        tokens = [torch.randint(VOCAB, (4,), generator=generator)]
        for _ in range(LENGTH):
            stray = torch.randint(VOCAB, (4,), generator=generator)
            kept = torch.rand(4, generator=generator) < 0.9
            tokens.append(torch.where(kept, following[tokens[-1]], stray))
        found.append(torch.stack(tokens, 1))
    return found


def state_of(stack: LayerStack, **fast: object) -> Float8State:
    names = {param: name for name, param in stack.canonical_parameters()}
    config = FastPathsConfig(fp8_format="hybrid", **fast)
    return Float8State(stack.blocks(), names, config, Mesh(), partitioned=False)


def train(stack: LayerStack, steps: int, recipe: str | None = None) -> list[float]:
    """With a recipe weights are kept in 8 bits as in a run."""
    optimizer = torch.optim.AdamW(stack.parameters(), lr=3e-3)
    losses = []
    state = state_of(stack, fp8_recipe=recipe or "tensorwise") if recipe else None
    for text in batches(steps):
        if state is not None:
            state.refresh()
        with torch.autocast("cpu", torch.bfloat16):
            logits = forward(stack, text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if state is not None:
            state.end_step()
        optimizer.step()
        losses.append(float(loss))
    return losses


@functools.cache
def trained_in_bf16() -> list[float]:
    return train(build(), 120)


@pytest.mark.proof
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_training_next_to_bf16(recipe):
    """From 4.2 nats down to about 1; the mean of the last steps within 3 %."""
    plain = trained_in_bf16()
    found = train(build(fp8_format="hybrid", fp8_recipe=recipe), 120, recipe)
    assert found != plain
    assert found[0] == pytest.approx(plain[0], rel=5e-3)
    last = [sum(losses[-20:]) / 20 for losses in (found, plain)]
    assert last[1] < 2.0 < plain[0]
    assert last[0] == pytest.approx(last[1], rel=0.03)


@pytest.mark.proof
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_training(recompute):
    flags = {"fp8_format": "hybrid"}
    assert train(build(recompute, **flags), 3) == train(build(**flags), 3)
    flags["fp8_recipe"] = "delayed"
    found, expected = (train(build(each, **flags), 3, "delayed") for each in (recompute, None))
    assert found == expected


def test_kept_weights_give_the_same_training():
    flags = {"fp8_format": "hybrid"}
    assert train(build(**flags), 3, "tensorwise") == train(build(**flags), 3)


@pytest.mark.parametrize(
    ("algorithm", "margin", "chosen"),
    [("most_recent", 0, [3.0, 1.0, 1.0, 2.0]), ("max", 1, [6.0, 6.0, 6.0, 4.0])],
)
def test_the_history_of_largest_magnitudes(algorithm, margin, chosen):
    """Of three steps; the third step's is infinite, and the fourth's are two micro batches'."""
    stack = build(fp8_format="hybrid", fp8_recipe="delayed")
    state = state_of(
        stack, fp8_recipe="delayed", fp8_amax_history_len=3, fp8_amax_compute_algo=algorithm,
        fp8_margin=margin,
    )  # fmt: skip
    layer = stack.blocks()[1].mlp.up
    assert not layer.weight_kept.measured and not state.history.state()
    found = []
    for magnitudes in ([3.0], [1.0], [torch.inf], [2.0, 0.5]):
        for each in magnitudes:
            (layer.weight_kept.largest * each).sum().backward()
        state.end_step()
        found.append(float(layer.weight_kept.largest[0]))
    assert layer.weight_kept.measured and layer.weight_kept.largest.grad is None
    # With "max" the first three are 3, doubled by the margin; then it has left the history.
    assert found == chosen
    key = "layers.1.mlp.up.weight"
    stored = state.history.state()
    assert stored[key][:, 0].tolist() == [2.0, 1.0, 1.0]
    other = build(fp8_format="hybrid", fp8_recipe="delayed")
    longer = state_of(other, fp8_recipe="delayed", fp8_amax_history_len=4)
    assert not longer.history.load({}) and not other.blocks()[1].mlp.up.weight_kept.measured
    assert longer.history.load(stored)
    assert longer.history.state()[key][:, 0].tolist() == [2.0, 1.0, 1.0, 0.0]
    assert other.blocks()[1].mlp.up.weight_kept.measured
    assert float(other.blocks()[1].mlp.up.weight_kept.largest[0]) == 2.0


def test_weights_are_those_of_bf16():
    """Names, shapes and dtypes: a checkpoint does not know of 8 bits."""
    ours, plain = build(fp8_format="hybrid"), build()
    for (name, param), (other, same) in zip(
        ours.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(param, same) and param.dtype == same.dtype
