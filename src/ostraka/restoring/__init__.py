"""A restore: match, plan, read, place on devices."""
