/*
 * Direct allocation (draft 6.6) on a session's own ring: BIND, FREE, ticket timeout and reclaim, and the allocations
 * that the target executes on the same ring for the same session (profile 6.10).
 *
 * ALLOCATORS of one session, which together keep its quota of F blocks, allocate directly: FetchAdd on Head; the slot
 * twice, its two halves in any order; the block by an RDMA Write; BIND. Then FREE, perhaps. Each may stop for good
 * with a ticket (where tickets time out) or with a block. The operations of one allocator come one after the other,
 * those of several in any order. An STag that is gone stops whoever uses it; that its stream ends changes nothing
 * more here.
 *
 * Properties: an RDMA Write hits only the block that the writer's ticket is for; a block leaves the ring once for
 * each time it came; a BIND that came in time is served (the assertions). At the end no ticket is left over, no free
 * is deferred and nobody waits (`Judge`).
 *
 * A rule is taken out with
 *   NO_CONFIRM           the slot is read once (draft 6.6 has the second read)
 *   KEEP_PARTITION_STAG  reclaim leaves the Partition STag as it is (draft 3.4 has it invalidated)
 *   KEEP_HEAD_STAG       reclaim leaves the Head STag as it is (profile 6.11)
 *   SNAPSHOT_FIRST       the snapshot of Head is taken before the Head STag is gone (profile 6.11)
 *   EARLY_TIMEOUT        a ticket may time out before its slot was written (profile 6.11)
 *   ABANDON_RECEIVED     a ticket may be abandoned while its BIND waits to be processed (profile 6.11)
 *   HOLD_AND_WAIT        no BIND while another ticket's slot is waited for (profile 6.11)
 *   TAKEN_WITHIN_N       a ticket counts as taken only if it is at most N behind Head (profile 8.10)
 *   FORGET_TICKET        the target forgets a ticket of its own if a peer's FetchAdd took the block from it (profile
 *                        6.10)
 */
#ifndef N
#define N 2
#endif
#ifndef F
#define F 2
#endif
#ifndef ALLOCATORS
#define ALLOCATORS F
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 1
#endif
#ifndef OWN
#define OWN 1 /* whether the target allocates too */
#endif

#include "tickets.pml"

mtype = { NOTHING, BINDING, BOUND, FREEING, REFUSED }

byte deferred[F];           /* the Tail ticket under which a freed block waits to be written */
byte written[F];            /* the Tail ticket of a block that is in its slot without it */
byte lies[F];               /* of each block: the ticket under which it is in the ring; NONE if it is not */
byte taken[ALLOCATORS];     /* the ticket of each allocator, until it is bound or abandoned */
byte wanted[ALLOCATORS];    /* the Block Offset of its BIND */
mtype request[ALLOCATORS];  /* what it asked for, or was told */
bool abandoned[ALLOCATORS]; /* its ticket is reclaimed */
bool in_time[ALLOCATORS];   /* its BIND came before that */
bool waits[ALLOCATORS];     /* it has seen no block for its ticket yet */
bool counted[ALLOCATORS];   /* its ticket is before the snapshot of Head */
byte own;                   /* the target's own ticket, until it has its block */
byte usage;                 /* blocks bound and tickets outstanding: the initiator itself keeps to its quota */
bool head_stag = true, partition_stag = true, reclaiming, snapshot;

inline rebase() {
    BACK_ONE_TURN_ALL(sequence, N);
    BACK_ONE_TURN_ALL(deferred, F);
    BACK_ONE_TURN_ALL(written, F);
    BACK_ONE_TURN_ALL(lies, F);
    BACK_ONE_TURN_ALL(taken, ALLOCATORS);
    back_one_turn(own)
}

#ifdef TAKEN_WITHIN_N
#define IS_TAKEN(ticket) ((head + TICKETS - ticket - 1) % TICKETS < N)
#else
#define IS_TAKEN(ticket) ((ticket + TICKETS - head) % TICKETS >= (tail + TICKETS - head) % TICKETS)
#endif

