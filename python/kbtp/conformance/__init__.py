"""A suite that tells another implementer what is wrong with their target or initiator.

A peer by hand (a plain socket, MPA frames, segments and messages that may be as malformed as they like) talks to the
peer under test, and says what it expected and what it saw.

| module | what |
|---|---|
| `rule` | one rule of an RFC, the draft or the profile; `kbtp/rules.py`, `iwarp/rules.py` list them all |
| `case` | a case: which rules it looks at, whom it tests, what it needs |
| `catalogue` | every rule and every case there is |
| `segments` | ULPDUs by hand, any field wrong |
| `tcp`, `stream` | a connection with deadlines; MPA, DDP and RDMAP on it |
| `memory` | the octets that the peer by hand lends to the one under test |
| `initiator_side`, `target_side` | a KBTP session in which we are the initiator, or the target |
| `probe` | what a case is handed: it reaches the peer under test |
| `runner`, `expectations`, `report` | running the cases, what may fail and why, what came out |
| `workload` | what an initiator under test has to do, done with `kbtp` |
"""
