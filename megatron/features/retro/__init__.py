"""Retro: models that read the neighbours of their samples."""
