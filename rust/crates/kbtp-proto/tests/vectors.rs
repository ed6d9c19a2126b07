//! `vectors/iwarp.json`, both ways: `fields` pack to `hex` and `hex` parses to `fields`. Those that a stream refuses are
//! the stream's tests.

use kbtp_proto::ddp::{SegmentHeader, TaggedHeader, UntaggedHeader, pack_tagged, pack_untagged, parse_header};
use kbtp_proto::fpdu::{FpduDecoder, FpduEncoder};
use kbtp_proto::mpa::{
    ActiveStartup, Answer, EnhancedWord, MpaFrame, MpaOptions, MpaRejected, PassiveStartup, RtrKind,
};
use kbtp_proto::rdmap::{
    AtomicOperation, AtomicRequest, AtomicResponse, RdmapOpcode, ReadRequest, control_octet, opcode_of,
};
use kbtp_proto::terminate::{Offender, pack_terminate, parse_terminate};
use kbtp_proto::types::{TerminateCause, TerminateInfo};
use serde::{Deserialize, Deserializer};

const JSON: &str = include_str!("../../../../vectors/iwarp.json");

#[derive(Deserialize)]
struct Vector {
    name: String,
    len: usize,
    #[serde(deserialize_with = "octets")]
    hex: Vec<u8>,
    fields: Option<Fields>,
    expect: Option<serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Fields {
    Fpdu(Fpdu),
    Frame(Frame),
}

#[derive(Deserialize)]
struct Frame {
    reply: bool,
    markers: bool,
    crc: bool,
    revision: u8,
    #[serde(deserialize_with = "octets")]
    private_data: Vec<u8>,
    rejected: bool,
    word: Option<Word>,
}

#[derive(Deserialize)]
struct Word {
    ird: u16,
    ord: u16,
    peer_to_peer: bool,
    rtr: Vec<String>,
}

#[derive(Deserialize)]
struct Fpdu {
    crc: bool,
    markers: bool,
    opcode: String,
    last: bool,
    #[serde(flatten)]
    header: Header,
    #[serde(flatten)]
    message: Message,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Header {
    Tagged { stag: u32, to: u64 },
    Untagged { ulp_word: u32, qn: u32, msn: u32, mo: u32 },
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    ReadRequest(ReadRequestFields),
    AtomicRequest(AtomicRequestFields),
    AtomicResponse {
        request_id: u32,
        value: u64,
    },
    Terminate(TerminateFields),
    #[serde(deserialize_with = "octets")]
    Payload(Vec<u8>),
}

#[derive(Deserialize)]
struct ReadRequestFields {
    sink_stag: u32,
    sink_to: u64,
    size: u32,
    source_stag: u32,
    source_to: u64,
}

#[derive(Deserialize)]
struct AtomicRequestFields {
    operation: String,
    request_id: u32,
    stag: u32,
    to: u64,
    data: u64,
    mask: u64,
    compare_data: u64,
    compare_mask: u64,
}

#[derive(Deserialize)]
struct TerminateFields {
    layer: u8,
    etype: u8,
    code: u8,
    ddp_segment_length: Option<u16>,
    #[serde(deserialize_with = "octets")]
    ddp_header: Vec<u8>,
    #[serde(deserialize_with = "octets")]
    rdmap_header: Vec<u8>,
}

fn octets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let hex = String::deserialize(deserializer)?;
    (0..hex.len() / 2)
        .map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).map_err(serde::de::Error::custom))
        .collect()
}

fn vectors() -> Vec<Vector> {
    serde_json::from_str(JSON).expect("the vectors have these fields")
}

fn frames() -> Vec<(Vector, MpaFrame)> {
    let frame_of = |vector: &Vector| match &vector.fields {
        Some(Fields::Frame(frame)) => Some(MpaFrame {
            reply: frame.reply,
            markers: frame.markers,
            crc: frame.crc,
            revision: frame.revision,
            private_data: frame.private_data.clone(),
            rejected: frame.rejected,
            word: frame.word.as_ref().map(|word| EnhancedWord {
                ird: word.ird,
                ord: word.ord,
                peer_to_peer: word.peer_to_peer,
                rtr: word
                    .rtr
                    .iter()
                    .map(|kind| RtrKind::from_name(kind).expect("a kind"))
                    .collect(),
            }),
        }),
        _ => None,
    };
    vectors()
        .into_iter()
        .filter_map(|vector| frame_of(&vector).map(|frame| (vector, frame)))
        .collect()
}

