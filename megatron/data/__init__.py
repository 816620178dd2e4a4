"""Data pipeline from indexed files to micro batches: sample order, blending, and loading."""
