//! Scripts for the two halves of an MPA start-up.

use std::error::Error;

use kbtp_proto::mpa::{ActiveStartup, Answer, MpaOptions, Negotiated, PassiveStartup, RtrKind};
use kbtp_proto::types::TerminateCause;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::octets::{Hex, hex};

#[derive(Deserialize)]
pub(crate) struct Script {
    crc: bool,
    want_markers: bool,
    revision: u8,
    peer_to_peer: u8,
    revision1_depth: u16,
    private_data: Hex,
    ird: u16,
    ord: u16,
    /// None: this side sends the Request. Else whether it accepts the one that comes.
    accepts: Option<bool>,
    pieces: Vec<Hex>,
}

pub(crate) fn execute(script: &Script) -> Result<Value, Box<dyn Error>> {
    let options = MpaOptions {
        crc: script.crc,
        want_markers: script.want_markers,
        revision: script.revision,
        peer_to_peer: RtrKind::from_bits_retain(script.peer_to_peer),
        revision1_depth: script.revision1_depth,
    };
    let Ok(options) = options.checked() else {
        return Ok(json!("misuse"));
    };
    Ok(match script.accepts {
        None => active(script, &options),
        Some(accepts) => passive(script, &options, accepts),
    })
}

fn active(script: &Script, options: &MpaOptions) -> Value {
    let Ok(mut startup) = ActiveStartup::new(options, &script.private_data.0, script.ird, script.ord) else {
        return json!("misuse");
    };
    let mut outcome = Value::Null;
    for piece in &script.pieces {
        outcome = match startup.receive_data(&piece.0) {
            Err(error) => json!({"error": error.to_string()}),
            Ok(None) => continue,
            Ok(Some(Answer::Negotiated(negotiated))) => told(&negotiated),
            Ok(Some(Answer::Rejected(rejected))) => {
                json!([hex(&rejected.private_data), rejected.peer_ird, rejected.peer_ord])
            }
        };
        break;
    }
    json!({"request": hex(startup.request()), "outcome": outcome, "surplus": hex(startup.surplus())})
}

fn passive(script: &Script, options: &MpaOptions, accepts: bool) -> Value {
    let mut startup = PassiveStartup::new(options);
    for piece in &script.pieces {
        let request = match startup.receive_data(&piece.0) {
            Err(error) => return json!({"error": error.to_string()}),
            Ok(None) => continue,
            Ok(Some(request)) => json!([
                hex(&request.private_data),
                request.peer_ird,
                request.peer_ord,
                request.revision,
                request.wants_markers,
                request.wants_crc,
                request.rtr_offered.bits(),
                request.enhanced,
            ]),
        };
        let answer = if accepts {
            startup
                .accept(&script.private_data.0, script.ird, script.ord)
                .map(|(reply, negotiated)| json!({"reply": hex(&reply), "negotiated": told(&negotiated)}))
        } else {
            startup
                .reject(&script.private_data.0, script.ird, script.ord)
                .map(|reply| json!({"reply": hex(&reply)}))
        };
        return json!({"request": request, "answer": answer.unwrap_or(json!("misuse"))});
    }
    Value::Null
}

fn told(negotiated: &Negotiated) -> Value {
    json!({
        "crc": negotiated.crc,
        "tx_markers": negotiated.tx_markers,
        "rx_markers": negotiated.rx_markers,
        "ird": negotiated.ird,
        "ord": negotiated.ord,
        "peer_ird": negotiated.peer_ird,
        "peer_ord": negotiated.peer_ord,
        "revision": negotiated.revision,
        "private_data": hex(&negotiated.private_data),
        "rtr": negotiated.rtr.bits(),
        "failure": negotiated.failure.map(TerminateCause::value),
    })
}
