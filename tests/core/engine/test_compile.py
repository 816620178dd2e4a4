"""Compiled blocks: how often something is compiled, and that results are those of eager ones."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from configs import model_config, run_config
from functorch.compile import make_boxed_func
from gpt_forward import forward
from graph_counts import graphs, graphs_alone
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.nn.attention import flex_attention

from megatron.config import ModelConfig, ParallelConfig, TrainingConfig
from megatron.config.engine import FastPathsConfig
from megatron.engine import compilation
from megatron.engine.backend import runs_graphs
from megatron.engine.compilation import compile_blocks, to_compile
from megatron.families import build_model
from megatron.features.curriculum.flags import CurriculumConfig
from megatron.features.float8 import mlp
from megatron.features.float8.casts import cast
from megatron.features.float8.linear import Float8
from megatron.features.float8.operators import casts
from megatron.features.float8.state import Float8State
from megatron.features.gpu_attention import kernels as gpu_kernels
from megatron.features.gpu_attention.kernels import CUDNN_FIRST
from megatron.kernels.compiler import missing_compiler
from megatron.model import attention_flex
from megatron.model.attention_backends import KernelOrder
from megatron.model.layer_list import LayerStack, initialise
from megatron.parallel import softmax_loss
from megatron.parallel.layers import ParallelLinear
from megatron.parallel.mesh import Mesh

BLOCKS, LENGTH, VOCAB = 4, 16, 64
LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False,
}  # fmt: skip
KINDS: dict[str, dict] = {
    "gpt2": {},
    "gpt2-dropout": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "llama": LLAMA,
    "llama-gqa-window": LLAMA | {"num_query_groups": 2, "sliding_window": 5},
    "gemma": LLAMA | {"qk_layernorm": True, "post_norm": True, "apply_layernorm_1p": True},
    "bloom": {"position_embedding_type": "alibi"},
    "neox": {"parallel_residual": True},
    "gpt-oss": LLAMA
    | {"swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0, "num_query_groups": 2}
    | {"activation_func_clamp_value": 7.0, "softmax_type": "learnable"},
}
GEMMA2 = {"num_query_groups": 2, "sliding_window": 5, "window_attn_skip_freq": 2} | {
    "attn_logit_softcapping": 5.0
}

OTHERS = {
    "gemma2": LLAMA | GEMMA2,
    # The window is no narrower than the text: but for their bases the blocks are equal.
    "gemma3": LLAMA
    | {"sliding_window": LENGTH, "window_attn_skip_freq": 2, "rotary_base_local": 100.0},
}


def config(kind: str) -> ModelConfig:
    shape = {
        "num_layers": BLOCKS, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4,
        "num_query_groups": 4, "kv_channels": 8, "seq_length": LENGTH,
        "max_position_embeddings": 2 * LENGTH, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "padded_vocab_size": VOCAB, "unpadded_vocab_size": VOCAB,
    }  # fmt: skip
    return model_config(**shape | (KINDS | OTHERS)[kind])


def build(kind: str, recompute: str | None = None, float8: Float8 | None = None) -> LayerStack:
    method = "uniform" if recompute == "full" else None
    parallel = ParallelConfig(recompute_granularity=recompute, recompute_method=method)
    if recompute == "mlp_act":
        parallel = ParallelConfig(recompute_granularity="selective", recompute_modules=("mlp_act",))
    stack = build_model(config(kind), parallel)
    for name, param in stack.canonical_parameters():
        initialise(name, param, 1)
    for module in stack.modules():
        if float8 is not None and isinstance(module, ParallelLinear):
            module.kernel = float8
    return stack


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def without_generated_code():
    with graphs_alone():
        yield


def in_sample(*sample: tuple, of: Iterable[tuple]) -> list:
    """All cases; those not in the sample take long together."""
    return [pytest.param(*each, marks=() if each in sample else pytest.mark.proof) for each in of]


def compiled(stack: LayerStack, budget: float | None = None) -> LayerStack:
    paths = FastPathsConfig(activation_memory_budget=budget)
    compile_blocks([stack.sequence], paths, torch.device("cpu"))
    return stack


def outcome(
    stack: LayerStack,
    length: int = LENGTH,
    seed: int = 0,
    documents: bool = False,
    model: ModelConfig | None = None,
) -> list[Tensor]:
    """Logits and all gradients; with ``model``, by FlexAttention where that can be."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (2, length), generator=generator)
    ids = torch.randint(3, (2, length), generator=generator).sort().values if documents else None
    stack.zero_grad()
    logits = forward(stack, tokens, None, ids, dropout_seed=seed, model=model)
    weights = torch.randn(logits.shape, generator=generator)
    (logits * weights).sum().backward()
    grads = [p.grad.clone() for p in stack.parameters() if p.grad is not None]
    return [logits.detach(), *grads]


