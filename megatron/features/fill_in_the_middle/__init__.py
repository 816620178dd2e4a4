"""Samples whose middle is moved to their end."""
