"""From token files on disk to micro batches: indexed files, sample order, blends, loader."""