def assert_near(found: list[Tensor], expected: list[Tensor], limit: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max()) <= limit * max(float(theirs.abs().max()), 1e-2)


MASKED = ("llama-gqa-window", "bloom")
RECOMPUTE = (None, "selective", "full", "mlp_act")


@pytest.mark.parametrize(
    ("kind", "recompute"),
    in_sample(
        ("bloom", None), ("llama-gqa-window", "full"), ("gpt2-dropout", "selective"),
        of=product(KINDS, RECOMPUTE),
    ),
)  # fmt: skip
@pytest.mark.usefixtures("without_generated_code")
def test_all_blocks_are_compiled_once_and_whole(kind, recompute):
    """Twice where the first block makes a mask that the others find made, unless each makes it."""
    eager = build(kind, recompute)
    stack = compiled(build(kind, recompute))
    for seed in range(2):
        assert_near(outcome(stack, seed=seed), outcome(eager, seed=seed), 4e-6)
    shared = kind in MASKED and recompute in (None, "mlp_act")
    assert graphs() == (2 if shared else 1, Counter())


@pytest.fixture
def flex_on_the_cpu(monkeypatch):
    """torch refuses its gradient on a CPU, where it generates no code for it."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention_flex, "DEVICES", ("cpu",))
    monkeypatch.setattr(attention_flex, "SMALLEST_HEAD", 1)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    in_sample(
        ("bloom", None),
        of=product(["llama-gqa-window", "bloom", "gemma2"], RECOMPUTE),
    ),
)  # fmt: skip
@pytest.mark.usefixtures("without_generated_code", "flex_on_the_cpu")
def test_documents_are_part_of_a_blocks_graph(kind, recompute):
    """Their masks are others in every micro batch, and nothing is compiled again."""
    eager, stack = build(kind, recompute), compiled(build(kind, recompute))
    for seed in range(3):
        found = outcome(stack, seed=seed, documents=True, model=config(kind))
        assert_near(found, outcome(eager, seed=seed, documents=True), 4e-6)
    # With and without a window.
    assert graphs() == (2 if kind == "gemma2" else 1, Counter())


@pytest.mark.usefixtures("without_generated_code")
def test_blocks_share_a_graph_with_an_order_of_kernels(monkeypatch):
    order = KernelOrder(CUDNN_FIRST, any_length=False)
    monkeypatch.setattr(gpu_kernels, "kernel_order", lambda name: order)
    eager, stack = build("llama"), compiled(build("llama"))
    assert_near(outcome(stack), outcome(eager), 4e-6)
    assert graphs() == (1, Counter())


@pytest.mark.usefixtures("without_generated_code")
def test_8_bit_products_are_compiled_with_the_block():
    eager, stack = build("llama", float8=Float8()), compiled(build("llama", float8=Float8()))
    assert_near(outcome(stack), outcome(eager), 4e-6)
    assert graphs() == (1, Counter())


@pytest.mark.usefixtures("without_generated_code")
def test_products_by_blocks_are_one_operator_of_a_graph():
    """As compilers take it for GPUs too, of which some rewrite torch's own operator."""
    weight = torch.randn(384, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    inputs = [torch.ones(128, 256).bfloat16().requires_grad_(), weight.requires_grad_()]
    float8, operators, outcomes = Float8(True, "blockwise"), [], []

    def inspect(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return F.silu(float8.linear(F.silu(x), weight, None))

    backend = aot_autograd(fw_compiler=inspect)
    for function in (product, torch._dynamo.optimize(backend, nopython=True)(product)):
        y = function(*inputs)
        outcomes.append([y, *torch.autograd.grad(y.float().sum(), inputs)])
    assert_near(*outcomes, 1e-2)
    assert graphs() == (1, Counter())
    assert operators.count("megatron.multiply_blocks.default") == 3
    assert not any("scaled_mm" in name for name in operators)


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("delayed", marks=pytest.mark.proof)])
@pytest.mark.usefixtures("without_generated_code")
def test_8_bit_casts_as_on_gpus_stay_in_the_graph(monkeypatch, recipe):
    """They are operators there, outside of compiled blocks as well: kept weights have fixed sizes,
    without which a block's graph breaks at attention."""
    expected = outcome(build("llama", float8=Float8(True, recipe)))
    for module in (casts, mlp):
        monkeypatch.setattr(module, "uses", lambda name, x: True)
    stack = build("llama", float8=Float8(True, recipe))
    for block in stack.blocks():
        mlp.fuse(block.mlp, config("llama"), Float8(True, recipe))
    names = {param: name for name, param in stack.canonical_parameters()}
    fast = FastPathsConfig(fp8_format="hybrid", fp8_recipe=recipe)
    state = Float8State(stack.blocks(), names, fast, Mesh(), partitioned=False)
    compiled(stack)
    state.refresh()
    operands = [
        operand
        for module in stack.modules()
        for name, kept in vars(module).items()
        if name.endswith("_kept") and kept is not None
        for operand in kept.weight
    ]
    assert len(operands) == 2 * 4 * BLOCKS
    assert not [name for x in operands for name in vars(x) if "dynamic_indices" in name]
    assert_near(outcome(stack), expected, 1e-2)
    assert graphs() == (1, Counter())


