/*
 * FREE of a handle, and BIND of a ticket to the same handle right behind it: the target starts the BIND when the
 * FREE is resolved (profile 3, "Same handle, same session").
 *
 * The ring has N slots and as many blocks; one block is bound to the handle, under ticket 1, while ticket 0 is taken
 * and not yet bound: the freed block's slot is that of ticket 0.
 *
 * Property: both are completed (no other end).
 *
 * A rule is taken out with
 *   FREE_WAITS  the FREE completes when its block is in its slot, not when its Tail ticket is taken (profile 6.2)
 */
#define N 2
#define F 2

#include "tickets.pml"

byte deferred[F];
bool freed, bound;

proctype Writer() {
    byte ticket;
end_idle:
    do
    :: atomic { DUE(deferred[1]) -> ticket = deferred[1]; deferred[1] = NONE; block[ticket % N] = 1 }
       sequence[ticket % N] = ticket
    od
}

proctype Target() {
    take_tail(deferred[1]);
    printf("target: FREE of block 1, ticket %d\n", SHOWN(deferred[1]));
#ifdef FREE_WAITS
    deferred[1] == NONE;
#endif
    freed = true;
    d_step { HOLDS(0) -> printf("target: BIND of ticket 0\n"); block[0] = EMPTY; bound = true }
}

init {
    d_step {
        initialize_ring();
        deferred[0] = NONE;
        deferred[1] = NONE;
        head = 2;         /* tickets 0 and 1 are taken, */
        block[1] = EMPTY  /* and 1 is bound */
    }
    atomic { run Writer(); run Target() }
}
