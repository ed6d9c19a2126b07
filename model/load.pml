/*
 * LOAD beside FREE and reuse (draft 6.1, 6.4; profile 6.1): the target reads the entry once, and the block leaves it in
 * halves while OWNERS free and bind handles as they like.
 *
 * Property: a LOAD that succeeds has the data that was bound under the generation it names (the assertion), and
 * every FREE completes, even if the reader of its block stops taking octets (no end with a FREE that waits).
 *
 * A rule is taken out with
 *   DRAFT_6_1  no pin: a FREE returns the block while a LOAD is still in it
 *   NO_DRAIN   a reader that does not take its octets is left alone (profile 6.1)
 */
#ifndef OWNERS
#define OWNERS 2
#endif
#define BLOCKS OWNERS
#define BINDINGS 3 /* of each handle; its generation counts them */
#define LOADERS 2
#define UNBOUND 255
#define DATA(handle, generation) (16 * (handle + 1) + generation) /* never twice the same */

byte entry_block[OWNERS], entry_generation[OWNERS];
byte low[BLOCKS], high[BLOCKS]; /* the halves of each block */
bool in_ring[BLOCKS];
byte pins[BLOCKS];

inline take_any_block(b) {
    if
    :: atomic { in_ring[0] -> b = 0; in_ring[b] = false }
    :: atomic { in_ring[1] -> b = 1; in_ring[b] = false }
    fi
}

/* ALLOC_STORE and FREE of one handle. */
proctype Owner(byte handle) {
    byte b, generation;
    for (generation : 1 .. BINDINGS) {
        take_any_block(b);
        low[b] = DATA(handle, generation);
        high[b] = DATA(handle, generation);
        d_step {
            printf("handle %d: bound to block %d, generation %d\n", handle, b, generation);
            entry_block[handle] = b;
            entry_generation[handle] = generation
        }
        d_step { entry_block[handle] = UNBOUND; printf("handle %d: unbound, block %d\n", handle, b) }
#ifndef DRAFT_6_1
        pins[b] == 0;
#endif
        in_ring[b] = true
    }
}

/* A LOAD of handle 0. The target sends from the block; the reader's window may close for ever. */
proctype Loader() {
    byte b, generation, first, second;
    do
    :: d_step {
           entry_block[0] != UNBOUND ->
           b = entry_block[0];
           generation = entry_generation[0];
           printf("LOAD: block %d, generation %d\n", b, generation);
           pins[b]++
       }
       if
       :: first = low[b]
       :: goto stalled
       fi;
       second = high[b];
       d_step {
           printf("LOAD: SUCCESS with generation %d, data %d and %d\n", generation, first, second);
           assert(first == DATA(0, generation) && second == DATA(0, generation));
           pins[b]--
       }
    :: goto over
    od;
stalled:
#ifndef NO_DRAIN
    pins[b]--; /* `drain` seconds after a FREE began to wait for it, its stream ends */
#else
end_stalled:
    false;
#endif
over:
    skip
}

init {
    byte i;
    atomic {
        for (i : 0 .. OWNERS - 1) { entry_block[i] = UNBOUND; in_ring[i] = true; run Owner(i) }
        for (i : 1 .. LOADERS) { run Loader() }
    }
}