@pytest.mark.usefixtures("without_generated_code")
def test_a_graph_with_symbols_for_sizes_is_seen():
    """Results of a graph for any size are marked, and make the next graph one for any size."""
    marked = torch.compile(lambda x: x * 2, dynamic=True)(torch.ones(4, 3))
    with pytest.raises(Exception, match="sizes that are symbols"):
        torch.compile(lambda x: x + 1, dynamic=False)(marked)


@pytest.mark.proof
@pytest.mark.skipif(missing_compiler("cpu") is not None, reason="no compiler")
def test_generated_code_has_no_symbol_of_a_kept_weight(monkeypatch):
    monkeypatch.setattr(casts, "uses", lambda name, x: True)
    torch.compiler.reset()
    weight = cast(torch.ones(96, 64), torch.float8_e4m3fn, "tensor", rows=True).rows
    assert weight is not None
    product = torch.compile(lambda x: x @ weight.values.t().float() * weight.scale, dynamic=False)
    _, codes = run_and_get_code(product, torch.ones(3, 64))
    assert codes and not any(re.search(r"\bk?s\d+\b", code) for code in codes)


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("delayed", marks=pytest.mark.proof)])
@pytest.mark.usefixtures("without_generated_code")
def test_kept_8_bit_weights_enter_the_graph(recipe):
    """And once more where scales come from earlier steps, of which the first step has none."""
    float8, stacks = Float8(True, recipe), []
    for n in range(2):
        stack = build("llama", float8=float8)
        names = {param: name for name, param in stack.canonical_parameters()}
        fast = FastPathsConfig(fp8_format="hybrid", fp8_recipe=recipe)
        state = Float8State(stack.blocks(), names, fast, Mesh(), partitioned=False)
        stacks.append((compiled(stack) if n else stack, state))
    for seed in range(3):
        found = []
        for stack, state in stacks:
            state.refresh()
            found.append(outcome(stack, seed=seed))
            state.end_step()
        # A product of 16 bits rounds by the CPU, and with it the scale of a whole tensor.
        assert_near(*found, {"delayed": 1e-2, "tensorwise": 3e-5}.get(recipe, 4e-6))
    assert graphs() == (2 if recipe == "delayed" else 1, Counter())


