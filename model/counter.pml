/*
 * The masked form of a counter (draft 3.3), in miniature: 16 bits for 64, so that the Ticket has bits 15-8 and the Slot
 * Offset the low ORDER + 4 bits. Add Data and Add Mask are the draft's, as is RFC 7306's FetchAdd.
 *
 * Property: the value is what the draft says for each ticket, through two wraps of it (the assertion).
 *
 * ORDER=0 is a ring that draft 3.3 allows and profile 5 does not: N = 2^0 is a power of two not smaller than F = 1.
 */
#ifndef ORDER
#define ORDER 1
#endif
#define N (1 << ORDER)
#define TICKETS 256

#define ADD_DATA 272                                       /* 0x0110 */
#define ADD_MASK ((1 << 15) | (1 << 7) | (1 << ORDER + 3)) /* the top bit of each field */
#define VALUE(ticket) (256 * (ticket % TICKETS) + 16 * (ticket % N))

int counter, ticket;

init {
    do
    :: ticket < 2 * TICKETS ->
        d_step {
            /* Below the top bits carries run; the top bits themselves are added without one (RFC 7306 5.1.1). */
            counter = (((counter & ~ADD_MASK) + (ADD_DATA & ~ADD_MASK)) & 65535) ^ ((counter ^ ADD_DATA) & ADD_MASK);
            ticket++;
            printf("ticket %d: counter %x, %x expected\n", ticket, counter, VALUE(ticket));
            assert(counter == VALUE(ticket))
        }
    :: else -> break
    od
}
