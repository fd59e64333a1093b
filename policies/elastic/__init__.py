"""Published schedulers of elastic jobs, and their registry."""