fn fpdus() -> Vec<(String, Vec<u8>, Fpdu)> {
    vectors()
        .into_iter()
        .filter_map(|vector| match vector.fields {
            Some(Fields::Fpdu(fpdu)) => Some((vector.name, vector.hex, fpdu)),
            _ => None,
        })
        .collect()
}

fn opcode_named(name: &str) -> RdmapOpcode {
    RdmapOpcode::ALL
        .into_iter()
        .find(|opcode| opcode.name() == name)
        .expect("an opcode")
}

impl Fpdu {
    fn header(&self) -> SegmentHeader {
        let (control, last) = (control_octet(opcode_named(&self.opcode)), self.last);
        match self.header {
            Header::Tagged { stag, to } => SegmentHeader::Tagged(TaggedHeader {
                control,
                stag,
                to,
                last,
            }),
            Header::Untagged { ulp_word, qn, msn, mo } => SegmentHeader::Untagged(UntaggedHeader {
                control,
                ulp_word,
                qn,
                msn,
                mo,
                last,
            }),
        }
    }
}

impl ReadRequestFields {
    fn message(&self) -> ReadRequest {
        ReadRequest {
            sink_stag: self.sink_stag,
            sink_to: self.sink_to,
            size: self.size,
            source_stag: self.source_stag,
            source_to: self.source_to,
        }
    }
}

impl AtomicRequestFields {
    fn message(&self) -> AtomicRequest {
        let operation = match &self.operation[..] {
            "FETCH_ADD" => AtomicOperation::FetchAdd,
            "COMPARE_SWAP" => AtomicOperation::CompareSwap,
            other => unreachable!("{other}"),
        };
        AtomicRequest {
            operation,
            request_id: self.request_id,
            stag: self.stag,
            to: self.to,
            data: self.data,
            mask: self.mask,
            compare_data: self.compare_data,
            compare_mask: self.compare_mask,
        }
    }
}

impl TerminateFields {
    fn info(&self) -> TerminateInfo {
        TerminateInfo {
            layer: self.layer,
            etype: self.etype,
            code: self.code,
            ddp_segment_length: self.ddp_segment_length,
            ddp_header: self.ddp_header.clone(),
            rdmap_header: self.rdmap_header.clone(),
        }
    }

    fn payload(&self) -> Vec<u8> {
        let cause = TerminateCause::from_value((self.layer, self.etype, self.code)).expect("a known cause");
        let offender = self.ddp_segment_length.map(|segment_bytes| Offender {
            segment_bytes,
            ddp_header: self.ddp_header.clone(),
            read_request: self.rdmap_header.first_chunk().copied(),
        });
        pack_terminate(cause, offender.as_ref())
    }
}

impl Message {
    /// The octets after the DDP header.
    fn payload(&self) -> Vec<u8> {
        match self {
            Self::ReadRequest(fields) => fields.message().pack().to_vec(),
            Self::AtomicRequest(fields) => fields.message().pack().to_vec(),
            &Self::AtomicResponse { request_id, value } => AtomicResponse { request_id, value }.pack().to_vec(),
            Self::Terminate(fields) => fields.payload(),
            Self::Payload(payload) => payload.clone(),
        }
    }

    fn check_parsed(&self, payload: &[u8], name: &str) {
        match self {
            Self::ReadRequest(fields) => {
                assert_eq!(
                    ReadRequest::parse(payload.try_into().expect("28 octets")),
                    fields.message(),
                    "{name}"
                );
            }
            Self::AtomicRequest(fields) => {
                let parsed = AtomicRequest::parse(payload.try_into().expect("52 octets"));
                assert_eq!(parsed, Ok(fields.message()), "{name}");
            }
            &Self::AtomicResponse { request_id, value } => {
                let parsed = AtomicResponse::parse(payload.try_into().expect("12 octets"));
                assert_eq!(parsed, AtomicResponse { request_id, value }, "{name}");
            }
            Self::Terminate(fields) => assert_eq!(parse_terminate(payload), Ok(fields.info()), "{name}"),
            Self::Payload(expected) => assert_eq!(payload, expected, "{name}"),
        }
    }
}

