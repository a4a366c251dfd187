//! Which RDMA devices of this machine could be used, what keeps the others from it, and what to do.

use crate::device::{DeviceAttributes, DeviceList, ListError, MemoryWindows, PortAttributes};
use crate::kernel::{self, KernelDevice, KernelPaths, Transport};
use crate::library::{Library, LibraryError};
use rustix::fs::{Access, AtFlags, CWD};
use rustix::process::Resource;
use rustix::thread::CapabilitySet;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// The devices of this machine, and what keeps them from being used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// All devices that the kernel has.
    pub devices: Vec<SurveyedDevice>,
    /// What concerns every device.
    pub obstacles: Vec<Obstacle>,
    /// Whether rdma-core is installed.
    pub has_library: bool,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedDevice {
    /// What the kernel says of it.
    pub kernel: KernelDevice,
    /// What the device says of itself, by rdma-core, if it can be opened.
    pub details: Option<DeviceDetails>,
    /// What concerns only this device.
    pub obstacles: Vec<Obstacle>,
}

impl SurveyedDevice {
    /// Whether peers reach only copies of data, and no memory windows: connections are confined
    /// ([`crate::queue_pair`]).
    #[must_use]
    pub fn confines(&self) -> bool {
        let windows = self.details.as_ref().map(|details| details.attributes.windows);
        self.kernel.transport == Transport::Iwarp || windows == Some(MemoryWindows::None)
    }
}

/// What a device says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDetails {
    /// What it can do.
    pub attributes: DeviceAttributes,
    /// Its ports, from number 1.
    pub ports: Vec<PortAttributes>,
}

/// What keeps devices from being used, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// The kernel was built without RDMA, or its modules are not installed.
    #[error("Linux {release} has no RDMA here: no module ib_core; use a kernel with its modules installed")]
    NoKernelSupport {
        /// The kernel's release.
        release: String,
    },
    /// There is no device.
    #[error("the kernel has no RDMA device; load the driver of an adapter{}", .software.map_or("", SoftwareDevice::how))]
    NoDevice {
        /// The software device that the kernel offers.
        software: Option<SoftwareDevice>,
    },
    /// The connection manager has no device node.
    #[error("{} does not exist; load it with `modprobe rdma_ucm`, and pass /dev/infiniband to a container", .0.display())]
    NoConnectionManager(PathBuf),
    /// rdma-core is not installed.
    #[error("{0}")]
    NoLibrary(LibraryError),
    /// rdma-core fails.
    #[error("rdma-core cannot list devices: {0}; see `ibv_devices` of ibverbs-utils")]
    ListFailed(String),
    /// Little memory can be registered.
    #[error(
        "at most {0} bytes of memory can be registered; raise LimitMEMLOCK= of the service, or `ulimit -l`"
    )]
    LockedMemory(u64),
    /// The device has no node.
    #[error(
        "{device} has no device node; load it with `modprobe ib_uverbs`, and pass /dev/infiniband to a container"
    )]
    NoNode {
        /// The device.
        device: String,
    },
    /// A node may not be opened.
    #[error("{} may not be opened; run as root, or give this user access to it", .0.display())]
    NotPermitted(PathBuf),
    /// rdma-core has no driver for the device.
    #[error("rdma-core has no provider for {device}; install ibverbs-providers, or the vendor's")]
    NoProvider {
        /// The device.
        device: String,
    },
    /// The device cannot be opened, though its node can.
    #[error("{device} does not answer: {reason}; look for its driver in `dmesg`")]
    NoAnswer {
        /// The device.
        device: String,
        /// The error.
        reason: String,
    },
    /// No port is active.
    #[error(
        "{device} has no active port; check its cable, its interface (`ip link`), and on InfiniBand the subnet manager"
    )]
    NoActivePort {
        /// The device.
        device: String,
    },
    /// No active port has an address.
    #[error("{device} has no IP address; add one to its network interface with `ip address add`")]
    NoAddress {
        /// The device.
        device: String,
    },
}

/// A device that the kernel implements over any network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SoftwareDevice {
    /// RoCEv2.
    Rxe,
    /// iWARP.
    Siw,
}

