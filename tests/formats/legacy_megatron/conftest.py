"""Writes files as Megatron-LM wrote them, from facts of its layout, without our exporter.

NVIDIA's own files cannot be had for tests; these have exactly their layout: the folders, the keys,
the order of query-key-value rows by checkpoint version, gates fused per rank, each pipeline rank's
own count of blocks, and torch.save's older and newer form.
"""

import argparse
import json
import zipfile

import pytest
import torch
from configs import model_config, run_config

from megatron.checkpoint.reader import CheckpointReader
from megatron.families import build_model

GPT2 = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 4,
    "seq_length": 12,
    "max_position_embeddings": 12,
    "unpadded_vocab_size": 61,
    "padded_vocab_size": 64,
    "make_vocab_size_divisible_by": 16,
}
LLAMA = GPT2 | {
    "kv_channels": 8,
    "num_query_groups": 2,
    "group_query_attention": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "glu_activation": "swiglu",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}


def shapes(model):
    """Canonical names and shapes, written down by hand."""
    h, f, v = model.hidden_size, model.mlp.ffn_hidden_size, model.vocabulary.size
    q, kv = (
        n * model.attention.kv_channels
        for n in (model.attention.num_attention_heads, model.attention.num_query_groups)
    )
    norms = ["weight"] if model.norm.normalization == "RMSNorm" else ["weight", "bias"]
    actual = {"embedding.word_embeddings.weight": (v, h)}
    if model.positions.position_embedding_type == "learned_absolute":
        actual["embedding.position_embeddings.weight"] = (
            model.positions.max_position_embeddings,
            h,
        )
    for n in range(model.num_layers):
        block = {f"attention_norm.{kind}": (h,) for kind in norms}
        block |= {"attention.qkv.weight": (q + 2 * kv, h), "attention.qkv.bias": (q + 2 * kv,)}
        block |= {"attention.proj.weight": (h, q), "attention.proj.bias": (h,)}
        block |= {f"mlp_norm.{kind}": (h,) for kind in norms}
        up = 2 * f if model.mlp.gated else f
        block |= {"mlp.up.weight": (up, h), "mlp.up.bias": (up,)}
        block |= {"mlp.down.weight": (h, f), "mlp.down.bias": (h,)}
        for name, shape in block.items():
            if model.mlp.bias or "norm" in name or not name.endswith("bias"):
                actual[f"layers.{n}.{name}"] = shape
    actual |= {f"final_norm.norm.{kind}": (h,) for kind in norms}
    if model.embedding.untie_embeddings_and_output_weights:
        actual["output_layer.weight"] = (v, h)
    return actual


@pytest.fixture(scope="session")
def legacy_model():
    """Makes the network of the tests: a GPT-2, with ``llama=True`` a Llama."""

    def make(llama=False, **changes):
        return model_config(**((LLAMA if llama else GPT2) | changes))

    return make


