"""A GPT's samples with the neighbours of their chunks."""
