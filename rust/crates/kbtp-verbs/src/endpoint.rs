//! Connections: ids and event channels of librdmacm, queue pairs and completion queues of libibverbs.

use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

use smallvec::SmallVec;
use socket2::SockAddr;

use crate::abi::*;
use crate::device::{Context, Pd};
use crate::events::{CmEvent, Completion, Parameters, address_of};
use crate::library::{checked, checked_number, library, made};
use crate::machine::{Device, mtu_complaint};
use crate::work::{Depths, SendWork};

/// Work requests that one call hands to a device at most without an allocation.
const CHAINED: usize = 8;

fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: two calls without pointers, on a file descriptor of a library's.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    checked(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) })
}

/// The queue pair of an endpoint, with one completion queue for both directions.
struct Queues {
    qp: NonNull<IbvQp>,
    cq: NonNull<IbvCq>,
    channel: NonNull<IbvCompChannel>,
    depths: Depths,
    /// Notifications that were taken, and not yet acknowledged.
    unacknowledged: u32,
    _pd: Arc<Pd>,
}

/// What librdmacm calls an id, on an event channel of its own; with `create_queues`, one end of a connection.
pub struct Endpoint {
    id: NonNull<RdmaCmId>,
    channel: NonNull<RdmaEventChannel>,
    queues: Option<Queues>,
    /// There may be a peer to say goodbye to.
    connected: bool,
}

// SAFETY: both libraries may be called by several threads; an endpoint is used by one at a time.
unsafe impl Send for Endpoint {}

/// # Safety
///
/// The event is about a connection, and not yet acknowledged.
unsafe fn parameters_of(event: &RdmaCmEvent) -> Parameters {
    let conn = &event.conn;
    let length = usize::from(conn.private_data_len);
    let with_data = matches!(
        event.event,
        RDMA_CM_EVENT_CONNECT_REQUEST | RDMA_CM_EVENT_ESTABLISHED | RDMA_CM_EVENT_REJECTED
    );
    if !with_data || conn.private_data.is_null() {
        return Parameters::of(conn, &[]);
    }
    // SAFETY: as many octets as said, which stay as long as the event does.
    Parameters::of(conn, unsafe {
        std::slice::from_raw_parts(conn.private_data.cast::<u8>(), length)
    })
}

fn create_channel() -> io::Result<NonNull<RdmaEventChannel>> {
    // SAFETY: it has no requirements.
    let channel = made(unsafe { (library().rdma_create_event_channel)() })?;
    // SAFETY: the library has just made it.
    set_nonblocking(unsafe { channel.as_ref().fd })?;
    Ok(channel)
}

