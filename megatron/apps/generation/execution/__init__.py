"""The model side: what a step computes, over the ranks of a layout."""
