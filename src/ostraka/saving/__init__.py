"""A save: capture, agree, plan, write, commit."""
