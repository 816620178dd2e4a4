"""Process groups, tensor-parallel layers and how a parameter is cut."""