impl Endpoint {
    /// One that is neither bound nor connected. The libraries are loaded.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub(crate) fn create() -> io::Result<Self> {
        let channel = create_channel()?;
        let mut id = null_mut();
        // SAFETY: the channel is there; it stores the pointer in `id`.
        let created =
            checked(unsafe { (library().rdma_create_id)(channel.as_ptr(), &raw mut id, null_mut(), RDMA_PS_TCP) });
        match created.and_then(|()| made(id)) {
            Ok(id) => Ok(Self::of(id, channel)),
            Err(error) => {
                // SAFETY: made above, and nothing is on it.
                unsafe { (library().rdma_destroy_event_channel)(channel.as_ptr()) };
                Err(error)
            }
        }
    }

    fn of(id: NonNull<RdmaCmId>, channel: NonNull<RdmaEventChannel>) -> Self {
        Self {
            id,
            channel,
            queues: None,
            connected: false,
        }
    }

    /// Readable when `event` has something.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives as long as `self`, and with it its file descriptor.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    /// Listen on `address`, whose port 0 takes a free one; what it is then.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub fn listen(&mut self, address: SocketAddr, backlog: c_int) -> io::Result<SocketAddr> {
        let (id, address) = (self.id.as_ptr(), SockAddr::from(address));
        let mut yes: c_int = 1;
        // SAFETY: the option is an int, and the address a socket address of its family; both are copied.
        unsafe {
            let option = (&raw mut yes).cast();
            let size = size_of::<c_int>();
            checked((library().rdma_set_option)(
                id,
                RDMA_OPTION_ID,
                RDMA_OPTION_ID_REUSEADDR,
                option,
                size,
            ))?;
            checked((library().rdma_bind_addr)(id, address.as_ptr().cast()))?;
            checked((library().rdma_listen)(id, backlog))?;
        }
        // SAFETY: the id is bound.
        let port = u16::from_be(unsafe { (library().rdma_get_src_port)(id) });
        let mut bound = address
            .as_socket()
            .unwrap_or_else(|| SocketAddr::from(([0, 0, 0, 0], port)));
        bound.set_port(port);
        Ok(bound)
    }

    /// Find out through which device `to` is reached; `AddressResolved` follows, or an event that says why not.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub fn resolve_address(&mut self, to: SocketAddr, timeout_ms: c_int) -> io::Result<()> {
        let to = SockAddr::from(to);
        // SAFETY: a socket address of its family, which is copied.
        checked(unsafe { (library().rdma_resolve_addr)(self.id.as_ptr(), null(), to.as_ptr().cast(), timeout_ms) })
    }

    /// Find the way there; `RouteResolved` follows, or an event that says why not.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub fn resolve_route(&mut self, timeout_ms: c_int) -> io::Result<()> {
        // SAFETY: the library refuses an id whose address is not resolved.
        checked(unsafe { (library().rdma_resolve_route)(self.id.as_ptr(), timeout_ms) })
    }

    /// The device, once the address is resolved or the request is there.
    #[must_use]
    pub fn context(&self) -> Option<Context> {
        // SAFETY: the id lives as long as `self`.
        NonNull::new(unsafe { self.id.as_ref().verbs }).map(Context)
    }

    /// This side's, once it is known.
    #[must_use]
    pub fn local_address(&self) -> Option<SocketAddr> {
        // SAFETY: the id lives as long as `self`.
        address_of(unsafe { &self.id.as_ref().source.0 })
    }

    /// The peer's, once it is known.
    #[must_use]
    pub fn remote_address(&self) -> Option<SocketAddr> {
        // SAFETY: the id lives as long as `self`.
        address_of(unsafe { &self.id.as_ref().destination.0 })
    }

    /// This side's GID and port, once the address is resolved.
    #[must_use]
    pub fn local_gid(&self) -> (IbvGid, u8) {
        // SAFETY: the id lives as long as `self`.
        let id = unsafe { self.id.as_ref() };
        (id.source_gid, id.port_number)
    }

    /// A queue pair in `pd`, as deep as `wanted` or as the device allows.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub fn create_queues(&mut self, pd: &Arc<Pd>, wanted: Depths) -> io::Result<Depths> {
        let context = pd.context().raw();
        // SAFETY: the context is open.
        let channel = made(unsafe { (library().ibv_create_comp_channel)(context) })?;
        let entries = (wanted.sends + wanted.receives) as c_int;
        // SAFETY: the channel is there, and of this context.
        let cq = made(unsafe { (library().ibv_create_cq)(context, entries, null_mut(), channel.as_ptr(), 0) });
        let queues = cq.and_then(|cq| {
            // SAFETY: the channel is there.
            let fd = unsafe { channel.as_ref().fd };
            let qp = set_nonblocking(fd).and_then(|()| self.create_qp(pd, cq, wanted));
            qp.inspect_err(|_| {
                // SAFETY: made above, and in use by nothing.
                unsafe { (library().ibv_destroy_cq)(cq.as_ptr()) };
            })
            .map(|(qp, depths)| (cq, qp, depths))
        });
        match queues {
            Ok((cq, qp, depths)) => {
                self.queues = Some(Queues {
                    qp,
                    cq,
                    channel,
                    depths,
                    unacknowledged: 0,
                    _pd: Arc::clone(pd),
                });
                Ok(depths)
            }
            Err(error) => {
                // SAFETY: made above, and in use by nothing any more.
                unsafe { (library().ibv_destroy_comp_channel)(channel.as_ptr()) };
                Err(error)
            }
        }
    }

    /// With less inline data where the device does not take so much.
    fn create_qp(&mut self, pd: &Arc<Pd>, cq: NonNull<IbvCq>, wanted: Depths) -> io::Result<(NonNull<IbvQp>, Depths)> {
        let mut inline_bytes = wanted.inline_bytes;
        loop {
            let mut attributes = IbvQpInitAttr {
                qp_context: null_mut(),
                send_cq: cq.as_ptr(),
                recv_cq: cq.as_ptr(),
                srq: null_mut(),
                cap: IbvQpCap {
                    max_send_wr: wanted.sends,
                    max_recv_wr: wanted.receives,
                    max_send_sge: wanted.pieces,
                    max_recv_sge: 1,
                    max_inline_data: inline_bytes,
                },
                qp_type: IBV_QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: id, domain and queue are there, of one device or the library refuses; it changes `attributes` alone.
            let created =
                checked(unsafe { (library().rdma_create_qp)(self.id.as_ptr(), pd.0.as_ptr(), &raw mut attributes) });
            match created {
                Ok(()) => {
                    // SAFETY: the id lives as long as `self`, and has a queue pair now.
                    let qp = made(unsafe { self.id.as_ref().qp })?;
                    return Ok((qp, Depths { inline_bytes, ..wanted }));
                }
                Err(_) if inline_bytes > 0 => inline_bytes /= 2,
                Err(error) => return Err(error),
            }
        }
    }

    /// Connect; `Established`, or an event that says why not, follows.
    ///
    /// # Errors
    ///
    /// As the system gives it, for too long private data for example.
    pub fn connect(&mut self, parameters: &Parameters) -> io::Result<()> {
        let mut raw = parameters.raw();
        // SAFETY: the library refuses an id that is in no state for it, and copies the private data.
        checked(unsafe { (library().rdma_connect)(self.id.as_ptr(), &raw mut raw) })?;
        self.connected = true;
        Ok(())
    }

    /// Accept the request that this endpoint came with.
    ///
    /// # Errors
    ///
    /// As `connect`.
    pub fn accept(&mut self, parameters: &Parameters) -> io::Result<()> {
        let mut raw = parameters.raw();
        // SAFETY: as `connect`.
        checked(unsafe { (library().rdma_accept)(self.id.as_ptr(), &raw mut raw) })?;
        self.connected = true;
        Ok(())
    }

    /// Refuse the request that this endpoint came with.
    ///
    /// # Errors
    ///
    /// As `connect`.
    pub fn reject(&mut self, private_data: &[u8]) -> io::Result<()> {
        let length = u8::try_from(private_data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: as many octets as said, which are copied.
        checked(unsafe { (library().rdma_reject)(self.id.as_ptr(), private_data.as_ptr().cast(), length) })
    }

    /// End the connection; `Disconnected` follows.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub fn disconnect(&mut self) -> io::Result<()> {
        self.connected = false;
        // SAFETY: the library refuses an id that is not connected.
        checked(unsafe { (library().rdma_disconnect)(self.id.as_ptr()) })
    }

    /// The next event; None if there is none now.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub fn event(&mut self) -> io::Result<Option<CmEvent>> {
        let mut event = null_mut();
        // SAFETY: the channel lives as long as `self`; it stores the pointer in `event`.
        let got = checked(unsafe { (library().rdma_get_cm_event)(self.channel.as_ptr(), &raw mut event) });
        match got {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            got => got?,
        }
        let event = made(event)?;
        // SAFETY: the event stays until it is acknowledged, and of a connection its parameters are of that kind.
        let (kind, status, id, parameters) = unsafe {
            let event = event.as_ref();
            (event.event, event.status, event.id, parameters_of(event))
        };
        // SAFETY: once, and nothing of it is looked at afterwards.
        unsafe { (library().rdma_ack_cm_event)(event.as_ptr()) };
        if kind != RDMA_CM_EVENT_CONNECT_REQUEST {
            return Ok(Some(CmEvent::of(kind, status, parameters)));
        }
        let request = Self::of_request(made(id)?)?;
        Ok(Some(CmEvent::ConnectRequest(request, parameters)))
    }

    /// Whose events come through a channel of its own from now on. Dropped, it refuses.
    fn of_request(id: NonNull<RdmaCmId>) -> io::Result<Self> {
        let migrated = create_channel().and_then(|channel| {
            // SAFETY: id and channel are there, and the id's event was acknowledged.
            let migrated = checked(unsafe { (library().rdma_migrate_id)(id.as_ptr(), channel.as_ptr()) });
            migrated.map(|()| Self::of(id, channel)).inspect_err(|_| {
                // SAFETY: made above, and nothing is on it.
                unsafe { (library().rdma_destroy_event_channel)(channel.as_ptr()) };
            })
        });
        migrated.inspect_err(|_| {
            // SAFETY: nobody else has it.
            unsafe { (library().rdma_destroy_id)(id.as_ptr()) };
        })
    }

    // --- the queues ---

    /// Readable after `request_notification` when something is complete.
    #[must_use]
    pub fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        let queues = self.queues.as_ref()?;
        // SAFETY: the channel lives until `close_queues`, which needs `self` for itself.
        Some(unsafe { BorrowedFd::borrow_raw(queues.channel.as_ref().fd) })
    }

    /// Take the notifications that have come; whether there were any.
    pub fn take_notifications(&mut self) -> bool {
        let Some(queues) = self.queues.as_mut() else {
            return false;
        };
        let before = queues.unacknowledged;
        let (mut cq, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel is there; it stores two pointers.
        while unsafe { (library().ibv_get_cq_event)(queues.channel.as_ptr(), &raw mut cq, &raw mut context) } == 0 {
            queues.unacknowledged += 1;
        }
        queues.unacknowledged != before
    }

    /// Have the next completion notified. What was complete before is not: `poll` once more.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub fn request_notification(&mut self) -> io::Result<()> {
        let Some(Queues { cq, .. }) = &self.queues else {
            return Ok(());
        };
        // SAFETY: the queue is there, and its context names the function.
        checked_number(unsafe { ((*cq.as_ref().context).req_notify_cq)(cq.as_ptr(), 0) })
    }

    /// What is complete, up to a number of them, to the end of `into`.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub fn poll(&mut self, into: &mut Vec<Completion>) -> io::Result<()> {
        let Some(Queues { cq, .. }) = &self.queues else {
            return Ok(());
        };
        let mut raw = [IbvWc::default(); 32];
        // SAFETY: the queue is there, its context names the function, and there is room for so many.
        let count = unsafe { ((*cq.as_ref().context).poll_cq)(cq.as_ptr(), raw.len() as c_int, raw.as_mut_ptr()) };
        let Ok(count) = usize::try_from(count) else {
            return Err(io::Error::other("the completion queue cannot be read"));
        };
        into.extend(raw.iter().take(count).map(Completion::of));
        Ok(())
    }

    /// Post `works`, in order.
    ///
    /// # Errors
    ///
    /// As the device gives it; some of them may be posted then.
    pub fn post(&mut self, works: &[SendWork<'_>]) -> io::Result<()> {
        let Some(Queues { qp, .. }) = &self.queues else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let (mut requests, mut copied): (SmallVec<[_; CHAINED]>, SmallVec<[_; CHAINED]>) =
            works.iter().map(SendWork::request).unzip();
        for (index, request) in requests.iter_mut().enumerate() {
            let pieces: (*mut Sge, usize) = match (copied.get_mut(index), works.get(index)) {
                (Some(Some(copied)), _) => (copied, 1),
                (
                    _,
                    Some(SendWork {
                        pieces, octets: None, ..
                    }),
                ) => (pieces.as_ptr().cast_mut(), pieces.len()),
                _ => (null_mut(), 0),
            };
            (request.sg_list, request.num_sge) = (pieces.0, pieces.1 as c_int);
        }
        let begin = requests.as_mut_ptr();
        for index in 1..requests.len() {
            // SAFETY: both are within the vector, which is changed in no other way any more.
            unsafe { (*begin.add(index - 1)).next = begin.add(index) };
        }
        if works.is_empty() {
            return Ok(());
        }
        let mut refused = null_mut();
        // SAFETY: the queue pair is there, and its context names the function. Requests and pieces stay until it returns; it
        // does not change them. Octets that are sent inline are borrowed by `works` and copied.
        checked_number(unsafe { ((*qp.as_ref().context).post_send)(qp.as_ptr(), begin, &raw mut refused) })
    }

    /// Post a receive buffer.
    ///
    /// # Errors
    ///
    /// As the device gives it.
    pub fn post_receive(&mut self, id: u64, mut piece: Sge) -> io::Result<()> {
        let Some(Queues { qp, .. }) = &self.queues else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let mut request = IbvRecvWr {
            wr_id: id,
            next: null_mut(),
            sg_list: &raw mut piece,
            num_sge: 1,
        };
        let mut refused = null_mut();
        // SAFETY: as `post`.
        let posted = unsafe { ((*qp.as_ref().context).post_recv)(qp.as_ptr(), &raw mut request, &raw mut refused) };
        checked_number(posted)
    }

    /// As they are; None without a queue pair.
    #[must_use]
    pub fn depths(&self) -> Option<Depths> {
        self.queues.as_ref().map(|queues| queues.depths)
    }

    /// What is wrong if the two ends have agreed on packets that the port of `device` does not take.
    #[must_use]
    pub fn mtu_complaint(&self, device: &Device) -> Option<String> {
        let path = self.path_mtu_code().filter(|_| !device.iwarp)?;
        mtu_complaint(&device.name, path, device.mtu_code)
    }

    /// Of a packet's payload, as the two ends have agreed (`enum ibv_mtu`).
    fn path_mtu_code(&self) -> Option<c_int> {
        let Queues { qp, .. } = self.queues.as_ref()?;
        let mut attributes = MaybeUninit::<IbvQpAttr>::zeroed();
        let mut init = MaybeUninit::<IbvQpInitAttr>::zeroed();
        // SAFETY: the queue pair is there; it fills both structures, the first of which is valid as zeros too.
        let attributes = unsafe {
            let (attributes_at, init_at) = (attributes.as_mut_ptr(), init.as_mut_ptr());
            checked_number((library().ibv_query_qp)(
                qp.as_ptr(),
                attributes_at,
                IBV_QP_PATH_MTU,
                init_at,
            ))
            .ok()?;
            attributes.assume_init()
        };
        Some(attributes.path_mtu)
    }

    /// Say goodbye, and give up the queue pair: nothing is sent, placed or delivered any more after this returns.
    pub fn close_queues(&mut self) {
        if self.connected {
            // Should it fail, there is nobody to tell.
            let _ = self.disconnect();
        }
        let Some(queues) = self.queues.take() else {
            return;
        };
        let Queues {
            cq,
            channel,
            unacknowledged,
            ..
        } = queues;
        // SAFETY: each was made by `create_queues` and is given back once, whatever uses another one first; the notifications
        // that were taken are acknowledged, for which `ibv_destroy_cq` waits.
        unsafe {
            (library().rdma_destroy_qp)(self.id.as_ptr());
            if unacknowledged > 0 {
                (library().ibv_ack_cq_events)(cq.as_ptr(), unacknowledged);
            }
            (library().ibv_destroy_cq)(cq.as_ptr());
            (library().ibv_destroy_comp_channel)(channel.as_ptr());
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close_queues();
        // SAFETY: events are acknowledged as they are taken, the queue pair is gone, and the id is the only one on its channel.
        unsafe {
            (library().rdma_destroy_id)(self.id.as_ptr());
            (library().rdma_destroy_event_channel)(self.channel.as_ptr());
        }
    }
}
