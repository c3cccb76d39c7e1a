"""Threads, memory, dtypes, units: the basis of all other folders."""
