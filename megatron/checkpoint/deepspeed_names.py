"""What this project adds to DeepSpeed's own checkpoints, by name: files and client state. Saving
and reading agree on it here."""

from __future__ import annotations

CONFIG, STATE = "config.json", "state.json"
"""Files beside DeepSpeed's: the run's configuration and its counters."""

RUN, COUNTERS = "run_config", "run_state"
"""The same in the client state, which a conversion by DeepSpeed keeps."""

UNIVERSAL_VERSION = 0.4
"""DeepSpeed's number of the universal format."""
