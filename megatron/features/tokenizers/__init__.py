"""Tokenizers that read other projects' file formats, and training of new tokenizers."""
