"""Updates of stored states: against float32 states, the same compiled, however slices are cut, and
the bytes that they move."""

import re
from functools import partial
from itertools import combinations
from typing import NamedTuple

import pytest
import torch
from flat_partitions import flat_partitions, set_gradients
from torch import Tensor, nn

from megatron.config.layouts import StateDtypes
from megatron.engine.update import partition_update
from megatron.engine.update.adam import BLOCK, Decoded, ElementwiseAdam, Float32States
from megatron.engine.update.partition_update import PartitionUpdate
from megatron.features.low_bit_states.stored_states import StoredPartition, StoredStates
from megatron.kernels.compiler import missing_compiler

BETAS, EPS = (0.9, 0.999), 1e-8
DTYPES = {
    "exact": StateDtypes(),
    "A": StateDtypes("fp32", "bf16", "bf16"),
    "B": StateDtypes("bf16", "bf16", "bf16"),
    "C": StateDtypes("fp32", "int8", "int8"),
    "mixed": StateDtypes("bf16", "int8", "fp32"),
}
COUNT = 40 * BLOCK


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(partition_update, "LEAST", 2 * BLOCK)


def parameters() -> list[list[nn.Parameter]]:
    draw = torch.Generator().manual_seed(3)
    shapes = [[(64, 48), (30, 101), (9,), (40, 64)], [(48,), (7,)]]
    return [
        [nn.Parameter(torch.randn(shape, generator=draw).bfloat16()) for shape in group]
        for group in shapes
    ]


class Stored:
    """Partitions of stored states and their update."""

    def __init__(self, name: str, most: int = 1 << 20) -> None:
        self.form, params = StoredStates(DTYPES[name]), parameters()
        self.wrapper, self.optimizer = flat_partitions(params, padding=3)
        self.form.take_main_weights(self.wrapper, self.optimizer)
        self.form.keys = {
            param: 10**6 * n for n, param in enumerate(p for group in params for p in group)
        }
        kernel = ElementwiseAdam(self.form, BETAS, EPS, compiled=False)
        self.update = PartitionUpdate(self.wrapper, self.optimizer, self.form, kernel, most)

    def step(self, number: int, held: bool = False) -> None:
        draw = torch.Generator().manual_seed(number)
        set_gradients(
            self.wrapper,
            [
                [torch.randn(param.shape, generator=draw).bfloat16() for param in group]
                for group in parameters()
            ],
        )
        self.update.step(torch.tensor(float("nan") if held else 0.5), torch.tensor(float(held)))

    def tensors(self) -> list[Tensor]:
        mains = self.wrapper.single_partition_of_fp32_groups
        states = [self.optimizer.state[main] for main in mains]
        return [*mains, *(tensor for state in states for tensor in state.values())]

    def partitions(self) -> list[StoredPartition]:
        return [
            self.form.partition(main, self.optimizer.state[main])
            for main in self.wrapper.single_partition_of_fp32_groups
        ]


@pytest.mark.parametrize("name", DTYPES)
def test_does_not_depend_on_how_slices_are_cut(name):
    whole, cut = Stored(name), Stored(name, most=BLOCK)
    for step in range(3):
        whole.step(step)
        cut.step(step)
    assert all(map(torch.equal, whole.tensors(), cut.tensors()))


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_not_finite_changes_nothing(name):
    stored = Stored(name)
    for step in range(2):
        stored.step(step)
    before = [tensor.clone() for tensor in stored.tensors()]
    stored.step(2, held=True)
    assert all(map(torch.equal, before, stored.tensors()))
    stored.step(3)
    assert not all(map(torch.equal, before, stored.tensors()))


@pytest.mark.parametrize("name", DTYPES)
def test_reads_and_writes_ranges(name):
    """What is read can be written to a new partition, range by range, with the same bits."""
    stored, copy = Stored(name), Stored(name)
    for step in range(2):
        stored.step(step)
    copy.step(5)
    for source, target in zip(stored.partitions(), copy.partitions(), strict=True):
        length = source._model.numel()
        edges = sorted(
            {0, length, *(place for place in (5, 300, 301, 1024, 6000) if place < length)}
        )
        ranges = list(zip(edges, edges[1:], strict=False))
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            assert source.has(kind)
            for start, end in reversed(ranges):
                values = source.get(kind, start, end - start)
                assert values.dtype == torch.float32 and len(values) == end - start
                target.set(kind, start, values)
    tensors = zip(stored.tensors(), copy.tensors(), strict=True)
    assert all(torch.equal(a, b) for a, b in tensors if a.dim())


