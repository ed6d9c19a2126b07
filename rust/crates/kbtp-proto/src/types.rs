//! The Terminate codes, and the errors that every layer names.

use std::fmt;

macro_rules! terminate_causes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal ($layer:literal, $etype:literal, $code:literal);)*) => {
        /// Why a stream is ended, as (layer, error type, error code) of the Terminate message.
        ///
        /// Layers: 0 RDMAP (RFC 5040 4.8), 1 DDP (RFC 5041 7), 2 LLP (RFC 5044 8, RFC 6581 9).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum TerminateCause {
            $($(#[$doc])* $variant,)*
        }

        impl TerminateCause {
            /// Every cause there is.
            pub const ALL: &[TerminateCause] = &[$(TerminateCause::$variant,)*];

            /// (layer, error type, error code).
            pub const fn value(self) -> (u8, u8, u8) {
                match self {
                    $(TerminateCause::$variant => ($layer, $etype, $code),)*
                }
            }

            /// The name it has in `kbtp.types.TerminateCause`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(TerminateCause::$variant => $name,)*
                }
            }
        }
    };
}

terminate_causes! {
    /// RDMAP, local catastrophic; its code means nothing.
    LocalCatastrophic = "LOCAL_CATASTROPHIC" (0, 0, 0x00);
    /// Remote protection: invalid STag.
    RdmapInvalidStag = "RDMAP_INVALID_STAG" (0, 1, 0x00);
    /// Remote protection: base or bounds.
    RdmapBaseOrBounds = "RDMAP_BASE_OR_BOUNDS" (0, 1, 0x01);
    /// Remote protection: access rights.
    RdmapAccessRights = "RDMAP_ACCESS_RIGHTS" (0, 1, 0x02);
    /// Remote protection: the STag is not associated with the stream.
    RdmapStagNotAssociated = "RDMAP_STAG_NOT_ASSOCIATED" (0, 1, 0x03);
    /// Remote protection: TO wrap.
    RdmapToWrap = "RDMAP_TO_WRAP" (0, 1, 0x04);
    /// Remote protection: the STag cannot be invalidated.
    RdmapCannotInvalidate = "RDMAP_CANNOT_INVALIDATE" (0, 1, 0x09);
    /// Remote operation: invalid RDMAP version.
    RdmapInvalidVersion = "RDMAP_INVALID_VERSION" (0, 2, 0x05);
    /// Remote operation: unexpected opcode.
    RdmapUnexpectedOpcode = "RDMAP_UNEXPECTED_OPCODE" (0, 2, 0x06);
    /// Remote operation: catastrophic, this stream.
    RdmapCatastrophicStream = "RDMAP_CATASTROPHIC_STREAM" (0, 2, 0x07);
    /// Remote operation: unspecified.
    RdmapUnspecified = "RDMAP_UNSPECIFIED" (0, 2, 0xFF);
    /// DDP, local catastrophic.
    DdpLocalCatastrophic = "DDP_LOCAL_CATASTROPHIC" (1, 0, 0x00);
    /// Tagged buffer: invalid STag.
    DdpInvalidStag = "DDP_INVALID_STAG" (1, 1, 0x00);
    /// Tagged buffer: base or bounds.
    DdpBaseOrBounds = "DDP_BASE_OR_BOUNDS" (1, 1, 0x01);
    /// Tagged buffer: the STag is not associated with the stream.
    DdpStagNotAssociated = "DDP_STAG_NOT_ASSOCIATED" (1, 1, 0x02);
    /// Tagged buffer: TO wrap.
    DdpToWrap = "DDP_TO_WRAP" (1, 1, 0x03);
    /// Tagged buffer: invalid DDP version.
    DdpTaggedInvalidVersion = "DDP_TAGGED_INVALID_VERSION" (1, 1, 0x04);
    /// Untagged buffer: invalid QN.
    DdpInvalidQn = "DDP_INVALID_QN" (1, 2, 0x01);
    /// Untagged buffer: no buffer available.
    DdpNoBuffer = "DDP_NO_BUFFER" (1, 2, 0x02);
    /// Untagged buffer: MSN out of range.
    DdpMsnOutOfRange = "DDP_MSN_OUT_OF_RANGE" (1, 2, 0x03);
    /// Untagged buffer: invalid MO.
    DdpInvalidMo = "DDP_INVALID_MO" (1, 2, 0x04);
    /// Untagged buffer: message too long for the buffer.
    DdpMessageTooLong = "DDP_MESSAGE_TOO_LONG" (1, 2, 0x05);
    /// Untagged buffer: invalid DDP version.
    DdpUntaggedInvalidVersion = "DDP_UNTAGGED_INVALID_VERSION" (1, 2, 0x06);
    /// MPA: CRC mismatch.
    MpaCrc = "MPA_CRC" (2, 0, 0x02);
    /// MPA: marker and length field do not agree.
    MpaMarkerMismatch = "MPA_MARKER_MISMATCH" (2, 0, 0x03);
    /// MPA: local catastrophic (RFC 6581 9.3).
    MpaLocalCatastrophic = "MPA_LOCAL_CATASTROPHIC" (2, 0, 0x05);
    /// MPA: insufficient IRD resources (RFC 6581 9.1).
    MpaInsufficientIrd = "MPA_INSUFFICIENT_IRD" (2, 0, 0x06);
    /// MPA: no matching RTR option (RFC 6581 9.2).
    MpaNoMatchingRtr = "MPA_NO_MATCHING_RTR" (2, 0, 0x07);
}

