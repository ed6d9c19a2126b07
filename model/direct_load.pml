/*
 * Direct load (draft 6.6, profile 6.3): entry, block, entry by RDMA Read, each in two halves in any order, while the
 * owners of two handles bind and free.
 *
 * Of an entry, the first half is Flags, Generation and Data Length, the second the Block Offset, which a FREE leaves
 * as it is (the draft says nothing of it). Here the entry is read a third time, beside the block, and all three must
 * be equal: then the generation was VALID from the first read to the last, and the Block Offset of the second cannot
 * be another's.
 *
 * ASCENDING: the responder always reads the first half before the second, as both RNICs here do; then two reads are
 * enough.
 *
 * Property: what the reader takes for good is the data of the handle and generation it read (the assertion).
 *
 * A rule is taken out with
 *   DRAFT_6_3      two reads of the entry, and VALID, SEALED and Generation compared
 *   TWO_READS      two reads of the entry, and all 16 octets compared (profile 6.3)
 *   GENERATIONS=1  one generation, over and over: 2^16 bindings and frees pass between two reads of the entry
 *                  (profile 6.3 has the reader discard what took longer than 100 ms)
 *   OWNER_WRITES   the owner writes to its sealed block through the Partition STag of a direct allocation (profile
 *                  6.12)
 */
#define HANDLES 2
#define BLOCKS 2
#define BINDINGS 3
#ifndef GENERATIONS
#define GENERATIONS BINDINGS
#endif
#define DATA(handle, binding) (16 * (handle + 1) + binding) /* never twice the same */

byte valid_generation[HANDLES]; /* first half: 0 if not VALID */
byte block_offset[HANDLES];     /* second half */
byte low[BLOCKS], high[BLOCKS];
bool in_ring[BLOCKS];

proctype Owner(byte handle) {
    byte b, binding;
    for (binding : 1 .. BINDINGS) {
        if
        :: atomic { in_ring[0] -> b = 0; in_ring[b] = false }
        :: atomic { in_ring[1] -> b = 1; in_ring[b] = false }
        fi;
        low[b] = DATA(handle, binding);
        high[b] = DATA(handle, binding);
        d_step { block_offset[handle] = b; printf("handle %d: Block Offset %d\n", handle, b) }
        d_step {
            valid_generation[handle] = 1 + (binding - 1) % GENERATIONS;
            printf("handle %d: VALID, generation %d\n", handle, valid_generation[handle])
        }
#ifdef OWNER_WRITES
        d_step { low[b] = DATA(handle, binding) + BINDINGS; printf("handle %d: block %d is written to\n", handle, b) }
#endif
        d_step { valid_generation[handle] = 0; printf("handle %d: freed, block %d\n", handle, b) }
        in_ring[b] = true
    }
}

inline read_entry(first_half, second_half) {
    if
    :: first_half = valid_generation[0]; second_half = block_offset[0]
#ifndef ASCENDING
    :: second_half = block_offset[0]; first_half = valid_generation[0]
#endif
    fi
}

#ifdef DRAFT_6_3
#define READ_MEANWHILE skip
#define SAME (again == generation)
#else
#ifdef TWO_READS
#define READ_MEANWHILE skip
#define SAME (again == generation && b_again == b)
#else
#define READ_MEANWHILE read_entry(meanwhile, b_meanwhile)
#define SAME (meanwhile == generation && b_meanwhile == b && again == generation && b_again == b)
#endif
#endif

proctype Reader() {
    byte generation, b, meanwhile, b_meanwhile, again, b_again, first, second;
    read_entry(generation, b);
    if
    :: generation == 0 -> goto over
    :: else -> printf("reader: entry {generation %d, block %d}\n", generation, b)
    fi;
    if
    :: first = low[b]; READ_MEANWHILE; second = high[b]
    :: second = high[b]; READ_MEANWHILE; first = low[b]
    fi;
    read_entry(again, b_again);
    d_step {
        printf("reader: data %d and %d; entry {generation %d, block %d}\n", first, second, again, b_again);
        if
        :: SAME ->
            assert(first == second && first / 16 == 1 && 1 + (first % 16 - 1) % GENERATIONS == generation)
        :: else
        fi
    }
over:
    skip
}

init {
    byte i;
    atomic {
        for (i : 0 .. BLOCKS - 1) { in_ring[i] = true }
        for (i : 0 .. HANDLES - 1) { run Owner(i) }
        run Reader()
    }
}
