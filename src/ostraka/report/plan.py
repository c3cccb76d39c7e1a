"""Plans as a document: one, or several side by side, with the choices of the page. No JAX."""

from __future__ import annotations
