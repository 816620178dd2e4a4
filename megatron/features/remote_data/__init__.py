"""Data files in object stores and on web servers."""
