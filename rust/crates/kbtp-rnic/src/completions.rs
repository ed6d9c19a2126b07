//! From what an `IwarpStream` reports to work completions of the verbs.

use kbtp_proto::limits::IMMEDIATE_DATA_BYTES;
use kbtp_proto::stream::{Event, Flushed, WrKind};

use crate::api::{StreamId, WcOpcode, WcStatus, WorkCompletion};

fn bare(stream: StreamId, wr_id: u64, opcode: WcOpcode, status: WcStatus) -> WorkCompletion {
    WorkCompletion {
        stream,
        wr_id,
        opcode,
        status,
        length: 0,
        value: 0,
        invalidated_stag: None,
        immediate: None,
        solicited: false,
    }
}

/// The successful completion of `stream` that `event` reports, or `event` if it is about the stream's end.
pub(crate) fn completion_of(stream: StreamId, event: Event) -> Result<WorkCompletion, Event> {
    let done = |wr_id, opcode| bare(stream, wr_id, opcode, WcStatus::Success);
    Ok(match event {
        Event::SendCompleted { wr_id } => done(wr_id, WcOpcode::Send),
        Event::WriteCompleted { wr_id } => done(wr_id, WcOpcode::RdmaWrite),
        Event::ImmediateCompleted { wr_id } => done(wr_id, WcOpcode::Immediate),
        Event::ReadCompleted { wr_id, length } => WorkCompletion {
            length,
            ..done(wr_id, WcOpcode::RdmaRead)
        },
        Event::AtomicCompleted { wr_id, value } => WorkCompletion {
            value,
            ..done(wr_id, WcOpcode::Atomic)
        },
        Event::Received {
            wr_id,
            length,
            invalidated_stag,
            solicited,
        } => WorkCompletion {
            length,
            invalidated_stag,
            solicited,
            ..done(wr_id, WcOpcode::Recv)
        },
        Event::ImmediateReceived { wr_id, data, solicited } => WorkCompletion {
            length: IMMEDIATE_DATA_BYTES as u32,
            immediate: Some(data),
            solicited,
            ..done(wr_id, WcOpcode::RecvImmediate)
        },
        Event::TerminateReceived { .. } | Event::Failed { .. } => return Err(event),
    })
}

/// What is reported of work that was not done. A flushed receive is `Recv`: what it would have received is not known.
pub(crate) fn flushed(stream: StreamId, flushed: Flushed) -> WorkCompletion {
    let opcode = match flushed.kind {
        WrKind::Send => WcOpcode::Send,
        WrKind::Write => WcOpcode::RdmaWrite,
        WrKind::Read => WcOpcode::RdmaRead,
        WrKind::Atomic => WcOpcode::Atomic,
        WrKind::Immediate => WcOpcode::Immediate,
        WrKind::Receive => WcOpcode::Recv,
    };
    bare(stream, flushed.wr_id, opcode, WcStatus::Flushed)
}

/// As `flushed`, of a receive that was posted before there was an `IwarpStream`.
pub(crate) fn flushed_receive(stream: StreamId, wr_id: u64) -> WorkCompletion {
    bare(stream, wr_id, WcOpcode::Recv, WcStatus::Flushed)
}
