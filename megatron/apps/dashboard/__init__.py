"""Dashboard for runs: an index of their metrics, and a server with a page of charts."""
