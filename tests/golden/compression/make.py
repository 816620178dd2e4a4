"""Writes ``values.safetensors``: what DeepSpeed 0.19.6's compression computes.

    python tests/golden/compression/make.py FOLDER

FOLDER is that of the package's source (``pip download --no-deps --no-binary :all:
deepspeed==0.19.6``, unpacked). Its modules are imported into the installed DeepSpeed, which has
them no more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import Tensor

WEIGHT_CASES = [
    (bits, symmetric, groups, dtype)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for symmetric in (True, False)
    for bits, groups in ((12, 1), (8, 2), (4, 4), (3, 6), (2, 4), (1, 2))
    if symmetric or bits > 2
]
STEPS = 70
"""Quantisations of the schedule: 12 to 4 bits, from a period of 5 on."""


def modules_of(folder: Path) -> SimpleNamespace:
    """DeepSpeed 0.19.6's modules of compression, in the installed package."""
    import deepspeed.compression
    import deepspeed.ops.quantizer
    import deepspeed.runtime

    deepspeed.compression.__path__.insert(0, str(folder / "deepspeed" / "compression"))
    deepspeed.runtime.__path__.append(str(folder / "deepspeed" / "runtime"))
    # Of a kernel for GPUs, which is not called here.
    deepspeed.ops.quantizer.__dict__.setdefault("ds_quantizer", None)
    from deepspeed.compression import basic_layer, utils
    from deepspeed.runtime import quantize

    return SimpleNamespace(basic_layer=basic_layer, utils=utils, quantize=quantize)


def weights(seed: int, *shape: int) -> Tensor:
    """Values that both sides begin with."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantised(theirs: SimpleNamespace) -> dict[str, Tensor]:
    utils, values = theirs.utils, {}
    for number, (bits, symmetric, groups, dtype) in enumerate(WEIGHT_CASES):
        kind = utils.SymQuantizer if symmetric else utils.AsymQuantizer
        kind = {1: utils.BinaryQuantizer, 2: utils.TernaryQuantizer}.get(bits, kind)
        x = weights(number, 12, 10).to(dtype)
        values[f"quantised/{number}"] = kind.apply(x, bits, None, None, groups)
    return values


def scheduled(theirs: SimpleNamespace) -> dict[str, Tensor]:
    """A parameter in MoQ, with a share of the weights in it, in float16."""
    values = {}
    for mixed in (False, True):
        quantizer = theirs.quantize.Quantizer(
            q_groups=4, q_mixed_fp16=mixed, q_change_ratio=0.05, q_type="symmetric",
            q_rounding="nearest",
        )  # fmt: skip
        results, bits = [], []
        param = torch.nn.Parameter(weights(50, 8, 6).half())
        param.start_bits, param.target_bits, param.q_period = 12, 4, 5
        for step in range(STEPS):
            param.data = weights(100 + step, 8, 6).half()
            quantizer.quantize([[param]], False, False, None)
            results.append(param.data.clone())
            bits.append(param.start_bits)
        values[f"scheduled/{mixed}"] = torch.stack(results)
        values[f"bits/{mixed}"] = torch.tensor(bits)
    return values


def ranges(theirs: SimpleNamespace) -> dict[str, Tensor]:
    """The range of static activations after each batch, and inputs of a fixed one."""
    values = {}
    for mode in ("symmetric", "asymmetric"):
        act = theirs.basic_layer.QuantAct(quant_mode=mode)
        history = []
        for step in range(6):
            act(weights(200 + step, 4, 5, 6), 8)
            history.append(act.x_min_max.clone())
        act.eval()
        values[f"range/{mode}"] = torch.stack(history)
        values[f"activations/{mode}"] = act(weights(300, 4, 5, 6), 8)
    return values


def pruned(theirs: SimpleNamespace) -> dict[str, Tensor]:
    """A linear layer [8, 12] with each technique: masks, outputs and gradients."""
    values = {}
    for kind in ("l1", "topk", "row_l1", "row_topk", "head", "forward", "dynamic"):
        layer = theirs.basic_layer.LinearLayer_Compress(12, 8, bias=True)
        layer.weight.data, layer.bias.data = weights(400, 8, 12), weights(401, 8)
        scores = None
        if kind in ("l1", "topk"):
            layer.enable_sparse_pruning(0.3, kind)
            layer.sparse_pruning_enabled, scores = True, getattr(layer, "sparse_mask_scores", None)
        elif kind.startswith("row"):
            layer.enable_row_pruning(0.4, kind.removeprefix("row_"))
            layer.row_pruning_enabled, scores = True, getattr(layer, "row_mask_scores", None)
        elif kind == "head":
            layer.enable_head_pruning(0.5, "topk", 4)
            layer.head_pruning_enabled, scores = True, layer.head_pruning_scores
        elif kind == "forward":
            layer.enable_weight_quantization(8, 4, 1, True, "asymmetric", 6)
            layer.weight_quantization_enabled = True
        else:
            layer.enable_activation_quantization(8, "asymmetric", "dynamic")
            layer.activation_quantization_enabled = True
        if scores is not None:
            scores.data = weights(402, *scores.shape)
        x = weights(403, 2, 5, 12).requires_grad_()
        y = layer(x)
        (y * weights(404, 2, 5, 8)).sum().backward()
        values |= {f"{kind}/output": y.detach(), f"{kind}/x": x.grad}
        values |= {f"{kind}/weight": layer.weight.grad, f"{kind}/bias": layer.bias.grad}
        if scores is not None:
            values[f"{kind}/scores"] = scores.grad
    return values


def main(folder: str) -> None:
    theirs = modules_of(Path(folder))
    values = quantised(theirs) | scheduled(theirs) | ranges(theirs) | pruned(theirs)
    values = {name: each.detach().contiguous() for name, each in values.items()}
    save_file(values, Path(__file__).with_name("values.safetensors"))
    print(f"{len(values)} tensors")


if __name__ == "__main__":
    main(sys.argv[1])
