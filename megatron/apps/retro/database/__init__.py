"""The database of a project: the chunks of its training documents."""
