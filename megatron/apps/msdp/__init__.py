"""Dialogues by prompting in stages (MSDP): data, examples, generation, F1."""
