"""What several processes agree on, over JAX's coordination service."""
