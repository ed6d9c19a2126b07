//! MPA start-up: the Request and Reply frames and what they settle (RFC 5044 7.1, RFC 6581 9).
//!
//! ```text
//! octet 0..15  16           17   18..19     20..
//!       Key    M C R S Res  Rev  PD_Length  private data
//!
//! With S and Rev 2 the private data begins with the enhanced word of RFC 6581 9:
//!       A B IRD(14)  C D ORD(14)
//! ```
//!
//! `ActiveStartup` is the side that sends the Request, `PassiveStartup` the one that answers it. Both take octets in any
//! split. What breaks the rules of the start-up is `MpaStartupError`: the TCP connection is then closed without
//! a further word, neither Reply nor Terminate (RFC 5044 7.1.2).

use std::fmt;

use crate::limits::{
    IRD_ORD_MAX, IRD_ORD_ULP_MANAGED, MPA_ENHANCED_WORD_BYTES, MPA_FRAME_BYTES, MPA_PRIVATE_DATA_MAX_BYTES,
};
use crate::types::{ApiMisuse, TerminateCause};

/// The first octets of a Request.
pub const REQUEST_KEY: &[u8; 16] = b"MPA ID Req Frame";
/// The first octets of a Reply.
pub const REPLY_KEY: &[u8; 16] = b"MPA ID Rep Frame";
/// RFC 5044.
pub const REVISION_PLAIN: u8 = 1;
/// RFC 6581.
pub const REVISION_ENHANCED: u8 = 2;

const M: u8 = 0x80;
const C: u8 = 0x40;
const R: u8 = 0x20;
const S: u8 = 0x10;
const A: u16 = 0x8000;
const B: u16 = 0x4000;
const C_WRITE: u16 = 0x8000;
const D_READ: u16 = 0x4000;

/// The peer's start-up frame is not one to go on with: close the TCP connection, send nothing (RFC 5044 7.1.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpaStartupError(pub String);

impl fmt::Display for MpaStartupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MpaStartupError {}

bitflags::bitflags! {
    /// RFC 6581 9.2: the zero-length messages that may serve as the initiator's Ready To Receive indication.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RtrKind: u8 {
        /// A Send.
        const SEND = 1;
        /// An RDMA Write.
        const WRITE = 2;
        /// An RDMA Read.
        const READ = 4;
    }
}

/// How this side starts a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpaOptions {
    /// This side wants CRCs.
    pub crc: bool,
    /// This side wants markers in what it receives.
    pub want_markers: bool,
    /// The highest MPA revision spoken.
    pub revision: u8,
    /// The RTR kinds the active side offers, none for the client-server model (A=0); a passive side serves every kind
    /// whatever stands here.
    pub peer_to_peer: RtrKind,
    /// The read depth either way when the peer speaks revision 1, which cannot tell it (profile 3).
    pub revision1_depth: u16,
}

impl Default for MpaOptions {
    fn default() -> Self {
        Self {
            crc: true,
            want_markers: false,
            revision: REVISION_ENHANCED,
            peer_to_peer: RtrKind::empty(),
            revision1_depth: 0,
        }
    }
}

impl MpaOptions {
    /// Refuses options that cannot be.
    pub fn checked(self) -> Result<Self, ApiMisuse> {
        if ![REVISION_PLAIN, REVISION_ENHANCED].contains(&self.revision) {
            return Err(ApiMisuse(format!("MPA revision must be 1 or 2, not {}", self.revision)));
        }
        check_depth("revision1_depth", self.revision1_depth)?;
        if self.revision == REVISION_PLAIN && !self.peer_to_peer.is_empty() {
            return Err(ApiMisuse(
                "the peer-to-peer model needs MPA revision 2 (RFC 6581)".into(),
            ));
        }
        Ok(self)
    }
}

