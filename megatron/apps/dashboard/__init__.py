"""Runs that can be watched: an index of their metrics, and a server with one page of charts."""
