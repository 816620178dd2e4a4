"""Runs whose length is a number of passes over their data."""
