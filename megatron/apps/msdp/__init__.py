"""Multi-stage dialogue prompting (MSDP): data, examples, generation and F1 scores."""
