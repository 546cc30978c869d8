"""The doors: each pops its keyword or finds its model, and calls `api`."""
