"""A command in a container, and the command lines of the programs that run containers."""