impl SoftwareDevice {
    fn how(self) -> &'static str {
        match self {
            SoftwareDevice::Rxe => {
                ", or add one in software: `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev IFACE`"
            }
            SoftwareDevice::Siw => {
                ", or add one in software: `modprobe siw && rdma link add siw0 type siw netdev IFACE`"
            }
        }
    }

    fn installed(paths: &KernelPaths) -> Option<SoftwareDevice> {
        let modules = [(RXE_MODULE, SoftwareDevice::Rxe), ("siw", SoftwareDevice::Siw)];
        modules.into_iter().find(|(module, _)| paths.is_installed(module)).map(|(_, device)| device)
    }
}

/// What rdma-core says: each device that it lists, with its details or why it does not tell them.
type LibraryView = Result<Vec<(String, io::Result<DeviceDetails>)>, ListError>;

impl Survey {
    /// Whether a device can be used.
    #[must_use]
    pub fn has_ready_device(&self) -> bool {
        self.obstacles.is_empty() && self.devices.iter().any(|device| device.obstacles.is_empty())
    }

    /// All obstacles, those that concern every device first.
    pub fn all_obstacles(&self) -> impl Iterator<Item = &Obstacle> {
        self.obstacles.iter().chain(self.devices.iter().flat_map(|device| &device.obstacles))
    }

    /// Looks at the devices of this machine. Opens each for a moment.
    ///
    /// # Errors
    /// If the kernel's list cannot be read.
    pub fn of_this_machine() -> io::Result<Survey> {
        Survey::new(&KernelPaths::new(), library_view(), locked_memory_limit())
    }

    fn new(paths: &KernelPaths, library: LibraryView, locked_memory: Option<u64>) -> io::Result<Survey> {
        let found = kernel::devices(paths)?;
        let mut obstacles = Vec::new();
        if found.is_empty() {
            let has_rdma = paths.is_loaded("ib_core") || paths.is_installed("ib_core");
            obstacles.push(match has_rdma {
                true => Obstacle::NoDevice { software: SoftwareDevice::installed(paths) },
                false => Obstacle::NoKernelSupport { release: kernel::release() },
            });
        } else {
            obstacles.extend(node_obstacle(&paths.cm_node(), Obstacle::NoConnectionManager));
            obstacles.extend(locked_memory.map(Obstacle::LockedMemory));
        }
        let has_library = !matches!(library, Err(ListError::Library(_)));
        let mut listed = match library {
            Ok(listed) => Some(listed),
            Err(ListError::Library(error)) => {
                obstacles.push(Obstacle::NoLibrary(error));
                None
            }
            // Without a device that says nothing new.
            Err(ListError::Refused(_)) if found.is_empty() => None,
            Err(ListError::Refused(error)) => {
                obstacles.push(Obstacle::ListFailed(error.to_string()));
                None
            }
        };
        let devices = found.into_iter().map(|device| {
            let at = |listed: &Vec<(String, _)>| listed.iter().position(|(name, _)| *name == device.name);
            let entry = listed.as_mut().map(|listed| at(listed).map(|at| listed.swap_remove(at).1));
            SurveyedDevice::new(device, entry)
        });
        Ok(Survey { devices: devices.collect(), obstacles, has_library })
    }
}

/// Why connections cannot be accepted at an address of this machine, as far as that shows without
/// opening a device; half a sentence, and what to do.
#[must_use]
pub fn obstacle_at(address: IpAddr) -> Option<String> {
    let library = Library::load().err().map(|error| error.to_string());
    library.or_else(|| address_obstacle(&KernelPaths::new(), address))
}

/// Whether the kernel's software RoCEv2 is loaded, which has the UDP port of RoCEv2 at all
/// addresses.
#[must_use]
pub fn has_software_roce() -> bool {
    KernelPaths::new().is_loaded(RXE_MODULE)
}

/// Whether the TCP ports of an interface, by its index, are those of an iWARP device: one that the
/// device listens at has no other listener.
#[must_use]
pub fn has_device_with_tcp_ports(interface: u32) -> bool {
    kernel::is_of_iwarp(&KernelPaths::new(), interface)
}

