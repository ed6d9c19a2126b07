//! Every number of the protocol and of the RNIC's defaults, each once: the twins of `kbtp.limits`, which a test compares.
//!
//! The asserts at the end are the relations between them: an edit that breaks one does not compile.

// --- KBTP messages (draft 5, profile 1 and 2), octets ---
/// Draft 5.1.
pub const KBTP_VERSION: u8 = 1;
/// Draft 5.1.
pub const COMMON_HEADER_BYTES: usize = 24;
/// Draft 5.2.
pub const DATA_DESCRIPTOR_BYTES: usize = 16;
/// Draft 5.2.
pub const COMPLETION_DESCRIPTOR_BYTES: usize = 16;
/// Profile 2.
pub const COMPLETION_BYTES: usize = 40;
/// A completion record (draft 6.5).
pub const COMPLETION_RECORD_BYTES: usize = 24;
/// Room for Sends that have left but are reported behind an RDMA Write or Read.
pub const COMPLETIONS_POSTED_PER_CREDIT: usize = 4;

// --- block structures (draft 3, profile 5) ---
/// Draft 3.2.
pub const ENTRY_BYTES: usize = 16;
/// Draft 3.3.
pub const SLOT_BYTES: usize = 16;
/// Draft 3.3: Head and Tail.
pub const COUNTER_BYTES: usize = 8;
/// In a ring slot: consumed (draft 3.3).
pub const BLOCK_OFFSET_EMPTY: u64 = 0xFFFF_FFFF_FFFF_FFFF;
/// Of a handle that was never bound.
pub const GENERATION_INITIAL: u16 = 1;
/// The last one before it starts over.
pub const GENERATION_MAX: u16 = 0xFFFF;
/// Smallest ring: two slots.
pub const RING_ORDER_MIN: u32 = 1;
/// Largest ring whose Slot Offset fits its counter.
pub const RING_ORDER_MAX: u32 = 28;
/// Smallest block.
pub const BLOCK_SIZE_MIN_BYTES: u32 = 512;
/// Largest block.
pub const BLOCK_SIZE_MAX_BYTES: u32 = 1 << 30;
/// Block sizes are multiples of this.
pub const BLOCK_SIZE_MULTIPLE_BYTES: u32 = 64;
/// Pool Base is a multiple of this.
pub const POOL_BASE_ALIGN_BYTES: u64 = 64;

// --- MPA, DDP, RDMAP (RFC 5044, 5041, 5040, 6581, 7306) ---
/// A Request or Reply frame without its private data (RFC 5044 7.1.1).
pub const MPA_FRAME_BYTES: usize = 20;
/// RFC 5044 7.1.1: PD_Length is at most this.
pub const MPA_PRIVATE_DATA_MAX_BYTES: usize = 512;
/// IRD and ORD before the private data (RFC 6581 9).
pub const MPA_ENHANCED_WORD_BYTES: usize = 4;
/// RFC 5044 4.3: a marker stands at every multiple of this in a half connection.
pub const MPA_MARKER_SPACING_BYTES: usize = 512;
/// RFC 5044 4.2.
pub const MPA_MARKER_BYTES: usize = 4;
/// RFC 5044 3.
pub const ULPDU_MAX_BYTES: u32 = 64768;
/// RFC 5044 4.5.
pub const MULPDU_MIN_BYTES: u32 = 128;
/// An FPDU with PAD carries no more payload than this: it is to be a TCP segment of its own.
pub const PADDED_PAYLOAD_MAX_BYTES: u32 = 256;
/// RFC 5041 4.2.
pub const DDP_TAGGED_HEADER_BYTES: usize = 14;
/// RFC 5041 4.3.
pub const DDP_UNTAGGED_HEADER_BYTES: usize = 18;
/// RFC 5040 4.4.
pub const READ_REQUEST_BYTES: usize = 28;
/// RFC 7306 5.2.1.
pub const ATOMIC_REQUEST_BYTES: usize = 52;
/// RFC 7306 5.2.2.
pub const ATOMIC_RESPONSE_BYTES: usize = 12;
/// RFC 7306 6.
pub const IMMEDIATE_DATA_BYTES: usize = 8;
/// The greatest depth that says what it says (RFC 6581 9).
pub const IRD_ORD_MAX: u16 = 0x3FFE;
/// The depth that leaves the matter to the ULPs (RFC 6581 9.1).
pub const IRD_ORD_ULP_MANAGED: u16 = 0x3FFF;

