"""Support for unattended runs: detection of hangs, anomalies and stragglers, and restarts."""