/// What both frames together settled, from this side's view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// CRCs are generated and checked both ways.
    pub crc: bool,
    /// What this side sends has markers.
    pub tx_markers: bool,
    /// What this side receives has markers.
    pub rx_markers: bool,
    /// Requests of the peer's at a time, in force here.
    pub ird: u16,
    /// Requests of this side's at a time, in force here.
    pub ord: u16,
    /// What the peer's frame said.
    pub peer_ird: u16,
    /// What the peer's frame said.
    pub peer_ord: u16,
    /// The MPA revision of the peer's frame.
    pub revision: u8,
    /// The peer's, without the enhanced word.
    pub private_data: Vec<u8>,
    /// On the active side the kind to send, on the passive side the kinds that may come; none in the client-server
    /// model.
    pub rtr: RtrKind,
    /// Active side only: the stream must send this Terminate and nothing else (RFC 6581 9.1, 9.2).
    pub failure: Option<TerminateCause>,
}

impl Negotiated {
    /// An FPDU with PAD starts and ends a TCP segment.
    ///
    /// Linux siw takes a CRC for wrong if a segment ends between PAD and CRC. It knows no markers.
    #[must_use]
    pub const fn pad_stands_alone(&self) -> bool {
        self.crc && !self.tx_markers
    }
}

/// A Reply with R=1: MPA is left, the TCP connection is still open (RFC 5044 7.1.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpaRejected {
    /// The peer's, without the enhanced word.
    pub private_data: Vec<u8>,
    /// What the peer's frame said.
    pub peer_ird: u16,
    /// What the peer's frame said.
    pub peer_ord: u16,
}

/// How the peer answered a Request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// With a Reply that accepts.
    Negotiated(Negotiated),
    /// With a Reply that rejects.
    Rejected(MpaRejected),
}

/// A valid Request. `peer_ird` and `peer_ord` are the configured depth if the Request could not tell them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRequest {
    /// The peer's, without the enhanced word.
    pub private_data: Vec<u8>,
    /// The IRD of the Request.
    pub peer_ird: u16,
    /// The ORD of the Request.
    pub peer_ord: u16,
    /// Its MPA revision.
    pub revision: u8,
    /// The peer wants markers in what it receives.
    pub wants_markers: bool,
    /// The peer wants CRCs.
    pub wants_crc: bool,
    /// The RTR kinds the peer can send.
    pub rtr_offered: RtrKind,
    /// It came in the form of RFC 6581.
    pub enhanced: bool,
}

/// RFC 6581 9: the 4 octets before the private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnhancedWord {
    /// The sender's IRD.
    pub ird: u16,
    /// The sender's ORD.
    pub ord: u16,
    /// The A bit.
    pub peer_to_peer: bool,
    /// The B, C and D bits.
    pub rtr: RtrKind,
}

impl EnhancedWord {
    /// Its octets. A=0 is sent with B=C=D=0 (RFC 6581 9.2).
    pub fn pack(&self) -> [u8; MPA_ENHANCED_WORD_BYTES] {
        let bit = |kind, bit| {
            if self.peer_to_peer && self.rtr.contains(kind) {
                bit
            } else {
                0
            }
        };
        let first = self.ird | if self.peer_to_peer { A } else { 0 } | bit(RtrKind::SEND, B);
        let second = self.ord | bit(RtrKind::WRITE, C_WRITE) | bit(RtrKind::READ, D_READ);
        let ([a, b], [c, d]) = (first.to_be_bytes(), second.to_be_bytes());
        [a, b, c, d]
    }

    /// What `octets` say. B, C and D mean nothing when A is 0 (RFC 6581 9.2).
    pub fn parse(octets: &[u8; MPA_ENHANCED_WORD_BYTES]) -> Self {
        let &[a, b, c, d] = octets;
        let (first, second) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        let peer_to_peer = first & A != 0;
        let mut rtr = RtrKind::empty();
        if peer_to_peer {
            rtr.set(RtrKind::SEND, first & B != 0);
            rtr.set(RtrKind::WRITE, second & C_WRITE != 0);
            rtr.set(RtrKind::READ, second & D_READ != 0);
        }
        Self {
            ird: first & IRD_ORD_ULP_MANAGED,
            ord: second & IRD_ORD_ULP_MANAGED,
            peer_to_peer,
            rtr,
        }
    }
}

