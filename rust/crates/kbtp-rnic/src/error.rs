//! What can go wrong for a caller, and why a stream ended; the twins of `kbtp.errors`.

use std::fmt;
use std::io;

use kbtp_proto::blocks::PartitionError;
use kbtp_proto::types::{ApiMisuse, PeerMisbehaved, TerminateInfo};

/// Why a call failed.
#[derive(Debug)]
pub enum Error {
    /// The caller asked for something that can never work; says what would.
    ApiMisuse(String),
    /// The stream has ended.
    ConnectionLost {
        /// A sentence for people.
        message: String,
        /// What the peer's Terminate said, if it sent one.
        terminate: Option<TerminateInfo>,
    },
    /// As the system gives it.
    Io(io::Error),
    /// The peer broke the protocol, and its stream is to end.
    PeerMisbehaved(PeerMisbehaved),
}

impl Error {
    pub(crate) fn misuse(message: impl Into<String>) -> Self {
        Self::ApiMisuse(message.into())
    }

    pub(crate) fn lost(message: impl Into<String>) -> Self {
        Self::ConnectionLost {
            message: message.into(),
            terminate: None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ApiMisuse(message) | Self::ConnectionLost { message, .. } => f.write_str(message),
            Self::Io(error) => error.fmt(f),
            Self::PeerMisbehaved(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Error {}

impl From<ApiMisuse> for Error {
    fn from(error: ApiMisuse) -> Self {
        Self::ApiMisuse(error.0)
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<PeerMisbehaved> for Error {
    fn from(error: PeerMisbehaved) -> Self {
        Self::PeerMisbehaved(error)
    }
}

impl From<PartitionError> for Error {
    fn from(error: PartitionError) -> Self {
        match error {
            PartitionError::Misuse(error) => error.into(),
            PartitionError::Misbehaved(error) => error.into(),
        }
    }
}

/// Why a stream ended.
#[derive(Clone, Debug)]
pub enum EndReason {
    /// The stream ended, by either side's will or because the connection broke.
    ConnectionLost {
        /// A sentence for people.
        message: String,
        /// What the peer's Terminate said, if it sent one.
        terminate: Option<TerminateInfo>,
    },
    /// Time ran out.
    DeadlineExceeded(String),
    /// The peer is not one this side can talk to.
    PeerIncompatible(String),
    /// The peer broke the protocol.
    PeerMisbehaved(PeerMisbehaved),
}

impl EndReason {
    pub(crate) fn lost(message: impl Into<String>) -> Self {
        Self::ConnectionLost {
            message: message.into(),
            terminate: None,
        }
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ConnectionLost { message, .. }
            | Self::DeadlineExceeded(message)
            | Self::PeerIncompatible(message) => f.write_str(message),
            Self::PeerMisbehaved(error) => error.fmt(f),
        }
    }
}

/// What the system calls `error`, without Rust's "(os error 98)".
pub(crate) fn error_text(error: &io::Error) -> String {
    let text = error.to_string();
    match error.raw_os_error() {
        Some(number) => text
            .strip_suffix(&format!(" (os error {number})"))
            .map_or(text.clone(), str::to_owned),
        None => text,
    }
}
