"""Rewards of completions, and the confined processes that compute them."""