@pytest.fixture(scope="session")
def random_weights():
    """Makes whole parameters by canonical name, all elements different."""

    def make(model, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        actual = {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape in shapes(model).items()
        }
        for values in actual.values():
            values[1000:-1000] = 0  # of large vocabularies the ends are enough, and faster
        return actual

    return make


@pytest.fixture(scope="session")
def bert_weights(random_weights):
    """Makes whole parameters of a BERT by canonical name, but for its output head, whose names are
    Megatron's."""

    def make(model, seed=0, dtype=torch.float32):
        hidden = model.hidden_size
        heads = {
            "lm_head.dense.weight": (hidden, hidden), "lm_head.dense.bias": (hidden,),
            "lm_head.layernorm.weight": (hidden,), "lm_head.layernorm.bias": (hidden,),
            "lm_head.bias": (model.vocabulary.size,),
        }  # fmt: skip
        if model.bert_binary_head:
            heads |= {
                "embedding.tokentype_embeddings.weight": (2, hidden),
                "pooler.dense.weight": (hidden, hidden), "pooler.dense.bias": (hidden,),
                "binary_head.weight": (2, hidden), "binary_head.bias": (2,),
            }  # fmt: skip
        if model.head != "lm":
            labels, name = model.num_labels or 1, "classification_head"
            name = name if model.num_labels else "multichoice_head"
            heads = {n: shape for n, shape in heads.items() if "lm_head" not in n}
            heads = {n: shape for n, shape in heads.items() if "binary_head" not in n}
            heads |= {f"{name}.weight": (labels, hidden), f"{name}.bias": (labels,)}
        generator = torch.Generator().manual_seed(seed + 100)
        actual = random_weights(model, seed, dtype)
        for name, shape in heads.items():
            actual[name] = torch.randn(shape, generator=generator).to(dtype)
        order = ("embedding", "layers", "final_norm", "output_layer", "pooler", "lm_head.bias",
                 "lm_head", "binary_head", "classification_head", "multichoice_head")  # fmt: skip
        return dict(
            sorted(actual.items(), key=lambda item: next(
                place for place, start in enumerate(order) if item[0].startswith(start)
            ))
        )  # fmt: skip

    return make


def qkv_rows(model, version, rank, size):
    """Which canonical row each row of a rank's query-key-value matrix is."""
    heads, groups, d = (
        model.attention.num_attention_heads,
        model.attention.num_query_groups,
        model.attention.kv_channels,
    )
    local, shared = heads // size, heads // groups

    def row(part, head, i):
        if part == 0:
            return head * d + i
        return (heads + (part - 1) * groups + head) * d + i

    mine = range(rank * local, (rank + 1) * local)
    if version == 0:
        return [row(part, head, i) for part in range(3) for head in mine for i in range(d)]
    if version == 1:
        return [row(part, head, i) for head in mine for i in range(d) for part in range(3)]
    order = []
    for group in range(rank * groups // size, (rank + 1) * groups // size):
        for head in range(group * shared, (group + 1) * shared):
            order += [row(0, head, i) for i in range(d)]
        order += [row(part, group, i) for part in (1, 2) for i in range(d)]
    return order


def share(name, whole, model, version, rank, size):
    """A tensor-parallel rank's part of a parameter, as Megatron holds it."""

    def part(values, dim=0):
        return values.chunk(size, dim)[rank]

    if "word_embeddings" in name or name in ("output_layer.weight", "lm_head.bias"):
        padding = model.vocabulary.padded - len(whole)
        rows = torch.full((padding, *whole.shape[1:]), 7.0).to(whole)
        return part(torch.cat([whole, rows])).clone()
    if ".qkv." in name:
        return whole[qkv_rows(model, version, rank, size)]
    if ".mlp.up." in name:
        halves = whole.chunk(2 if model.mlp.gated else 1)
        return torch.cat([part(half) for half in halves])
    if name.endswith(("proj.weight", "down.weight")):
        return part(whole, 1).clone()
    return whole.clone()


NAMES = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "{attention}.query_key_value",
    "attention.proj": "{attention}.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


HEADS = ("lm_head", "binary_head", "classification_head", "multichoice_head")
"""Next to the language model; the last two in fine-tuned models, whose embedding has no copy."""


def chunk_of(weights, model, version, tensor, layers, first, last, spelling):
    """The nested dictionary of one model chunk."""
    stack, attention = spelling
    language, embedding, blocks, actual = {}, {}, {}, {}
    local = {name: share(name, w, model, version, *tensor) for name, w in weights.items()}
    for name, values in local.items():
        outer, _, kind = name.rpartition(".")
        if outer.startswith("embedding.") and first:
            embedding[outer.removeprefix("embedding.")] = {kind: values}
        elif outer.startswith("layers."):
            _, number, inner = outer.split(".", 2)
            if int(number) in layers:
                theirs = NAMES[inner].format(attention=attention)
                blocks[f"layers.{layers.index(int(number))}.{theirs}.{kind}"] = values
        elif last and outer.startswith("final_norm"):
            blocks[f"final_layernorm.{kind}"] = values
        elif last and outer.startswith("pooler"):
            language.setdefault("pooler", {})[f"dense.{kind}"] = values
        elif last and outer == "output_layer":
            language["output_layer"] = {kind: values}
        elif last and outer.startswith(HEADS):
            head, _, inner = name.partition(".")
            actual.setdefault(head, {})[inner] = values
    ordered = {"embedding": embedding} if first else {}
    actual = {"language_model": ordered | {stack: blocks} | language} | actual
    labelled = any(name.startswith(HEADS[2:]) for name in weights)
    if last and not first and "output_layer.weight" not in weights and not labelled:
        copy = local["embedding.word_embeddings.weight"].clone()
        actual["word_embeddings_for_head"] = {"weight": copy}
    return actual


def arguments_of(model, tensor_size, pipeline_size):
    """Return the namespace of Megatron-LM 3, as far as it is about the network."""
    rope = model.positions.position_embedding_type == "rope"
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.mlp.ffn_hidden_size,
        "num_attention_heads": model.attention.num_attention_heads,
        "kv_channels": model.attention.kv_channels,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.positions.max_position_embeddings,
        "layernorm_epsilon": 1e-5,
        "normalization": model.norm.normalization,
        "apply_layernorm_1p": False,
        "use_rotary_position_embeddings": rope,
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "swiglu": model.mlp.gated,
        "bias_gelu_fusion": not model.mlp.gated,
        "openai_gelu": False,
        "onnx_safe": None,
        "add_bias_linear": model.mlp.bias,
        "group_query_attention": model.attention.num_query_groups
        < model.attention.num_attention_heads,
        "num_query_groups": (
            model.attention.num_query_groups
            if model.attention.num_query_groups < model.attention.num_attention_heads
            else 1
        ),
        "untie_embeddings_and_output_weights": model.embedding.untie_embeddings_and_output_weights,
        "make_vocab_size_divisible_by": model.embedding.make_vocab_size_divisible_by,
        "padded_vocab_size": model.vocabulary.padded,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": model.vocabulary.size - 1,
        "tensor_model_parallel_size": tensor_size,
        "pipeline_model_parallel_size": pipeline_size,
        "consumed_train_samples": 800,
        "num_experts": None,
        "params_dtype": torch.float16,
    }


def flat(nested):
    for value in nested.values():
        if isinstance(value, dict):
            yield from flat(value)
        else:
            yield value


class AdamRun:
    """Two steps of torch's AdamW, whose state is then saved as Megatron's optimizers save it."""

    def __init__(self, dtype, key="wd_mult"):
        self.dtype, self.key = dtype, key

    def step(self, params):
        matrices = [p for p in params if p.ndim > 1]
        vectors = [p for p in params if p.ndim == 1]
        groups = [
            {"params": matrices, self.key: 0.1 if self.key == "weight_decay" else 1.0},
            {"params": vectors, self.key: 0.0},
        ]
        groups = groups if params[0].ndim > 1 else groups[::-1]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        for factor in (0.1, -0.3):
            for p in params:
                p.grad = p.detach() * factor
            optimizer.step()
        return optimizer, groups

    def save(self, chunks):
        """Updates the chunks' weights; returns what stands under ``optimizer``."""
        tensors = [values for chunk in chunks for values in flat(chunk)]
        params = [torch.nn.Parameter(values.float()) for values in tensors]
        optimizer, groups = self.step(params)
        for values, param in zip(tensors, params, strict=True):
            values.copy_(param.detach())
        state = optimizer.state_dict()
        if self.dtype == torch.float32:
            return state
        masters = [[p.detach() for p in group["params"]] for group in groups]
        scaler = {"scale": torch.tensor([65536.0])}
        return {"optimizer": state, "grad_scaler": scaler, "fp32_from_fp16_params": masters}


@pytest.fixture(scope="session")
def adam_run():
    return AdamRun


@pytest.fixture(scope="session")
def write_legacy():
    """Writes a checkpoint as Megatron-LM does; returns its folder.

    Args:
        save: the folder of checkpoints.
        weights: whole parameters by canonical name.
        model: the network.
        version: ``checkpoint_version``; None to leave it out, as the oldest files do.
        tensor, pipeline, virtual: sizes of the layout.
        iteration: None for ``release``.
        arguments: changes of the arguments; None for a file without any.
        spelling: names of the stack and of the attention.
        adam: an AdamRun, for optimizer state.
        zipped: whether torch.save writes its newer form.
        change: called with the content of each rank's file before it is written.
    """

    def write(
        save,
        weights,
        model,
        version=3,
        tensor=1,
        pipeline=1,
        virtual=1,
        iteration=100,
        arguments=(),
        spelling=("encoder", "self_attention"),
        adam=None,
        zipped=True,
        change=lambda content, tensor, pipeline: None,
    ):
        name = "release" if iteration is None else f"iter_{iteration:07d}"
        stages = pipeline * virtual
        per_stage = model.num_layers // stages
        for t in range(tensor):
            for p in range(pipeline):
                chunks = []
                for v in range(virtual):
                    stage = v * pipeline + p
                    layers = list(range(stage * per_stage, (stage + 1) * per_stage))
                    ends = (stage == 0, stage == stages - 1)
                    order = version or 0
                    chunk = chunk_of(weights, model, order, (t, tensor), layers, *ends, spelling)
                    chunks.append(chunk)
                content = {"iteration": iteration or 0}
                if version is not None:
                    content["checkpoint_version"] = float(version)
                if arguments is not None:
                    namespace = arguments_of(model, tensor, pipeline) | dict(arguments)
                    content["args"] = argparse.Namespace(**namespace)
                if adam is not None:
                    content["optimizer"] = adam.save(chunks)
                numbered = enumerate(chunks)
                content |= (
                    {"model": chunks[0]} if virtual == 1 else {f"model{n}": c for n, c in numbered}
                )
                change(content, t, p)
                folder = save / name / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else ""))
                folder.mkdir(parents=True)
                torch.save(
                    content,
                    folder / "model_optim_rng.pt",
                    _use_new_zipfile_serialization=zipped,
                )
        tracker = save / "latest_checkpointed_iteration.txt"
        tracker.write_text("release" if iteration is None else str(iteration))
        return save / name

    return write


