"""The object through which DeepSpeed asks for process groups."""

from __future__ import annotations

from typing import Any

from megatron.parallel.mesh import Mesh


class Mpu:
    """Model-parallel unit: DeepSpeed's view of :class:`Mesh`.

    It must not have a method ``initialize_sequence_parallel``: DeepSpeed would take it for another
    kind of layout. Without an mpu DeepSpeed assumes a tensor-parallel size of 1.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._kinds = {
            "data": mesh.data,
            "model": mesh.model,
            "tensor_model": mesh.tensor,
            "slice": mesh.tensor,
            "pipeline_model": mesh.pipeline,
        }

    def __getattr__(self, name: str) -> Any:
        """Answers ``get_<kind>_parallel_<rank|world_size|group|group_ranks|src_rank>``."""
        for kind, group in self.__dict__.get("_kinds", {}).items():
            answers = {
                "rank": group.rank,
                "world_size": group.size,
                "group": group.handle,
                "group_ranks": list(group.ranks),
                "src_rank": group.ranks[0],
            }
            for what, answer in answers.items():
                if name == f"get_{kind}_parallel_{what}":
                    return lambda answer=answer: answer
        raise AttributeError(name)
