"""What a layout costs in memory, communication and time, and which layout costs least."""
