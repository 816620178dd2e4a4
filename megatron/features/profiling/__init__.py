"""Profiles of chosen steps."""
