"""Every number of the protocol and of this implementation's defaults, each once.

Section numbers are the profile's unless an RFC or the draft is named. The asserts at the end are the
relations between them: an edit that breaks one fails at import.
"""

from __future__ import annotations

# --- KBTP messages (draft 5, profile 1 and 2), octets ---
KBTP_VERSION = 1
COMMON_HEADER_BYTES = 24
DATA_DESCRIPTOR_BYTES = 16
COMPLETION_DESCRIPTOR_BYTES = 16
COMPLETION_RECORD_BYTES = 24
COMPLETION_BYTES = 40
HELLO_FIXED_BYTES = 64
HELLO_ACK_FIXED_BYTES = 152
HELLO_MAX_BYTES = 1024  # HELLO and HELLO_ACK with options
MIN_MAX_MESSAGE_BYTES = 1024
NAME_MAX_BYTES = 255
NAMESPACE_MAX_BYTES = 255
OPTION_HEADER_BYTES = 4
OPTION_ALIGN_BYTES = 4
OPTION_SKIPPABLE_FROM = 0x8000
AUTH_VALUE_BYTES = 36
AUTH_MAC_BYTES = 32
INITIATOR_ID_BYTES = 16

# --- connection data (3) ---
CONNECTION_DATA_BYTES = 24
CONNECTION_DATA_VERSION = 1
CONNECTION_NONCE_BYTES = 16
DEFAULT_PORT = 5287  # 9

# --- keys (3, 4) ---
KEY_ID_MAX = (1 << 32) - 1
KEY_SECRET_MIN_BYTES = 32
KEY_SECRET_MAX_BYTES = 64  # one block of SHA-256: with a longer one HMAC would take longer, which can be measured
TRUST_DOMAIN_MAX_BYTES = 64
KEYS_FILE_MAX_BYTES = 1 << 20

# --- block structures (draft 3, profile 5) ---
ENTRY_BYTES = 16
SLOT_BYTES = 16
COUNTER_BYTES = 8
BLOCK_OFFSET_EMPTY = 0xFFFF_FFFF_FFFF_FFFF
GENERATION_INITIAL = 1
GENERATION_MAX = 0xFFFF
RING_ORDER_MIN = 1
RING_ORDER_MAX = 28
BLOCK_SIZE_MIN_BYTES = 512
BLOCK_SIZE_MAX_BYTES = 1 << 30
BLOCK_SIZE_MULTIPLE_BYTES = 64
POOL_BASE_ALIGN_BYTES = 64

# --- timers, seconds (3, 6.1, 8.2, 8.8) ---
MPA_REQUEST_TIMEOUT_S = 5.0
HELLO_TIMEOUT_S = 5.0
DRAIN_S = 5.0
CLOSE_S = 1.0  # how long a closing side waits for the other to close too
MAX_WAIT_S = 60.0  # longest time an event loop waits before it looks around, whatever its deadlines say
LINGER_S = 3600.0
TICKET_TIMEOUT_S = 10.0  # 6.11
TICKET_TIMEOUT_MAX_S = 86400.0
TICKET_LOOKS_PER_TIMEOUT = 4  # how often Head is looked at within the Ticket Timeout, at least (6.11)

# --- MPA, DDP, RDMAP (RFC 5044, 5041, 5040, 6581, 7306) ---
MPA_FRAME_BYTES = 20
MPA_PRIVATE_DATA_MAX_BYTES = 512
MPA_ENHANCED_WORD_BYTES = 4
MPA_MARKER_SPACING_BYTES = 512
MPA_MARKER_BYTES = 4
ULPDU_MAX_BYTES = 64768
MULPDU_MIN_BYTES = 128
PADDED_PAYLOAD_MAX_BYTES = 256  # of an FPDU with PAD, which is to be a TCP segment of its own
DDP_TAGGED_HEADER_BYTES = 14
DDP_UNTAGGED_HEADER_BYTES = 18
READ_REQUEST_BYTES = 28
ATOMIC_REQUEST_BYTES = 52
ATOMIC_RESPONSE_BYTES = 12
IMMEDIATE_DATA_BYTES = 8
IRD_ORD_MAX = 0x3FFE
IRD_ORD_ULP_MANAGED = 0x3FFF

# --- STags (RFC 5040 8.1.1 item 8) ---
STAG_HISTORY = 1 << 16  # used STags remembered, so that reuse comes late
STAG_DRAWS_MAX = 1000

