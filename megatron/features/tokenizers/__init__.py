"""Tokenizers of other projects' files, chat templates, and their training."""