fn address_obstacle(paths: &KernelPaths, address: IpAddr) -> Option<String> {
    let devices = kernel::devices(paths).unwrap_or_default();
    if devices.is_empty() {
        return Some("this machine has no RDMA device; see `blockmux rdma`".to_owned());
    }
    if let Some(obstacle) = node_obstacle(&paths.cm_node(), Obstacle::NoConnectionManager) {
        return Some(obstacle.to_string());
    }
    // Only RoCE's tables of GIDs show the addresses.
    let has_it = devices.iter().any(|device| {
        device.ports.iter().any(|port| {
            !device.shows_addresses_of(port) || port.addresses.iter().any(|(known, _)| *known == address)
        })
    });
    let is_known = address.is_unspecified() || has_it;
    (!is_known).then(|| format!("no RDMA device has the address {address}; see `blockmux rdma`"))
}

impl SurveyedDevice {
    /// `listed` is what rdma-core says of the device; the outer `None` if it says nothing of any.
    fn new(kernel: KernelDevice, listed: Option<Option<io::Result<DeviceDetails>>>) -> SurveyedDevice {
        let device = kernel.name.clone();
        let node = kernel.node.as_deref();
        let no_node = |_| Obstacle::NoNode { device: device.clone() };
        let mut obstacles: Vec<_> = match node {
            Some(node) => node_obstacle(node, no_node).into_iter().collect(),
            None => vec![no_node(PathBuf::new())],
        };
        // Without its node rdma-core cannot know the device.
        let listed = listed.filter(|_| obstacles.is_empty());
        let details = match listed {
            Some(Some(Ok(details))) => Some(details),
            Some(Some(Err(error))) => {
                obstacles.push(Obstacle::NoAnswer { device: device.clone(), reason: error.to_string() });
                None
            }
            Some(None) => {
                obstacles.push(Obstacle::NoProvider { device: device.clone() });
                None
            }
            None => None,
        };
        obstacles.extend(link_obstacle(&kernel));
        SurveyedDevice { kernel, details, obstacles }
    }
}

/// What is wrong with a device node: it does not exist, or may not be opened.
fn node_obstacle(node: &Path, missing: impl FnOnce(PathBuf) -> Obstacle) -> Option<Obstacle> {
    let access = Access::READ_OK | Access::WRITE_OK;
    match rustix::fs::accessat(CWD, node, access, AtFlags::EACCESS) {
        Ok(()) => None,
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => Some(missing(node.to_owned())),
        Err(_) => Some(Obstacle::NotPermitted(node.to_owned())),
    }
}

/// What is wrong with the links of a device.
fn link_obstacle(device: &KernelDevice) -> Option<Obstacle> {
    let name = || device.name.clone();
    let mut active = device.ports.iter().filter(|port| port.is_active()).peekable();
    if active.peek().is_none() {
        return Some(Obstacle::NoActivePort { device: name() });
    }
    let lacks_address = active.all(|port| device.shows_addresses_of(port) && port.addresses.is_empty());
    lacks_address.then(|| Obstacle::NoAddress { device: name() })
}

fn library_view() -> LibraryView {
    let devices = DeviceList::read()?;
    let view = devices.iter().map(|device| {
        let details = device.open().and_then(|context| {
            let attributes = context.attributes()?;
            let ports = (1..=attributes.ports).map(|port| context.port(port));
            let ports = ports.collect::<io::Result<Vec<_>>>()?;
            Ok(DeviceDetails { attributes, ports })
        });
        (device.name(), details)
    });
    Ok(view.collect())
}

/// How much memory this process may lock, in bytes; `None` if there is no limit. The kernel counts
/// registered memory.
fn locked_memory_limit() -> Option<u64> {
    let has_no_limit =
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    rustix::process::getrlimit(Resource::Memlock).current.filter(|_| !has_no_limit)
}

