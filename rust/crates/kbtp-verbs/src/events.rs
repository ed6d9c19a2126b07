//! What comes out of an endpoint, as values.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ptr::null;

use crate::abi::*;
use crate::endpoint::Endpoint;

/// A sender's answer to "no receive is posted" is to try again, for as long as the connection lasts: whoever keeps to
/// its credits never needs it (profile 3).
const RNR_RETRY_WITHOUT_END: u8 = 7;

/// How often a packet is sent again, the most there is.
const RETRIES: u8 = 7;

/// What the two ends of a connection tell each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Of the sender's; what the peer gets may have zeros behind it.
    pub private_data: Vec<u8>,
    /// RDMA Reads and atomics of the peer's that whoever receives this may be asked to serve: of an event, the peer's ORD.
    pub responder_resources: u8,
    /// The same the other way: of an event, the peer's IRD.
    pub initiator_depth: u8,
}

impl Parameters {
    /// For as long as `self` stays.
    pub(crate) fn raw(&self) -> RdmaConnParam {
        RdmaConnParam {
            private_data: if self.private_data.is_empty() {
                null()
            } else {
                self.private_data.as_ptr().cast()
            },
            private_data_len: u8::try_from(self.private_data.len()).unwrap_or(u8::MAX),
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: 1,
            retry_count: RETRIES,
            rnr_retry_count: RNR_RETRY_WITHOUT_END,
            srq: 0,
            qp_num: 0,
        }
    }

    pub(crate) fn of(conn: &RdmaConnParam, private_data: &[u8]) -> Self {
        Self {
            private_data: private_data.to_vec(),
            responder_resources: conn.responder_resources,
            initiator_depth: conn.initiator_depth,
        }
    }
}

/// Something that happened to a connection.
pub enum CmEvent {
    /// The device is known.
    AddressResolved,
    /// So is the way.
    RouteResolved,
    /// Of a listening endpoint: somebody wants to connect to the new one.
    ConnectRequest(Endpoint, Parameters),
    /// The connection is there.
    Established(Parameters),
    /// The peer, or its system, has refused; see `refusal`.
    Rejected(c_int, Parameters),
    /// The peer has ended the connection, or this side's `disconnect` is done.
    Disconnected,
    /// The device is gone.
    DeviceRemoved,
    /// It will not be: what was tried, and the number of the error, or of the CM's status.
    Failed(&'static str, c_int),
    /// Nothing to act on.
    Other,
}

impl CmEvent {
    pub(crate) fn of(kind: c_int, status: c_int, parameters: Parameters) -> Self {
        match kind {
            RDMA_CM_EVENT_ADDR_RESOLVED => Self::AddressResolved,
            RDMA_CM_EVENT_ADDR_ERROR => Self::Failed("its address leads to no RDMA device", status),
            RDMA_CM_EVENT_ROUTE_RESOLVED => Self::RouteResolved,
            RDMA_CM_EVENT_ROUTE_ERROR => Self::Failed("there is no way to it", status),
            RDMA_CM_EVENT_CONNECT_ERROR => Self::Failed("connecting failed", status),
            RDMA_CM_EVENT_UNREACHABLE => Self::Failed("it does not answer", status),
            RDMA_CM_EVENT_REJECTED => Self::Rejected(status, parameters),
            RDMA_CM_EVENT_ESTABLISHED => Self::Established(parameters),
            RDMA_CM_EVENT_DISCONNECTED => Self::Disconnected,
            RDMA_CM_EVENT_DEVICE_REMOVAL => Self::DeviceRemoved,
            _ => Self::Other,
        }
    }
}

/// The reason code of a CM REJ that the peer's program has sent itself (IBTA 12.6.7.2).
const CONSUMER_REJECT: c_int = 28;

/// Why the peer refused, for people; None if it was its program, whose private data says why.
#[must_use]
pub fn refusal(status: c_int, private_data: &[u8]) -> Option<String> {
    Some(match status {
        CONSUMER_REJECT => return None,
        // iWARP: an MPA Reply with R=1 comes as ECONNREFUSED, and so does a TCP RST, which has no private data.
        _ if status == -libc::ECONNREFUSED || status == libc::ECONNREFUSED => {
            if !private_data.is_empty() {
                return None;
            }
            "nobody listens there for RDMA connections".into()
        }
        _ if status == -libc::ECONNRESET || status == libc::ECONNRESET => {
            if !private_data.is_empty() {
                return None;
            }
            "it closed the connection without an answer".into()
        }
        8 => "nobody listens there for RDMA connections (CM reject 8, invalid service ID)".into(),
        1..=3 | 5 => format!("it is out of resources for another connection (CM reject {status})"),
        4 => "it gave up waiting for an answer (CM reject 4, timeout)".into(),
        10 => "this side's connection is one that it does not know any more (CM reject 10, stale connection)".into(),
        12..=17 => format!("its port does not fit the address (CM reject {status})"),
        26 => "the two ports have MTUs that do not fit (CM reject 26, invalid path MTU)".into(),
        _ if status < 0 => std::io::Error::from_raw_os_error(status.saturating_neg()).to_string(),
        _ => format!("CM reject {status}"),
    })
}

/// One completed work request, as the device tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// As posted.
    pub id: u64,
    /// 0 for success; see `Failure`.
    pub status: c_int,
    /// Octets, of a receive or a Read.
    pub length: u32,
    /// Came with an RDMA Write with Immediate, which has taken a receive.
    pub immediate: Option<u32>,
    /// The key that the peer's Send has invalidated.
    pub invalidated: Option<u32>,
}

