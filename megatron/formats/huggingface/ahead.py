"""Tensor names of multi-token prediction (MTP) in Hugging Face files.

An architecture's table selects one of these with a single line, such as ``ahead=DEEPSEEK_AHEAD``.
MTP blocks are stored like other blocks, with higher indices. `transformers` does not load them with
the model, but as a separate MtpModel.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.features import AHEAD
from megatron.formats.huggingface.entries import Entry, Parameter, Reordering

_TABLE, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Ahead:
    """An architecture's tensor names for multi-token prediction. In a name, ``{n}`` is the index of
    the block, which continues after the model's layers, and ``{d}`` is the depth: 0 predicts the
    first additional token.

    Attributes:
        block: prefix of the names of a depth's block.
        parts: names of a depth's other parameters, without ``.weight``, by our names.
        keys: keys of config.json for the number of depths. The first is the one to write.
        copies: names of tensors that repeat a parameter of the model, with our name for it.
        most: maximum number of depths that the names allow; None means no limit.
        layers: prefix of the names of the model's own blocks.
    """

    block: str
    parts: Mapping[str, str]
    keys: tuple[str, ...]
    copies: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None
    layers: str = "model.layers.{n}"

    def _named(self, name: str, model: ModelConfig, depth: int) -> str:
        return name.format(n=model.num_layers + depth, d=depth)

    def stored(self, model: ModelConfig, has: Callable[[str], Any]) -> int:
        """Return the number of depths stored in files. ``has`` returns whether the files contain a
        tensor name."""
        merge = f"{self.parts['merge']}.weight"
        depths = count() if self.most is None else range(self.most)
        return len([*takewhile(lambda depth: has(self._named(merge, model, depth)), depths)])

    def pattern(self, model: ModelConfig, depths: int = 16) -> str:
        """Return a regular expression that matches all MTP tensor names for up to ``depths``
        depths."""
        first = self.block.partition("{")[0]
        if "{n}" not in self.block:
            return rf"{re.escape(first.partition('.')[0])}\..*"
        later = "|".join(map(str, range(model.num_layers, model.num_layers + depths)))
        return rf"{re.escape(first)}({later})\..*"

    def parameters(self, entries: Sequence[Entry], model: ModelConfig) -> Iterator[Parameter]:
        """Yield a model's MTP parameters. MTP blocks are like the model's last block."""
        last = model.num_layers - 1
        for depth in range(model.blocks_ahead):
            for ours, theirs in self.parts.items():
                name = f"{self._named(theirs, model, depth)}.weight"
                entry = Entry(f"{AHEAD}{depth}.{ours}.weight", (name,))
                yield Parameter(entry.ours, entry.theirs, entry, model)
            for entry in entries:
                if entry.stack == "layers" and (entry.at is None or entry.at(model, last)):
                    yield self._moved(entry.of_block(model, last), model, depth)

    def _moved(self, parameter: Parameter, model: ModelConfig, depth: int) -> Parameter:
        before = self.layers.format(n=model.num_layers - 1)
        block = self._named(self.block, model, depth)
        return dataclasses.replace(
            parameter,
            ours=f"{AHEAD}{depth}.block.{parameter.ours.split('.', 2)[2]}",
            theirs=tuple(block + name.removeprefix(before) for name in parameter.theirs),
            others=tuple(self._moved(other, model, depth) for other in parameter.others),
        )

    def copies_of(self, model: ModelConfig) -> dict[str, str]:
        """Return our name for each tensor that repeats a parameter of the model, by the tensor's
        name."""
        return {
            self._named(name, model, depth): _TABLE if model.embedding.tied else ours
            for depth in range(model.blocks_ahead)
            for name, ours in self.copies.items()
        }

    def repeating(self, parameters: Iterable[Parameter], model: ModelConfig) -> Iterator[Parameter]:
        """Yield ``parameters`` as they are written. The names of a parameter's copies are added to
        it."""
        copies = self.copies_of(model)
        for each in parameters:
            more = [name for name, ours in copies.items() if ours == each.ours]
            if more:
                names = (*each.theirs, *more)
                entry = Entry(each.ours, names, _repeated(len(names)))
                each = Parameter(each.ours, names, entry, model)
            yield each


def _repeated(number: int) -> Reordering:
    def copies(values: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        return values, *(values.clone() for _ in range(number - 1))

    return Reordering("repeated", number, copies, lambda tensors, _: tensors[0])


DEEPSEEK_AHEAD = Ahead(
    "model.layers.{n}",
    {
        "embed_norm": "model.layers.{n}.enorm",
        "hidden_norm": "model.layers.{n}.hnorm",
        "merge": "model.layers.{n}.eh_proj",
        "norm": "model.layers.{n}.shared_head.norm",
    },
    ("num_nextn_predict_layers", "num_mtp_layers"),
    {
        "model.layers.{n}.embed_tokens.weight": _TABLE,
        "model.layers.{n}.shared_head.head.weight": _HEAD,
    },
)
"""DeepSeek-V3 and successors such as GLM-4.5: each depth is one more layer, with its own copies of
the token embedding and the output head."""

QWEN_AHEAD = Ahead(
    "mtp.layers.{d}",
    {
        "embed_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "merge": "mtp.fc",
        "norm": "mtp.norm",
    },
    ("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    most=1,
)
"""Qwen3-Next and Qwen3.5: a single depth, stored apart from the layers under ``mtp.``."""
