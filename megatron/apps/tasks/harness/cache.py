"""Answers that are kept in a file from one evaluation to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from lm_eval.api.model import hash_args

from megatron.config import ConfigError
from megatron.util.processes import is_main_process

MADE_BY = "model"
"""Key of the description of the model, which lm-eval itself never asks for."""


class AnswerCache:
    """Answers by method and arguments, in the format of lm-eval's own cache. The main process has
    the file, and tells the others what is in it: they all have to answer the same requests.

    Args:
        path: of lm-eval's flag, without what it appends to it.
        model: what the answers depend on; another model does not get them.

    Raises:
        ConfigError: the file is of another model, or not a file of that kind.
    """

    def __init__(self, path: str, model: str) -> None:
        self.path = f"{path}_rank0.db"
        self._answers: Any = None
        refusal = self._open(model) if is_main_process() else None
        if (refusal := _from_main(refusal)) is not None:
            raise ConfigError(refusal)

    def _open(self, model: str) -> str | None:
        from sqlitedict import SqliteDict

        try:
            self._answers = SqliteDict(self.path)
            made_by = self._answers.get(MADE_BY)
            if made_by is None and len(self._answers):
                return (
                    f"--use-cache: {self.path} does not say which model gave its answers; name "
                    "another file"
                )
            if made_by not in (None, model):
                return (
                    f"--use-cache: {self.path} has the answers of {made_by}, and this is {model}; "
                    "name another file"
                )
            self._answers[MADE_BY] = model
            self._answers.commit()
        except Exception as error:  # of sqlite3, or RuntimeError if the folder does not exist
            return f"--use-cache: {self.path} cannot be used: {error}"
        return None

    def find(self, method: str, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The kept answer to each request, None where it is missing; the same on every rank."""
        found = None
        if self._answers is not None:
            found = [self._answers.get(hash_args(method, arguments)) for arguments in requests]
        return _from_main(found)

    def add(self, method: str, answers: Sequence[tuple[tuple[Any, ...], Any]]) -> None:
        """Keeps answers by arguments; they are on the disk afterwards."""
        if self._answers is None:
            return
        for arguments, answer in answers:
            self._answers[hash_args(method, arguments)] = answer
        self._answers.commit()

    def close(self) -> None:
        if self._answers is not None:
            self._answers.close()


def _from_main(value: Any) -> Any:
    """The main process's value, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
