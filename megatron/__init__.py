"""Megatron's models, data pipeline and parallel layers, trained by DeepSpeed's engine."""

__version__ = "0.1.0"
