"""The checkpoints of Megatron-LM before its core library, and what other trainers took over of
them."""
