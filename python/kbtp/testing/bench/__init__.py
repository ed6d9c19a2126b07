"""Measuring blocks on their way: `kbtp bench` is made of this, and so is the project's own comparison in `bench/`.

A target and each initiator are processes of their own (`target`, `initiator`, driven as `process` says), so that
neither the progress bar nor each other's interpreter is part of a figure. `workload` says what an initiator does and
how it makes sure that it got what was stored; `crew` runs some of them together; `figures` makes numbers with spreads.
"""
