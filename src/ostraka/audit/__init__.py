"""Audited resumes: the journal of a run, and why two runs differ. No JAX."""
