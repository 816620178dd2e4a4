"""CUDA graphs of compiled blocks, as far as that goes without a GPU: what keeps them right.

A graph writes its outputs to the same memory each time. Here a module's backward pass does so.
"""

import sysconfig
from types import SimpleNamespace

import pytest
import torch
from configs import run_config
from torch import Tensor, nn

from megatron.config.engine import FastPathsConfig
from megatron.engine import compilation
from megatron.engine.backend import PlainBackend, runs_graphs
from megatron.engine.compilation import compile_blocks, to_compile
from megatron.kernels import compiler
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerSequence, LayerState
from megatron.model.spec import ModelSpec

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WITH_GRAPHS = MODES[1:3]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, memory: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.memory = memory
        return x @ weight

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        torch.mm(x.t(), grad, out=ctx.memory)
        return None, ctx.memory.detach(), None  # another tensor on the same memory


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.memory = torch.empty(3, 2, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, self.memory)


@pytest.fixture
def compiled(monkeypatch):
    """Compiles for a GPU; of compiling nothing but the call is left."""
    monkeypatch.setattr(torch, "compile", lambda forward, mode, dynamic: forward)
    monkeypatch.setattr(compilation, "missing_compiler", lambda device_type: None)
    monkeypatch.setattr(torch.compiler, "assume_constant_result", lambda function: function)

    def build(mode: str, device: torch.device = GPU) -> Graph:
        block = Graph()
        compile_blocks(
            [LayerSequence([], [block])], FastPathsConfig(torch_compile_mode=mode), device
        )
        return block.to(torch.bfloat16)  # as DeepSpeed does, after that

    return build


def two_micro_batches(block: Graph) -> tuple[Tensor, Tensor]:
    """The sum of the gradients that autograd has, and what it should be."""
    expected = torch.zeros(3, 2, dtype=torch.bfloat16)
    for number in (1, 2):
        x = torch.full((1, 3), float(number), dtype=torch.bfloat16)
        block(x).sum().backward()
        expected += x.t()
    assert block.weight.grad is not None
    return block.weight.grad, expected


@pytest.mark.parametrize("mode", WITH_GRAPHS)
def test_gradients_of_graphs_add_up(compiled, mode):
    found, expected = two_micro_batches(compiled(mode))
    assert torch.equal(found, expected)


def test_without_care_they_do_not(compiled):
    """The reason for the test above."""
    found, expected = two_micro_batches(compiled("default"))
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_copied_for_graphs_only(compiled, mode, device):
    graphs = mode in WITH_GRAPHS and device == GPU
    assert bool(compiled(mode, device).weight._backward_hooks) == graphs
    for asked in ("on", "off"):
        fast = FastPathsConfig(torch_compile=asked, torch_compile_mode=mode)
        assert runs_graphs(run_config(fast_paths=fast), device) == (graphs and asked == "on")


@pytest.mark.parametrize("graphs", [True, False])
def test_each_pass_through_the_model_is_announced(monkeypatch, graphs):
    """A block's input is then not taken for what an earlier pass has left behind."""
    told: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: told.append("mark"))

    class Engine:
        optimizer = None
        set_gradient_accumulation_boundary = step = lambda *_: None

        def __call__(self, state):
            told.append("forward")
            return state.with_loss(LM_LOSS, torch.zeros(()))

        def backward(self, loss):
            told.append("backward")

    batch = SimpleNamespace(to=lambda *_, **__: batch)
    spec = ModelSpec(lambda _: [], lambda _: LayerState(torch.zeros(1, 1)), lambda *_: {})
    backend = PlainBackend.__new__(PlainBackend)
    backend._spec, backend._device = spec, CPU
    backend._graphs, backend._engine = graphs, Engine()
    backend.accumulate(iter([batch, batch]), [None, None])
    backend.evaluate(iter([batch, batch]), 2, spec.loss_measure)
    forward = ["mark", "forward"] if graphs else ["forward"]
    assert told == [*forward, "backward"] * 2 + forward * 2


@pytest.mark.parametrize("place", ["include", "CPATH", None])
def test_without_pythons_headers_blocks_stay_eager(monkeypatch, request, tmp_path, capsys, place):
    """Triton's start code is compiled against them; without them the first step would fail."""
    for name in ("include", "elsewhere"):
        (tmp_path / name).mkdir()
    if place:
        folder = "include" if place == "include" else "elsewhere"
        (tmp_path / folder / "Python.h").touch()
    monkeypatch.setenv("CPATH", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setattr(compiler.shutil, "which", lambda name: name)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: name)
    compiler.missing_compiler.cache_clear()
    request.addfinalizer(compiler.missing_compiler.cache_clear)
    config = run_config(fast_paths=FastPathsConfig(torch_compile="on"))
    assert to_compile(config, GPU) == (place is not None)
    said = f"--torch-compile: no Python.h in {tmp_path / 'include'} (python3-dev, python3-devel); "
    assert (said in capsys.readouterr().out) == (place is None)
