"""Megatron-Core as a program of its own: writes a checkpoint of a small GPT with Adam's moments, or
loads one, without CUDA. It runs with Megatron-Core in PYTHONPATH, whose package has our name.

    python core_program.py save FOLDER SETTINGS       the model after a step, and expected.pt
    python core_program.py load FOLDER SETTINGS       loaded.pt, what is read from FOLDER

SETTINGS is JSON: ``bf16``, ``distributed`` (its optimizer), ``experts``, ``moments``, the
``metadata`` of its sharded state, and ``gelu``, a network with biases, learned positions and
LayerNorm.
"""

import argparse
import contextlib
import json
import os
import sys

import torch
from torch.overrides import TorchFunctionMode

HIDDEN, HEADS, GROUPS, INNER, LAYERS, ROWS, LENGTH = 32, 4, 2, 48, 2, 64, 16


class OnCPU(TorchFunctionMode):
    """Makes tensors of ``device="cuda"`` on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return args[0] if function is torch.Tensor.cuda else function(*args, **kwargs)


def arguments(settings):
    """The arguments of Megatron-LM that describe the network."""
    gelu = settings.get("gelu", False)
    return argparse.Namespace(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS,
        num_query_groups=GROUPS, group_query_attention=True, ffn_hidden_size=INNER,
        swiglu=not gelu, add_bias_linear=gelu, normalization="LayerNorm" if gelu else "RMSNorm",
        position_embedding_type="learned_absolute" if gelu else "rope",
        untie_embeddings_and_output_weights=not gelu, max_position_embeddings=LENGTH,
        seq_length=LENGTH, norm_epsilon=1e-5, padded_vocab_size=ROWS, vocab_size=ROWS - 3,
        tokenizer_type="NullTokenizer", make_vocab_size_divisible_by=32, bias_gelu_fusion=gelu,
        tensor_model_parallel_size=1, consumed_train_samples=40, rotary_base=10000,
        hidden_dropout=0.0, attention_dropout=0.0, num_experts=settings.get("experts"),
        moe_router_topk=2, moe_router_pre_softmax=False, moe_grouped_gemm=False,
    )  # fmt: skip


def network(settings):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    args = arguments(settings)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
        ffn_hidden_size=INNER, use_cpu_initialization=True, add_bias_linear=args.add_bias_linear,
        gated_linear_unit=args.swiglu, normalization=args.normalization,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=not args.swiglu, bf16=settings.get("bf16", False),
        params_dtype=torch.bfloat16 if settings.get("bf16") else torch.float32,
        hidden_dropout=0.0, attention_dropout=0.0, num_moe_experts=settings.get("experts"),
        moe_router_topk=2, masked_softmax_fusion=False, layernorm_epsilon=1e-5,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=settings.get("experts"), normalization=args.normalization
    )
    model = GPTModel(
        config, spec, vocab_size=ROWS, max_sequence_length=LENGTH,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )  # fmt: skip
    return config, (model.bfloat16() if settings.get("bf16") else model)


def training(settings):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config, model = network(settings)
    own = settings.get("distributed", False)
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=own), model
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, bf16=config.bf16, params_dtype=config.params_dtype,
            use_distributed_optimizer=own, clip_grad=0.0,
        ),
        [wrapped],
    )  # fmt: skip
    for param in model.parameters():
        param.main_grad.copy_(torch.randn(param.shape))
    optimizer.step()
    return model, optimizer


def logits(model):
    tokens = torch.arange(2 * 8).view(2, 8) % (ROWS - 3)
    positions = torch.arange(8).repeat(2, 1)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    with torch.no_grad():
        return model.eval()(tokens, positions, mask).float()


def state_of(model, optimizer, settings, loading=False):
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", **settings.get("metadata", {})}
    weights = model.sharded_state_dict(metadata=metadata)
    if not settings.get("moments", True):
        return weights, {}
    return weights, optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)


def trained(model, optimizer):
    """Float32 weight and moments of each parameter, by the name of the model."""
    inner = (
        optimizer.chained_optimizers if hasattr(optimizer, "chained_optimizers") else [optimizer]
    )
    states = {param: state for each in inner for param, state in each.optimizer.state.items()}
    result = {}
    for name, param in model.named_parameters():
        main = param if param in states else param.main_param
        tensors = {"weight": main, **{k: states[main][k] for k in ("exp_avg", "exp_avg_sq")}}
        result[name] = {k: v.detach().float().reshape(param.shape) for k, v in tensors.items()}
    return result


def save(folder, settings):
    from megatron.core import dist_checkpointing

    torch.manual_seed(1)
    model, optimizer = training(settings)
    weights, state = state_of(model, optimizer, settings)
    args = arguments(settings)
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 5, **weights}
    if state:
        content["optimizer"] = state
    os.makedirs(folder)
    expected = {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "trained": trained(model, optimizer),
        "logits": logits(model) if not settings.get("bf16") else None,
    }
    dist_checkpointing.save(content, folder)
    torch.save(expected, os.path.join(os.path.dirname(folder), "expected.pt"))


def load(folder, settings):
    from megatron.core import dist_checkpointing

    torch.manual_seed(2)
    model, optimizer = training(settings)
    weights, state = state_of(model, optimizer, settings, loading=True)
    content = {**weights, **({"optimizer": state} if state else {})}
    loaded = dist_checkpointing.load(content, folder)
    model.load_state_dict({n: v for n, v in loaded.items() if n in weights}, strict=False)
    if state:
        optimizer.load_state_dict(loaded["optimizer"])
    result = {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "trained": trained(model, optimizer),
        "logits": logits(model),
        "common": {name: loaded.get(name) for name in ("iteration", "checkpoint_version")},
    }
    torch.save(result, os.path.join(os.path.dirname(folder), "loaded.pt"))


def main():
    command, folder, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, init_method=f"file://{os.path.dirname(folder)}/store"
    )
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    place = DistributedOptimizer._set_main_param_and_optimizer_states

    def placed(optimizer, param, tensors):
        # torch's Adam, which stands in for the fused one, counts in each parameter's state.
        return place(optimizer, param, {"step": torch.tensor(1.0), **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = placed

    moe_utils.te_general_gemm = None
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(1, 1)
    with OnCPU():
        {"save": save, "load": load}[command](folder, settings)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
