"""Flags for runs that start their own processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from megatron.config.features import FlagPart
from megatron.config.flags import POSITIVE, ConfigResolver, needs_value, option


@dataclass(frozen=True, kw_only=True)
class LaunchFlags(FlagPart):
    """Processes that a program starts itself."""

    before: ClassVar[str] = "data_parallel_size"

    num_gpus_per_node: int | None = option(
        None, derived="1, or as many as a launcher has started", bounds=POSITIVE, role="layout"
    )
    """Number of processes that this program starts itself on its node if no launcher has: one per
    GPU, or on the CPU if the node has no GPUs."""
    num_nodes: int | None = option(None, derived="1", bounds=POSITIVE, role="layout")
    """Number of nodes with --num-gpus-per-node processes each. Start the same command on each."""
    node_ips: str | None = option(None, role="layout")
    """Addresses or names of --num-nodes nodes, separated by commas. The nodes connect to the first.
    The position of a node's own address is its rank, unless the variable NODE_RANK is set."""
    ctrl_port: int = option(
        50051, bounds=POSITIVE, role="layout", needs=needs_value("node_ips", refused=False)
    )
    """Rendezvous port on the first of --node-ips."""

    @property
    def launched_processes(self) -> int | None:
        """Number of processes that the flags request; None if they leave it to a launcher."""
        if self.num_gpus_per_node is None and self.num_nodes is None:
            return None
        return (self.num_gpus_per_node or 1) * (self.num_nodes or 1)


def check_launched(values: Mapping[str, Any], processes: int, resolver: ConfigResolver) -> None:
    """Refuse flags that request another number of processes than a run has, given all its flags."""
    names = [field.name for field in fields(LaunchFlags)]
    flags = LaunchFlags(**{name: values[name] for name in names})
    asked = flags.launched_processes
    resolver.check(
        asked in (None, processes),
        f"--num-gpus-per-node {flags.num_gpus_per_node or 1} x --num-nodes {flags.num_nodes or 1} "
        f"is {asked} processes, and this run has {processes}; make them equal, or leave out the "
        "flags",
    )
    if flags.node_ips is not None and (flags.num_nodes or 1) == 1:
        resolver.notes.append(f"{resolver.show('node_ips')} changes nothing: the run has one node")
