"""The reference RNIC: user-space iWARP in Python, for anywhere and for reading.

From below: `tcp` (sockets), `loop` (readiness, timers, events), `goodbye` (the end of a connection), `posting` (checks
of work requests), `operation` and `completions` (a connection in use), `stream`, `connector` (active start-up),
`listener` and `request` (passive start-up), `channel`, `device`.
"""

from kbtp.rnic.reference.device import ReferenceRnic
from kbtp.rnic.reference.options import ReferenceOptions

__all__ = ["ReferenceOptions", "ReferenceRnic"]
