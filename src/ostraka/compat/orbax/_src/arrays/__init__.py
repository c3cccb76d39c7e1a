"""Arrays and where they lie."""
