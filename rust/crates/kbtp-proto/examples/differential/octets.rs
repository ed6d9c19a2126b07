//! Octets as hexadecimal digits.

use std::fmt::Write;

use serde::de::Error;
use serde::{Deserialize, Deserializer};

pub(crate) fn hex(octets: &[u8]) -> String {
    octets
        .iter()
        .fold(String::with_capacity(2 * octets.len()), |mut digits, octet| {
            let _ = write!(digits, "{octet:02x}"); // a String takes all
            digits
        })
}

/// What comes as digits.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hex(pub(crate) Vec<u8>);

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let digits = String::deserialize(from)?;
        let pairs = digits.as_bytes().chunks(2).map(str::from_utf8);
        let octets =
            pairs.map(|pair| u8::from_str_radix(pair.map_err(D::Error::custom)?, 16).map_err(D::Error::custom));
        octets.collect::<Result<_, _>>().map(Self)
    }
}
