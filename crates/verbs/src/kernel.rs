//! RDMA devices as the kernel lists them in sysfs, also where rdma-core is not installed.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// Where the kernel shows what it has. Tests have directories of their own.
#[derive(Clone, Debug)]
pub struct KernelPaths {
    /// Where sysfs is mounted.
    pub sysfs: PathBuf,
    /// Device nodes.
    pub dev: PathBuf,
    /// Modules of the running kernel that can be loaded.
    pub modules: PathBuf,
}

impl KernelPaths {
    /// The paths of the running kernel.
    #[must_use]
    pub fn new() -> KernelPaths {
        KernelPaths {
            sysfs: "/sys".into(),
            dev: "/dev".into(),
            modules: Path::new("/lib/modules").join(release()),
        }
    }

    /// Whether a module is loaded, or part of the kernel and initialized.
    pub(crate) fn is_loaded(&self, module: &str) -> bool {
        self.sysfs.join("module").join(module).exists()
    }

    /// Whether a module is installed for the running kernel, or part of it.
    pub(crate) fn is_installed(&self, module: &str) -> bool {
        ["modules.dep", "modules.builtin"].into_iter().any(|list| {
            let list = fs::read_to_string(self.modules.join(list)).unwrap_or_default();
            list.lines().any(|line| {
                let path = line.split(':').next().unwrap_or_default();
                let file = path.rsplit('/').next().unwrap_or_default();
                file.split(".ko").next() == Some(module)
            })
        })
    }

    /// The device node of the connection manager.
    pub(crate) fn cm_node(&self) -> PathBuf {
        self.dev.join("infiniband/rdma_cm")
    }
}

impl Default for KernelPaths {
    fn default() -> KernelPaths {
        KernelPaths::new()
    }
}

/// The release of the running kernel, as `uname -r` prints it.
#[must_use]
pub fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelDevice {
    /// The kernel's name of it, such as `mlx5_0`.
    pub name: String,
    /// How it transmits.
    pub transport: Transport,
    /// Version of its firmware; empty if it has none.
    pub firmware: String,
    /// The device node of the verbs; `None` if the kernel offers the device to no process.
    pub node: Option<PathBuf>,
    /// Its ports, in order.
    pub ports: Vec<KernelPort>,
}

impl KernelDevice {
    /// What the device is to its users: `InfiniBand`, `RoCE` or `iWARP`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        let is_ethernet = self.ports.iter().all(|port| port.link_layer == "Ethernet");
        match self.transport {
            Transport::InfiniBand if is_ethernet => "RoCE",
            Transport::InfiniBand => "InfiniBand",
            Transport::Iwarp => "iWARP",
            Transport::Other => "another transport",
        }
    }

    /// Whether the addresses of its port show: only RoCE's tables of GIDs have them.
    pub(crate) fn shows_addresses_of(&self, port: &KernelPort) -> bool {
        self.transport == Transport::InfiniBand && port.link_layer == "Ethernet"
    }
}

/// How a device transmits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// InfiniBand's transport, by InfiniBand's or Ethernet's link layer (RoCE).
    InfiniBand,
    /// iWARP, over TCP.
    Iwarp,
    /// Another one.
    Other,
}

/// A port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelPort {
    /// Its number, from 1.
    pub number: u8,
    /// Its state in capitals, such as `ACTIVE` or `DOWN`.
    pub state: String,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: String,
    /// Speed and width, such as `100 Gb/sec (4X EDR)`.
    pub rate: String,
    /// The IP addresses by which RoCE connects, each with its network interface.
    pub addresses: Vec<(IpAddr, String)>,
}

impl KernelPort {
    /// Whether the port transmits.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }
}

/// The devices, in the order of their names; none if the kernel has no RDMA.
///
/// # Errors
/// If they cannot be listed. What a device does not tell stays empty, because it may be just
/// disappearing.
pub fn devices(paths: &KernelPaths) -> io::Result<Vec<KernelDevice>> {
    let class = paths.sysfs.join("class/infiniband");
    let nodes = nodes(paths)?;
    let devices = names(&class)?.into_iter().map(|name| {
        let directory = class.join(&name);
        let node = nodes.iter().find(|(device, _)| *device == name).map(|(_, node)| node.clone());
        let transport = match behind_colon(&value(&directory.join("node_type"))) {
            "CA" | "switch" | "router" => Transport::InfiniBand,
            "RNIC" => Transport::Iwarp,
            _ => Transport::Other,
        };
        let firmware = value(&directory.join("fw_ver"));
        Ok(KernelDevice { ports: ports(&directory)?, name, transport, firmware, node })
    });
    devices.collect()
}

