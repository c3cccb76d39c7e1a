"""Safetensors files and Hugging Face directories."""
