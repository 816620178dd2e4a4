"""RETRO: language models that attend to retrieved neighbours of their input text."""