// --- STags (RFC 5040 8.1.1 item 8) ---
/// Used STags remembered, so that reuse comes late.
pub const STAG_HISTORY: usize = 1 << 16;
/// Draws before a source of randomness counts as none.
pub const STAG_DRAWS_MAX: usize = 1000;

// --- timers, seconds ---
/// From accept to the whole MPA Request (RFC 5044 7.1.2 rule 10).
pub const MPA_REQUEST_TIMEOUT_S: f64 = 5.0;
/// Longest time an event loop waits before it looks around, whatever its deadlines say.
pub const MAX_WAIT_S: f64 = 60.0;
/// For a last Terminate or Reply to leave and the peer's FIN to come (RFC 5040 6.2.1).
pub const GOODBYE_S: f64 = 2.0;
/// For the peer's FIN after ours, or without any progress before.
pub const DISCONNECT_S: f64 = 5.0;
/// Sent octets without an acknowledgement: the peer is lost.
pub const TCP_USER_TIMEOUT_S: f64 = 30.0;
/// Idle time before the first keepalive probe.
pub const TCP_KEEPALIVE_IDLE_S: u32 = 10;
/// Time between keepalive probes.
pub const TCP_KEEPALIVE_INTERVAL_S: u32 = 5;
/// Probes without an answer: the peer is lost.
pub const TCP_KEEPALIVE_PROBES: u32 = 4;

// --- the RNIC ---
/// IRD and ORD it can be asked for.
pub const RNIC_READ_DEPTH_MAX: u16 = 256;
/// FPDUs built ahead of the socket, a stream.
pub const RNIC_UNSENT_MAX_BYTES: usize = 256 * 1024;
/// Sent by one stream before the others get a turn.
pub const RNIC_PUMP_MAX_BYTES: usize = 1024 * 1024;
/// Read from one stream before the others get a turn.
pub const RNIC_READ_BUFFER_BYTES: usize = 256 * 1024;
/// FPDUs in one sendmsg.
pub const RNIC_IOV_MAX: usize = 64;
/// Connections the kernel completes ahead of accept.
pub const RNIC_LISTEN_BACKLOG: i32 = 1024;
/// Connections accepted before other work gets a turn.
pub const RNIC_ACCEPT_BATCH: usize = 64;
/// Accepted connections of a listener without a whole MPA Request.
pub const RNIC_PENDING_REQUESTS_MAX: usize = 1024;
/// After an accept that failed, for want of file descriptors for example.
pub const RNIC_ACCEPT_PAUSE_S: f64 = 0.1;

const _: () = {
    assert!(COMMON_HEADER_BYTES + DATA_DESCRIPTOR_BYTES == COMPLETION_BYTES);
    assert!(RING_ORDER_MAX + 4 <= 32);
    assert!(MULPDU_MIN_BYTES as usize >= DDP_UNTAGGED_HEADER_BYTES + ATOMIC_REQUEST_BYTES);
    // An FPDU has PAD if, and only if, its payload is no multiple of 4 octets.
    assert!((2 + DDP_TAGGED_HEADER_BYTES).is_multiple_of(4) && (2 + DDP_UNTAGGED_HEADER_BYTES).is_multiple_of(4));
    assert!(RNIC_READ_DEPTH_MAX <= IRD_ORD_MAX);
    assert!(IRD_ORD_MAX < IRD_ORD_ULP_MANAGED);
    assert!((TCP_KEEPALIVE_IDLE_S + TCP_KEEPALIVE_INTERVAL_S * TCP_KEEPALIVE_PROBES) as f64 <= TCP_USER_TIMEOUT_S);
};
