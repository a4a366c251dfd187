//! Installs the programs of other projects that interop tests need.

use crate::process::{find, succeed};
use anyhow::{Context, Result};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;

/// A program, a module of QEMU, or a file by its path, with its Debian package and the tests that
/// are skipped without it.
struct Peer {
    program: &'static str,
    package: &'static str,
    tests: &'static str,
}

const PEERS: &[Peer] = &[
    peer("nbdinfo", "libnbd-bin", "NBD interop with libnbd's programs"),
    peer("nbdcopy", "libnbd-bin", "NBD interop with libnbd's programs"),
    peer("nbdsh", "python3-libnbd", "NBD interop by libnbd scripts"),
    peer("psktool", "gnutls-bin", "NBD with TLS and pre-shared keys of GnuTLS"),
    peer("nbdkit", "nbdkit", "NBD initiator interop with nbdkit"),
    peer("nbd-server", "nbd-server", "NBD initiator interop with nbd-server"),
    peer("nbd-client", "nbd-client", "NBD interop with the kernel's client"),
    peer("qemu-img", "qemu-utils", "NBD interop with QEMU's client"),
    peer("qemu-io", "qemu-utils", "NBD interop with QEMU's client"),
    peer("qemu-nbd", "qemu-utils", "NBD initiator interop with qemu-nbd"),
    peer("qemu-storage-daemon", "qemu-system-common", "NBD initiator interop with qemu-storage-daemon"),
    peer("iscsi-test-cu", "libiscsi-bin", "libiscsi's conformance suite against the iSCSI target"),
    peer("iscsi-ls", "libiscsi-bin", "iSCSI interop with libiscsi's programs"),
    peer("block-iscsi.so", "qemu-block-extra", "iSCSI interop with QEMU's client"),
    peer("tgtd", "tgt", "iSCSI initiator interop with tgtd"),
    peer("istgt", "istgt", "iSCSI initiator interop with istgt"),
    peer("vblade", "vblade", "AoE initiator interop with vblade"),
    peer("ip", "iproute2", "AoE interop, which needs network namespaces"),
    peer("bonnie++", "bonnie++", "the study of a file system on attached disks"),
    peer("losetup", "mount", "the study of a file system on attached disks"),
    peer("strace", "strace", "failures and crashes at each system call of a reload or a save"),
    peer("fio", "fio", "NBD interop with fio's nbd engine, verified data"),
    peer("tshark", "tshark", "decoding of AoE and iWARP by tshark"),
    peer("chromium", "chromium", "the report page and the live page in a browser"),
    peer("prometheus", "prometheus", "metrics scraped by Prometheus"),
    peer("promtool", "prometheus", "metrics scraped by Prometheus"),
    peer("curl", "curl", "metrics scraped by Prometheus"),
    peer("virt-xml-validate", "libvirt-clients", "examples for libvirt"),
    peer("xmllint", "libxml2-utils", "examples for libvirt"),
    peer("dnsmasq", "dnsmasq-base", "examples for booting over the network"),
    peer("nft", "nftables", "discovery behind NAT"),
    peer("dig", "bind9-dnsutils", "announcements by multicast DNS"),
    peer("ansible-playbook", "ansible-core", "the role for Ansible"),
    peer("/usr/include/rdma/rdma_cma.h", "librdmacm-dev", "the layout of structures of rdma-core"),
    peer("qemu-system-x86_64", "qemu-system-x86", KERNEL),
    peer("grub-mkimage", "grub-pc-bin", "a guest that boots from a disk of Blockmux"),
    peer("/usr/lib/ipxe/qemu/efi-virtio.rom", "ipxe-qemu", "a guest that boots over the network"),
    peer("busybox", "busybox-static", KERNEL),
    peer("kmod", "kmod", KERNEL),
    peer("depmod", "kmod", KERNEL),
    peer("iscsid", "open-iscsi", KERNEL),
    peer("iscsiadm", "open-iscsi", KERNEL),
    peer("nvme", "nvme-cli", KERNEL),
    peer(
        "mkfs.xfs",
        "xfsprogs",
        "tests with the Linux kernel, and the study of a file system on attached disks",
    ),
    peer("xfs_repair", "xfsprogs", KERNEL),
    peer("rdma", "iproute2", KERNEL),
    peer("rping", "rdmacm-utils", RXE),
    peer("ib_send_bw", "perftest", RXE),
    peer("ib_read_bw", "perftest", RXE),
    peer("ib_write_bw", "perftest", RXE),
    peer("ss", "iproute2", KERNEL),
    peer("aoe-discover", "aoetools", KERNEL),
    peer("aoe-stat", "aoetools", KERNEL),
    peer("multipathd", "multipath-tools", KERNEL),
    peer("cryptsetup", "cryptsetup-bin", KERNEL),
    peer("openssl", "openssl", KERNEL),
    peer("sg_inq", "sg3-utils", KERNEL),
    peer("sg_persist", "sg3-utils", KERNEL),
    peer("sg_reset", "sg3-utils", KERNEL),
    peer("sg_rtpg", "sg3-utils", KERNEL),
];

