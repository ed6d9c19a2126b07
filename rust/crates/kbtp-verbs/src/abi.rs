//! The structures and numbers of libibverbs and librdmacm that this crate uses, as `infiniband/verbs.h` and
//! `rdma/rdma_cma.h` of rdma-core declare them. They are the ABI of these libraries since their first version
//! (`IBVERBS_1.1`, `RDMACM_1.0`), which every later one keeps.
//!
//! Of structures that the library makes, only the beginning is declared: as much as is looked at.

#![allow(
    missing_docs,
    reason = "the names and meanings are those of the headers; see ibv_* and rdma_* (3)"
)]

use std::ffi::{c_char, c_int, c_void};

/// `struct ibv_device`.
#[repr(C)]
pub struct IbvDevice {
    _ops: [*mut c_void; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
}

pub const IBV_TRANSPORT_IWARP: c_int = 1;

pub type PollCq = unsafe extern "C" fn(*mut IbvCq, c_int, *mut IbvWc) -> c_int;
pub type ReqNotifyCq = unsafe extern "C" fn(*mut IbvCq, c_int) -> c_int;
pub type PostSend = unsafe extern "C" fn(*mut IbvQp, *mut IbvSendWr, *mut *mut IbvSendWr) -> c_int;
pub type PostRecv = unsafe extern "C" fn(*mut IbvQp, *mut IbvRecvWr, *mut *mut IbvRecvWr) -> c_int;

/// `struct ibv_context` with its `struct ibv_context_ops`: what the header's inline functions call.
#[repr(C)]
pub struct IbvContext {
    pub device: *mut IbvDevice,
    _before_poll_cq: [*mut c_void; 11],
    pub poll_cq: PollCq,
    pub req_notify_cq: ReqNotifyCq,
    _before_post_send: [*mut c_void; 12],
    pub post_send: PostSend,
    pub post_recv: PostRecv,
    _after_post_recv: [*mut c_void; 5],
    pub cmd_fd: c_int,
    pub async_fd: c_int,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IbvDeviceAttr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: u32,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_int,
    _rest: [c_int; 14],
    _max_pkeys: u16,
    _local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

pub const IBV_DEVICE_MEM_MGT_EXTENSIONS: u32 = 1 << 21;
pub const IBV_ATOMIC_HCA: c_int = 1;
pub const IBV_ATOMIC_GLOB: c_int = 2;

/// `struct ibv_port_attr`, with room for what later versions have appended.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IbvPortAttr {
    pub state: c_int,
    pub max_mtu: c_int,
    pub active_mtu: c_int,
    pub gid_tbl_len: c_int,
    _port_cap_flags: u32,
    pub max_msg_sz: u32,
    _counters: [u32; 2],
    _pkeys_and_lids: [u16; 3],
    _lmc_to_phys_state: [u8; 8],
    pub link_layer: u8,
    _flags: u8,
    _later: [u8; 64],
}

pub const IBV_PORT_ACTIVE: c_int = 4;
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;

/// `union ibv_gid`.
pub type IbvGid = [u8; 16];

/// `struct ibv_pd`.
pub type IbvPd = c_void;

/// `struct ibv_mr`.
#[repr(C)]
pub struct IbvMr {
    _context_pd_address: [*mut c_void; 3],
    _length: usize,
    _handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

pub const IBV_ACCESS_LOCAL_WRITE: c_int = 1;
pub const IBV_ACCESS_REMOTE_WRITE: c_int = 1 << 1;
pub const IBV_ACCESS_REMOTE_READ: c_int = 1 << 2;
pub const IBV_ACCESS_REMOTE_ATOMIC: c_int = 1 << 3;

/// `struct ibv_comp_channel`.
#[repr(C)]
pub struct IbvCompChannel {
    _context: *mut c_void,
    pub fd: c_int,
}

/// `struct ibv_cq`.
#[repr(C)]
pub struct IbvCq {
    pub context: *mut IbvContext,
}

/// `struct ibv_qp`.
#[repr(C)]
pub struct IbvQp {
    pub context: *mut IbvContext,
    _qp_context_to_srq: [*mut c_void; 5],
    _handle: u32,
    pub qp_num: u32,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct IbvQpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub struct IbvQpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut IbvCq,
    pub recv_cq: *mut IbvCq,
    pub srq: *mut c_void,
    pub cap: IbvQpCap,
    pub qp_type: c_int,
    pub sq_sig_all: c_int,
}

pub const IBV_QPT_RC: c_int = 2;

/// `struct ibv_qp_attr`, for the path MTU alone.
#[repr(C)]
pub struct IbvQpAttr {
    _states: [c_int; 2],
    pub path_mtu: c_int,
    _rest: [u8; 132],
}

pub const IBV_QP_PATH_MTU: c_int = 1 << 8;

/// `struct ibv_sge`: `length` octets at `address`, registered under the local key `lkey`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    pub address: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `struct ibv_recv_wr`.
#[repr(C)]
pub struct IbvRecvWr {
    pub wr_id: u64,
    pub next: *mut IbvRecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

/// `struct ibv_send_wr`. Of its union, `rdma` is `[remote_addr, rkey, 0, 0]`, `atomic` `[remote_addr, compare_add, swap,
/// rkey]`: a key is the first half of a word on little-endian machines, which are all that this is built for.
#[repr(C)]
pub struct IbvSendWr {
    pub wr_id: u64,
    pub next: *mut IbvSendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: c_int,
    pub send_flags: u32,
    /// In network byte order; or the key to invalidate, in that of the machine.
    pub imm_data: u32,
    pub remote: [u64; 4],
    _xrc_and_bind: [u64; 7],
}

impl IbvSendWr {
    pub(crate) fn new() -> Self {
        Self {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode: 0,
            send_flags: 0,
            imm_data: 0,
            remote: [0; 4],
            _xrc_and_bind: [0; 7],
        }
    }
}

pub const IBV_WR_RDMA_WRITE: c_int = 0;
pub const IBV_WR_RDMA_WRITE_WITH_IMM: c_int = 1;
pub const IBV_WR_SEND: c_int = 2;
pub const IBV_WR_RDMA_READ: c_int = 4;
pub const IBV_WR_ATOMIC_CMP_AND_SWP: c_int = 5;
pub const IBV_WR_ATOMIC_FETCH_AND_ADD: c_int = 6;
pub const IBV_WR_SEND_WITH_INV: c_int = 9;

pub const IBV_SEND_SIGNALED: u32 = 1 << 1;
pub const IBV_SEND_SOLICITED: u32 = 1 << 2;
pub const IBV_SEND_INLINE: u32 = 1 << 3;

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct IbvWc {
    pub wr_id: u64,
    pub status: c_int,
    pub opcode: c_int,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// In network byte order; or the key that was invalidated, in that of the machine.
    pub imm_data: u32,
    pub qp_num: u32,
    _src_qp: u32,
    pub wc_flags: u32,
    _pkey_index_to_path_bits: [u16; 4],
}

pub const IBV_WC_RECV_RDMA_WITH_IMM: c_int = 129;
pub const IBV_WC_WITH_IMM: u32 = 1 << 1;
pub const IBV_WC_WITH_INV: u32 = 1 << 3;

/// `struct rdma_event_channel`.
#[repr(C)]
pub struct RdmaEventChannel {
    pub fd: c_int,
}

/// `struct rdma_cm_id`.
#[repr(C)]
pub struct RdmaCmId {
    pub verbs: *mut IbvContext,
    pub channel: *mut RdmaEventChannel,
    pub context: *mut c_void,
    pub qp: *mut IbvQp,
    pub source: SockaddrStorage,
    pub destination: SockaddrStorage,
    pub source_gid: IbvGid,
    _destination_gid: IbvGid,
    _pkey_and_paths: [u64; 3],
    pub port_space: c_int,
    pub port_number: u8,
}

/// `struct sockaddr_storage` of Linux.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct SockaddrStorage(pub [u8; 128]);

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RdmaConnParam {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

/// `struct rdma_cm_event`, whose union has other members for datagrams.
#[repr(C)]
pub struct RdmaCmEvent {
    pub id: *mut RdmaCmId,
    pub listen_id: *mut RdmaCmId,
    pub event: c_int,
    pub status: c_int,
    pub conn: RdmaConnParam,
}

pub const RDMA_PS_TCP: c_int = 0x0106;
pub const RDMA_OPTION_ID: c_int = 0;
pub const RDMA_OPTION_ID_REUSEADDR: c_int = 1;

pub const RDMA_CM_EVENT_ADDR_RESOLVED: c_int = 0;
pub const RDMA_CM_EVENT_ADDR_ERROR: c_int = 1;
pub const RDMA_CM_EVENT_ROUTE_RESOLVED: c_int = 2;
pub const RDMA_CM_EVENT_ROUTE_ERROR: c_int = 3;
pub const RDMA_CM_EVENT_CONNECT_REQUEST: c_int = 4;
pub const RDMA_CM_EVENT_CONNECT_ERROR: c_int = 6;
pub const RDMA_CM_EVENT_UNREACHABLE: c_int = 7;
pub const RDMA_CM_EVENT_REJECTED: c_int = 8;
pub const RDMA_CM_EVENT_ESTABLISHED: c_int = 9;
pub const RDMA_CM_EVENT_DISCONNECTED: c_int = 10;
pub const RDMA_CM_EVENT_DEVICE_REMOVAL: c_int = 11;

/// Measured with a C compiler against the headers of rdma-core, for a 64-bit machine.
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(offset_of!(IbvDevice, transport_type) == 20);
    assert!(offset_of!(IbvContext, poll_cq) == 96 && offset_of!(IbvContext, req_notify_cq) == 104);
    assert!(offset_of!(IbvContext, post_send) == 208 && offset_of!(IbvContext, post_recv) == 216);
    assert!(offset_of!(IbvContext, cmd_fd) == 264);
    assert!(size_of::<IbvDeviceAttr>() == 232 && offset_of!(IbvDeviceAttr, max_mr_size) == 80);
    assert!(offset_of!(IbvDeviceAttr, max_qp_rd_atom) == 144 && offset_of!(IbvDeviceAttr, atomic_cap) == 164);
    assert!(offset_of!(IbvDeviceAttr, phys_port_cnt) == 227);
    assert!(size_of::<IbvPortAttr>() >= 52 && offset_of!(IbvPortAttr, max_msg_sz) == 20);
    assert!(offset_of!(IbvPortAttr, link_layer) == 46);
    assert!(offset_of!(IbvMr, lkey) == 36 && offset_of!(IbvMr, rkey) == 40);
    assert!(offset_of!(IbvCompChannel, fd) == 8 && offset_of!(IbvQp, qp_num) == 52);
    assert!(size_of::<IbvQpInitAttr>() == 64 && offset_of!(IbvQpInitAttr, cap) == 32);
    assert!(size_of::<IbvQpAttr>() == 144 && offset_of!(IbvQpAttr, path_mtu) == 8);
    assert!(size_of::<Sge>() == 16 && size_of::<IbvRecvWr>() == 32);
    assert!(size_of::<IbvSendWr>() == 128 && offset_of!(IbvSendWr, remote) == 40);
    assert!(size_of::<IbvWc>() == 48 && offset_of!(IbvWc, wc_flags) == 36);
    assert!(offset_of!(RdmaCmId, source) == 32 && offset_of!(RdmaCmId, source_gid) == 288);
    assert!(offset_of!(RdmaCmId, port_space) == 344 && offset_of!(RdmaCmId, port_number) == 348);
    assert!(size_of::<RdmaConnParam>() == 24 && offset_of!(RdmaConnParam, qp_num) == 16);
    assert!(offset_of!(RdmaCmEvent, event) == 16 && offset_of!(RdmaCmEvent, conn) == 24);
};
