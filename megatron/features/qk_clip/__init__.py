"""QK-clip: projections of queries and keys of heads with large attention logits are scaled down."""
