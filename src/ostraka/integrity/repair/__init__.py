"""Find lost and damaged files again, and rewrite only those."""
