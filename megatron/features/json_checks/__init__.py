"""Checks of DeepSpeed JSON files, whose error messages name the key."""
