"""Names of the phases of a step, as they stand in a trace.

The trainer's profiler writes them; in traces of other programs the names that torch itself writes
(the loader's, autograd's, the optimizer's) take their place.
"""

from __future__ import annotations

import re

DATA, FORWARD, BACKWARD, OPTIMIZER, REST = "data", "forward", "backward", "optimizer", "rest"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, REST)
"""Phases of a step, in their order; ``rest`` is what lies in no other."""

RECEIVE_SCOPE = "megatron::receive"
"""Waiting for another stage of the pipeline."""
OUTSIDE = ("megatron::evaluate", "megatron::save")
"""Scopes that are no part of a step, although they lie between two steps."""

_PHASES = (
    (DATA, re.compile(r"megatron::data$|enumerate\(DataLoader\)")),
    (FORWARD, re.compile(r"megatron::forward$")),
    (BACKWARD, re.compile(r"megatron::backward$|autograd::engine::evaluate_function")),
    (OPTIMIZER, re.compile(r"megatron::optimizer$|Optimizer\.step#")),
)


def scope(phase: str) -> str:
    """The name under which a phase stands in a trace."""
    return f"megatron::{phase}"


def phase_of(name: str) -> str | None:
    """The phase that an event of this name opens, None if it opens none."""
    return next((phase for phase, pattern in _PHASES if pattern.match(name)), None)
