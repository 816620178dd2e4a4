"""Memory, communication and time of a layout, and a search for the cheapest one."""