/// A Request or Reply frame; `word` is None in the plain form of RFC 5044.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpaFrame {
    /// It is a Reply.
    pub reply: bool,
    /// The M bit.
    pub markers: bool,
    /// The C bit.
    pub crc: bool,
    /// Rev.
    pub revision: u8,
    /// Without the enhanced word.
    pub private_data: Vec<u8>,
    /// The R bit.
    pub rejected: bool,
    /// IRD, ORD and RTR kinds.
    pub word: Option<EnhancedWord>,
}

impl MpaFrame {
    /// Its octets. Refuses too long private data.
    pub fn pack(&self) -> Result<Vec<u8>, ApiMisuse> {
        let word_bytes = self.word.map_or(0, |_| MPA_ENHANCED_WORD_BYTES);
        let limit = MPA_PRIVATE_DATA_MAX_BYTES - word_bytes;
        let pd_length = u16::try_from(word_bytes + self.private_data.len()).ok();
        let Some(pd_length) = pd_length.filter(|_| self.private_data.len() <= limit) else {
            return Err(ApiMisuse(format!(
                "private data may have {limit} octets here, not {} (RFC 6581 9)",
                self.private_data.len()
            )));
        };
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        let flags = flag(self.markers, M) | flag(self.crc, C) | flag(self.rejected, R) | flag(self.word.is_some(), S);
        let mut octets = Vec::with_capacity(MPA_FRAME_BYTES + usize::from(pd_length));
        octets.extend(if self.reply { REPLY_KEY } else { REQUEST_KEY });
        octets.extend([flags, self.revision]);
        octets.extend(pd_length.to_be_bytes());
        octets.extend(self.word.iter().flat_map(EnhancedWord::pack));
        octets.extend(&self.private_data);
        Ok(octets)
    }
}

/// Collects one frame from octets in any split and judges it as early as it can (RFC 5044 7.1.2).
#[derive(Debug)]
struct FrameReader {
    reply: bool,
    highest_revision: u8,
    octets: Vec<u8>,
}

impl FrameReader {
    fn new(reply: bool, highest_revision: u8) -> Self {
        Self {
            reply,
            highest_revision,
            octets: Vec::new(),
        }
    }

    fn receive(&mut self, data: &[u8]) -> Result<Option<MpaFrame>, MpaStartupError> {
        self.octets.extend(data);
        self.check_key()?;
        let Some(&[flags, revision, length_high, length_low]) =
            self.octets.get(REQUEST_KEY.len()..).and_then(<[u8]>::first_chunk)
        else {
            return Ok(None);
        };
        let pd_length = usize::from(u16::from_be_bytes([length_high, length_low]));
        if !(REVISION_PLAIN..=self.highest_revision).contains(&revision) {
            let highest = self.highest_revision;
            return Err(MpaStartupError(format!(
                "MPA revision {revision} came, this side speaks 1 to {highest}"
            )));
        }
        if pd_length > MPA_PRIVATE_DATA_MAX_BYTES {
            return Err(MpaStartupError(format!(
                "PD_Length {pd_length} came, at most {MPA_PRIVATE_DATA_MAX_BYTES} is allowed"
            )));
        }
        // In a frame of RFC 5044 the S bit is one of Res and is not looked at.
        let enhanced = revision >= REVISION_ENHANCED && flags & S != 0;
        if enhanced && pd_length < MPA_ENHANCED_WORD_BYTES {
            return Err(MpaStartupError(format!(
                "S is set but PD_Length {pd_length} leaves no room for IRD and ORD (RFC 6581 9)"
            )));
        }
        if self.octets.len() < MPA_FRAME_BYTES + pd_length {
            return Ok(None);
        }
        let frame: Vec<u8> = self.octets.drain(..MPA_FRAME_BYTES + pd_length).collect();
        let mut private_data = frame.get(MPA_FRAME_BYTES..).unwrap_or_default();
        let mut word = None;
        if enhanced && let Some((octets, rest)) = private_data.split_first_chunk() {
            word = Some(EnhancedWord::parse(octets));
            private_data = rest;
        }
        Ok(Some(MpaFrame {
            reply: self.reply,
            markers: flags & M != 0,
            crc: flags & C != 0,
            revision,
            private_data: private_data.to_vec(),
            rejected: self.reply && flags & R != 0, // R of a Request is not checked (RFC 5044 7.1.1)
            word,
        }))
    }

