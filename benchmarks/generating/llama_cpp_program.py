"""llama.cpp in float32, from Python: batches of a part of the prompts and a token of each text.

The weights are rewritten as GGUF in float32, without a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import llama_cpp as llama
import numpy as np
from safetensors.numpy import load_file

from generating.load import Request

BATCH_TOKENS = 512


class LlamaCpp:
    """A model in a context of as many sequences as there are requests at once."""

    def __init__(self, folder: str, threads: int, concurrency: int, longest: int) -> None:
        file = Path(folder) / "model.gguf"
        if not file.exists():
            write_gguf(Path(folder), file)
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(
            str(file).encode(), llama.llama_model_default_params()
        )
        assert self.model, f"llama.cpp does not load {file}"
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        params = llama.llama_context_default_params()
        params.n_ctx = concurrency * (longest + 1)
        params.n_seq_max = concurrency
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = llama.GGML_TYPE_F32
        params.kv_unified = False
        params.offload_kqv = False
        self.context = llama.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp does not make a context"
        self.batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(
        self, requests: Sequence[Request], concurrency: int, first: Callable[[int], None]
    ) -> list[list[int]]:
        """See `Program`."""
        memory = llama.llama_get_memory(self.context)
        llama.llama_memory_clear(memory, True)
        waiting = [_Text(place, request) for place, request in enumerate(requests)]
        texts = list(waiting)
        free, running = list(range(concurrency)), []
        while waiting or running:
            while waiting and free:
                waiting[0].slot = free.pop()
                running.append(waiting.pop(0))
            for text, row in self._fill(running):
                logits = llama.llama_get_logits_ith(self.context, row)
                token = int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())
                first(text.place)
                text.new.append(token)
                if len(text.new) == text.request.new_tokens:
                    llama.llama_memory_seq_rm(memory, text.slot, -1, -1)
                    free.append(text.slot)
                    running.remove(text)
        return [text.new for text in texts]

    def _fill(self, running: list[_Text]) -> list[tuple[_Text, int]]:
        """Computes a batch; whose next token can be chosen, from which row."""
        batch, rows, wanted = self.batch, 0, []
        for text in sorted(running, key=lambda text: not text.new):
            tokens = text.ahead(BATCH_TOKENS - rows)
            for offset, token in enumerate(tokens):
                batch.token[rows] = token
                batch.pos[rows] = text.done + offset
                batch.n_seq_id[rows] = 1
                batch.seq_id[rows][0] = text.slot
                batch.logits[rows] = False
                rows += 1
            text.done += len(tokens)
            if tokens and text.done >= len(text.request.prompt):
                batch.logits[rows - 1] = True
                wanted.append((text, rows - 1))
        batch.n_tokens = rows
        status = llama.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode: {status}"
        return wanted


@dataclass
class _Text:
    """``done`` of its tokens are in the cache."""

    place: int
    request: Request
    slot: int = -1
    done: int = 0
    new: list[int] = field(default_factory=list)

    def ahead(self, most: int) -> list[int]:
        """Tokens that are to be computed next."""
        if self.new:
            return self.new[-1:][:most]
        return self.request.prompt[self.done : self.done + most]


NAMES = {
    "wte.weight": "token_embd.weight",
    "wpe.weight": "position_embd.weight",
    "ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
"""GGUF's names of GPT-2's parameters, the number of the block aside."""


def write_gguf(folder: Path, file: Path) -> None:
    """Rewrites GPT-2 of Hugging Face."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), "gpt2")
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight":
            continue  # that of the embedding
        linear = name.endswith("weight") and ".c_" in name  # [inputs, outputs] in GPT-2
        tensor = tensor.T if linear else tensor
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    name = name.removeprefix("transformer.")
    if name in NAMES:
        return NAMES[name]
    block = ""
    if name.startswith("h."):
        _, number, name = name.split(".", 2)
        block = f"blk.{number}."
    layer, _, kind = name.rpartition(".")
    return f"{block}{NAMES[layer]}.{kind}"
