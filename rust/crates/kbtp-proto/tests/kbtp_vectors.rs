//! `vectors/kbtp.json`, for the messages an RNIC knows: LOAD, STORE, ALLOC_STORE and FREE both ways, COMPLETION out.
#![allow(clippy::unwrap_used)] // in the helpers of tests too

use kbtp_proto::types::{RequestFlag, Status};
use kbtp_proto::wire::{
    CommonHeader, Completion, CompletionDescriptor, DataDescriptor, HEAD_BYTES_MAX, Operation, Request,
};
use serde::{Deserialize, Deserializer};

const JSON: &str = include_str!("../../../../vectors/kbtp.json");

#[derive(Deserialize)]
struct Vector {
    name: String,
    parse: String,
    #[serde(deserialize_with = "octets")]
    hex: Vec<u8>,
    fields: Option<serde_json::Value>,
    #[serde(default, deserialize_with = "some_octets")]
    packed: Option<Vec<u8>>,
    error: Option<Fault>,
}

#[derive(Deserialize)]
struct Fault {
    field: String,
    status: String,
}

#[derive(Deserialize)]
struct RequestFields {
    message: String,
    request_id: u64,
    handle: u64,
    generation: u16,
    flags: u16,
    #[serde(default)]
    data: DataFields,
    completion: Option<CompletionFields>,
    #[serde(default, deserialize_with = "octets")]
    inline_data: Vec<u8>,
}

#[derive(Default, Deserialize)]
struct DataFields {
    stag: u32,
    to: u64,
    length: u32,
}

#[derive(Deserialize)]
struct CompletionFields {
    stag: u32,
    to: u64,
}

fn octets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let digits: String = String::deserialize(deserializer)?.split_whitespace().collect();
    let octet = |at| u8::from_str_radix(&digits[at..at + 2], 16).map_err(serde::de::Error::custom);
    (0..digits.len()).step_by(2).map(octet).collect()
}

fn some_octets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<u8>>, D::Error> {
    #[derive(Deserialize)]
    struct Octets(#[serde(deserialize_with = "octets")] Vec<u8>);
    Ok(Option::<Octets>::deserialize(deserializer)?.map(|octets| octets.0))
}

fn vectors(parse: &'static str) -> impl Iterator<Item = Vector> {
    let all: Vec<Vector> = serde_json::from_str(JSON).unwrap();
    all.into_iter().filter(move |vector| vector.parse == parse)
}

fn operation_of(message: &str) -> Option<Operation> {
    Some(match message {
        "LOAD" => Operation::Load,
        "STORE" => Operation::Store,
        "ALLOC_STORE" => Operation::AllocStore,
        "FREE" => Operation::Free,
        _ => return None,
    })
}

fn parse(octets: &[u8]) -> Result<Request, kbtp_proto::wire::WireFormatError> {
    let head = &octets[..octets.len().min(HEAD_BYTES_MAX)];
    Request::parse(head, octets.len() as u32)
}

#[test]
fn good_requests_parse_to_the_fields_and_the_fields_pack_to_the_octets() {
    let mut seen = 0;
    for vector in vectors("request") {
        let Some(fields) = vector.fields else { continue };
        if operation_of(fields["message"].as_str().unwrap()).is_none() {
            assert_eq!(parse(&vector.hex).unwrap_err().field, "opcode", "{}", vector.name);
            continue;
        }
        seen += 1;
        let fields: RequestFields = serde_json::from_value(fields).unwrap();
        let request = parse(&vector.hex).unwrap();
        let from = request.inline_at as usize;
        let expected = Request {
            operation: operation_of(&fields.message).unwrap(),
            request_id: fields.request_id,
            handle: fields.handle,
            generation: fields.generation,
            flags: RequestFlag::from_bits(fields.flags).unwrap(),
            data: DataDescriptor {
                stag: fields.data.stag,
                to: fields.data.to,
                length: fields.data.length,
            },
            completion: fields.completion.map(|descriptor| CompletionDescriptor {
                stag: descriptor.stag,
                to: descriptor.to,
            }),
            inline_at: request.inline_at,
            inline_bytes: fields.inline_data.len() as u32,
        };
        assert_eq!(request, expected, "{}", vector.name);
        assert_eq!(vector.hex[from..], fields.inline_data, "{}", vector.name);
        let packed = vector.packed.unwrap_or(vector.hex);
        assert_eq!(request.pack(&fields.inline_data)[..], packed[..], "{}", vector.name);
    }
    assert_eq!(seen, 23);
}

#[test]
fn bad_requests_name_field_and_status() {
    let mut seen = 0;
    for vector in vectors("request") {
        let Some(fault) = vector.error else { continue };
        let error = parse(&vector.hex).unwrap_err();
        let known = CommonHeader::parse(&vector.hex).is_none_or(|header| Operation::of_opcode(header.opcode).is_some());
        if known || fault.field == "version" || fault.field == "opcode" {
            assert_eq!(
                (error.field, error.status.name()),
                (&*fault.field, &*fault.status),
                "{}",
                vector.name
            );
            seen += 1;
        } else {
            assert_eq!(error.field, "opcode", "{}", vector.name); // HELLO and BIND, judged no further
        }
    }
    assert!(seen > 30, "{seen}");
}

#[test]
fn headers_parse_and_pack() {
    for vector in vectors("header") {
        let parsed = CommonHeader::parse(&vector.hex);
        assert_eq!(parsed.is_none(), vector.error.is_some(), "{}", vector.name);
        let Some(header) = parsed else { continue };
        let fields = vector.fields.unwrap();
        let field = |name: &str| fields[name].as_u64().unwrap();
        assert_eq!(u64::from(header.version), field("version"));
        assert_eq!(u64::from(header.opcode), field("opcode"));
        assert_eq!(u64::from(header.flags), field("flags"));
        assert_eq!(header.request_id, field("request_id"));
        assert_eq!(header.handle, field("handle"));
        assert_eq!(u64::from(header.generation), field("generation"));
        assert_eq!(u64::from(header.status), field("status"));
        assert_eq!(header.pack()[..], vector.hex[..24], "{}", vector.name);
    }
}

#[test]
fn completions_both_ways() {
    let mut statuses = Vec::new();
    for vector in vectors("response") {
        let Some(fields) = vector.fields.filter(|fields| fields["message"] == "COMPLETION") else {
            assert!(Completion::parse(&vector.hex).is_err(), "{}", vector.name);
            continue;
        };
        let field = |name: &str| fields[name].as_u64().unwrap();
        let name = fields["status"].as_str().unwrap();
        let status = *Status::ALL.iter().find(|status| status.name() == name).unwrap();
        assert_eq!(Status::from_value(status as u16), Some(status));
        let completion = Completion {
            request_id: field("request_id"),
            handle: field("handle"),
            generation: field("generation") as u16,
            status,
            data_length: field("data_length") as u32,
            block_offset: field("block_offset"),
        };
        assert_eq!(Completion::parse(&vector.hex), Ok(completion), "{}", vector.name);
        let packed = vector.packed.unwrap_or(vector.hex);
        assert_eq!(completion.pack()[..], packed, "{}", vector.name);
        statuses.push(status);
    }
    assert!(Status::ALL.iter().all(|status| statuses.contains(status)));
    assert_eq!(Status::from_value(16), None);
}

#[test]
fn what_is_wrong_can_be_said() {
    let error = parse(&[0; 24]).unwrap_err();
    assert_eq!(error.to_string(), "version: UNSUPPORTED");
}