    fn check_key(&self) -> Result<(), MpaStartupError> {
        let (key, other) = if self.reply {
            (REPLY_KEY, REQUEST_KEY)
        } else {
            (REQUEST_KEY, REPLY_KEY)
        };
        let came = self.octets.get(..key.len()).unwrap_or(&self.octets);
        if key.starts_with(came) {
            return Ok(());
        }
        let (what, opposite) = if self.reply {
            ("Reply", "Request")
        } else {
            ("Request", "Reply")
        };
        if came == other {
            // Both ends of the connection play the same role (RFC 5044 7.1.2 rule 8).
            return Err(MpaStartupError(format!(
                "an MPA {opposite} came where a {what} was due"
            )));
        }
        if other.starts_with(came) {
            return Ok(());
        }
        let (due, came) = (key.escape_ascii(), came.escape_ascii());
        Err(MpaStartupError(format!(
            "no MPA {what}: the key b'{due}' was due, b'{came}' came"
        )))
    }
}

fn check_depth(name: &str, depth: u16) -> Result<(), ApiMisuse> {
    if depth > IRD_ORD_MAX {
        return Err(ApiMisuse(format!("{name} must be 0 to {IRD_ORD_MAX}, not {depth}")));
    }
    Ok(())
}

/// The initiator's half. Send `request`, then feed `receive_data` until it returns a result.
#[derive(Debug)]
pub struct ActiveStartup {
    options: MpaOptions,
    enhanced: bool,
    ird: u16,
    ord: u16,
    request: Vec<u8>,
    reader: FrameReader,
}

impl ActiveStartup {
    /// `ird` is the most this side can serve, `ord` what it would like to use.
    ///
    /// Refuses private data over 508 octets (512 in revision 1) and a depth over 0x3FFE.
    pub fn new(options: &MpaOptions, private_data: &[u8], ird: u16, ord: u16) -> Result<Self, ApiMisuse> {
        check_depth("ird", ird)?;
        check_depth("ord_", ord)?;
        let enhanced = options.revision >= REVISION_ENHANCED;
        let word = EnhancedWord {
            ird,
            ord,
            peer_to_peer: !options.peer_to_peer.is_empty(),
            rtr: options.peer_to_peer,
        };
        let request = MpaFrame {
            reply: false,
            markers: options.want_markers,
            crc: options.crc,
            revision: options.revision,
            private_data: private_data.to_vec(),
            rejected: false,
            word: enhanced.then_some(word),
        };
        let depth = options.revision1_depth;
        Ok(Self {
            options: options.clone(),
            enhanced,
            ird: if enhanced { ird } else { ird.min(depth) },
            ord: if enhanced { ord } else { ord.min(depth) },
            request: request.pack()?,
            reader: FrameReader::new(true, options.revision),
        })
    }

    /// The octets to send first.
    pub fn request(&self) -> &[u8] {
        &self.request
    }

    /// Octets that came after the Reply: they belong to the stream.
    pub fn surplus(&self) -> &[u8] {
        &self.reader.octets
    }

