"""Process groups, collectives, tensor-parallel layers, sharding and pipeline schedules."""