/// What a cluster of Ceph on this machine consists of, and its own clients.
const CEPH: &[Peer] = &[
    peer("ceph-mon", "ceph-mon", CLUSTER),
    peer("ceph-osd", "ceph-osd", CLUSTER),
    peer("ceph", "ceph-common", CLUSTER),
    peer("rbd", "ceph-common", CLUSTER),
    peer("qemu-img", "qemu-utils", CLUSTER),
    peer("block-rbd.so", "qemu-block-extra", CLUSTER),
];

/// Tests that need all of these programs at once.
const CLUSTER: &str = "tests with a Ceph cluster";
/// Tests that need all of these programs at once.
const KERNEL: &str = "tests with the Linux kernel";
/// Tests that the other tests with the kernel do without.
const RXE: &str = "software RoCEv2 with the Linux kernel's";

const fn peer(program: &'static str, package: &'static str, tests: &'static str) -> Peer {
    Peer { program, package, tests }
}

/// Installs missing programs if possible, and prints the tests that are skipped because of the
/// programs that are still missing.
///
/// Never fails: a machine without any of the programs can still run all other tests.
pub(crate) fn install() {
    install_all(PEERS);
}

/// Installs Ceph as [`install`] does; returns whether all of it is there.
pub(crate) fn install_ceph() -> bool {
    install_all(CEPH);
    missing(CEPH, is_installed).is_empty()
}

fn install_all(peers: &'static [Peer]) {
    let wanted = missing(peers, is_installed);
    if wanted.is_empty() {
        println!("test peers: all installed");
        return;
    }
    let why = match obstacle() {
        Some(obstacle) => obstacle.to_owned(),
        None => match install_packages(&packages(&wanted)) {
            Ok(()) => "the package does not contain it".to_owned(),
            Err(error) => format!("{error:#}"),
        },
    };
    let still = missing(peers, is_installed);
    for peer in &still {
        println!("skipped: {} (no {}, Debian package {})", peer.tests, peer.program, peer.package);
    }
    if still.is_empty() {
        println!("test peers: installed {}", packages(&wanted).join(" "));
    } else {
        println!("test peers: {} of {} missing: {why}", still.len(), peers.len());
    }
}

/// The Debian package of `program`, if it is a test peer.
pub(crate) fn package(program: &str) -> Option<&'static str> {
    PEERS.iter().find(|peer| peer.program == program).map(|peer| peer.package)
}

fn is_installed(program: &str) -> bool {
    find(program).is_some() || is_qemu_module(program)
}

/// Modules are in a subdirectory of the library directory, which is named after the architecture.
fn is_qemu_module(name: &str) -> bool {
    let libraries = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    libraries.map(|library| library.path().join("qemu").join(name)).any(|module| module.is_file())
}

