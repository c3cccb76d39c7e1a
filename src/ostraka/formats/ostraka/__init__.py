"""Ostraka's own format."""