/* The target marks the slot of `ticket` consumed. */
inline consume(ticket, b) {
    assert(lies[b] == ticket);
    lies[b] = NONE;
    block[ticket % N] = EMPTY
}

inline free_block(b) {
    assert(lies[b] == NONE);
    take_tail(deferred[b]);
    lies[b] = deferred[b]
}

proctype Writer(byte b) {
end_idle:
    do
    :: d_step { DUE(deferred[b]) -> written[b] = deferred[b]; deferred[b] = NONE; block[written[b] % N] = b }
       d_step {
           printf("target: slot %d gets {%d, block %d}\n", written[b] % N, SHOWN(written[b]), b);
           sequence[written[b] % N] = written[b];
           written[b] = NONE
       }
    od
}

/* BIND and FREE of allocator `a`. */
proctype Server(byte a) {
end_idle:
    do
    :: d_step {
           request[a] == BINDING ->
           if
           :: abandoned[a] ->
               printf("target: BIND of allocator %d: TICKET_ABANDONED\n", a);
               assert(!in_time[a]);
               request[a] = REFUSED
           :: else ->
               printf("target: BIND of allocator %d, ticket %d, block %d\n", a, SHOWN(taken[a]), wanted[a]);
               assert(IS_TAKEN(taken[a]) && HOLDS(taken[a]) && block[taken[a] % N] == wanted[a]);
               consume(taken[a], wanted[a]);
               taken[a] = NONE;
               request[a] = BOUND
           fi
       }
    :: d_step {
           request[a] == FREEING ->
           free_block(wanted[a]);
           printf("target: FREE of allocator %d, block %d, ticket %d\n", a, wanted[a], SHOWN(deferred[wanted[a]]));
           wanted[a] = 0;
           usage--;
           request[a] = NOTHING
       }
    od
}

#ifdef EARLY_TIMEOUT
#define MAY_TIME_OUT(a) (taken[a] != NONE && !abandoned[a] && request[a] != BINDING)
#else
#ifdef ABANDON_RECEIVED
#define MAY_TIME_OUT(a) (taken[a] != NONE && !abandoned[a] && HOLDS(taken[a]))
#else
#define MAY_TIME_OUT(a) (taken[a] != NONE && !abandoned[a] && HOLDS(taken[a]) && request[a] != BINDING)
#endif
#endif

#ifdef KEEP_PARTITION_STAG
#define NOTHING_IS_WRITTEN true
#else
#define NOTHING_IS_WRITTEN !partition_stag
#endif

/* Of Head, and so of the tickets that are taken and not bound. */
inline take_snapshot() {
    d_step {
        for (each : 0 .. ALLOCATORS - 1) { counted[each] = (taken[each] != NONE) }
        each = 0;
        snapshot = true
    }
}

/* The first ticket that times out ends direct allocation for this session. */
proctype Reclaim(byte a) {
    byte b;
end_idle:
    do
    :: atomic { !reclaiming && MAY_TIME_OUT(a) -> reclaiming = true; printf("target: allocator %d's time is up\n", a) }
#ifdef SNAPSHOT_FIRST
       take_snapshot();
       head_stag = false;
#else
#ifndef KEEP_HEAD_STAG
       head_stag = false;
#endif
       take_snapshot();
#endif
#ifndef KEEP_PARTITION_STAG
       partition_stag = false
#endif
    :: atomic {
           snapshot && NOTHING_IS_WRITTEN && counted[a] && MAY_TIME_OUT(a) ->
           printf("target: ticket %d of allocator %d is abandoned\n", SHOWN(taken[a]), a);
           abandoned[a] = true;
           usage--;
           if
           :: HOLDS(taken[a]) -> b = block[taken[a] % N]; consume(taken[a], b); free_block(b); b = 0
           :: else
           fi;
           taken[a] = NONE
       }
       break
    od;
end_reclaimed:
    false
}

