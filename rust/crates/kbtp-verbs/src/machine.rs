//! What RDMA there is on this machine, and in plain words what is missing or looks wrong.
//!
//! Devices, ports and GIDs are read from `/sys/class/infiniband`, for which no library is needed.

use std::fmt;
use std::fs;
use std::io;
use std::net::Ipv6Addr;
use std::path::Path;

use crate::abi::{IBV_ATOMIC_GLOB, IBV_ATOMIC_HCA, IBV_DEVICE_MEM_MGT_EXTENSIONS};
use crate::device::{Context, contexts, memlock_limit};
use crate::endpoint::Endpoint;
use crate::library::load;

const DEVICES: &str = "/sys/class/infiniband";
const CM_DEVICE: &str = "/dev/infiniband/rdma_cm";

/// Less than this is a default of the system's, and not chosen for RDMA.
const MEMLOCK_LITTLE_BYTES: u64 = 256 * 1024 * 1024;

/// Of the effective capabilities: pinned memory has no limit.
const CAP_IPC_LOCK: u32 = 14;

/// Why there is no RDMA device to use, and what would help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing(pub String);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Missing {}

/// What an entry of a port's GID table is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand, RoCE version 1, or iWARP, as the port is.
    Native,
    /// RoCE version 2.
    RoceV2,
}

/// One port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// From 1 on.
    pub number: u8,
    /// As the system calls it, such as `ACTIVE`.
    pub state: String,
    /// Its link is Ethernet's.
    pub ethernet: bool,
    /// Those that are not zero: index, GID, kind.
    pub gids: Vec<(u16, [u8; 16], GidKind)>,
}

impl Port {
    /// Packets can be sent.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }
}

/// One device, as the system shows it to everybody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Such as `mlx5_0`.
    pub name: String,
    /// An RNIC in the narrow sense: iWARP.
    pub iwarp: bool,
    /// In order.
    pub ports: Vec<Port>,
}

impl Survey {
    /// What keeps it from being used, or will surprise; one sentence each.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        for port in &self.ports {
            let at = format!("{} port {}", self.name, port.number);
            if !port.is_active() {
                let state = &port.state;
                complaints.push(format!(
                    "{at} is {state}, not ACTIVE: check its cable, and that its interface is up"
                ));
            }
            let routable = |gid: &[u8; 16]| !is_link_local(gid);
            if port.ethernet && !self.iwarp && !port.gids.iter().any(|(_, gid, _)| routable(gid)) {
                complaints.push(format!(
                    "{at} has link-local GIDs only: give its network interface an IPv4 or IPv6 address, by which peers \
                     reach it"
                ));
            }
        }
        complaints
    }
}

/// It names this port to its own link alone.
fn is_link_local(gid: &[u8; 16]) -> bool {
    Ipv6Addr::from(*gid).is_unicast_link_local()
}

/// Every RDMA device, by name.
#[must_use]
pub fn survey() -> Vec<Survey> {
    survey_in(Path::new(DEVICES))
}

fn survey_in(devices: &Path) -> Vec<Survey> {
    let mut found: Vec<_> = names(devices)
        .into_iter()
        .map(|name| {
            let device = devices.join(&name);
            let ports = names(&device.join("ports"));
            let mut ports: Vec<_> = ports
                .iter()
                .filter_map(|number| Some(port_in(&device.join("ports").join(number), number.parse().ok()?)))
                .collect();
            ports.sort_by_key(|port| port.number);
            Survey {
                iwarp: line(&device.join("node_type")).ends_with("RNIC"),
                name,
                ports,
            }
        })
        .collect();
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}

fn port_in(folder: &Path, number: u8) -> Port {
    let state = line(&folder.join("state"));
    let mut gids: Vec<_> = names(&folder.join("gids"))
        .iter()
        .filter_map(|index| {
            let gid: Ipv6Addr = line(&folder.join("gids").join(index)).parse().ok()?;
            let kind = line(&folder.join("gid_attrs/types").join(index));
            let kind = if kind.ends_with("v2") {
                GidKind::RoceV2
            } else {
                GidKind::Native
            };
            let names_something = gid.segments()[4..].iter().any(|part| *part != 0);
            names_something.then_some((index.parse().ok()?, gid.octets(), kind))
        })
        .collect();
    gids.sort_unstable_by_key(|(index, ..)| *index);
    Port {
        number,
        // "4: ACTIVE"
        state: state.rsplit(' ').next().unwrap_or_default().to_owned(),
        ethernet: line(&folder.join("link_layer")) == "Ethernet",
        gids,
    }
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect()
}

/// Empty for what cannot be read, as a GID that is not set.
fn line(file: &Path) -> String {
    fs::read_to_string(file).map_or_else(|_| String::new(), |text| text.trim().to_owned())
}

/// What the device's atomic operations are atomic with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomics {
    /// It has none.
    None,
    /// Those of the same device.
    Device,
    /// Those of processors too.
    System,
}

