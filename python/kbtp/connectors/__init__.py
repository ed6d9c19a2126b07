"""Plugins that have inference engines use `kbtp.Cache`; docs/connectors/ has the configuration of each.

Each translates the surface of one framework and decides nothing. Its promises: nothing is raised into the framework's
threads, every wait has a deadline, and whatever is wrong is a miss, a counter and a line in the log.
"""
