"""All faults, by name."""

from __future__ import annotations

from faults.fault import Fault
from faults.ranks import RANKS

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*RANKS,)}
