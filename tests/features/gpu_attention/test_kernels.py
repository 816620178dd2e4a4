"""Which kernel of torch is asked for, and the line about it, on machines that are not here."""

import importlib.util
import types

import pytest
import torch
from small_gpts import KINDS, small_config
from torch.nn import attention
from torch.nn.attention import SDPBackend

from megatron.config import ConfigError
from megatron.features.gpu_attention import kernels
from megatron.features.gpu_attention.kernels import (
    CUDNN_FIRST,
    FLASH_FIRST,
    describe_attention,
    flash,
    kernel_order,
    version_of_flash,
)
from megatron.model import attention_flex
from megatron.model.attention_backends import TORCHS_ORDER, KernelOrder, attention_backend, sdpa
from megatron.model.attention_masks import AttentionMasks, AttentionScoring

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HOPPER, BLACKWELL, AMPERE, NO_GPU = (9, 0), (10, 0), (8, 0), (0, 0)


class Machine:
    """A GPU, cuDNN, and versions of flash-attention."""

    def __init__(self, monkeypatch) -> None:
        self.capability, self.cudnn, self.installed = HOPPER, 92000, set()
        self.active: list[str | None] = [None]
        put = monkeypatch.setattr
        put(kernels, "_capability", lambda: self.capability)
        put(torch.cuda, "is_available", lambda: self.capability != NO_GPU)
        put(torch.backends.cudnn, "is_available", lambda: True)
        put(torch.backends.cudnn, "version", lambda: self.cudnn)
        put(kernels, "_let_torch_set_its_order", lambda: None)
        put(importlib.util, "find_spec", self.find)
        put(attention, "activate_flash_attention_impl", self.active.append)
        put(attention, "restore_flash_attention_impl", lambda: self.active.append(None))
        put(attention, "current_flash_attention_impl", lambda: self.active[-1])

    def find(self, name: str) -> types.SimpleNamespace | None:
        versions = {"flash_attn": 2, "flash_attn_interface": 3, "flash_attn.cute": 4}
        if versions[name] not in self.installed:
            if name == "flash_attn" and 4 in self.installed:  # the folder that version 4 is in
                return types.SimpleNamespace(origin=None, submodule_search_locations=[""])
            return None
        return types.SimpleNamespace(origin=name, submodule_search_locations=[""])


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("capability", "installed", "dropout", "expected"),
    [
        (HOPPER, {2, 3, 4}, 0.0, 3), (HOPPER, {2, 4}, 0.0, 4), (HOPPER, {2, 3, 4}, 0.1, 2),
        (BLACKWELL, {2, 3, 4}, 0.0, 4), (BLACKWELL, {2, 3}, 0.0, 2), (AMPERE, {2, 3, 4}, 0.0, 2),
        (HOPPER, {3}, 0.0, 3), (AMPERE, {3, 4}, 0.0, None), (HOPPER, set(), 0.0, None),
        (HOPPER, {4}, 0.1, None), (NO_GPU, {2, 3}, 0.0, 2),
    ],
)  # fmt: skip
def test_flash_is_the_fastest_version_that_runs(machine, capability, installed, dropout, expected):
    machine.capability, machine.installed = capability, installed
    if expected is None:
        with pytest.raises(ConfigError, match=r"--attention-backend flash needs the flash-attn"):
            version_of_flash("flash", dropout)
    else:
        assert version_of_flash("flash", dropout) == expected


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("flash2", {"installed": {3, 4}}, "--attention-backend flash2 needs the flash-attn pack"),
        ("flash3", {"installed": {2}}, "needs the flash-attn-3 package, .* flash_attn_interface"),
        ("flash4", {"installed": {2, 3}}, "needs the flash-attn-4 package, .* flash_attn.cute"),
        ("flash3", {"capability": BLACKWELL}, "needs a GPU of compute capability 9.0; flash"),
        ("flash4", {"capability": AMPERE}, "needs a GPU of compute capability 9.0 or 10.0; flash"),
        ("flash4", {"dropout": 0.1}, r"has no dropout: set --attention-dropout 0 \(it is 0.1\)"),
        ("flash3", {"known": []}, "is not known to torch 2"),
    ],
)
def test_a_version_that_cannot_run_is_refused(monkeypatch, machine, name, change, said):
    machine.installed = change.get("installed", {2, 3, 4})
    machine.capability = change.get("capability", HOPPER)
    known = change.get("known", ["FA3", "FA4"])
    monkeypatch.setattr(attention, "list_flash_attention_impls", lambda: known)
    with pytest.raises(ConfigError, match=said):
        attention_backend(name, change.get("dropout", 0.0))