impl Completion {
    pub(crate) fn of(raw: &IbvWc) -> Self {
        let of_write = raw.opcode == IBV_WC_RECV_RDMA_WITH_IMM || raw.wc_flags & IBV_WC_WITH_IMM != 0;
        Self {
            id: raw.wr_id,
            status: raw.status,
            length: raw.byte_len,
            immediate: (raw.status == 0 && of_write).then(|| u32::from_be(raw.imm_data)),
            invalidated: (raw.status == 0 && raw.wc_flags & IBV_WC_WITH_INV != 0).then_some(raw.imm_data),
        }
    }
}

/// What a completion's status means (`ibv_wc_status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The queue pair had failed before: what came first says why.
    Flushed,
    /// The peer's message was longer than the receive buffer.
    MessageTooLong,
    /// Anything else, for people.
    Because(&'static str),
}

impl Failure {
    /// None for success.
    #[must_use]
    pub fn of(status: c_int) -> Option<Self> {
        Some(match status {
            0 => return None,
            1 => Self::MessageTooLong,
            2 => Self::Because(
                "the connection ended under a work request, or the device refused it (local QP operation error)",
            ),
            4 => Self::Because("the memory of the work request is not registered as it needs (local protection error)"),
            5 => Self::Flushed,
            7 => Self::Because("the peer sent an answer that is none (bad response)"),
            8 => Self::Because("the peer asked for more than this side allows (local access error)"),
            9 => Self::Because("the peer does not take such a request (remote invalid request)"),
            10 => Self::Because("the peer's STag does not allow it (remote access error)"),
            11 => Self::Because("the peer could not do it (remote operation error)"),
            12 => Self::Because("the peer does not answer (retries exceeded): is it, or the way to it, still there?"),
            13 => Self::Because("the peer has no receive posted (receiver not ready retries exceeded)"),
            16 => Self::Because("the peer has given up the work (remote aborted)"),
            19 => Self::Because("the device has failed (fatal error)"),
            20 => Self::Because("the peer does not answer (response timeout)"),
            _ => Self::Because("the device says no more than that (general error)"),
        })
    }
}

