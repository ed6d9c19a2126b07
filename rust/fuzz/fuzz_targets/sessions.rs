//! Two initiators that do anything in any order, against the model of the property tests.
#![no_main]
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../../crates/kbtp-proto/tests/target/oracle.rs"]
mod oracle;
#[allow(dead_code)]
#[path = "../../crates/kbtp-proto/tests/target/python.rs"]
mod python;
#[allow(dead_code)]
#[path = "../../crates/kbtp-proto/tests/target/random_sessions.rs"]
mod random_sessions;
mod script;
#[allow(dead_code)]
#[path = "../../crates/kbtp-proto/tests/target/world.rs"]
mod world;

use kbtp_proto::types::RequestFlag;
use kbtp_proto::wire::Operation;
use libfuzzer_sys::fuzz_target;

use random_sessions::{Model, Step};
use script::Script;
use world::BLOCK;

fn step(script: &mut Script) -> Step {
    let choice = script.octet();
    let peer = usize::from(choice >> 7);
    match choice % 32 {
        0..18 => request(script, peer),
        18..22 => Step::Finish {
            peer,
            n: script.below(8),
        },
        22..25 => Step::TakeSends { peer },
        25..29 => Step::ServePunt { peer },
        29..31 => Step::ForeignRead { peer },
        _ => Step::End { peer },
    }
}

fn request(script: &mut Script, peer: usize) -> Step {
    let (choice, flags) = (script.octet(), script.octet());
    let operation = [
        Operation::Load,
        Operation::Store,
        Operation::AllocStore,
        Operation::Free,
    ][usize::from(choice & 3)];
    let length = match script.octet() {
        octet @ 0..200 => u32::from(octet),
        octet @ 200..240 => BLOCK - 20 + u32::from(octet - 200),
        _ => BLOCK,
    };
    let flags = RequestFlag::from_bits_retain(u16::from(flags)) & operation.flags_allowed();
    let inline = flags.contains(RequestFlag::INLINE);
    let flags = if inline { flags - RequestFlag::INVALIDATE } else { flags };
    Step::Request {
        peer,
        operation,
        whose: usize::from(choice >> 2 & 1),
        n: u64::from(choice >> 3 & 3),
        flags: flags - RequestFlag::RECORD,
        length,
        generation: [0, 0, 0, 38, 38, 39, 0, 38][usize::from(choice >> 5)],
    }
}

fuzz_target!(|data: &[u8]| {
    let mut script = Script::new(data);
    let punts = [script.octet(), script.octet()].map(|octet| f64::from(octet.saturating_sub(100)) / 155.0);
    let (seed, read_depth) = (u64::from(script.octet()), 1 + u32::from(script.octet() % 3));
    let mut model = Model::new(punts, seed, read_depth);
    while !script.is_over() {
        model.step(&step(&mut script));
    }
    model.finish();
});
