//! What the RNIC logs, in the loggers of Python.
//!
//! The RNIC logs while it holds no lock, so that taking the GIL for a line, and whatever a handler does, is safe there.

use log::{Level, Log, Metadata, Record};
use pyo3::prelude::*;

/// To `logging.getLogger(<target of the record>)`, which decides whether it is heard.
struct PythonLoggers;

pub(crate) fn install() {
    // Another interpreter of this process may have installed it.
    if log::set_logger(&PythonLoggers).is_ok() {
        log::set_max_level(log::LevelFilter::Debug);
    }
}

impl Log for PythonLoggers {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // None: the interpreter is being finalized, and nobody listens any more.
        let _ = Python::try_attach(|py| {
            if let Err(error) = pass_on(py, record) {
                error.write_unraisable(py, None);
            }
        });
    }

    fn flush(&self) {}
}

fn pass_on(py: Python<'_>, record: &Record<'_>) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", (record.target(),))?;
    logger.call_method1("log", (python_level(record.level()), "%s", record.args().to_string()))?;
    Ok(())
}

/// The numbers of Python's `logging`.
fn python_level(level: Level) -> u8 {
    match level {
        Level::Error => 40,
        Level::Warn => 30,
        Level::Info => 20,
        Level::Debug | Level::Trace => 10,
    }
}