@pytest.mark.usefixtures("without_generated_code")
@pytest.mark.proof
def test_blocks_leave_their_last_sum_to_the_next():
    """Before and after them nothing is pending; observers see whole sums all the same."""
    eager, stack = build("llama"), compiled(build("llama"))
    seen: list[list[Tensor]] = [[], []]
    for observed, outputs in zip((eager, stack), seen, strict=True):
        for block in observed.blocks():
            assert block.hands_on == (observed is stack)
        observed.sequence.observe(
            lambda _, state, outputs=outputs: outputs.append(state.hidden.detach())
        )
        outcome(observed)
    assert len(seen[0]) == len(seen[1]) > BLOCKS
    assert_near(seen[1], seen[0], 4e-6)
    for others in (build("gemma"), build("neox"), build("llama", "full")):
        assert not any(block.hands_on for block in compiled(others).blocks())


@pytest.mark.parametrize("recompute", [None, pytest.param("selective", marks=pytest.mark.proof)])
@pytest.mark.usefixtures("without_generated_code")
def test_a_memory_budget_keeps_a_share_of_the_activations(recompute):
    """Bytes that a block keeps for its backward pass, its weights apart."""
    kept = {}
    budgets = (None, 0.5, 0.0) if recompute else (None, 0.0)
    for budget in budgets:
        torch.compiler.reset()
        stack, eager = compiled(build("llama", recompute), budget), build("llama", recompute)
        own = {param.untyped_storage().data_ptr() for param in stack.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved=saved, own=own) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = outcome(stack)
        assert_near(found, outcome(eager), 4e-6)
        kept[budget] = sum(saved.values())
    sizes = [kept[budget] for budget in budgets]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes), kept


@pytest.mark.usefixtures("without_generated_code")
@pytest.mark.proof
def test_more_lengths_than_torch_compiles_by_default():
    """It would run the ninth version of a block eagerly; here the third."""
    with torch._dynamo.config.patch(recompile_limit=2):
        stack = compiled(build("llama"))
        for length in range(1, 5):
            outcome(stack, length)
    assert graphs() == (4, Counter())


def test_losses_have_room_for_their_versions():
    """torch compiles eight; of a loss, which must be one graph, the ninth would be an error."""
    import torch._dynamo.config as dynamo

    with dynamo.patch(recompile_limit=8):
        softmax_loss.compiled.__wrapped__(softmax_loss.softmax_of)
        assert dynamo.recompile_limit >= 64


def test_compiled_code_makes_no_tuple_by_replace():
    """With torch 2.11 such a tuple is empty after the compiled function."""
    package = Path(compilation.__file__).parents[1]
    paths = [
        path
        for name in ("model", "parallel", "families")
        for path in package.rglob(f"{name}/**/*.py")
    ]
    assert package / "model/block.py" in paths
    assert not [path.name for path in paths if "._replace(" in path.read_text()]


@pytest.mark.usefixtures("without_generated_code")
def test_rotations_by_other_bases_are_compiled_apart():
    """The tables are constants of the graphs."""
    eager, stack = build("gemma3"), compiled(build("gemma3"))
    assert_near(outcome(stack), outcome(eager), 4e-6)
    assert graphs() == (2, Counter())