impl TerminateCause {
    /// The layer that found the error.
    pub const fn layer(self) -> u8 {
        self.value().0
    }

    /// The error type within the layer.
    pub const fn etype(self) -> u8 {
        self.value().1
    }

    /// The error code within the type.
    pub const fn code(self) -> u8 {
        self.value().2
    }

    /// The cause with these numbers.
    pub fn from_value(value: (u8, u8, u8)) -> Option<TerminateCause> {
        Self::ALL.iter().copied().find(|cause| cause.value() == value)
    }
}

impl fmt::Display for TerminateCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layer, etype, code) = self.value();
        write!(f, "{} ({layer}/{etype}/{code:02x})", self.name())
    }
}

/// What a received Terminate said, decoded by its bits (RFC 5040 4.8).
///
/// `layer`, `etype` and `code` are raw because a peer may send values this stack does not know. The headers are empty
/// if they did not come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TerminateInfo {
    /// The layer that found the error.
    pub layer: u8,
    /// The error type within the layer.
    pub etype: u8,
    /// The error code within the type.
    pub code: u8,
    /// Length of the segment the Terminate is about, its header included.
    pub ddp_segment_length: Option<u16>,
    /// The DDP header of that segment.
    pub ddp_header: Vec<u8>,
    /// The Read Request header in that segment.
    pub rdmap_header: Vec<u8>,
}

impl fmt::Display for TerminateInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layer, etype, code) = (self.layer, self.etype, self.code);
        let name = TerminateCause::from_value((layer, etype, code)).map_or("unknown code", TerminateCause::name);
        write!(f, "{name} ({layer}/{etype}/{code:02x})")
    }
}

/// The peer broke the protocol; its stream ends with `cause`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerMisbehaved {
    /// The Terminate that says so.
    pub cause: TerminateCause,
    /// What was wrong.
    pub message: String,
}

impl PeerMisbehaved {
    /// `message` without the cause, which `Display` adds.
    pub fn new(cause: TerminateCause, message: impl Into<String>) -> Self {
        Self {
            cause,
            message: message.into(),
        }
    }
}

impl fmt::Display for PeerMisbehaved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.message, self.cause)
    }
}

impl std::error::Error for PeerMisbehaved {}

/// Profile 1: KBTP opcodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
#[repr(u8)]
pub enum Opcode {
    Hello = 1,
    HelloAck = 2,
    Load = 3,
    Store = 4,
    AllocStore = 5,
    Free = 6,
    Bind = 7,
    Completion = 8,
}