/// The kernel's software RoCEv2.
const RXE_MODULE: &str = "rdma_rxe";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::testing::TestKernel;
    use crate::library::PACKAGES;

    const MODULES: &str = "kernel/drivers/infiniband/core/ib_core.ko.xz:\n";

    fn details() -> DeviceDetails {
        let attributes = DeviceAttributes {
            firmware: String::new(),
            ports: 1,
            queue_pairs: 1 << 16,
            queue_depth: 1 << 14,
            segments: 32,
            peer_reads: 128,
            reads: 128,
            registrations: 1 << 17,
            registration_len: u64::MAX,
            shared_receive_queues: 1 << 16,
            windows: MemoryWindows::Type2B,
            has_kernel_flags: true,
        };
        let port = PortAttributes { is_active: true, mtu: 1024, message_len: 1 << 31 };
        DeviceDetails { attributes, ports: vec![port] }
    }

    fn not_installed() -> LibraryView {
        let (library, reason) = ("libibverbs.so.1", "no such file".to_owned());
        Err(LibraryError::NotLoaded { library, reason, packages: PACKAGES }.into())
    }

    /// A device that everything is there for.
    fn ready() -> TestKernel {
        let kernel = TestKernel::new();
        kernel.add_device("rxe0", "1: CA", "Ethernet", "4: ACTIVE");
        kernel.add_gid("rxe0", 1, "::ffff:192.0.2.1", "eth0");
        kernel.write("dev/infiniband/rdma_cm", "");
        kernel
    }

    fn listed() -> LibraryView {
        Ok(vec![
            ("mlx5_0".to_owned(), Err(io::ErrorKind::NotFound.into())),
            ("rxe0".to_owned(), Ok(details())),
        ])
    }

    /// The only device and all obstacles, first those that concern every device.
    fn survey(kernel: &TestKernel, library: LibraryView) -> (Option<SurveyedDevice>, Vec<Obstacle>) {
        let mut survey = Survey::new(&kernel.paths, library, None).unwrap();
        let device = survey.devices.pop();
        assert!(survey.devices.is_empty());
        let own = device.iter().flat_map(|device| device.obstacles.clone());
        let obstacles = survey.obstacles.into_iter().chain(own).collect();
        (device, obstacles)
    }

    #[test]
    fn a_device_that_everything_is_there_for_has_no_obstacle() {
        let (device, obstacles) = survey(&ready(), listed());
        assert_eq!((device.unwrap().details, obstacles), (Some(details()), Vec::new()));
    }

    #[test]
    fn a_kernel_without_rdma_is_told_from_one_without_devices() {
        let kernel = TestKernel::new();
        let refused = || Err(ListError::Refused(io::Error::from_raw_os_error(libc::ENOSYS)));
        let without = Obstacle::NoKernelSupport { release: kernel::release() };
        assert_eq!(survey(&kernel, refused()).1, [without]);
        kernel.write("modules/modules.dep", MODULES);
        assert_eq!(survey(&kernel, refused()).1, [Obstacle::NoDevice { software: None }]);
        kernel.write("modules/modules.dep", &format!("{MODULES}kernel/x/siw.ko:\n"));
        let siw = Obstacle::NoDevice { software: Some(SoftwareDevice::Siw) };
        assert_eq!(survey(&kernel, refused()).1, [siw]);
        kernel.write("modules/modules.dep", &format!("{MODULES}kernel/x/siw.ko:\nkernel/x/rdma_rxe.ko:\n"));
        let text = survey(&kernel, refused()).1[0].to_string();
        assert_eq!(
            text,
            "the kernel has no RDMA device; load the driver of an adapter, or add one in software: \
             `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev IFACE`"
        );
    }

    #[test]
    fn a_missing_library_is_named_once_and_devices_are_listed_without_it() {
        let (device, obstacles) = survey(&ready(), not_installed());
        assert_eq!(device.unwrap().details, None);
        let [Obstacle::NoLibrary(error)] = &obstacles[..] else { panic!("{obstacles:?}") };
        assert!(error.to_string().contains("install rdma-core"), "{error}");
        assert!(!Survey::new(&ready().paths, not_installed(), None).unwrap().has_library);
        assert!(Survey::new(&ready().paths, listed(), None).unwrap().has_library);
    }

    #[test]
    fn missing_nodes_name_the_module_that_makes_them() {
        let kernel = ready();
        kernel.remove("dev/infiniband/rdma_cm");
        let node = kernel.paths.cm_node();
        assert_eq!(survey(&kernel, listed()).1, [Obstacle::NoConnectionManager(node)]);
        let no_node = [Obstacle::NoNode { device: "rxe0".to_owned() }];
        kernel.write("dev/infiniband/rdma_cm", "");
        kernel.remove("dev/infiniband/uverbs_rxe0");
        assert_eq!(survey(&kernel, Ok(Vec::new())).1, no_node);
        kernel.remove("sys/class/infiniband_verbs/uverbs_rxe0/ibdev");
        assert_eq!(survey(&kernel, Ok(Vec::new())).1, no_node);
    }

    #[test]
    fn a_device_that_rdma_core_does_not_know_lacks_a_provider() {
        let (device, obstacles) = survey(&ready(), Ok(Vec::new()));
        assert_eq!(device.unwrap().details, None);
        assert_eq!(obstacles, [Obstacle::NoProvider { device: "rxe0".to_owned() }]);
    }

    #[test]
    fn errors_of_the_device_and_of_the_library_are_reported() {
        let gone = || io::Error::from_raw_os_error(libc::EIO);
        let reason = gone().to_string();
        let (_, obstacles) = survey(&ready(), Ok(vec![("rxe0".to_owned(), Err(gone()))]));
        assert_eq!(obstacles, [Obstacle::NoAnswer { device: "rxe0".to_owned(), reason: reason.clone() }]);
        let (_, obstacles) = survey(&ready(), Err(ListError::Refused(gone())));
        assert_eq!(obstacles, [Obstacle::ListFailed(reason)]);
    }

    #[test]
    fn a_link_that_is_down_or_has_no_address_is_an_obstacle() {
        let kernel = ready();
        kernel.write("sys/class/infiniband/rxe0/ports/1/gid_attrs/types/1", "IB/RoCE v1");
        assert_eq!(survey(&kernel, listed()).1, [Obstacle::NoAddress { device: "rxe0".to_owned() }]);
        // Another port is InfiniBand, whose addresses the table does not show.
        kernel.write("sys/class/infiniband/rxe0/ports/2/link_layer", "InfiniBand");
        kernel.write("sys/class/infiniband/rxe0/ports/2/state", "4: ACTIVE");
        assert_eq!(survey(&kernel, listed()).1, []);
        kernel.write("sys/class/infiniband/rxe0/ports/1/state", "1: DOWN");
        kernel.write("sys/class/infiniband/rxe0/ports/2/state", "2: INIT");
        assert_eq!(survey(&kernel, listed()).1, [Obstacle::NoActivePort { device: "rxe0".to_owned() }]);
    }

    #[test]
    fn an_address_of_no_device_is_an_obstacle() {
        let at = |kernel: &TestKernel, address: &str| {
            address_obstacle(&kernel.paths, address.parse().unwrap()).unwrap_or_default()
        };
        let kernel = ready();
        assert_eq!([at(&kernel, "192.0.2.1"), at(&kernel, "0.0.0.0")], ["", ""]);
        assert!(at(&kernel, "192.0.2.2").starts_with("no RDMA device has the address 192.0.2.2; "));
        kernel.remove("dev/infiniband/rdma_cm");
        assert!(at(&kernel, "192.0.2.1").contains("modprobe rdma_ucm"));
        assert!(at(&TestKernel::new(), "192.0.2.1").starts_with("this machine has no RDMA device; "));
    }

    #[test]
    fn an_iwarp_device_is_as_ready_as_others() {
        let kernel = ready();
        kernel.write("sys/class/infiniband/rxe0/node_type", "4: RNIC");
        let (device, obstacles) = survey(&kernel, listed());
        assert!(device.unwrap().confines() && obstacles.is_empty());
        assert!(!survey(&ready(), listed()).0.unwrap().confines());
        // Its addresses do not show.
        assert_eq!(address_obstacle(&kernel.paths, "192.0.2.2".parse().unwrap()), None);
    }

    #[test]
    fn a_limit_of_locked_memory_matters_with_a_device() {
        let obstacles = |kernel: &TestKernel| {
            Survey::new(&kernel.paths, Ok(Vec::new()), Some(8 << 20)).unwrap().obstacles
        };
        assert_eq!(obstacles(&ready()), [Obstacle::LockedMemory(8 << 20)]);
        let without_device = TestKernel::new();
        without_device.write("modules/modules.dep", MODULES);
        assert_eq!(obstacles(&without_device), [Obstacle::NoDevice { software: None }]);
    }
}
