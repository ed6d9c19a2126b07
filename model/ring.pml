/*
 * The free-block ring (draft 3.3) of a target that executes allocations and frees: their steps in any order.
 *
 * ALLOCATORS initiators with a quota of one block each allocate, hold and free; each may stop for good, but not
 * while it has a ticket and no block.
 *
 * Properties: no block is handed out twice (the assertion); none is lost, and no allocation within quota waits for ever
 * (no end but where all have stopped; `served`, under weak fairness).
 *
 * A rule is taken out with
 *   DRAFT_6_2     a deferred free is written once the slot is consumed, whatever the slot's Sequence
 *   NO_DEFERRAL   a free overwrites a slot that is not consumed (draft 3.3 forbids it)
 *   TICKET_FIRST  a ticket is taken before the quota is looked at (profile 6.8)
 *   STALLS        the first allocator may stop between its ticket and its slot
 */
#ifndef N
#define N 4
#endif
#ifndef F
#define F 3
#endif
#ifndef ALLOCATORS
#define ALLOCATORS F
#endif

#include "tickets.pml"

byte deferred[F];           /* the Tail ticket under which a freed block waits to be written */
byte written[F];            /* the Tail ticket of a block that is in its slot without it */
byte taken[ALLOCATORS + 1]; /* the Head ticket of an allocator, 1 to ALLOCATORS, that has no block for it yet */
byte holder[F];             /* of each block: IN_RING, or the number of the allocator that was given it */
#define IN_RING 0

inline rebase() {
    BACK_ONE_TURN_ALL(sequence, N);
    BACK_ONE_TURN_ALL(deferred, F);
    BACK_ONE_TURN_ALL(written, F);
    BACK_ONE_TURN_ALL(taken, ALLOCATORS + 1)
}

/* Writes freed block `b` to its slot, at once or later: Block Offset first, then Sequence. */
proctype Writer(byte b) {
end_idle:
    do
    :: d_step { DUE(deferred[b]) -> written[b] = deferred[b]; deferred[b] = NONE; block[written[b] % N] = b }
       d_step { printf("free: slot %d gets {%d, block %d}\n", written[b] % N, SHOWN(written[b]), b);
                sequence[written[b] % N] = written[b]; written[b] = NONE }
    od
}

proctype Allocator(byte me) {
    byte b;
    do
    :: goto stopped
    :: d_step { take_head(taken[me]); printf("allocator %d: ticket %d\n", me, SHOWN(taken[me])) }
#ifdef STALLS
       if
       :: me == 1 -> goto stopped
       :: true
       fi;
#endif
       d_step {
           HOLDS(taken[me]) ->
           b = block[taken[me] % N];
           printf("allocator %d: block %d\n", me, b);
           assert(holder[b] == IN_RING);
           holder[b] = me
       }
       d_step { block[taken[me] % N] = EMPTY; taken[me] = NONE }
       do
       :: goto stopped
       :: break
#ifdef TICKET_FIRST
       :: d_step { take_head(taken[0]); taken[0] = NONE } /* beyond the quota: NO_SPACE, but the ticket is gone */
#endif
       od;
       atomic {
           take_tail(deferred[b]);
           printf("allocator %d: frees block %d, ticket %d\n", me, b, SHOWN(deferred[b]));
           holder[b] = IN_RING;
           b = 0
       }
    od;
stopped:
end_stopped:
    false
}

init {
    byte i;
    d_step {
        initialize_ring();
        for (i : 0 .. F - 1) { deferred[i] = NONE; written[i] = NONE }
        for (i : 0 .. ALLOCATORS) { taken[i] = NONE }
        i = 0
    }
    atomic {
        for (i : 1 .. ALLOCATORS) { run Allocator(i) }
        for (i : 0 .. F - 1) { run Writer(i) }
        i = 0
    }
}

/* The last allocator never stops with a ticket in hand; under fairness it gets its block. */
ltl served { [] ((taken[ALLOCATORS] != NONE) -> <> (taken[ALLOCATORS] == NONE)) }
