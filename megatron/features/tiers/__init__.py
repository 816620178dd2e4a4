"""Memory tiers for ZeRO's partitioned states: device memory, host memory and files."""