def test_each_state_has_random_bits_of_its_own():
    elements, step = torch.arange(1 << 16, dtype=torch.int32), torch.tensor(3)
    for one, other in combinations(StoredStates(DTYPES["B"]).bits(elements, step), 2):
        assert abs(((one ^ other) < 0).double().mean() - 0.5) < 0.01  # 5 standard deviations


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (bf16), main weights and moments of a slice."""
    draw = torch.Generator().manual_seed(seed)
    grad, main, first = torch.randn(3, COUNT, generator=draw)
    second = torch.randn(COUNT, generator=draw).square() * 1e-2
    return grad.bfloat16(), main * 0.02, first * 0.1, second


def state_of(form: StoredStates, main: Tensor, first: Tensor, second: Tensor) -> tuple:
    model = main.bfloat16()
    state = form.create(model)
    alongside = form._main.zeros(COUNT, model.device)
    state |= zip(form._names["weight"], alongside, strict=True)
    partition = form.partition(model, state)
    for kind, values in (("weight", main), ("exp_avg", first), ("exp_avg_sq", second)):
        partition.set(kind, 0, values)
    return form.tensors(model, model, state)


def decoded(form: StoredStates, stored: tuple[Tensor, ...]) -> Decoded:
    """A slice's numbers, flat."""
    _, _, views = form.arrange(torch.empty(COUNT), torch.tensor(0), stored)
    return Decoded(*(each.reshape(-1) for each in form.decode(views)))


def update(
    adam: ElementwiseAdam, grad: Tensor, stored: tuple[Tensor, ...], elements: Tensor | None = None
) -> None:
    group, held = {"lr": 1e-3, "weight_decay": 0.1}, torch.tensor(0.0)
    apply = adam.of_group(group, torch.tensor(7.0), torch.tensor(0.7), held)
    apply(grad, torch.tensor(11, dtype=torch.int32) if elements is None else elements, stored)


@pytest.mark.parametrize("name", DTYPES)
def test_one_update_against_float32_states(name):
    """From the same numbers: exact main weights bit for bit; others, and moments, to one of the two
    neighbours, and right in the mean."""
    form, (grad, main, first, second) = StoredStates(DTYPES[name]), drawn(1)
    stored = state_of(form, main, first, second)
    before = decoded(form, stored)
    wide = (before.weight.bfloat16(), *(each.clone() for each in before))
    update(ElementwiseAdam(Float32States(), BETAS, EPS, compiled=False), grad, wide)
    update(ElementwiseAdam(form, BETAS, EPS, compiled=False), grad, stored)
    after = decoded(form, stored)
    dtypes = DTYPES[name]
    gaps = {"fp32": 0.0, "bf16": 2.0**-7, "int8": 2.0**-3}
    for found, expected, gap in (
        (after.weight, wide[1], 0.0 if dtypes.main_params == "fp32" else gaps["bf16"]),
        (after.exp_avg, wide[2], gaps[dtypes.exp_avg]),
        (after.exp_avg_sq, wide[3], gaps[dtypes.exp_avg_sq]),
    ):
        if not gap:
            assert torch.equal(found, expected)
            continue
        assert not torch.equal(found, expected)
        floor = expected.abs().max() * 2.0**-15
        assert bool(((found - expected).abs() <= gap * expected.abs() + floor).all())
        error = ((found - expected) / expected.abs().mean()).double()
        assert abs(error.mean()) < 5 * error.std() / COUNT**0.5
    assert torch.equal(stored[0], form.model_weights(after.weight))


def test_compiled_code_has_no_number_of_a_format_as_input(monkeypatch):
    """Added to int32 it would be int64 in code for GPUs, whose bits are not those of a float32."""
    inputs: list[list] = []

    def note(graph, example_inputs):
        inputs.append(list(example_inputs))
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note))
    form = StoredStates(DTYPES["C"])
    adam = ElementwiseAdam(form, BETAS, EPS, compiled=True)
    grad, *numbers = drawn(1)
    stored = state_of(form, *numbers)
    update(adam, grad, stored)
    update(adam, grad[: 3 * BLOCK], sliced(stored, 0, 3))
    torch.compiler.reset()
    (found,) = inputs
    assert sum(not isinstance(each, Tensor) for each in found) == 1  # the number of blocks


