//! The malformed FPDUs of `vectors/iwarp.json` get their Terminates.

use serde_json::Value;

use crate::peer::{End, negotiated};

fn octets(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}

#[test]
fn bad_fpdus_get_their_terminates() {
    let vectors: Vec<Value> = serde_json::from_str(include_str!("../../../../../vectors/iwarp.json")).unwrap();
    let mut seen = 0;
    for vector in vectors {
        let number = |name: &str| vector["expect"][name].as_u64().map(|number| number as u8);
        let (Some(layer), Some(etype), Some(code)) = (number("layer"), number("etype"), number("code")) else {
            continue;
        };
        seen += 1;
        for split in [1, usize::MAX] {
            let mut end = End::new(negotiated(), false, 1454, None);
            end.receive(1, 64);
            let before = end.memory.0.borrow().octets[0].clone();
            for part in octets(vector["hex"].as_str().unwrap()).chunks(split) {
                end.take(part);
            }
            assert_eq!(end.terminates(), (layer, etype, code), "{}", vector["name"]);
            assert_eq!(end.events().len(), 1, "{}", vector["name"]);
            assert_eq!(end.memory.0.borrow().octets[0], before, "{}", vector["name"]);
        }
    }
    assert!(seen >= 20, "{seen}");
}
