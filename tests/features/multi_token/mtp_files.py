"""Small models of transformers with multi-token prediction, in files as they are published."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from megatron.formats.huggingface.compare import _Float64

_LATER = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
_APART = {
    "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm",
}  # fmt: skip


def names_of(model_type: str, layers: int, at: int) -> tuple[str, dict[str, str]]:
    """The beginning of names of a block in files, and names of the modules of an MtpLayer next to
    it: as of a further layer, or in Qwen's apart from the model."""
    if model_type.startswith("qwen"):
        return f"mtp.layers.{at}", _APART
    block = f"model.layers.{layers + at}"
    return block, {module: f"{block}.{name}" for module, name in _LATER.items()}


def randomised(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The model with random weights, biases and buffers of the router too."""
    random = torch.Generator().manual_seed(seed)
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if "rotary" not in name and "inv_freq" not in name:
            mean = 1.0 if "norm" in name else 0.0
            values.data = mean + 0.3 * torch.randn(values.shape, generator=random)
    return model


def written(model_type: str, keys: dict, depth: int, folder: Path) -> tuple:
    """Write a model and ``depth`` layers of multi-token prediction; return both. The files are
    those of a model with more layers, as its class saves them, with what the last have beyond.
    Lists in ``keys`` have those layers too."""
    layers = keys["num_hidden_layers"]
    lists = {name: values for name, values in keys.items() if isinstance(values, list)}

    def build(count: int):
        cut = {name: values[:count] for name, values in lists.items()}
        config = AutoConfig.for_model(model_type, **keys | {"num_hidden_layers": count} | cut)
        config.num_mtp_layers = depth
        for name, values in lists.items():
            setattr(config, f"mtp_{name}", values[layers:])
        return AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )

    longer, main = randomised(build(layers + depth), 1), build(layers)
    state = longer.state_dict()
    main.load_state_dict({name: state[name] for name in main.state_dict()})
    predicting = randomised(MtpModel(main, depth), 2)
    main.load_state_dict({name: state[name] for name in main.state_dict()})  # drawn again above
    longer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    table, head = (main.get_input_embeddings().weight, main.lm_head.weight)
    for at, layer in enumerate(predicting.layers):
        saved, (name, modules) = f"model.layers.{layers + at}", names_of(model_type, layers, at)
        block = {
            key.removeprefix(f"{saved}."): values
            for key, values in state.items()
            if key.startswith(f"{saved}.")
        }
        layer.mtp_block.load_state_dict(block)
        for key in [key for key in tensors if key.startswith(f"{saved}.")]:
            tensors[name + key.removeprefix(saved)] = tensors.pop(key)
        for module, stored in modules.items():
            tensors[f"{stored}.weight"] = getattr(layer, module).weight.detach().clone()
        if name == saved:
            tensors[f"{name}.embed_tokens.weight"] = table.detach().clone()
            tensors[f"{name}.shared_head.head.weight"] = head.detach().clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content = {name: content[name] for name in content if "mtp_" not in name}
    content |= {"num_hidden_layers": layers, "num_nextn_predict_layers": depth}
    for name in ("layer_types", "mlp_layer_types"):
        if content.get(name):
            content[name] = content[name][:layers]
    (folder / "config.json").write_text(json.dumps(content))
    return main, predicting


def hf_losses(main, predicting, tokens_BS: torch.Tensor) -> list[torch.Tensor]:
    """The loss of the model, and that of each further token, on whole sequences."""
    with _Float64(integers=True):
        return _hf_losses(main, predicting, tokens_BS)


def _hf_losses(main, predicting, tokens_BS: torch.Tensor) -> list[torch.Tensor]:
    x_BSH = main.model(input_ids=tokens_BS).last_hidden_state
    losses = [_loss(main.lm_head(x_BSH), tokens_BS[:, 1:])]
    for depth in range(len(predicting.layers)):
        ids_BS = tokens_BS[:, depth + 1 :]
        positions_1S = torch.arange(ids_BS.shape[1])[None]
        x_BSH = predicting.forward_layer(depth, x_BSH[:, :-1], positions_1S, None, input_ids=ids_BS)
        losses.append(_loss(predicting._project_to_logits(x_BSH), ids_BS[:, 1:]))
    return losses


def _loss(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    logits_BSV = logits_BSV[:, : labels_BS.shape[1]]
    return torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())
