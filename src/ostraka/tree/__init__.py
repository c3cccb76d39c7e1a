"""Trees and paths as data, and as JSON. No JAX."""