/* ALLOC_STORE of the same session: a ticket is taken for a block that is there, unless a FetchAdd comes between. */
proctype Own() {
    byte b;
    do
    :: goto stopped
    :: d_step { usage < F && HOLDS(head) -> usage++ }
       atomic {
           take_head(own);
           printf("target: ticket %d for itself\n", SHOWN(own));
#ifdef FORGET_TICKET
           if
           :: !HOLDS(own) -> own = NONE; usage--; goto stopped
           :: else
           fi
#endif
       }
       d_step { HOLDS(own) -> b = block[own % N]; consume(own, b); own = NONE }
       if
       :: goto stopped
       :: true
       fi;
       atomic { free_block(b); usage--; b = 0 }
    od;
stopped:
end_stopped:
    false
}

/* Two halves of 8 octets, in either order: a 16-octet read is not atomic. */
inline read_slot(sequence_matches, offset) {
    if
    :: d_step { sequence_matches = (sequence[taken[me] % N] == taken[me]) }
       d_step { offset = block[taken[me] % N] }
    :: d_step { offset = block[taken[me] % N] }
       d_step { sequence_matches = (sequence[taken[me] % N] == taken[me]) }
    fi
}

proctype Allocator(byte me) {
    bool matches, still_matches;
    byte first, second;
    do
    :: goto stopped
    :: d_step {
           head_stag && usage < F ->
           usage++;
           waits[me] = true;
           take_head(taken[me]);
           printf("allocator %d: ticket %d\n", me, SHOWN(taken[me]))
       }
       do
       :: read_slot(matches, first);
          if
          :: matches && first != EMPTY ->
#ifdef NO_CONFIRM
              break
#else
              read_slot(still_matches, second);
              if
              :: still_matches && second == first -> break
              :: else
              fi
#endif
          :: else ->
              /* Read again when there is something else to read. */
              if
              :: (sequence[taken[me] % N] == taken[me]) != matches || block[taken[me] % N] != first
              :: !head_stag -> goto stopped
              fi
          fi
       od;
       atomic { waits[me] = false; printf("allocator %d: reads block %d\n", me, first) }
       if
       :: TIMEOUTS -> goto stopped
       :: true
       fi;
       if
       :: d_step { partition_stag -> assert(lies[first] == taken[me]) } /* an RDMA Write is placed */
       :: !partition_stag -> goto stopped
       fi;
#ifdef HOLD_AND_WAIT
       !waits[0] && !waits[1];
#endif
       d_step {
           wanted[me] = first;
           in_time[me] = !abandoned[me];
           request[me] = BINDING;
           matches = false; still_matches = false; first = 0; second = 0
       }
       if
       :: request[me] == BOUND -> in_time[me] = false
       :: request[me] == REFUSED -> goto stopped
       fi;
       if
       :: goto stopped
       :: request[me] = FREEING
       fi;
       request[me] == NOTHING
    od;
stopped:
    atomic { waits[me] = false; matches = false; still_matches = false; first = 0; second = 0 }
end_stopped:
    false
}

/* When nothing moves any more: what could be left over? */
proctype Judge() {
    byte i;
    atomic {
        timeout ->
        for (i : 0 .. ALLOCATORS - 1) { assert(taken[i] == NONE); assert(!waits[i]) }
        assert(own == NONE);
        for (i : 0 .. F - 1) { assert(deferred[i] == NONE && written[i] == NONE) }
        for (i : 0 .. N - 1) { assert(block[i] == EMPTY || !IS_TAKEN(sequence[i])) }
    }
end_judged:
    false
}

init {
    byte i;
    d_step {
        initialize_ring();
        for (i : 0 .. F - 1) { deferred[i] = NONE; written[i] = NONE; lies[i] = i }
        for (i : 0 .. ALLOCATORS - 1) { taken[i] = NONE; request[i] = NOTHING }
        own = NONE;
        i = 0
    }
    atomic {
        for (i : 0 .. ALLOCATORS - 1) {
            run Allocator(i);
            run Server(i);
            if
            :: TIMEOUTS -> run Reclaim(i)
            :: else
            fi
        }
        for (i : 0 .. F - 1) { run Writer(i) }
        if
        :: OWN -> run Own()
        :: else
        fi;
        run Judge();
        i = 0
    }
}
