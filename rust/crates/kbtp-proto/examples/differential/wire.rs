//! KBTP messages: requests are parsed, completions packed.

use std::error::Error;

use kbtp_proto::types::Status;
use kbtp_proto::wire::{Completion, HEAD_BYTES_MAX, Request};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::octets::{Hex, hex};

#[derive(Deserialize)]
pub(crate) struct Message {
    octets: Hex,
}

#[derive(Deserialize)]
pub(crate) struct CompletionFields {
    request_id: u64,
    handle: u64,
    generation: u16,
    status: u16,
    data_length: u32,
    block_offset: u64,
}

pub(crate) fn parse(message: &Message) -> Value {
    let octets = &message.octets.0;
    let head = octets.get(..HEAD_BYTES_MAX).unwrap_or(octets);
    match Request::parse(head, octets.len() as u32) {
        Err(error) => json!({"field": error.field, "status": error.status.name()}),
        Ok(request) => {
            let inline = octets.get(request.inline_at as usize..).unwrap_or_default();
            json!({
                "opcode": request.operation.opcode() as u8,
                "request_id": request.request_id,
                "handle": request.handle,
                "generation": request.generation,
                "flags": request.flags.bits(),
                "data": [request.data.stag, request.data.to, request.data.length],
                "completion": request.completion.map(|completion| json!([completion.stag, completion.to])),
                "inline_bytes": request.inline_bytes,
                "inline_data": hex(if request.is_inline() { inline } else { &[] }),
                "packed": hex(&request.pack(inline)),
            })
        }
    }
}

pub(crate) fn pack(fields: &CompletionFields) -> Result<Value, Box<dyn Error>> {
    let completion = Completion {
        request_id: fields.request_id,
        handle: fields.handle,
        generation: fields.generation,
        status: Status::from_value(fields.status).ok_or("no such status")?,
        data_length: fields.data_length,
        block_offset: fields.block_offset,
    };
    Ok(json!(hex(&completion.pack())))
}