# --- the reference RNIC ---
RNIC_READ_DEPTH_MAX = 256  # IRD and ORD it can be asked for
RNIC_UNSENT_MAX_BYTES = 256 * 1024  # FPDUs built ahead of the socket, a stream
RNIC_PUMP_MAX_BYTES = 1024 * 1024  # sent by one stream before the others get a turn
RNIC_READ_BUFFER_BYTES = 256 * 1024  # read from one stream before the others get a turn
RNIC_IOV_MAX = 64  # FPDUs in one sendmsg
RNIC_LISTEN_BACKLOG = 1024
RNIC_ACCEPT_BATCH = 64
RNIC_PENDING_REQUESTS_MAX = 1024  # accepted connections of a listener without a whole MPA Request
RNIC_ACCEPT_PAUSE_S = 0.1  # after an accept that failed, for want of file descriptors for example
RNIC_THREADS_MAX = 256  # event loops of one target
RNIC_SPIN_US = 200  # a thread that waits looks again for so long before it blocks; chosen by measurement
RNIC_SPIN_MAX_US = 1_000_000
GOODBYE_S = 2.0  # for a last Terminate or Reply to leave and the peer's FIN to come (RFC 5040 6.2.1)
DISCONNECT_S = 5.0  # for the peer's FIN after ours, or without any progress before
TCP_USER_TIMEOUT_S = 30.0  # sent octets without an acknowledgement: the peer is lost
TCP_KEEPALIVE_IDLE_S = 10
TCP_KEEPALIVE_INTERVAL_S = 5
TCP_KEEPALIVE_PROBES = 4

# --- defaults of a target; `kbtp serve` reads them from here ---
DEFAULT_BLOCK_SIZE_BYTES = 1 << 20
DEFAULT_POOL_BLOCKS = 256
DEFAULT_TABLE_HANDLES_PER_BLOCK = 4
DEFAULT_TABLE_HANDLES = 1 << 16
TABLE_HANDLES_MAX = 1 << 32
CREDITS_MAX = 1 << 16
MAX_MESSAGE_MAX_BYTES = 1 << 20
DEFAULT_POOL_BASE = 1 << 16  # not zero, so that a cleared Block Offset is never a block's
DEFAULT_REQUEST_CREDITS = 32
COMPLETIONS_POSTED_PER_CREDIT = 4  # room for Sends that have left but are reported behind an RDMA Read
DEFAULT_TARGET_MAX_MESSAGE_BYTES = 16 * 1024
DEFAULT_READ_DEPTH = 16  # IRD and ORD asked for by either side
DEFAULT_MAX_SESSIONS = 1024

# --- defaults of an initiator ---
DEFAULT_COMPLETION_CREDITS = 32
DEFAULT_INITIATOR_MAX_MESSAGE_BYTES = 1024
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_CONNECT_TIMEOUT_S = 10.0
HELLO_ACK_TIMEOUT_S = 3.0  # then the initiator tries again on a new connection (3)
HELLO_DELAY_S = 0.005  # from the Reply to HELLO (3)
HELLO_DELAY_AGAIN_S = 0.1  # on the second connection, and four times as much on each further one
HELLO_DELAY_MAX_S = 1.6
DEFAULT_INLINE_MAX_BYTES = 4096
DIRECT_LOAD_INTERVAL_S = 0.1  # between the two reads of an entry; in longer ones a Generation may come again (6.3)
DIRECT_LOAD_TRIES_MAX = 3  # then LOAD is used (6.3)
DIRECT_LOAD_WINDOW_BYTES = 4 << 20  # of blocks on their way at once, so that each fits into the interval
DIRECT_SLOT_WAIT_S = 0.0005  # before a slot that is not ready is read again; doubled each time
DIRECT_SLOT_WAIT_MAX_S = 0.05

