//! The passive side of start-up over rdma-core: requests come from the connection manager whole.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};

use kbtp_proto::limits;
use kbtp_verbs::{CmEvent, Endpoint};

use crate::core::{Core, Source};
use crate::error::error_text;
use crate::event_loop::{Token, Watch, new_token};
use crate::request::Pending;

/// An address that is listened on.
pub(crate) struct VerbsListener {
    endpoint: Endpoint,
    watch: Watch,
    address: SocketAddr,
}

impl VerbsListener {
    /// On the first address of `host` ("": the system's wildcard); port 0 takes a free one.
    pub(crate) fn open(core: &mut Core, host: &str, port: u16) -> io::Result<(Token, SocketAddr)> {
        let address = if host.is_empty() {
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))
        } else {
            (host, port)
                .to_socket_addrs()?
                .next()
                .ok_or(io::ErrorKind::AddrNotAvailable)?
        };
        let hardware = core.device.hardware.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let mut endpoint = Endpoint::new(hardware)?;
        let address = endpoint.listen(address, limits::RNIC_LISTEN_BACKLOG)?;
        let token = new_token();
        let mut watch = Watch::default();
        watch.set(core.poller(), endpoint.fd(), token, true, false)?;
        let listener = Self {
            endpoint,
            watch,
            address,
        };
        core.sources.insert(token, Source::VerbsListener(listener));
        Ok((token, address))
    }

    pub(crate) fn on_ready(mut self, core: &mut Core, token: Token) {
        for _ in 0..limits::RNIC_ACCEPT_BATCH {
            match self.endpoint.event() {
                Ok(Some(CmEvent::ConnectRequest(endpoint, parameters))) => {
                    Pending::ask_verbs(core, token, endpoint, parameters);
                }
                Ok(Some(CmEvent::DeviceRemoved)) => {
                    let address = self.address;
                    core.log(
                        log::Level::Error,
                        format!("{address}: the RDMA device is gone: nobody can connect any more"),
                    );
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => {
                    let (address, error) = (self.address, error_text(&error));
                    core.log(log::Level::Warn, format!("cannot accept on {address}: {error}"));
                    break;
                }
            }
        }
        core.sources.insert(token, Source::VerbsListener(self));
    }

    /// Stop listening; requests that are not answered yet can still be.
    pub(crate) fn close(mut self, core: &mut Core) {
        // It is registered, so this cannot fail; closing it would do the same.
        let _ = self.watch.clear(core.poller(), self.endpoint.fd());
    }
}
