"""Keys of the metadata of a GGUF file, read so that none is overlooked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from torch import Tensor

from megatron.checkpoint.files import CheckpointError

Content = dict[str, Any]
"""A config.json of `transformers`, or a part of it."""
_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
"""The vocabulary follows from the token embedding; the others describe where a model comes from."""


class Keys:
    """The keys that begin with an architecture's name, which is left out.

    Attributes:
        tensors: names of the tensors of the file.
        values: a function that reads one.
    """

    def __init__(
        self, metadata: Mapping[str, Any], name: str, tensors: Collection[str],
        values: Callable[[str], Tensor], where: str,
    ) -> None:  # fmt: skip
        self.metadata, self.tensors, self.values = metadata, tensors, values
        self._name, self._where, self._read = name, where, set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; ``default`` where it is missing. Raises CheckpointError if the
        default is a number, and the value is not one of its kind."""
        self._read.add(key)
        value = self.metadata.get(f"{self._name}.{key}", default)
        kinds: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float)}
        if type(value) not in kinds.get(type(default), (type(value),)):
            self.refuse(key, f"expected a number, as {default}")
        return value

    def require(self, key: str) -> Any:
        """The value of a key. Raises CheckpointError if it is missing."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self._where} has no {self._name}.{key}")
        return value

    def whole(self, key: str) -> int:
        """A positive integer. Raises CheckpointError if it is missing, or another value."""
        value = self.require(key)
        if type(value) is not int or value < 1:
            self.refuse(key, "expected a positive integer")
        return value

    def only(self, key: str, value: Any) -> None:
        """Refuse another value of a key; a missing one is fine."""
        if self.get(key, value) != value:
            self.refuse(key, f"expected {value}")

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise a CheckpointError about the value of a key."""
        value = f"{self.metadata.get(f'{self._name}.{key}')!r:.100}"
        raise CheckpointError(f"{self._where}: {self._name}.{key} is {value}: {why}")

    def refuse_tensor(self, name: str, why: str) -> NoReturn:
        """Raise a CheckpointError about a tensor."""
        raise CheckpointError(f"{self._where}: {name}: {why}")

    def refuse_the_rest(self) -> None:
        """Refuse keys that were not read, unless they have no effect."""
        prefix = f"{self._name}."
        for key in self.metadata:
            short = key.removeprefix(prefix)
            if key.startswith(prefix) and short not in self._read | _HARMLESS:
                self.refuse(short, "its effect on such a model is not known")
