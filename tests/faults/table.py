"""All faults, by name."""

from __future__ import annotations

from faults.fault import Fault
from faults.ranks import RANKS
from faults.surroundings import SURROUNDINGS

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*RANKS, *SURROUNDINGS)}