fn missing(peers: &'static [Peer], is_installed: impl Fn(&str) -> bool) -> Vec<&'static Peer> {
    peers.iter().filter(|peer| !is_installed(peer.program)).collect()
}

/// The packages of these programs, each once.
fn packages(peers: &[&Peer]) -> Vec<&'static str> {
    let mut packages: Vec<_> = peers.iter().map(|peer| peer.package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

/// The reason why packages cannot be installed, as half a sentence; `None` if they can.
fn obstacle() -> Option<&'static str> {
    if find("apt-get").is_none() {
        return Some("this system has no apt-get");
    }
    let user = succeed(Command::new("id").arg("-u")).unwrap_or_default();
    (user.trim() != "0").then_some("only root can install them: sudo cargo xtask install-peers")
}

/// Installs packages that only some tests need, if there are any and this user may install them.
///
/// # Errors
/// If they cannot be installed.
pub(crate) fn install_if_permitted(packages: &[&str]) -> Result<()> {
    if packages.is_empty() || obstacle().is_some() {
        return Ok(());
    }
    install_packages(packages)
}

/// Installs packages together, or one by one if that fails, because a release may lack one.
fn install_packages(packages: &[&str]) -> Result<()> {
    println!("test peers: installing {} (some minutes)", packages.join(" "));
    let _no_daemons =
        NoDaemons::begin(Path::new(POLICY)).context("cannot keep packages from starting daemons")?;
    let updated = apt_get(&["update"]);
    if apt_get(&[&["install"], packages].concat()).is_ok() {
        return Ok(());
    }
    let (mut refused, mut reason) = (Vec::new(), String::new());
    for package in packages {
        if let Err(error) = apt_get(&["install", package]) {
            refused.push(*package);
            // apt-get's last line says why it gave up.
            reason = error.to_string().lines().last().unwrap_or_default().to_owned();
        }
    }
    if refused.is_empty() {
        return Ok(());
    }
    updated.context("apt-get update")?;
    anyhow::bail!("apt-get install failed for {}: {reason}", refused.join(" "))
}

fn apt_get(arguments: &[&str]) -> Result<()> {
    succeed(
        Command::new("apt-get")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["--yes", "--no-install-recommends"])
            .args([
                "-o",
                "Acquire::Retries=2",
                "-o",
                "Acquire::http::Timeout=30",
                "-o",
                "DPkg::Lock::Timeout=300",
            ])
            .args(arguments),
    )?;
    Ok(())
}

/// While this value exists, packages do not start their daemons, because of Debian's policy-rc.d
/// script. An existing script is kept.
struct NoDaemons<'a> {
    /// The script, if we created it.
    ours: Option<&'a Path>,
}

impl NoDaemons<'_> {
    fn begin(script: &Path) -> Result<NoDaemons<'_>> {
        if script.exists() {
            return Ok(NoDaemons { ours: None });
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o755).open(script)?;
        // 101 is "action forbidden by policy".
        file.write_all(b"#!/bin/sh\nexit 101\n")?;
        Ok(NoDaemons { ours: Some(script) })
    }
}

impl Drop for NoDaemons<'_> {
    fn drop(&mut self) {
        if let Some(script) = self.ours.filter(|script| std::fs::remove_file(script).is_err()) {
            println!(
                "test peers: please remove {}, it prevents packages from starting daemons",
                script.display()
            );
        }
    }
}

/// Read by invoke-rc.d and deb-systemd-invoke before they start anything.
const POLICY: &str = "/usr/sbin/policy-rc.d";

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_package_with_several_missing_programs_is_installed_once() {
        let wanted =
            missing(PEERS, |program| !program.starts_with("qemu-") || program.starts_with("qemu-system"));
        assert_eq!(wanted.len(), 4);
        assert_eq!(packages(&wanted), ["qemu-system-common", "qemu-utils"]);
    }

    #[test]
    fn nothing_is_missing_when_everything_is_installed() {
        assert!(missing(PEERS, |_| true).is_empty());
    }

    #[test]
    fn daemons_are_forbidden_while_packages_are_installed_and_not_after() {
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("policy-rc.d");
        let no_daemons = NoDaemons::begin(&script).unwrap();
        assert!(script.metadata().unwrap().permissions().mode() & 0o111 == 0o111);
        assert_eq!(Command::new("sh").arg(&script).status().unwrap().code(), Some(101));
        drop(no_daemons);
        assert!(!script.exists());
    }

    #[test]
    fn an_existing_policy_of_the_administrator_is_kept() {
        let script = tempfile::NamedTempFile::new().unwrap();
        drop(NoDaemons::begin(script.path()).unwrap());
        assert!(script.path().exists());
    }
}