@pytest.mark.parametrize("version", [3, 4])
def test_newer_versions_replace_torchs_kernel(machine, version):
    machine.installed = {version}
    found = attention_backend("flash", 0.0)
    assert found.func is sdpa and found.keywords["order"] == KernelOrder(FLASH_FIRST)
    # One object, so that blocks share compiled code, and registered once.
    assert attention_backend(f"flash{version}", 0.0) is found
    assert machine.active == [None, f"FA{version}"]
    assert attention_backend("sdpa") is sdpa
    assert machine.active[-1] is None
    machine.installed = {2}
    assert attention_backend("flash") is flash


@pytest.mark.parametrize(
    ("name", "capability", "cudnn", "expected"),
    [
        # From 9.15.1 on torch puts cuDNN first by itself.
        ("sdpa", HOPPER, 91501, TORCHS_ORDER), ("sdpa", BLACKWELL, 92000, TORCHS_ORDER),
        ("sdpa", HOPPER, 91002, KernelOrder(CUDNN_FIRST, any_length=False)),
        ("sdpa", HOPPER, 90800, KernelOrder((), any_length=False)),
        ("sdpa", AMPERE, 91002, KernelOrder((), any_length=False)),
        ("cudnn", AMPERE, 92000, KernelOrder(CUDNN_FIRST)),
    ],
)  # fmt: skip
def test_cudnn_comes_first_where_it_is_fastest(machine, name, capability, cudnn, expected):
    machine.capability, machine.cudnn = capability, cudnn
    assert kernel_order(name) == expected


def test_torchs_own_switch_against_cudnn_counts(monkeypatch, machine):
    machine.cudnn = 91002
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert kernel_order("sdpa").kernels == ()


OLD, NEW = KernelOrder(CUDNN_FIRST, any_length=False), KernelOrder(CUDNN_FIRST)


@pytest.mark.parametrize(
    ("order", "keys", "masked", "cudnn"),
    [
        (OLD, 256, False, True), (OLD, 250, False, False), (OLD, 256, True, True),
        (NEW, 250, False, True), (NEW, 320, True, False), (NEW, 256, True, True),
    ],
)  # fmt: skip
def test_cudnn_is_left_out_where_it_is_wrong(order, keys, masked, cudnn):
    with order.during(CUDA, keys, keys, masked):
        inside = attention._cur_sdpa_kernel_backends(with_priority=True)
    assert (inside[0] == SDPBackend.CUDNN_ATTENTION) == cudnn
    assert (SDPBackend.CUDNN_ATTENTION in inside) == cudnn
    with TORCHS_ORDER.during(CUDA, 320, 320, True):
        assert SDPBackend.CUDNN_ATTENTION not in attention._cur_sdpa_kernel_backends()


@pytest.mark.parametrize("order", [NEW, OLD, TORCHS_ORDER])
def test_cudnn_is_left_out_where_a_mask_is_learned(monkeypatch, order):
    """torch would choose it, and then says that it has no gradient of the mask."""
    with order.during(CUDA, 256, 256, True, learned=True):
        assert SDPBackend.CUDNN_ATTENTION not in attention._cur_sdpa_kernel_backends()
    q = torch.empty(1, 2, 256, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.empty(1, 2, 256, 256, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="not differentiable .* 'attn_bias'"):
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, bias, True, 0.0, False, False)
    found, real = [], KernelOrder.during

    def spy(self, device, *args):
        found.append(args)
        return real(self, device, *args)

    monkeypatch.setattr(KernelOrder, "during", spy)
    for learned in (True, False):
        mask = bias.detach().requires_grad_(learned)
        sdpa(q, q, q, AttentionScoring(), AttentionMasks(), 0.0, mask, order=order)
    assert found == [(256, 256, True, True), (256, 256, True, False)]


