/*
 * What the models of the ring share: N slots, F blocks, Head and Tail, and tickets that never run out.
 *
 * A ticket is a number modulo TICKETS, compared for equality and taken modulo N and no more. So a state in which all
 * tickets are a turn (N) further means the same: whenever Head has gone round, every ticket there is goes back one
 * turn (`rebase`, which each model defines for its own variables). Tickets thus wrap in every run, as they do at 2^32.
 */
#ifndef TICKETS
#define TICKETS (16 * N)
#endif
#define EMPTY 255 /* a Block Offset of all ones */
#define NONE 254  /* no ticket */

#define HOLDS(ticket) (sequence[ticket % N] == ticket && block[ticket % N] != EMPTY)

/* Whether the block freed under Tail ticket `ticket` may be written to its slot now (profile 6.2). */
#ifdef NO_DEFERRAL
#define DUE(ticket) (ticket != NONE)
#else
#ifdef DRAFT_6_2
#define DUE(ticket) (ticket != NONE && block[ticket % N] == EMPTY)
#else
#define DUE(ticket) \
    (ticket != NONE && block[ticket % N] == EMPTY && sequence[ticket % N] == (ticket + TICKETS - N) % TICKETS)
#endif
#endif

byte sequence[N], block[N]; /* the slots */
byte head, tail;
byte each;                  /* index of loops inside one step; 0 between steps */

/* A trace (TRACE) counts the turns of Head, so that it can print tickets as they would be without `rebase`. */
#ifdef TRACE
int turns;
#define COUNT_TURN turns++
#define SHOWN(ticket) (N * turns + ticket - (ticket >= TICKETS / 2 -> TICKETS : 0))
#else
#define COUNT_TURN each = 0
#define SHOWN(ticket) ticket
#endif

inline back_one_turn(ticket) {
    ticket = (ticket != NONE -> (ticket + TICKETS - N) % TICKETS : NONE)
}

/* A macro, as an inline takes no array. */
#define BACK_ONE_TURN_ALL(tickets, count) \
    for (each : 0 .. count - 1) { back_one_turn(tickets[each]) } \
    each = 0

inline take_head(ticket) {
    ticket = head;
    head++;
    if
    :: head == N -> head = 0; COUNT_TURN; back_one_turn(tail); rebase()
    :: else
    fi
}

inline take_tail(ticket) {
    ticket = tail;
    tail = (tail + 1) % TICKETS
}

inline initialize_ring() {
    for (each : 0 .. N - 1) {
        if
        :: each < F -> sequence[each] = each; block[each] = each
        :: else -> sequence[each] = (each + TICKETS - N) % TICKETS; block[each] = EMPTY
        fi
    }
    each = 0;
    head = 0;
    tail = F
}