bitflags::bitflags! {
    /// Draft 5.1: flags of LOAD, STORE, ALLOC_STORE, FREE and BIND.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct RequestFlag: u16 {
        /// Data follows the request.
        const INLINE = 0x0001;
        /// Seal the block after the store.
        const SEAL = 0x0002;
        /// Complete with a completion record.
        const RECORD = 0x0004;
        /// Complete with Send with Invalidate.
        const INVALIDATE = 0x0008;
        /// A load may return an unsealed block.
        const ALLOW_UNSEALED = 0x0010;
    }
}

macro_rules! statuses {
    ($($variant:ident = $name:literal $value:literal;)*) => {
        /// Profile 1: status codes of completions and HELLO_ACK.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        #[repr(u16)]
        pub enum Status {
            $($variant = $value,)*
        }

        impl Status {
            /// Every status there is.
            pub const ALL: &[Status] = &[$(Status::$variant,)*];

            /// The name it has in profile 1.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Status::$variant => $name,)*
                }
            }

            /// The status with this number.
            #[must_use]
            pub const fn from_value(value: u16) -> Option<Status> {
                match value {
                    $($value => Some(Status::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

statuses! {
    Success = "SUCCESS" 0;
    NotBound = "NOT_BOUND" 1;
    NotSealed = "NOT_SEALED" 2;
    Sealed = "SEALED" 3;
    AlreadyBound = "ALREADY_BOUND" 4;
    GenerationMismatch = "GENERATION_MISMATCH" 5;
    HandleOutOfRange = "HANDLE_OUT_OF_RANGE" 6;
    LengthError = "LENGTH_ERROR" 7;
    NoSpace = "NO_SPACE" 8;
    TicketAbandoned = "TICKET_ABANDONED" 9;
    TicketMismatch = "TICKET_MISMATCH" 10;
    Malformed = "MALFORMED" 11;
    Unsupported = "UNSUPPORTED" 12;
    AccessDenied = "ACCESS_DENIED" 13;
    NoSession = "NO_SESSION" 14;
    TargetError = "TARGET_ERROR" 15;
}

/// 64-bit name of a block table entry.
pub type Handle = u64;
/// 16-bit reuse counter of an entry; in requests zero means "any".
pub type Generation = u16;
/// 32-bit turn on a free-block ring.
pub type Ticket = u32;
/// Address of a block under the Pool STag.
pub type BlockOffset = u64;

bitflags::bitflags! {
    /// Draft 3.2: flags of a block table entry.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct EntryFlag: u16 {
        /// The handle is bound to a block.
        const VALID = 0x0001;
        /// The block's data changes no more.
        const SEALED = 0x0002;
    }
}

/// The caller asked for something that can never work; says what would.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiMisuse(pub String);

impl fmt::Display for ApiMisuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ApiMisuse {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_named_by_their_numbers_and_back() {
        for &cause in TerminateCause::ALL {
            assert_eq!(TerminateCause::from_value(cause.value()), Some(cause));
        }
        assert_eq!(TerminateCause::ALL.len(), 28);
        assert_eq!(TerminateCause::from_value((0, 1, 5)), None);
    }

    #[test]
    fn sentences_end_with_the_cause() {
        let error = PeerMisbehaved::new(TerminateCause::RdmapUnspecified, "why");
        assert_eq!(error.to_string(), "why [RDMAP_UNSPECIFIED (0/2/ff)]");
        let info = TerminateInfo {
            layer: 15,
            etype: 14,
            code: 0xDD,
            ..TerminateInfo::default()
        };
        assert_eq!(info.to_string(), "unknown code (15/14/dd)");
        assert_eq!(
            TerminateInfo {
                layer: 2,
                code: 2,
                ..TerminateInfo::default()
            }
            .to_string(),
            "MPA_CRC (2/0/02)"
        );
    }
}
