"""Starting the processes of a run without a launcher."""