/// A device that is opened, and what it can do.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Device {
    pub context: Context,
    pub name: String,
    pub iwarp: bool,
    pub atomics: Atomics,
    /// It sends Send with Invalidate.
    pub send_with_invalidate: bool,
    pub max_region_bytes: u64,
    pub max_message_bytes: u32,
    pub max_requests: u32,
    pub max_completions: u32,
    pub max_pieces: u32,
    /// RDMA Reads and atomics of a peer's at a time.
    pub max_ird: u8,
    pub max_ord: u8,
    /// Code of the packet size of its port now (`enum ibv_mtu`).
    pub mtu_code: i32,
    /// What its owner should know; one sentence each.
    pub complaints: Vec<String>,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// Open the device `name`, or else the first that has an active port.
///
/// # Errors
///
/// `Missing`, which says what is, and what would help.
pub fn open(name: Option<&str>) -> Result<Device, Missing> {
    load().map_err(|why| {
        Missing(format!(
            "{why}: install rdma-core (Debian, Ubuntu: rdma-core, ibverbs-providers and librdmacm1; RHEL, Fedora: rdma-core, \
             libibverbs and librdmacm)"
        ))
    })?;
    let seen = survey();
    if seen.is_empty() {
        return Err(Missing(format!(
            "this machine has no RDMA device ({DEVICES} is empty): load the driver of its adapter, or try one in software, \
             such as `rdma link add rxe0 type rxe netdev eth0`"
        )));
    }
    let opened = contexts().map_err(|error| Missing(cannot_open(&error)))?;
    let chosen = choose(&seen, name)?;
    let context = opened
        .into_iter()
        .find(|context| context.name() == chosen.name)
        .ok_or_else(|| {
            let name = &chosen.name;
            Missing(format!(
                "librdmacm does not know the RDMA device {name}: install the library of its driver (Debian, Ubuntu: \
                 ibverbs-providers), and see that /dev/infiniband/uverbs* may be opened"
            ))
        })?;
    describe(context, chosen)
        .map_err(|error| Missing(format!("the RDMA device {} does not answer: {error}", chosen.name)))
}

fn cannot_open(error: &io::Error) -> String {
    if !Path::new(CM_DEVICE).exists() {
        return format!("{CM_DEVICE} is not there: load the kernel module rdma_ucm (`modprobe rdma_ucm`)");
    }
    format!(
        "librdmacm finds no usable device ({error}): see that {CM_DEVICE} and /dev/infiniband/uverbs* may be opened"
    )
}

fn choose<'a>(seen: &'a [Survey], name: Option<&str>) -> Result<&'a Survey, Missing> {
    let known = || {
        let names: Vec<_> = seen.iter().map(|one| one.name.as_str()).collect();
        names.join(", ")
    };
    if let Some(name) = name {
        return seen
            .iter()
            .find(|one| one.name == name)
            .ok_or_else(|| Missing(format!("there is no RDMA device {name}; there are {}", known())));
    }
    seen.iter()
        .find(|one| one.ports.iter().any(Port::is_active))
        .ok_or_else(|| {
            Missing(format!(
                "no port of an RDMA device ({}) is ACTIVE: check cables and interfaces",
                known()
            ))
        })
}

fn describe(context: Context, seen: &Survey) -> io::Result<Device> {
    let attributes = context.attributes()?;
    let number = seen
        .ports
        .iter()
        .find(|port| port.is_active())
        .map_or(1, |port| port.number);
    let port = context.port_attributes(number)?;
    let count = |number: i32| u32::try_from(number).unwrap_or(0);
    let depth = |number: i32| u8::try_from(number.max(0)).unwrap_or(u8::MAX);
    let iwarp = context.is_iwarp();
    let mut complaints = seen.complaints();
    complaints.extend(little_memlock());
    Ok(Device {
        context,
        name: seen.name.clone(),
        iwarp,
        atomics: match attributes.atomic_cap {
            _ if iwarp => Atomics::None,
            IBV_ATOMIC_HCA => Atomics::Device,
            IBV_ATOMIC_GLOB => Atomics::System,
            _ => Atomics::None,
        },
        send_with_invalidate: iwarp || attributes.device_cap_flags & IBV_DEVICE_MEM_MGT_EXTENSIONS != 0,
        max_region_bytes: attributes.max_mr_size,
        max_message_bytes: port.max_msg_sz,
        max_requests: count(attributes.max_qp_wr),
        max_completions: count(attributes.max_cqe),
        max_pieces: count(attributes.max_sge),
        max_ird: depth(attributes.max_qp_rd_atom),
        max_ord: depth(attributes.max_qp_init_rd_atom),
        mtu_code: port.active_mtu,
        complaints,
    })
}

/// The limit on pinned memory that is in force, if any.
fn memlock_in_force() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    if effective.is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 == 1) {
        return None;
    }
    memlock_limit()
}

fn little_memlock() -> Option<String> {
    let limit = memlock_in_force().filter(|limit| *limit < MEMLOCK_LITTLE_BYTES)?;
    Some(format!(
        "only {limit} octets of memory may be registered by this process (`ulimit -l`): raise memlock in \
         /etc/security/limits.conf, or LimitMEMLOCK of its systemd unit"
    ))
}

