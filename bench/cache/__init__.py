"""What must hold of the keyed cache: `python -m bench.cache`."""