# --- the cache ---
CACHE_KEY_MAX_BYTES = 64 * 1024
CACHE_RECORD_MAX_BLOCKS = 1 << 20  # of one value
CACHE_COPIES_MAX = 16
CACHE_TIMEOUT_S = 5.0  # for each batch of a target's and each step of the index's
CACHE_CONNECT_TIMEOUT_S = 2.0
CACHE_TIMEOUT_MAX_S = 86400.0  # of either of them
CACHE_BACKOFF_MIN_S = 0.5  # until a target or index that is not there is tried again, doubled each time
CACHE_BACKOFF_MAX_S = 30.0
CACHE_TARGETS_REFRESH_S = 5.0  # age at which the list of targets is read again
CACHE_BEAT_S = 2.0  # how often a target announces itself
CACHE_BEAT_TTL_S = 10.0  # and how long that counts
CACHE_LOOKUP_MAX_NAMES = 4096  # in one command of the index
CACHE_SWEEP_S = 10.0  # how often a writer looks through a page of the index for records of blocks that are gone
CACHE_REMEMBERED_MAX_BLOCKS = 1 << 16  # that remembered records name in all, some 100 octets each
CACHE_MAIL_MAX = 8192  # names a reader remembers to tell an owner, and that wait for an owner
CACHE_MAIL_TTL_S = 3600
CACHE_TTL_MAX_S = 1e9  # of a value or a pin; far below what a server can count in ms
CACHE_CLAIM_MAX_BYTES = 32 << 20  # put without looking up first: else what is there already costs too much
CACHE_CLAIM_AFTER = 16  # puts of names that were all new, after one that was not
CACHE_FREE_BATCH = 4096
CACHE_SETTLE_MAX_HANDLES = 2 * CACHE_RECORD_MAX_BLOCKS  # freed by a new session to find what a lost one has bound
CACHE_ASIDE_BYTES = 256 * 1024  # checksums of so much are not taken in an event loop

assert COMMON_HEADER_BYTES + DATA_DESCRIPTOR_BYTES == COMPLETION_BYTES
assert HELLO_FIXED_BYTES <= HELLO_ACK_FIXED_BYTES
# All options at their longest fit, so no HELLO or HELLO_ACK that packs is ever too long.
assert (
    HELLO_ACK_FIXED_BYTES
    + sum(
        OPTION_HEADER_BYTES + n + -n % OPTION_ALIGN_BYTES
        for n in (NAME_MAX_BYTES, NAMESPACE_MAX_BYTES, AUTH_VALUE_BYTES)
    )
    <= HELLO_MAX_BYTES
    <= MIN_MAX_MESSAGE_BYTES
)
assert DEFAULT_TARGET_MAX_MESSAGE_BYTES >= MIN_MAX_MESSAGE_BYTES
assert DEFAULT_INITIATOR_MAX_MESSAGE_BYTES >= max(HELLO_ACK_FIXED_BYTES, COMPLETION_BYTES)
assert 1 <= DEFAULT_REQUEST_CREDITS
assert 1 <= DEFAULT_COMPLETION_CREDITS
assert DEFAULT_READ_DEPTH <= IRD_ORD_MAX
assert DEFAULT_BLOCK_SIZE_BYTES % BLOCK_SIZE_MULTIPLE_BYTES == 0
assert BLOCK_SIZE_MIN_BYTES <= DEFAULT_BLOCK_SIZE_BYTES <= BLOCK_SIZE_MAX_BYTES
assert DEFAULT_POOL_BLOCKS <= 1 << RING_ORDER_MAX
assert DRAIN_S < DEFAULT_TIMEOUT_S
assert TCP_KEEPALIVE_IDLE_S + TCP_KEEPALIVE_INTERVAL_S * TCP_KEEPALIVE_PROBES <= TCP_USER_TIMEOUT_S
assert RNIC_READ_DEPTH_MAX <= IRD_ORD_MAX
assert HELLO_DELAY_S <= HELLO_DELAY_AGAIN_S <= HELLO_DELAY_MAX_S < HELLO_ACK_TIMEOUT_S < DEFAULT_CONNECT_TIMEOUT_S
assert HELLO_DELAY_MAX_S < HELLO_TIMEOUT_S
assert DIRECT_SLOT_WAIT_S <= DIRECT_SLOT_WAIT_MAX_S
assert DEFAULT_POOL_BASE % POOL_BASE_ALIGN_BYTES == 0
assert MULPDU_MIN_BYTES >= DDP_UNTAGGED_HEADER_BYTES + ATOMIC_REQUEST_BYTES
assert DEFAULT_INLINE_MAX_BYTES <= DEFAULT_TARGET_MAX_MESSAGE_BYTES - COMMON_HEADER_BYTES - DATA_DESCRIPTOR_BYTES
assert CACHE_BEAT_S * 3 <= CACHE_BEAT_TTL_S
assert CACHE_BACKOFF_MIN_S <= CACHE_BACKOFF_MAX_S
assert CACHE_TARGETS_REFRESH_S <= CACHE_BEAT_TTL_S
