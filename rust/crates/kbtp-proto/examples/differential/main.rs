//! Does what it is told to on the codecs and the stream of this crate and says what came of it, so that a test can hold
//! that against their twins in Python (tests/differential).
//!
//! A line of JSON in, a line of JSON out; octets are in hexadecimal digits.

mod memory;
mod octets;
mod startup;
mod stream;
mod wire;

use std::error::Error;
use std::io::{Write, stdin, stdout};

use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
#[serde(tag = "task", rename_all = "snake_case")]
enum Task {
    Stream(stream::Script),
    Startup(startup::Script),
    Request(wire::Message),
    Completion(wire::CompletionFields),
}

fn answer(line: &str) -> Result<Value, Box<dyn Error>> {
    match serde_json::from_str(line)? {
        Task::Stream(script) => stream::execute(&script),
        Task::Startup(script) => startup::execute(&script),
        Task::Request(message) => Ok(wire::parse(&message)),
        Task::Completion(fields) => wire::pack(&fields),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    for line in stdin().lines() {
        let answer = answer(&line?).unwrap_or_else(|error| json!({"not understood": error.to_string()}));
        let mut out = stdout().lock();
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}
