"""DeepSpeed's own checkpoints, read and written on one process without DeepSpeed: the folders that
its engines save, and the universal ones that any of its layouts loads."""