@pytest.mark.usefixtures("without_generated_code")
def test_another_length_is_compiled_again():
    stack, eager = compiled(build("llama")), build("llama")
    for length in (LENGTH, LENGTH // 2, LENGTH):
        assert_near(outcome(stack, length), outcome(eager, length), 4e-6)
    assert graphs() == (2, Counter())


@pytest.mark.proof
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", pytest.param("gpt-oss", marks=pytest.mark.proof)]
)
def test_generated_code_against_eager_blocks(kind, dtype):
    stack = compiled(build(kind).to(dtype))
    found, expected = outcome(stack), outcome(build(kind).to(dtype))
    assert_near(found, expected, 2e-6 if dtype == torch.float32 else 3e-2)
    assert graphs() == (1, Counter())


LONG, SHORT = {"train_iters": 200}, {"train_iters": 199}
CURRICULUM = CurriculumConfig(
    curriculum_learning=json.dumps(
        {
            "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 16,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 8},
        }
    )
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "device", "training", "missing", "compiles", "words"),
    [
        (
            "auto",
            "cuda",
            LONG,
            None,
            True,
            "auto: 200 iterations on a GPU repay it; the blocks are",
        ),
        (
            "auto",
            "cuda",
            SHORT,
            None,
            False,
            "auto: 199 iterations may not repay it (from 200); the",
        ),
        ("auto", "cuda", {"train_samples": 800}, None, True, "auto: 200 iterations"),
        ("auto", "cuda", {"train_tokens": 6399}, None, False, "auto: 199 iterations"),
        ("auto", "cuda", {}, None, False, "auto: a run of unknown length"),
        ("auto", "cuda", LONG | {"skip_train": True}, None, False, "auto: a run of unknown length"),
        ("auto", "cuda", LONG | {"sections": (CURRICULUM,)}, None, False, "auto: every sequence"),
        (
            "auto",
            "cuda",
            LONG,
            "no compiler",
            False,
            "compile: no compiler; the blocks run",
        ),
        ("on", "cpu", SHORT, "no compiler", False, "no compiler; the blocks run eagerly"),
        ("auto", "cpu", LONG, None, False, ""),
        ("on", "cpu", SHORT, None, True, ""),
        ("on", "cuda", SHORT, None, True, ""),
        ("off", "cuda", LONG, None, False, ""),
    ],
)
def test_when_a_run_is_compiled(
    monkeypatch, capsys, asked, device, training, missing, compiles, words
):
    monkeypatch.setattr(compilation, "missing_compiler", lambda device_type: missing)
    training = dict(training)
    config = run_config(
        model_config(),
        sections=training.pop("sections", ()),
        training=TrainingConfig(micro_batch_size=4, global_batch_size=4, **training),
        fast_paths=FastPathsConfig(torch_compile=asked),
    )
    assert to_compile(config, torch.device(device)) == compiles
    said = capsys.readouterr().out
    assert words in said
    assert said.count("\n") == bool(words)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_flags_of_compiled_blocks_that_are_not_used_are_said(monkeypatch, capsys, device):
    monkeypatch.setattr(compilation, "missing_compiler", lambda device_type: None)
    fast = FastPathsConfig(torch_compile_mode="reduce-overhead", activation_memory_budget=0.5)
    for iterations, compiles in ((199, False), (200, device == "cuda")):
        training = TrainingConfig(train_iters=iterations)
        config = run_config(model_config(), training=training, fast_paths=fast)
        assert to_compile(config, torch.device(device)) == compiles
        assert runs_graphs(config, torch.device(device)) == compiles
        said = capsys.readouterr().out
        unused = "not used: --torch-compile-mode reduce-overhead, --activation-memory-budget 0.5\n"
        assert said.endswith(unused) == (not compiles) and said.count("\n") == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_compiler_blocks_stay_eager(monkeypatch, request, capsys, device):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    from torch._inductor import cpp_builder, exc

    def none_found() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    missing_compiler.cache_clear()
    request.addfinalizer(missing_compiler.cache_clear)
    config = run_config(model_config(), fast_paths=FastPathsConfig(torch_compile="on"))
    assert not to_compile(config, torch.device(device))
    assert "compiler found; the blocks run eagerly" in capsys.readouterr().out
