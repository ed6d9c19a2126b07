"""`make bench`: kbtp beside bare sockets and beside what else moves blocks over TCP, in one run and in turn.

See docs/benchmarks.md for what is measured and how; `kbtp bench` measures one target and is part of the package.
"""
