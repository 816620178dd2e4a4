"""Layers of transformer models, and models as lists of layers."""
