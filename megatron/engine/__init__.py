"""DeepSpeed's engine: the only package that imports deepspeed."""