def test_the_order_is_part_of_compiled_code():
    """Code in torch's cache would otherwise serve a run that asks for another kernel."""
    graphs = []

    def keep(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def attend(q):
        with NEW.during(CPU, 128, 128, False):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    torch.compiler.reset()
    torch.compile(attend, backend=keep, fullgraph=True)(torch.zeros(1, 1, 128, 8))
    torch.compiler.reset()
    (targets,) = graphs
    product = targets.index(torch._C._nn.scaled_dot_product_attention)
    assert attention._sdpa_kernel in targets[:product]
    assert attention._sdpa_kernel in targets[product:]


class Choice:
    """What torch chooses, and for which inputs."""

    def __init__(self, kernel: SDPBackend) -> None:
        self.kernel = kernel
        self.asked: list[tuple] = []

    def __call__(self, q, k, v, mask, dropout, causal, *, scale, enable_gqa):
        assert q.requires_grad and q.transpose(1, 2).is_contiguous()
        self.asked.append((tuple(q.shape), k.shape[1], mask is not None, dropout, causal))
        return int(self.kernel)


CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
HALF = "FlexAttention in 1 blocks, cuDNN 9.20 in 1 blocks"
DENSE = (
    "memory-efficient attention, with a dense mask since FlexAttention has no --attention-dropout "
    "(0.1)"
)


@pytest.mark.parametrize(
    ("kind", "change", "documents", "kernel", "expected"),
    [
        ("llama", {}, False, CUDNN, "cuDNN 9.20"),
        ("llama", {}, False, SDPBackend.FLASH_ATTENTION, "flash-attention 2"),
        ("llama", {}, True, CUDNN, "FlexAttention"),
        ("gemma2", {}, False, CUDNN, "FlexAttention"),
        ("window", {"window_attn_skip_freq": 2}, False, CUDNN, HALF),
        ("gpt-oss", {}, False, CUDNN, "FlexAttention"),
        ("gpt-oss", {"attention_dropout": 0.1}, False, CUDNN,
         "plain matrix products (FlexAttention has no --attention-dropout (0.1))"),
        ("llama", {"attention_dropout": 0.1}, True, EFFICIENT, DENSE),
        ("llama", {"attention_backend": "eager"}, True, CUDNN, "plain matrix products"),
        ("gemma2", {"attention_dropout": 0.1}, False, CUDNN,
         "plain matrix products (FlexAttention has no --attention-dropout (0.1))"),
        ("window", {"attention_backend": "flash2"}, False, CUDNN,
         "flash-attention 2 of the package flash-attn"),
        ("window", {"attention_backend": "flash"}, True, CUDNN, "FlexAttention"),
    ],
)  # fmt: skip
def test_the_line_about_the_kernel(monkeypatch, machine, kind, change, documents, kernel, expected):
    machine.installed = {2}
    monkeypatch.setattr(attention_flex, "missing_compiler", lambda _: None)
    monkeypatch.setattr(attention_flex, "DEVICES", ("cpu",))
    choice = Choice(kernel)
    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    model = small_config(**KINDS[kind] | change)
    found = describe_attention(model, torch.bfloat16, CPU, 2, documents)
    backend = model.attention.attention_backend
    assert found == (
        f"attention: {expected} (torch {torch.__version__}; --attention-backend {backend})"
    )
    for shape, kv_heads, masked, dropout, causal in choice.asked:
        assert shape == (1, 2, model.seq_length, 16) and causal != masked
        assert kv_heads == (2 if masked else 1)
        assert dropout == model.attention.attention_dropout


def test_the_line_of_relative_positions(monkeypatch, machine):
    monkeypatch.setattr(torch, "_fused_sdp_choice", Choice(EFFICIENT))
    model = small_config(family="t5", encoder_decoder=True, position_embedding_type="relative")
    found = describe_attention(model, torch.bfloat16, CPU, 1, False)
    assert "attention, with a dense mask since relative positions are learned" in found


def test_the_line_says_why_only_the_slow_kernel_is_possible(monkeypatch, machine):
    monkeypatch.setattr(torch, "_fused_sdp_choice", Choice(MATH))
    found = describe_attention(small_config(), torch.bfloat16, CPU, 1, False)
    assert "torch's slow math kernel, which writes out all scores: no fused kernel" in found
    assert "bfloat16 with 4 query heads on 4 key heads of 16 channels" in found


def test_torchs_choice_takes_these_arguments():
    """Not a stand-in: the operator as it is installed."""
    for width in (16, 20):
        model = small_config(kv_channels=width)
        assert "flash-attention 2" in describe_attention(model, torch.bfloat16, CPU, 1, False)