/// Whether the ports of an interface are those of an iWARP device.
pub(crate) fn is_of_iwarp(paths: &KernelPaths, interface: u32) -> bool {
    let is_it = |name: &String| {
        value(&paths.sysfs.join("class/net").join(name).join("ifindex")) == interface.to_string()
    };
    let found = devices(paths).unwrap_or_default();
    found.iter().filter(|device| device.transport == Transport::Iwarp).any(|device| {
        let directory = paths.sysfs.join("class/infiniband").join(&device.name);
        // From Linux 6.6 on, a port of iWARP names its interface, too.
        let port = |port: &KernelPort| directory.join(format!("ports/{}/gid_attrs/ndevs/0", port.number));
        let of_ports = device.ports.iter().map(|found| value(&port(found)));
        of_ports.chain(names(&directory.join("device/net")).unwrap_or_default()).any(|name| is_it(&name))
    })
}

/// Names of devices, each with its device node.
fn nodes(paths: &KernelPaths) -> io::Result<Vec<(String, PathBuf)>> {
    let class = paths.sysfs.join("class/infiniband_verbs");
    let names = names(&class)?.into_iter().filter(|name| name.starts_with("uverbs"));
    let node =
        |name: String| (value(&class.join(&name).join("ibdev")), paths.dev.join("infiniband").join(&name));
    Ok(names.map(node).collect())
}

fn ports(device: &Path) -> io::Result<Vec<KernelPort>> {
    let directory = device.join("ports");
    let mut numbers: Vec<u8> = names(&directory)?.iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort_unstable();
    let port = |number: u8| {
        let directory = directory.join(number.to_string());
        Ok(KernelPort {
            number,
            state: behind_colon(&value(&directory.join("state"))).to_owned(),
            link_layer: value(&directory.join("link_layer")),
            rate: value(&directory.join("rate")),
            addresses: addresses(&directory)?,
        })
    };
    numbers.into_iter().map(port).collect()
}

/// The addresses of the GIDs of RoCEv2. The table has hundreds of entries, most of them empty.
fn addresses(port: &Path) -> io::Result<Vec<(IpAddr, String)>> {
    let mut indexes: Vec<u32> =
        names(&port.join("gids"))?.iter().filter_map(|name| name.parse().ok()).collect();
    indexes.sort_unstable();
    let address = |index: u32| {
        let index = index.to_string();
        // The types of empty entries cannot be read.
        if value(&port.join("gid_attrs/types").join(&index)) != "RoCE v2" {
            return None;
        }
        let gid: Ipv6Addr = value(&port.join("gids").join(&index)).parse().ok()?;
        let interface = value(&port.join("gid_attrs/ndevs").join(&index));
        Some((gid.to_canonical(), interface))
    };
    Ok(indexes.into_iter().filter_map(address).collect())
}

/// Names in a directory, sorted; none if it does not exist.
fn names(directory: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<io::Result<Vec<_>>>()?;
    names.sort_unstable();
    Ok(names)
}

