"""Fixtures that these tests share with others."""

from trained_tokenizers import python_sources, trained, trained_folder

__all__ = ["python_sources", "trained", "trained_folder"]
