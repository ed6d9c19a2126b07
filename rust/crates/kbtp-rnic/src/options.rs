//! What can be set on a native RNIC.

use std::time::Duration;

use kbtp_proto::limits;
use kbtp_proto::mpa::MpaOptions;

/// How a native RNIC starts its streams, and how long it waits for what.
#[derive(Clone, Debug)]
pub struct Options {
    /// Used by both sides: CRC, markers wanted, MPA revision and the RTR kinds offered.
    pub mpa: MpaOptions,
    /// From accept to the whole MPA Request (RFC 5044 7.1.2 rule 10).
    pub mpa_request_timeout: Duration,
    /// From a last Terminate or Reply to the peer's FIN.
    pub goodbye: Duration,
    /// For the peer's FIN after ours, or without any progress before.
    pub disconnect: Duration,
    /// After an accept that failed, for want of file descriptors for example.
    pub accept_pause: Duration,
    /// Sent octets without an acknowledgement for so long: the peer is lost.
    pub tcp_user_timeout: Duration,
    /// How long `poll` keeps looking before it blocks: less latency for a busy core.
    pub spin: Duration,
    /// For tests: how likely a request is left to its session's owner though it could be served here, 0 to 1.
    pub forced_punts: f64,
    /// Seed of that draw, the same for each stream of the same number.
    pub forced_punts_seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mpa: MpaOptions::default(),
            mpa_request_timeout: Duration::from_secs_f64(limits::MPA_REQUEST_TIMEOUT_S),
            goodbye: Duration::from_secs_f64(limits::GOODBYE_S),
            disconnect: Duration::from_secs_f64(limits::DISCONNECT_S),
            accept_pause: Duration::from_secs_f64(limits::RNIC_ACCEPT_PAUSE_S),
            tcp_user_timeout: Duration::from_secs_f64(limits::TCP_USER_TIMEOUT_S),
            spin: Duration::ZERO,
            forced_punts: 0.0,
            forced_punts_seed: 0,
        }
    }
}