/// The line of a file of sysfs; empty if it cannot be read.
fn value(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// The text of a value such as `4: ACTIVE`.
fn behind_colon(value: &str) -> &str {
    value.split_once(": ").map_or(value, |(_, text)| text)
}

/// A kernel's files below a directory, for tests.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use tempfile::TempDir;

    pub(crate) struct TestKernel {
        pub(crate) paths: KernelPaths,
        root: TempDir,
    }

    impl TestKernel {
        pub(crate) fn new() -> TestKernel {
            let root = tempfile::tempdir().unwrap();
            let at = |name: &str| root.path().join(name);
            let paths = KernelPaths { sysfs: at("sys"), dev: at("dev"), modules: at("modules") };
            TestKernel { paths, root }
        }

        pub(crate) fn write(&self, path: &str, content: &str) {
            let path = self.root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }

        pub(crate) fn remove(&self, path: &str) {
            fs::remove_file(self.root.path().join(path)).unwrap();
        }

        /// Adds a device with one port and its device node.
        pub(crate) fn add_device(&self, name: &str, node_type: &str, link_layer: &str, state: &str) {
            let device = format!("sys/class/infiniband/{name}");
            self.write(&format!("{device}/node_type"), node_type);
            self.write(&format!("{device}/ports/1/state"), state);
            self.write(&format!("{device}/ports/1/link_layer"), link_layer);
            self.write(&format!("{device}/ports/1/rate"), "25 Gb/sec (1X EDR)\n");
            self.write(&format!("sys/class/infiniband_verbs/uverbs_{name}/ibdev"), name);
            self.write(&format!("dev/infiniband/uverbs_{name}"), "");
        }

        /// Adds a GID of RoCEv2 to the device's port.
        pub(crate) fn add_gid(&self, name: &str, index: u32, gid: &str, interface: &str) {
            let port = format!("sys/class/infiniband/{name}/ports/1");
            self.write(&format!("{port}/gids/{index}"), gid);
            self.write(&format!("{port}/gid_attrs/types/{index}"), "RoCE v2\n");
            self.write(&format!("{port}/gid_attrs/ndevs/{index}"), interface);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::TestKernel;
    use super::*;

    #[test]
    fn a_kernel_without_rdma_has_no_devices() {
        assert_eq!(devices(&TestKernel::new().paths).unwrap(), []);
    }

    #[test]
    fn a_device_has_what_sysfs_says() {
        let kernel = TestKernel::new();
        kernel.add_device("rxe0", "1: CA\n", "Ethernet\n", "4: ACTIVE\n");
        kernel.add_gid("rxe0", 10, "fe80:0000:0000:0000:5054:00ff:fe12:3456\n", "eth0\n");
        kernel.add_gid("rxe0", 2, "0000:0000:0000:0000:0000:ffff:c000:0201\n", "eth0\n");
        // An empty entry of the table, and one of the first version of RoCE.
        kernel.write("sys/class/infiniband/rxe0/ports/1/gids/3", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        kernel.add_gid("rxe0", 4, "fe80:0000:0000:0000:5054:00ff:fe12:3456\n", "eth0\n");
        kernel.write("sys/class/infiniband/rxe0/ports/1/gid_attrs/types/4", "IB/RoCE v1\n");
        let found = devices(&kernel.paths).unwrap();
        let port = KernelPort {
            number: 1,
            state: "ACTIVE".to_owned(),
            link_layer: "Ethernet".to_owned(),
            rate: "25 Gb/sec (1X EDR)".to_owned(),
            addresses: vec![
                ("192.0.2.1".parse().unwrap(), "eth0".to_owned()),
                ("fe80::5054:ff:fe12:3456".parse().unwrap(), "eth0".to_owned()),
            ],
        };
        let device = KernelDevice {
            name: "rxe0".to_owned(),
            transport: Transport::InfiniBand,
            firmware: String::new(),
            node: Some(kernel.paths.dev.join("infiniband/uverbs_rxe0")),
            ports: vec![port],
        };
        assert_eq!(found, [device]);
        assert_eq!(found[0].kind(), "RoCE");
        // A port of InfiniBand's own link layer makes it an adapter of InfiniBand.
        kernel.write("sys/class/infiniband/rxe0/ports/2/link_layer", "InfiniBand\n");
        assert_eq!(devices(&kernel.paths).unwrap()[0].kind(), "InfiniBand");
    }

    #[test]
    fn devices_are_sorted_and_ports_are_numbers() {
        let kernel = TestKernel::new();
        kernel.add_device("siw0", "4: RNIC", "Ethernet", "1: DOWN");
        kernel.add_device("mlx5_0", "1: CA", "InfiniBand", "4: ACTIVE");
        for port in ["10", "2"] {
            kernel.write(&format!("sys/class/infiniband/mlx5_0/ports/{port}/state"), "1: DOWN");
        }
        let found = devices(&kernel.paths).unwrap();
        let names: Vec<_> = found.iter().map(|device| (device.name.as_str(), device.transport)).collect();
        assert_eq!(names, [("mlx5_0", Transport::InfiniBand), ("siw0", Transport::Iwarp)]);
        assert_eq!([found[0].kind(), found[1].kind()], ["InfiniBand", "iWARP"]);
        let ports: Vec<_> = found[0].ports.iter().map(|port| (port.number, port.is_active())).collect();
        assert_eq!(ports, [(1, true), (2, false), (10, false)]);
    }

    #[test]
    fn a_module_is_installed_as_a_file_or_as_part_of_the_kernel() {
        let kernel = TestKernel::new();
        assert!(!kernel.paths.is_installed("ib_core"));
        kernel.write(
            "modules/modules.dep",
            "kernel/drivers/infiniband/core/ib_core.ko.xz:\nkernel/x/rdma_rxe.ko: kernel/x/ib_uverbs.ko\n",
        );
        kernel.write("modules/modules.builtin", "kernel/drivers/infiniband/core/rdma_cm.ko\n");
        let installed = ["ib_core", "rdma_rxe", "rdma_cm", "ib_uverbs", "core", "ib_cor"];
        let installed = installed.map(|module| kernel.paths.is_installed(module));
        assert_eq!(installed, [true, true, true, false, false, false]);
    }

    #[test]
    fn an_iwarp_device_has_the_ports_of_its_interface() {
        let kernel = TestKernel::new();
        kernel.add_device("siw0", "4: RNIC", "Ethernet", "4: ACTIVE");
        kernel.add_device("rxe0", "1: CA", "Ethernet", "4: ACTIVE");
        kernel.add_device("irdma0", "4: RNIC", "Ethernet", "4: ACTIVE");
        kernel.write("sys/class/infiniband/siw0/ports/1/gid_attrs/ndevs/0", "eth1\n");
        kernel.write("sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/0", "eth2\n");
        kernel.write("sys/class/infiniband/irdma0/device/net/eth3/address", "");
        for interface in 1..=4 {
            kernel.write(&format!("sys/class/net/eth{interface}/ifindex"), &format!("{}\n", interface + 10));
        }
        let found = [11, 12, 13, 14].map(|interface| is_of_iwarp(&kernel.paths, interface));
        assert_eq!(found, [true, false, true, false]);
    }
}
