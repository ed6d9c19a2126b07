"""What this machine can do, and how far a target is reached: `kbtp doctor`.

| module | what |
|---|---|
| `facts` | what was found, as values; what could not be found out is `Unknown`, with why |
| `tree`, `read_rdma`, `read_machine`, `read_rnics` | reading: sysfs, procfs, limits, the RNICs |
| `query_verbs` | what only libibverbs tells, in a process of its own |
| `verdicts`, `verdicts_machine`, `verdicts_reach` | deciding what the facts mean: ok, note or problem, and what to do |
| `reach` | one session with a target, step by step |
| `report` | all of it as lines and as JSON |
"""
