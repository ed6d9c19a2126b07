//! Work requests for the send queue.

use crate::abi::*;

/// How many work requests queues take, and of how many pieces each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depths {
    /// In the send queue.
    pub sends: u32,
    /// In the receive queue.
    pub receives: u32,
    /// Pieces of memory in one of the send queue.
    pub pieces: u32,
    /// Octets that a Send may carry without registered memory.
    pub inline_bytes: u32,
}

/// What a work request of the send queue does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Kind {
    Send {
        invalidate: Option<u32>,
    },
    Write {
        rkey: u32,
        to: u64,
    },
    WriteImmediate {
        rkey: u32,
        to: u64,
        immediate: u32,
    },
    Read {
        rkey: u32,
        to: u64,
    },
    FetchAdd {
        rkey: u32,
        to: u64,
        add: u64,
    },
    CompareSwap {
        rkey: u32,
        to: u64,
        compare: u64,
        swap: u64,
    },
}

/// One for the send queue. `octets` are copied when it is posted, and stand instead of `pieces`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "said above")]
pub struct SendWork<'a> {
    pub id: u64,
    pub kind: Kind,
    pub pieces: &'a [Sge],
    pub octets: Option<&'a [u8]>,
    pub solicited: bool,
}

impl SendWork<'_> {
    /// As the library takes it, without its pieces; and the piece that `octets` are.
    pub(crate) fn request(&self) -> (IbvSendWr, Option<Sge>) {
        let mut wr = IbvSendWr::new();
        wr.wr_id = self.id;
        wr.send_flags = IBV_SEND_SIGNALED | if self.solicited { IBV_SEND_SOLICITED } else { 0 };
        match self.kind {
            Kind::Send { invalidate: None } => wr.opcode = IBV_WR_SEND,
            Kind::Send { invalidate: Some(rkey) } => {
                (wr.opcode, wr.imm_data) = (IBV_WR_SEND_WITH_INV, rkey);
                // Where siw's library looks for it, as if this were an RDMA Write; others do not look there.
                wr.remote = [0, rkey.into(), 0, 0];
            }
            Kind::Write { rkey, to } => (wr.opcode, wr.remote) = (IBV_WR_RDMA_WRITE, [to, rkey.into(), 0, 0]),
            Kind::WriteImmediate { rkey, to, immediate } => {
                (wr.opcode, wr.remote) = (IBV_WR_RDMA_WRITE_WITH_IMM, [to, rkey.into(), 0, 0]);
                wr.imm_data = immediate.to_be();
            }
            Kind::Read { rkey, to } => (wr.opcode, wr.remote) = (IBV_WR_RDMA_READ, [to, rkey.into(), 0, 0]),
            Kind::FetchAdd { rkey, to, add } => {
                (wr.opcode, wr.remote) = (IBV_WR_ATOMIC_FETCH_AND_ADD, [to, add, 0, rkey.into()]);
            }
            Kind::CompareSwap {
                rkey,
                to,
                compare,
                swap,
            } => (wr.opcode, wr.remote) = (IBV_WR_ATOMIC_CMP_AND_SWP, [to, compare, swap, rkey.into()]),
        }
        let copied = self.octets.filter(|octets| !octets.is_empty()).map(|octets| Sge {
            address: octets.as_ptr().expose_provenance() as u64,
            length: octets.len() as u32,
            lkey: 0,
        });
        if copied.is_some() {
            wr.send_flags |= IBV_SEND_INLINE;
        }
        (wr, copied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: Kind, octets: Option<&[u8]>) -> (IbvSendWr, Option<Sge>) {
        SendWork {
            id: 7,
            kind,
            pieces: &[],
            octets,
            solicited: false,
        }
        .request()
    }

    #[test]
    fn each_kind_has_its_fields_where_the_header_says() {
        let (wr, _) = request(Kind::Write { rkey: 5, to: 6 }, None);
        assert_eq!((wr.wr_id, wr.opcode, wr.remote), (7, IBV_WR_RDMA_WRITE, [6, 5, 0, 0]));
        let (wr, _) = request(
            Kind::WriteImmediate {
                rkey: 5,
                to: 6,
                immediate: 0x0102_0304,
            },
            None,
        );
        assert_eq!(
            (wr.opcode, wr.imm_data.to_ne_bytes()),
            (IBV_WR_RDMA_WRITE_WITH_IMM, [1, 2, 3, 4])
        );
        let (wr, _) = request(Kind::FetchAdd { rkey: 5, to: 8, add: 9 }, None);
        assert_eq!((wr.opcode, wr.remote), (IBV_WR_ATOMIC_FETCH_AND_ADD, [8, 9, 0, 5]));
        let (wr, _) = request(
            Kind::CompareSwap {
                rkey: 5,
                to: 8,
                compare: 1,
                swap: 2,
            },
            None,
        );
        assert_eq!((wr.opcode, wr.remote), (IBV_WR_ATOMIC_CMP_AND_SWP, [8, 1, 2, 5]));
        let (wr, _) = request(Kind::Send { invalidate: Some(11) }, None);
        assert_eq!((wr.opcode, wr.imm_data, wr.remote[1]), (IBV_WR_SEND_WITH_INV, 11, 11));
    }

    #[test]
    fn octets_go_inline_if_there_are_any() {
        let plain = Kind::Send { invalidate: None };
        let (wr, copied) = request(plain, Some(b"abc"));
        assert_eq!(copied.map(|piece| (piece.length, piece.lkey)), Some((3, 0)));
        assert_ne!(wr.send_flags & IBV_SEND_INLINE, 0);
        let (wr, copied) = request(plain, Some(b""));
        assert_eq!((copied, wr.send_flags), (None, IBV_SEND_SIGNALED));
    }
}
