"""LMCache 0.5: the second level of its multiprocess server (`l2`)."""
