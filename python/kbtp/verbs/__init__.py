"""RDMA verbs: the interface of an RNIC (`api`), and what a software RNIC needs to keep it.

`buffers` finds the octets of anything that can be registered; `stag_table` decides which of them a peer may reach.
"""