/// The address in a `sockaddr_storage`; None if it is none of IPv4 or IPv6.
pub(crate) fn address_of(storage: &[u8; 128]) -> Option<SocketAddr> {
    let part = |from: usize, len: usize| storage.get(from..from + len);
    let family = i32::from(u16::from_ne_bytes(part(0, 2)?.try_into().ok()?));
    let port = u16::from_be_bytes(part(2, 2)?.try_into().ok()?);
    match family {
        libc::AF_INET => {
            let octets: [u8; 4] = part(4, 4)?.try_into().ok()?;
            Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::from(octets)), port))
        }
        libc::AF_INET6 => {
            let octets: [u8; 16] = part(8, 16)?.try_into().ok()?;
            Some(SocketAddr::new(IpAddr::V6(Ipv6Addr::from(octets)), port))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(change: impl FnOnce(&mut IbvWc)) -> Completion {
        let mut raw = IbvWc::default();
        change(&mut raw);
        Completion::of(&raw)
    }

    #[test]
    fn an_immediate_is_in_network_byte_order_and_a_key_is_not() {
        let recorded = completion(|raw| {
            raw.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
            raw.wc_flags = IBV_WC_WITH_IMM;
            raw.imm_data = 0x0102_0304_u32.to_be();
        });
        assert_eq!((recorded.immediate, recorded.invalidated), (Some(0x0102_0304), None));
        let invalidating = completion(|raw| {
            raw.wc_flags = IBV_WC_WITH_INV;
            raw.imm_data = 0x0102_0304;
        });
        assert_eq!(
            (invalidating.immediate, invalidating.invalidated),
            (None, Some(0x0102_0304))
        );
    }

    #[test]
    fn of_work_that_failed_nothing_but_its_status_means_something() {
        let failed = completion(|raw| {
            raw.status = 5;
            raw.wc_flags = IBV_WC_WITH_IMM | IBV_WC_WITH_INV;
        });
        assert_eq!((failed.immediate, failed.invalidated), (None, None));
        assert_eq!(Failure::of(failed.status), Some(Failure::Flushed));
    }

    #[test]
    fn every_status_but_success_is_a_failure() {
        assert_eq!(Failure::of(0), None);
        assert_eq!(Failure::of(1), Some(Failure::MessageTooLong));
        assert!((2..40).all(|status| Failure::of(status).is_some()));
        let Some(Failure::Because(why)) = Failure::of(10) else {
            panic!("no reason")
        };
        assert!(why.contains("STag"));
    }

    #[test]
    fn a_program_that_refuses_says_why_itself_and_a_system_is_spoken_for() {
        for (status, private_data) in [(28, &b"KBTP"[..]), (28, b""), (-libc::ECONNREFUSED, b"KBTP")] {
            assert_eq!(refusal(status, private_data), None);
        }
        for status in [8, -libc::ECONNREFUSED] {
            assert!(refusal(status, b"").unwrap().contains("nobody listens"));
        }
        assert!(refusal(26, b"").unwrap().contains("MTU"));
        assert_eq!(refusal(99, b"").unwrap(), "CM reject 99");
    }

    #[test]
    fn private_data_is_passed_as_it_is() {
        let said = Parameters {
            private_data: b"KBTP".to_vec(),
            responder_resources: 3,
            initiator_depth: 4,
        };
        let raw = said.raw();
        assert_eq!((raw.private_data_len, raw.rnr_retry_count), (4, RNR_RETRY_WITHOUT_END));
        assert_eq!(Parameters::of(&raw, b"KBTP"), said);
        assert!(Parameters::default().raw().private_data.is_null());
    }

    #[test]
    fn addresses_of_both_families_are_read() {
        let mut storage = [0; 128];
        storage[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        storage[2..8].copy_from_slice(&[0x14, 0xA7, 10, 0, 2, 15]);
        assert_eq!(address_of(&storage), "10.0.2.15:5287".parse().ok());
        storage[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
        storage[8..24].copy_from_slice(&Ipv6Addr::LOCALHOST.octets());
        assert_eq!(address_of(&storage), "[::1]:5287".parse().ok());
        assert_eq!(address_of(&[0; 128]), None);
    }
}