class Compiled(NamedTuple):
    """A format's slice after an update by the code that torch generates, the code, and the numbers
    of graphs for pieces of one gradient, and for collected ones too."""

    name: str
    after: tuple[Tensor, ...]
    code: str
    graphs: tuple[int, int]


COMPILED = [pytest.param(name, marks=pytest.mark.proof) for name in "ABC"]


@pytest.fixture(scope="module", params=COMPILED)
def compiled(request):
    if missing_compiler("cpu"):
        pytest.skip("needs a C++ compiler")
    import torch._dynamo.testing
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    form, (grad, *numbers) = StoredStates(DTYPES[request.param]), drawn(1)
    adam = ElementwiseAdam(form, BETAS, EPS, compiled=False)
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    adam._update = torch.compile(adam.update, dynamic=True, fullgraph=True, backend=counter)
    stored = state_of(form, *numbers)
    with config.patch("fx_graph_cache", False):
        _, (code,) = run_and_get_code(update, adam, grad, stored)
    after = tuple(each.clone() for each in stored)
    for first, end in ((0, 10), (7, 27)):
        update(adam, grad[first * BLOCK : end * BLOCK], sliced(stored, first, end))
    whole = counter.frame_count
    elements = torch.arange(10 * BLOCK, dtype=torch.int32)
    update(adam, grad[: 10 * BLOCK], sliced(stored, 0, 10), elements)
    yield Compiled(request.param, after, code, (whole, counter.frame_count))
    torch.compiler.reset()


def sliced(stored: tuple[Tensor, ...], first: int, end: int) -> tuple[Tensor, ...]:
    """These blocks of a slice."""
    sizes = [BLOCK if each.numel() == COUNT else 1 for each in stored]
    return tuple(e[first * n : end * n] for e, n in zip(stored, sizes, strict=True))


@pytest.mark.proof
def test_compiled_as_eager(compiled):
    """The same but where the compiler joins a product and a sum, which rounds differently."""
    form, (grad, *numbers) = StoredStates(DTYPES[compiled.name]), drawn(1)
    expected = state_of(form, *numbers)
    update(ElementwiseAdam(form, BETAS, EPS, compiled=False), grad, expected)
    for a, b in zip(decoded(form, compiled.after), decoded(form, expected), strict=True):
        near = torch.isclose(a, b, rtol=1e-5, atol=1e-8)
        assert near.float().mean() > 0.999
        torch.testing.assert_close(a, b, rtol=0.13, atol=float(b.abs().max()) * 2**-15)
    assert compiled.graphs == (1, 2)


MOVED = {"A": (2 + 2 + 2 + 4, 2 + 2 + 4), "B": (2 + 2 + 4, 2 + 4), "C": (2 + 2 + 2 + 2, 2 + 2 + 2)}
"""Bytes per element that an update loads (gradient, weight, what it lacks, moments) and stores.
Moments in 8 bits have a scale per block, and on CPUs what is encoded is stored in between."""


def test_bytes_per_parameter(compiled):
    """One kernel; with the norm of the gradients, which reads 2 bytes, a step moves 20, 16 and 16
    bytes of a parameter, where float32 states move 30."""
    code = compiled.code
    (signature,) = re.findall(r"cpp_pybinding\(\[(.*?)\]", code)
    (call,) = re.findall(r"^ +cpp_fused_\w+\((.*?)\)$", code, re.MULTILINE)
    size = {"at::BFloat16": 2, "int16_t": 2, "int8_t": 1, "uint8_t": 1}
    loads, stores = {}, {}
    for kind, argument in zip(signature.split(", "), call.split(", "), strict=True):
        word, read = kind.strip("'").removesuffix("*"), "const" in kind
        width = size.get(word.removeprefix("const "), 0)
        (loads if read else stores)[argument] = width
    assert (sum(loads.values()), sum(stores.values())) == MOVED[compiled.name]
