"""Rewards of texts, and the processes that compute them within limits."""
