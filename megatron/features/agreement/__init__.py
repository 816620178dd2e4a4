"""The processes of a run compare what they begin with."""
