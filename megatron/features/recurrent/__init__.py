"""Recurrent layers (Mamba-2 and Gated DeltaNet), whose state has a fixed size."""