#[test]
fn every_vector_is_used_and_has_its_length() {
    for vector in vectors() {
        assert_eq!(vector.hex.len(), vector.len, "{}", vector.name);
        assert_ne!(vector.fields.is_some(), vector.expect.is_some(), "{}", vector.name);
    }
    let with_fields = vectors().iter().filter(|vector| vector.fields.is_some()).count();
    assert_eq!(frames().len() + fpdus().len(), with_fields);
    assert!(!frames().is_empty() && !fpdus().is_empty());
}

#[test]
fn start_up_frames_pack() {
    for (vector, frame) in frames() {
        assert_eq!(frame.pack().as_ref(), Ok(&vector.hex), "{}", vector.name);
    }
}

#[test]
fn requests_parse() {
    for (vector, frame) in frames().into_iter().filter(|(_, frame)| !frame.reply) {
        let request = PassiveStartup::new(&MpaOptions::default()).receive_data(&vector.hex);
        let request = request.expect("a good Request").expect("a whole Request");
        assert_eq!(request.private_data, frame.private_data, "{}", vector.name);
        let said = (
            request.revision,
            request.wants_markers,
            request.wants_crc,
            request.enhanced,
        );
        assert_eq!(
            said,
            (frame.revision, frame.markers, frame.crc, frame.word.is_some()),
            "{}",
            vector.name
        );
        if let Some(word) = frame.word {
            let said = (request.peer_ird, request.peer_ord, request.rtr_offered);
            assert_eq!(said, (word.ird, word.ord, word.rtr), "{}", vector.name);
        }
    }
}

#[test]
fn replies_parse() {
    for (vector, frame) in frames().into_iter().filter(|(_, frame)| frame.reply) {
        let options = MpaOptions {
            revision: frame.revision,
            ..MpaOptions::default()
        };
        let mut startup = ActiveStartup::new(&options, b"", 16, 16).expect("good options");
        match startup
            .receive_data(&vector.hex)
            .expect("a good Reply")
            .expect("a whole Reply")
        {
            Answer::Rejected(rejected) => {
                assert!(frame.rejected, "{}", vector.name);
                assert_eq!(
                    rejected,
                    MpaRejected {
                        private_data: frame.private_data,
                        peer_ird: 0,
                        peer_ord: 0
                    },
                    "{}",
                    vector.name
                );
            }
            Answer::Negotiated(settled) => {
                assert!(settled.crc && !frame.rejected, "{}", vector.name);
                assert_eq!(
                    (settled.tx_markers, settled.private_data),
                    (frame.markers, frame.private_data)
                );
                if let Some(word) = frame.word {
                    assert_eq!(
                        (settled.peer_ird, settled.peer_ord),
                        (word.ird, word.ord),
                        "{}",
                        vector.name
                    );
                }
            }
        }
    }
}

#[test]
fn fpdus_pack() {
    for (name, hex, fpdu) in fpdus() {
        let header = match fpdu.header() {
            SegmentHeader::Tagged(header) => pack_tagged(&header).to_vec(),
            SegmentHeader::Untagged(header) => pack_untagged(&header).to_vec(),
        };
        let mut packed = Vec::new();
        FpduEncoder::new(fpdu.crc, fpdu.markers).encode(&[&header, &fpdu.message.payload()], &mut packed);
        assert_eq!(packed, hex, "{name}");
    }
}

#[test]
fn fpdus_parse() {
    for (name, hex, fpdu) in fpdus() {
        let (mut decoder, mut data) = (FpduDecoder::new(fpdu.crc, fpdu.markers), &hex[..]);
        let ulpdu = decoder.next(&mut data).expect("a good FPDU").expect("a whole FPDU");
        let header = parse_header(ulpdu).expect("a good header");
        assert_eq!(header, fpdu.header(), "{name}");
        assert_eq!(opcode_of(&header), Ok(opcode_named(&fpdu.opcode)), "{name}");
        fpdu.message.check_parsed(&ulpdu[header.bytes()..], &name);
        assert!(data.is_empty(), "{name}");
    }
}

#[test]
fn bad_requests_close() {
    let bad = vectors()
        .into_iter()
        .filter(|vector| vector.expect.as_ref().is_some_and(|expect| expect == "close"));
    let mut count = 0;
    for vector in bad {
        let refused = PassiveStartup::new(&MpaOptions::default()).receive_data(&vector.hex);
        assert!(refused.is_err(), "{}", vector.name);
        count += 1;
    }
    assert!(count > 0);
}
