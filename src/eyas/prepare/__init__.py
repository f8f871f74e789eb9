"""Rows of a data file become tokens with supervised spans."""
