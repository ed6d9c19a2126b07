//! Scripts for one `IwarpStream`: what its owner and its peer do, step by step, and what is seen of it after each.

use std::collections::BTreeMap;
use std::error::Error;

use kbtp_proto::memory::{Octets, Span};
use kbtp_proto::mpa::{Negotiated, RtrKind};
use kbtp_proto::stream::{Event, Flushed, Inline, IwarpStream, Outgoing, Part, Payload, Piece, PostError, Work};
use kbtp_proto::types::TerminateCause;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::memory::{Contents, Region, Rights};
use crate::octets::{Hex, hex};

#[derive(Deserialize)]
pub(crate) struct Script {
    options: StreamOptions,
    active: bool,
    mulpdu: u32,
    first_msn: Option<[u32; 4]>,
    first_stag: u32,
    regions: Vec<Region>,
    /// Payload is sent from where it lies.
    still: bool,
    /// Octets are read straight to where they belong when the stream says so.
    direct: bool,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct StreamOptions {
    crc: bool,
    tx_markers: bool,
    rx_markers: bool,
    ird: u16,
    ord: u16,
    rtr: u8,
    failure: Option<(u8, u8, u8)>,
}

#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
enum Step {
    Receive {
        wr_id: u64,
        length_bytes: usize,
    },
    Send {
        wr_id: u64,
        pieces: Vec<Hex>,
        invalidate_stag: Option<u32>,
        solicited: bool,
    },
    Write {
        wr_id: u64,
        pieces: Vec<Hex>,
        stag: u32,
        to: u64,
    },
    Read {
        wr_id: u64,
        length_bytes: usize,
        stag: u32,
        to: u64,
    },
    FetchAdd {
        wr_id: u64,
        stag: u32,
        to: u64,
        operands: [u64; 2],
    },
    CompareSwap {
        wr_id: u64,
        stag: u32,
        to: u64,
        operands: [u64; 4],
    },
    Immediate {
        wr_id: u64,
        data: Hex,
        solicited: bool,
    },
    Hear {
        octets: Hex,
    },
    Out {
        limit_bytes: usize,
    },
    Revoke {
        region: usize,
    },
    CloseOtherStream,
    SetMulpdu {
        mulpdu: u32,
    },
    Terminate {
        cause: (u8, u8, u8),
    },
    Eof,
    Flush,
}

pub(crate) fn execute(script: &Script) -> Result<Value, Box<dyn Error>> {
    let options = &script.options;
    let negotiated = Negotiated {
        crc: options.crc,
        tx_markers: options.tx_markers,
        rx_markers: options.rx_markers,
        ird: options.ird,
        ord: options.ord,
        peer_ird: options.ord,
        peer_ord: options.ird,
        revision: 2,
        private_data: Vec::new(),
        rtr: RtrKind::from_bits_retain(options.rtr),
        failure: options.failure.and_then(TerminateCause::from_value),
    };
    let rights = Rights::new(script.first_stag, script.still, &script.regions)?;
    let contents = rights.contents.clone();
    let stream = IwarpStream::new(negotiated, script.active, script.mulpdu, script.first_msn);
    let direct = script.direct;
    let mut end = End {
        stream,
        outgoing: Outgoing::default(),
        rights,
        contents,
        direct,
        buffers: BTreeMap::new(),
    };
    let steps = script
        .steps
        .iter()
        .map(|step| end.step(step))
        .collect::<Result<Vec<_>, _>>()?;
    let octets_of = |(wr_id, span): (&u64, &Span)| (wr_id.to_string(), json!(hex(&end.contents.octets(*span))));
    let regions = end
        .rights
        .regions()
        .map(|(stag, valid, octets)| json!([stag, valid, hex(&octets)]));
    Ok(json!({
        "steps": steps,
        "regions": regions.collect::<Vec<_>>(),
        "buffers": end.buffers.iter().map(octets_of).collect::<serde_json::Map<_, _>>(),
    }))
}

struct End {
    stream: IwarpStream,
    outgoing: Outgoing,
    rights: Rights,
    contents: Contents,
    direct: bool,
    /// Receive buffers and sinks, by wr_id.
    buffers: BTreeMap<u64, Span>,
}

impl End {
    fn step(&mut self, step: &Step) -> Result<Value, Box<dyn Error>> {
        let mut result = Value::Null;
        match step {
            Step::Receive { wr_id, length_bytes } => {
                let buffer = self.buffer(*wr_id, *length_bytes);
                result = posted(self.stream.post_receive(*wr_id, buffer));
            }
            Step::Hear { octets } => self.hear(&octets.0),
            Step::Out { limit_bytes } => result = self.out(*limit_bytes),
            Step::Revoke { region } => self.rights.revoke(*region),
            Step::CloseOtherStream => self.rights.close_other_stream(),
            Step::SetMulpdu { mulpdu } => self.stream.set_mulpdu(*mulpdu),
            Step::Terminate { cause } => {
                let cause = TerminateCause::from_value(*cause).ok_or("no such cause")?;
                self.stream.terminate(cause);
            }
            Step::Eof => result = json!(self.stream.receive_eof()),
            Step::Flush => {
                let flushed = self.stream.flush(&mut self.rights);
                result = flushed
                    .iter()
                    .map(|Flushed { wr_id, kind }| json!([wr_id, format!("{kind:?}").to_uppercase()]))
                    .collect();
            }
            _ => {
                let work = self.work(step)?;
                result = posted(self.stream.post(work));
            }
        }
        let events = std::iter::from_fn(|| self.stream.next_event()).map(|event| told(&event));
        let events = events.collect::<Vec<_>>();
        Ok(json!({
            "result": result,
            "events": events,
            "wants_to_send": self.stream.wants_to_send(),
            "failed": self.stream.failed(),
            "ended": self.stream.ended(),
            "terminate_sent": self.stream.terminate_sent(),
            "sent_cause": self.stream.sent_cause().map(TerminateCause::value),
        }))
    }

