"""QK-clip: scale down the query and key projections of heads with large attention logits."""
