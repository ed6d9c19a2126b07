"""Planted faults: each takes one rule out of the code, and some test must notice. `make mutants` runs them all."""
