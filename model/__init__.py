"""Models of the free-block ring and of what races with it, for Spin; `python -m model` checks them all."""
