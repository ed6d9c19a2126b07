//! The numbers of `kbtp_proto::limits`, for the test that compares them with `kbtp.limits`.

use kbtp_proto::limits as proto;
use pyo3::prelude::*;
use pyo3::types::PyDict;

macro_rules! by_name {
    ($py:expr, $($name:ident,)*) => {{
        let numbers = PyDict::new($py);
        $(numbers.set_item(stringify!($name), proto::$name)?;)*
        Ok(numbers)
    }};
}

/// The numbers that the native RNIC shares with `kbtp.limits`, by the names they have there.
#[pyfunction]
pub(crate) fn limits(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    by_name!(
        py,
        KBTP_VERSION,
        COMMON_HEADER_BYTES,
        DATA_DESCRIPTOR_BYTES,
        COMPLETION_DESCRIPTOR_BYTES,
        COMPLETION_BYTES,
        COMPLETION_RECORD_BYTES,
        COMPLETIONS_POSTED_PER_CREDIT,
        ENTRY_BYTES,
        SLOT_BYTES,
        COUNTER_BYTES,
        BLOCK_OFFSET_EMPTY,
        GENERATION_INITIAL,
        GENERATION_MAX,
        RING_ORDER_MIN,
        RING_ORDER_MAX,
        BLOCK_SIZE_MIN_BYTES,
        BLOCK_SIZE_MAX_BYTES,
        BLOCK_SIZE_MULTIPLE_BYTES,
        POOL_BASE_ALIGN_BYTES,
        MPA_FRAME_BYTES,
        MPA_PRIVATE_DATA_MAX_BYTES,
        MPA_ENHANCED_WORD_BYTES,
        MPA_MARKER_SPACING_BYTES,
        MPA_MARKER_BYTES,
        ULPDU_MAX_BYTES,
        MULPDU_MIN_BYTES,
        PADDED_PAYLOAD_MAX_BYTES,
        DDP_TAGGED_HEADER_BYTES,
        DDP_UNTAGGED_HEADER_BYTES,
        READ_REQUEST_BYTES,
        ATOMIC_REQUEST_BYTES,
        ATOMIC_RESPONSE_BYTES,
        IMMEDIATE_DATA_BYTES,
        IRD_ORD_MAX,
        IRD_ORD_ULP_MANAGED,
        STAG_HISTORY,
        STAG_DRAWS_MAX,
        MPA_REQUEST_TIMEOUT_S,
        MAX_WAIT_S,
        GOODBYE_S,
        DISCONNECT_S,
        TCP_USER_TIMEOUT_S,
        TCP_KEEPALIVE_IDLE_S,
        TCP_KEEPALIVE_INTERVAL_S,
        TCP_KEEPALIVE_PROBES,
        RNIC_READ_DEPTH_MAX,
        RNIC_UNSENT_MAX_BYTES,
        RNIC_PUMP_MAX_BYTES,
        RNIC_READ_BUFFER_BYTES,
        RNIC_IOV_MAX,
        RNIC_LISTEN_BACKLOG,
        RNIC_ACCEPT_BATCH,
        RNIC_PENDING_REQUESTS_MAX,
        RNIC_ACCEPT_PAUSE_S,
    )
}