    /// None while the Reply is not complete.
    pub fn receive_data(&mut self, data: &[u8]) -> Result<Option<Answer>, MpaStartupError> {
        let Some(reply) = self.reader.receive(data)? else {
            return Ok(None);
        };
        if self.enhanced && reply.word.is_none() {
            // RFC 6581 10: an enhanced Request gets an enhanced Reply; a new connection may try revision 1.
            return Err(MpaStartupError(
                "a Reply without IRD and ORD came to a Request of MPA revision 2 (RFC 6581 10)".into(),
            ));
        }
        let depth = self.options.revision1_depth;
        let (peer_ird, peer_ord) = reply.word.map_or((depth, depth), |word| (word.ird, word.ord));
        if reply.rejected {
            return Ok(Some(Answer::Rejected(MpaRejected {
                private_data: reply.private_data,
                peer_ird,
                peer_ord,
            })));
        }
        // RFC 6581 9.1; a depth of all ones leaves ours alone.
        let ord = if peer_ird == IRD_ORD_ULP_MANAGED {
            self.ord
        } else {
            self.ord.min(peer_ird)
        };
        let (mut rtr, mut failure) = (RtrKind::empty(), None);
        if reply.word.is_some() && self.ird < peer_ord && peer_ord != IRD_ORD_ULP_MANAGED {
            failure = Some(TerminateCause::MpaInsufficientIrd);
        } else if !self.options.peer_to_peer.is_empty() {
            rtr = self.choose_rtr(reply.word, peer_ird);
            failure = rtr.is_empty().then_some(TerminateCause::MpaNoMatchingRtr);
        }
        Ok(Some(Answer::Negotiated(Negotiated {
            crc: self.options.crc || reply.crc,
            tx_markers: reply.markers,
            rx_markers: self.options.want_markers,
            ird: self.ird,
            ord,
            peer_ird,
            peer_ord,
            revision: reply.revision,
            private_data: reply.private_data,
            rtr,
            failure,
        })))
    }

    /// One kind that both sides set; cheapest first: a Write uses up nothing at the peer (RFC 6581 9.2).
    fn choose_rtr(&self, word: Option<EnhancedWord>, peer_ird: u16) -> RtrKind {
        let common = self.options.peer_to_peer & word.map_or(RtrKind::empty(), |word| word.rtr);
        if common.contains(RtrKind::WRITE) {
            return RtrKind::WRITE;
        }
        if common.contains(RtrKind::READ) && peer_ird >= 1 {
            return RtrKind::READ;
        }
        common & RtrKind::SEND
    }
}

/// The responder's half. Feed `receive_data` until it returns the Request, then `accept` or `reject` it.
#[derive(Debug)]
pub struct PassiveStartup {
    options: MpaOptions,
    reader: FrameReader,
    frame: Option<MpaFrame>,
}

impl PassiveStartup {
    /// Waits for a Request.
    pub fn new(options: &MpaOptions) -> Self {
        Self {
            options: options.clone(),
            reader: FrameReader::new(false, options.revision),
            frame: None,
        }
    }

    /// None while the Request is not complete.
    ///
    /// Refuses also any octet after the Request and before `accept` or `reject`: the initiator has to wait for the Reply
    /// (RFC 5044 7.1.2 rule 9).
    pub fn receive_data(&mut self, data: &[u8]) -> Result<Option<PeerRequest>, MpaStartupError> {
        let surplus_bytes = if self.frame.is_none() {
            self.frame = self.reader.receive(data)?;
            self.reader.octets.len()
        } else {
            data.len()
        };
        let Some(frame) = &self.frame else { return Ok(None) };
        if surplus_bytes > 0 {
            return Err(MpaStartupError(format!(
                "{surplus_bytes} octets came after the Request and before its Reply"
            )));
        }
        let depth = self.options.revision1_depth;
        Ok(Some(PeerRequest {
            private_data: frame.private_data.clone(),
            peer_ird: frame.word.map_or(depth, |word| word.ird),
            peer_ord: frame.word.map_or(depth, |word| word.ord),
            revision: frame.revision,
            wants_markers: frame.markers,
            wants_crc: frame.crc,
            rtr_offered: frame.word.map_or(RtrKind::empty(), |word| word.rtr),
            enhanced: frame.word.is_some(),
        }))
    }

