"""Other libraries' names over ours."""