    fn work(&mut self, step: &Step) -> Result<Work, Box<dyn Error>> {
        Ok(match step {
            Step::Send {
                wr_id,
                pieces,
                invalidate_stag,
                solicited,
            } => Work::Send {
                wr_id: *wr_id,
                payload: self.payload(pieces),
                invalidate_stag: *invalidate_stag,
                solicited: *solicited,
            },
            Step::Write {
                wr_id,
                pieces,
                stag,
                to,
            } => Work::Write {
                wr_id: *wr_id,
                payload: self.payload(pieces),
                stag: *stag,
                to: *to,
            },
            Step::Read {
                wr_id,
                length_bytes,
                stag,
                to,
            } => Work::Read {
                wr_id: *wr_id,
                sink: self.buffer(*wr_id, *length_bytes),
                source_stag: *stag,
                source_to: *to,
            },
            &Step::FetchAdd {
                wr_id,
                stag,
                to,
                operands: [add_data, add_mask],
            } => Work::FetchAdd {
                wr_id,
                stag,
                to,
                add_data,
                add_mask,
            },
            &Step::CompareSwap {
                wr_id,
                stag,
                to,
                operands: [swap_data, swap_mask, compare_data, compare_mask],
            } => Work::CompareSwap {
                wr_id,
                stag,
                to,
                swap_data,
                swap_mask,
                compare_data,
                compare_mask,
            },
            Step::Immediate { wr_id, data, solicited } => Work::Immediate {
                wr_id: *wr_id,
                data: data.0.as_slice().try_into()?,
                solicited: *solicited,
            },
            _ => return Err("not a post".into()),
        })
    }

    fn buffer(&mut self, wr_id: u64, length_bytes: usize) -> Span {
        let span = self.contents.add(vec![0; length_bytes]);
        self.buffers.insert(wr_id, span);
        span
    }

    /// In registered memory and in the stream's own by turns.
    fn payload(&self, pieces: &[Hex]) -> Payload {
        let piece = |(n, octets): (usize, &Hex)| match n % 2 {
            0 => Piece::Span(self.contents.add(octets.0.clone())),
            _ => Piece::Inline(Inline::from_slice(&octets.0)),
        };
        pieces.iter().enumerate().map(piece).collect()
    }

    fn hear(&mut self, octets: &[u8]) {
        let mut rest = octets;
        let span = if self.direct {
            self.stream.direct(&mut self.rights)
        } else {
            None
        };
        if let Some(span) = span {
            let (straight, staged) = rest.split_at(rest.len().min(span.len as usize));
            self.contents.write(span.part(0, straight.len() as u32), straight);
            self.stream.direct_received(straight.len() as u32, &self.contents);
            rest = staged;
        }
        self.stream.receive(rest, &mut self.rights, &mut self.contents);
    }

    /// FPDUs until there are `limit_bytes` of them, each sent at once.
    fn out(&mut self, limit_bytes: usize) -> Value {
        let (mut fpdus, mut built_bytes) = (Vec::new(), 0);
        while built_bytes < limit_bytes
            && self
                .stream
                .build_fpdu(&mut self.rights, &self.contents, &mut self.outgoing)
        {
            let mut octets = Vec::new();
            for part in self.outgoing.parts() {
                match part {
                    Part::Own(own) => octets.extend_from_slice(own),
                    Part::Registered(span) => self.contents.read(span, &mut octets),
                }
            }
            self.stream.sent(&mut self.outgoing, octets.len());
            built_bytes += octets.len();
            fpdus.push(json!(hex(&octets)));
        }
        fpdus.into()
    }
}

fn posted(result: Result<(), PostError>) -> Value {
    match result {
        Ok(()) => Value::Null,
        Err(PostError::Ended) => json!("ended"),
        Err(PostError::OrdIsZero | PostError::TooLong(_) | PostError::NotOfRdmap) => json!("misuse"),
    }
}

/// With the names and the order of fields that the event has in Python.
fn told(event: &Event) -> Value {
    match event {
        Event::SendCompleted { wr_id } => json!(["SendCompleted", wr_id]),
        Event::WriteCompleted { wr_id } => json!(["WriteCompleted", wr_id]),
        Event::ImmediateCompleted { wr_id } => json!(["ImmediateCompleted", wr_id]),
        Event::ReadCompleted { wr_id, length } => json!(["ReadCompleted", wr_id, length]),
        Event::AtomicCompleted { wr_id, value } => json!(["AtomicCompleted", wr_id, value]),
        Event::Received {
            wr_id,
            length,
            invalidated_stag,
            solicited,
        } => {
            json!(["Received", wr_id, length, invalidated_stag, solicited])
        }
        Event::ImmediateReceived { wr_id, data, solicited } => {
            json!(["ImmediateReceived", wr_id, hex(data), solicited])
        }
        Event::TerminateReceived { info } => json!([
            "TerminateReceived",
            [info.layer, info.etype, info.code],
            info.ddp_segment_length,
            hex(&info.ddp_header),
            hex(&info.rdmap_header),
        ]),
        Event::Failed { error } => json!(["Failed", error.cause.value(), error.message]),
    }
}
