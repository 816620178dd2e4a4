"""Planner: estimates the memory, communication and step time of a layout, and searches for the
fastest one."""