    /// The Reply to send and what holds from then on; `ird` is the most this side can serve.
    ///
    /// The initiator lowers its ORD to `ird` if it wanted more (RFC 6581 9.1). Refuses too long private data and
    /// a depth over 0x3FFE.
    pub fn accept(&self, private_data: &[u8], ird: u16, ord: u16) -> Result<(Vec<u8>, Negotiated), ApiMisuse> {
        check_depth("ird", ird)?;
        check_depth("ord_", ord)?;
        let request = self.request()?;
        let settled = match request.word {
            None => {
                let depth = self.options.revision1_depth;
                Settled {
                    ird: ird.min(depth),
                    ord: ord.min(depth),
                    peer_ird: depth,
                    peer_ord: depth,
                    word: None,
                    rtr: RtrKind::empty(),
                }
            }
            Some(word) => settle_enhanced(word, ird, ord),
        };
        let negotiated = Negotiated {
            crc: self.options.crc || request.crc,
            tx_markers: request.markers,
            rx_markers: self.options.want_markers,
            ird: settled.ird,
            ord: settled.ord,
            peer_ird: settled.peer_ird,
            peer_ord: settled.peer_ord,
            revision: request.revision,
            private_data: request.private_data.clone(),
            rtr: settled.rtr,
            failure: None,
        };
        Ok((self.reply(request, private_data, settled.word, false)?, negotiated))
    }

    /// A Reply with R=1; the depths may tell the initiator what would have been needed (RFC 6581 9.1).
    pub fn reject(&self, private_data: &[u8], ird: u16, ord: u16) -> Result<Vec<u8>, ApiMisuse> {
        check_depth("ird", ird)?;
        check_depth("ord_", ord)?;
        let request = self.request()?;
        let word = request.word.map(|word| EnhancedWord {
            ird,
            ord,
            rtr: RtrKind::all(),
            ..word
        });
        self.reply(request, private_data, word, true)
    }

    fn request(&self) -> Result<&MpaFrame, ApiMisuse> {
        self.frame
            .as_ref()
            .ok_or_else(|| ApiMisuse("there is no complete MPA Request to answer yet".into()))
    }

    fn reply(
        &self,
        request: &MpaFrame,
        private_data: &[u8],
        word: Option<EnhancedWord>,
        rejected: bool,
    ) -> Result<Vec<u8>, ApiMisuse> {
        MpaFrame {
            reply: true,
            markers: self.options.want_markers,
            crc: self.options.crc,
            revision: request.revision,
            private_data: private_data.to_vec(),
            rejected,
            word,
        }
        .pack()
    }
}

/// The depths and RTR kinds that an accepting Reply settles, and its word.
struct Settled {
    ird: u16,
    ord: u16,
    peer_ird: u16,
    peer_ord: u16,
    word: Option<EnhancedWord>,
    rtr: RtrKind,
}

fn settle_enhanced(request: EnhancedWord, mut ird: u16, mut ord: u16) -> Settled {
    let (peer_ird, peer_ord) = (request.ird, request.ord);
    if peer_ird != IRD_ORD_ULP_MANAGED {
        ord = ord.min(peer_ird);
    }
    if request.rtr == RtrKind::READ {
        ird = ird.max(1); // the RTR itself needs a place (RFC 6581 9.1)
    }
    let offered = if ird > 0 {
        RtrKind::all()
    } else {
        RtrKind::all() - RtrKind::READ
    };
    let word = EnhancedWord {
        // RFC 6581 9.1: all ones are answered crosswise with all ones.
        ird: if peer_ord == IRD_ORD_ULP_MANAGED {
            IRD_ORD_ULP_MANAGED
        } else {
            ird
        },
        ord: if peer_ird == IRD_ORD_ULP_MANAGED {
            IRD_ORD_ULP_MANAGED
        } else {
            ord
        },
        peer_to_peer: request.peer_to_peer,
        rtr: offered,
    };
    Settled {
        ird,
        ord,
        peer_ird,
        peer_ord,
        word: Some(word),
        rtr: offered & request.rtr,
    }
}