/// What is wrong, if `length` octets could not be registered because of `error`.
#[must_use]
pub fn explain_registration(device: &Device, length: u64, error: &io::Error) -> String {
    let name = &device.name;
    if length > device.max_region_bytes {
        let max = device.max_region_bytes;
        return format!("{name} takes regions of up to {max} octets (max_mr_size), not {length}: make it smaller");
    }
    match memlock_in_force() {
        Some(limit) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN)) => format!(
            "{name} cannot register {length} octets ({error}): this process may pin {limit} (`ulimit -l`); raise memlock in \
             /etc/security/limits.conf, or LimitMEMLOCK of its systemd unit"
        ),
        _ => format!("{name} cannot register {length} octets: {error}"),
    }
}

/// Codes are those of `enum ibv_mtu`: 1 for 256 octets, each next one for twice as many.
pub(crate) fn mtu_complaint(name: &str, path: i32, port: i32) -> Option<String> {
    let octets = |code: i32| 128 << code.clamp(1, 8);
    (path > port && port > 0).then(|| {
        let (path, port) = (octets(path), octets(port));
        format!(
            "the peer sends packets of {path} octets, and the port of {name} takes {port}: give the interfaces of both, and \
             what is between them, the same MTU"
        )
    })
}

impl Endpoint {
    /// One that is neither bound nor connected.
    ///
    /// # Errors
    ///
    /// As the system gives it.
    pub fn new(_opened: &Device) -> io::Result<Self> {
        Self::create()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file for each line `path: contents`.
    fn tree(name: &str, lines: &[(&str, &str)]) -> std::path::PathBuf {
        let root = std::env::temp_dir().join(format!("kbtp-verbs-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for (path, contents) in lines {
            let file = root.join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, format!("{contents}\n")).unwrap();
        }
        root
    }

    const NO_GID: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

    fn port(state: &str, gids: &[&str]) -> Vec<Survey> {
        let mut lines = vec![
            ("rxe0/node_type".to_owned(), "1: CA".to_owned()),
            ("rxe0/ports/1/state".to_owned(), state.to_owned()),
            ("rxe0/ports/1/link_layer".to_owned(), "Ethernet".to_owned()),
        ];
        for (index, gid) in gids.iter().enumerate() {
            lines.push((format!("rxe0/ports/1/gids/{index}"), (*gid).to_owned()));
            lines.push((format!("rxe0/ports/1/gid_attrs/types/{index}"), "RoCE v2".to_owned()));
        }
        let borrowed: Vec<_> = lines
            .iter()
            .map(|(path, text)| (path.as_str(), text.as_str()))
            .collect();
        let root = tree(&format!("{state}{}", gids.len()), &borrowed);
        let found = survey_in(&root);
        fs::remove_dir_all(root).unwrap();
        found
    }

    #[test]
    fn ports_and_gids_are_read() {
        let found = port(
            "4: ACTIVE",
            &["fe80::1", "0000:0000:0000:0000:0000:ffff:0a00:020f", NO_GID],
        );
        let port = &found[0].ports[0];
        assert_eq!(
            (found[0].name.as_str(), found[0].iwarp, port.number, port.ethernet),
            ("rxe0", false, 1, true)
        );
        let indexes: Vec<_> = port.gids.iter().map(|(index, _, kind)| (*index, *kind)).collect();
        assert_eq!(indexes, [(0, GidKind::RoceV2), (1, GidKind::RoceV2)]);
        assert!(port.is_active() && found[0].complaints().is_empty());
    }

    #[test]
    fn a_port_that_only_its_own_link_reaches_is_named() {
        let complaints = port("4: ACTIVE", &["fe80::1"])[0].complaints();
        assert!(complaints.len() == 1 && complaints[0].contains("rxe0 port 1 has link-local GIDs only"));
    }

    #[test]
    fn a_port_that_is_down_is_named_and_not_chosen() {
        let found = port("1: DOWN", &["2001:db8::1"]);
        assert!(found[0].complaints()[0].contains("rxe0 port 1 is DOWN"));
        assert!(
            choose(&found, None)
                .unwrap_err()
                .0
                .contains("no port of an RDMA device (rxe0) is ACTIVE")
        );
        assert_eq!(choose(&found, Some("rxe0")).unwrap().name, "rxe0");
        assert_eq!(
            choose(&found, Some("mlx5_0")).unwrap_err().0,
            "there is no RDMA device mlx5_0; there are rxe0"
        );
    }

    #[test]
    fn packets_that_the_port_does_not_take_are_named() {
        assert_eq!(mtu_complaint("rxe0", 3, 3), None);
        assert_eq!(mtu_complaint("rxe0", 2, 3), None);
        let complaint = mtu_complaint("rxe0", 5, 3).unwrap();
        assert!(complaint.contains("packets of 4096 octets, and the port of rxe0 takes 1024"));
    }

    #[test]
    fn a_machine_without_devices_has_none() {
        assert_eq!(survey_in(Path::new("/nonexistent")), []);
    }
}