@pytest.fixture(scope="session")
def archived():
    """Packs a folder of checkpoints as NVIDIA's downloads are."""

    def pack(save, target, compression=zipfile.ZIP_DEFLATED, prefix=""):
        with zipfile.ZipFile(target, "w", compression) as archive:
            for path in sorted(save.rglob("*")):
                archive.write(path, prefix + path.relative_to(save).as_posix())
        return target

    return pack


class WordTokenizer:
    """Files of a tokenizer, which the converter copies."""

    def save_pretrained(self, folder):
        folder.mkdir()
        model = {"type": "WordLevel", "vocab": {f"w{n}": n for n in range(61)}, "unk_token": "w0"}
        content = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
            "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
            "decoder": None, "model": model,
        }  # fmt: skip
        (folder / "tokenizer.json").write_text(json.dumps(content))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
        (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def exact_fractions(model):
    """Gives a model weights that are the same on every machine."""
    with torch.no_grad():
        for number, (_, param) in enumerate(model.canonical_parameters()):
            places = torch.arange(param.numel()) * 7919 + 31 * number
            values = (places % 251 - 125) / 512
            param.copy_(values.view_as(param) + (0.75 if param.ndim == 1 and number % 2 else 0))
    return model


@pytest.fixture
def ours(gpt_config, random_gpt, write_checkpoint, tmp_path):
    """A GPT-2 whose weights are exact fractions."""
    config = gpt_config()
    model = exact_fractions(random_gpt(config))
    return CheckpointReader(write_checkpoint(tmp_path / "ours", config, model, WordTokenizer()))


@pytest.fixture
def our_bert(legacy_model, write_checkpoint, tmp_path):
    """The same of a BERT, as transformers' converter assumes them."""
    network = legacy_model(family="bert", norm_epsilon=1e-12, bias_gelu_fusion=False)
    config = run_config(network)
    model = exact_fractions(build_model(network))
    return CheckpointReader(write_checkpoint(tmp_path / "ours", config, model))
