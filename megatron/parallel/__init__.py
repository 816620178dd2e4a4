"""Process groups, tensor-parallel layers and the description of how a parameter is cut."""
