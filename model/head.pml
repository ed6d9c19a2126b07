/*
 * A hostile initiator and the Head of its own ring (profile 6.9, 8.10): it does any atomic operation on Head, not
 * only the FetchAdds of draft 3.3, and sends BIND for any ticket and block. The target meanwhile allocates from the
 * ring for the same session (profile 6.10), serves BIND and FREE, and looks at Head now and then.
 *
 * Properties: the target uses no address outside the ring; a block leaves the ring once for each time it came; a
 * look ends the stream if the peer's FetchAdds took more tickets than blocks were offered, and never if they did not
 * (the assertions).
 *
 * A rule is taken out with
 *   DRAFT_6_9   the target takes a slot's address from the Slot Offset, as draft 3.3 says it can, and does not look
 *               at Head
 *   ANY_BIND    a BIND may be of a ticket that nobody took (draft 6.6 does not ask), or that the target took for itself
 *   TWO_OWNERS  a BIND may be checked between the two stores that write a slot, Block Offset and Sequence
 */
#define N 2
#define F 2
#define FETCH_ADDS 3
#define STRIKES 1
#define TICKETS 16

#include "tickets.pml"

#define OFFSETS (2 * N)
#define PROPER (offset == head % N && (tail + TICKETS - head) % TICKETS <= N)
#define IS_TAKEN(ticket) ((ticket + TICKETS - head) % TICKETS >= (tail + TICKETS - head) % TICKETS)

byte offset;                     /* the Slot Offset in Head, in slots; from N on it has filler bits set */
byte own = NONE;                 /* the target's ticket, until its block is there */
bool lies[F];                    /* the block is in the ring, in its slot or on the way there */
byte deferred[F];
short offered = F;               /* less the tickets that FetchAdds took */
byte fetch_adds, strikes;
bool ended;

inline hand_out(at) {
    assert(lies[block[at]]);
    lies[block[at]] = false;
    block[at] = EMPTY
}

proctype Writer(byte b) {
#ifdef TWO_OWNERS
    byte ticket;
#endif
end_idle:
    do
#ifdef TWO_OWNERS
    :: atomic { DUE(deferred[b]) -> ticket = deferred[b]; deferred[b] = NONE; block[ticket % N] = b }
       atomic { sequence[ticket % N] = ticket; ticket = 0 }
#else
    :: d_step {
           DUE(deferred[b]) ->
           block[deferred[b] % N] = b;
           sequence[deferred[b] % N] = deferred[b];
           deferred[b] = NONE
       }
#endif
    od
}

inline fetch_add() {
    head = (head + 1) % TICKETS;
    offset = (offset % N + 1) % N + N * (offset / N);
    offered--
}

proctype Peer() {
    byte value;
end_idle:
    do
    :: atomic {
           !ended && fetch_adds < FETCH_ADDS ->
           fetch_adds++;
           printf("peer: FetchAdd, ticket %d\n", head);
           fetch_add()
       }
    :: atomic {
           !ended && strikes < STRIKES -> strikes++;
           select(value : 0 .. TICKETS - 1);
           head = value;
           select(value : 0 .. OFFSETS - 1);
           offset = value;
           value = 0;
           printf("peer: Head is ticket %d, slot %d\n", head, offset)
       }
    od
}

proctype Target() {
    byte at, ticket;
end_idle:
    do
#ifdef DRAFT_6_9
    :: atomic {
           !ended && own == NONE ->
           own = head;
           at = offset;
           printf("target: allocates with ticket %d from slot %d\n", own, at);
           assert(at < N);
           fetch_add();
           own = NONE;
           at = 0
       }
#else
    :: d_step { !ended && own == NONE && HOLDS(head) -> own = head; printf("target: ticket %d\n", own); fetch_add() }
    :: d_step { own != NONE && HOLDS(own) -> printf("target: gets its block\n"); hand_out(own % N); own = NONE }
#endif
    :: atomic {
           !ended -> /* BIND of any ticket that names the block in its slot */
           select(at : 0 .. N - 1);
           if
#ifdef ANY_BIND
           :: block[at] != EMPTY ->
#else
           :: block[at] != EMPTY && IS_TAKEN(sequence[at]) && sequence[at] != own ->
#endif
               printf("target: BIND of ticket %d\n", sequence[at]);
               assert(sequence[at] != own);
               assert(strikes > 0 || IS_TAKEN(sequence[at]));
               hand_out(at)
           :: else
           fi;
           at = 0
       }
#ifndef DRAFT_6_9
    :: d_step {
           !ended ->
           ended = !PROPER;
           printf("target: looks at Head: %d\n", ended);
           assert(strikes > 0 || ended == (offered < 0))
       }
#endif
    od
}

/* FREE of blocks that were handed out. */
proctype Freer(byte b) {
end_idle:
    do
    :: d_step { !ended && !lies[b] && deferred[b] == NONE -> lies[b] = true; take_tail(deferred[b]); offered++ }
    od
}

init {
    byte b;
    d_step { initialize_ring(); for (b : 0 .. F - 1) { deferred[b] = NONE; lies[b] = true } b = 0 }
    atomic {
        run Peer();
        run Target();
        for (b : 0 .. F - 1) { run Writer(b); run Freer(b) }
    }
}
