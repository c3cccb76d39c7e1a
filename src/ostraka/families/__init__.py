"""Families of models: their configuration, their layers, their shapes."""
