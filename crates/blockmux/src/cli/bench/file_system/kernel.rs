//! Disks of the kernel's own initiators: its NBD client by `nbd-client`, and its AoE driver.
//!
//! The AoE driver uses only the network that the system has started with, so for its disks one end
//! of the link is there. It finds disks by broadcasts, which are limited to this link meanwhile.
//! Its list of interfaces is that of all its disks, so a machine that has others is not measured.

use super::programs::Programs;
use crate::cli::bench::veth::{INITIATOR, VethPair};
use blockmux_engine::attach::{is_installed, nbd, program, wait_for};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tracing::warn;

/// An initiator of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelInitiator {
    Nbd,
    Aoe,
}

impl KernelInitiator {
    /// That of a protocol, if the kernel has one that the study used.
    pub(super) fn of(protocol: &str) -> Option<KernelInitiator> {
        match protocol {
            "nbd" => Some(KernelInitiator::Nbd),
            "aoe" => Some(KernelInitiator::Aoe),
            _ => None,
        }
    }

    /// Whether this machine has it.
    ///
    /// # Errors
    /// Why not, and what to do.
    pub(super) fn probe(self) -> Result<(), String> {
        match self {
            KernelInitiator::Nbd => {
                nbd::probe().map_err(|error| error.to_string())?;
                match is_installed(NBD_CLIENT) {
                    true => Ok(()),
                    false => Err(format!("no program {NBD_CLIENT}; install the package {NBD_CLIENT}")),
                }
            }
            KernelInitiator::Aoe if Path::new(DISCOVER).exists() => check_no_aoe_disks(Path::new(BLOCK)),
            KernelInitiator::Aoe => {
                Err("the kernel has no AoE initiator; load it with `modprobe aoe`".to_owned())
            }
        }
    }

    /// Attaches what `url` names, at the initiator's end of the link.
    ///
    /// # Errors
    /// What failed, as one line.
    pub(super) fn attach(
        self,
        programs: &Programs,
        veth: &VethPair,
        url: &str,
    ) -> Result<KernelDisk, String> {
        match self {
            KernelInitiator::Nbd => attach_nbd(programs, veth, url),
            KernelInitiator::Aoe => attach_aoe(veth, url),
        }
    }
}

/// A disk of the kernel's initiator, which is detached when it is dropped.
pub(super) struct KernelDisk {
    pub(super) node: PathBuf,
    by: KernelInitiator,
    /// The interfaces that the AoE driver used before.
    interfaces: String,
}

impl KernelDisk {
    /// Detaches it.
    ///
    /// # Errors
    /// If the driver does not.
    pub(super) fn detach(self) -> Result<(), String> {
        let undone = self.undo();
        std::mem::forget(self);
        undone
    }

    fn undo(&self) -> Result<(), String> {
        match self.by {
            KernelInitiator::Nbd => disconnect_nbd(&self.node),
            KernelInitiator::Aoe => {
                let name = self.node.file_name().unwrap_or_default().to_string_lossy();
                let flushed = write(FLUSH, &name);
                // Without text there would be no write, and the list would stay.
                let before = if self.interfaces.is_empty() { "\0" } else { &self.interfaces };
                flushed.and(write(INTERFACES, before))
            }
        }
    }
}

impl Drop for KernelDisk {
    fn drop(&mut self) {
        if let Err(why) = self.undo() {
            warn!("{}: {why}", self.node.display());
        }
    }
}

fn attach_nbd(programs: &Programs, veth: &VethPair, url: &str) -> Result<KernelDisk, String> {
    let (host, port, export) =
        nbd_parts(url).ok_or_else(|| format!("internal error: {url} names no export"))?;
    let name = free_nbd(Path::new(BLOCK)).ok_or("all NBD devices are in use; detach one")?;
    let node = Path::new("/dev").join(&name);
    let mut client = Command::new(NBD_CLIENT);
    // Netlink takes no sockets of other networks.
    client.args(["-nonetlink", "-N", export, host, port]).arg(&node);
    veth.within(INITIATOR, || programs.run(&mut client)).map_err(|failure| failure.to_string())??;
    let disk = KernelDisk { node: node.clone(), by: KernelInitiator::Nbd, interfaces: String::new() };
    programs.use_disk(Some(Box::new(move || {
        // It fails if the disk has just been detached.
        let _ = disconnect_nbd(&node);
    })));
    let serves = Path::new(BLOCK).join(name).join("pid");
    match appears(|| serves.exists()) {
        true => Ok(disk),
        false => Err(format!("{} does not become ready", disk.node.display())),
    }
}

fn disconnect_nbd(node: &Path) -> Result<(), String> {
    let disconnected = program::run(Command::new(NBD_CLIENT).arg("-d").arg(node));
    disconnected.map(drop).map_err(|error| error.to_string())
}

fn attach_aoe(veth: &VethPair, url: &str) -> Result<KernelDisk, String> {
    let address = url.rsplit('/').next().unwrap_or_default().to_owned();
    let node = Path::new(ETHERD).join(&address);
    // Some may have come since the study began.
    check_no_aoe_disks(Path::new(BLOCK))?;
    let before = fs::read_to_string("/sys/module/aoe/parameters/aoe_iflist").unwrap_or_default();
    write(INTERFACES, veth.interface(INITIATOR))?;
    let disk = KernelDisk { node, by: KernelInitiator::Aoe, interfaces: before.trim().to_owned() };
    let state = format!("/sys/block/etherd!{address}/state");
    let is_up = || {
        // A frame may be lost while the interface comes up.
        let _ = write(DISCOVER, "1");
        fs::read_to_string(&state).is_ok_and(|state| state.starts_with("up")) && disk.node.exists()
    };
    match appears(is_up) {
        true => Ok(disk),
        false => Err(format!("the kernel's AoE driver does not find {address}")),
    }
}

/// Checks that the AoE driver has no disks. It has one list of interfaces for all, so those of
/// others would be without a network during the study, and for good if it is killed.
fn check_no_aoe_disks(block: &Path) -> Result<(), String> {
    let names = fs::read_dir(block).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let disk =
        names.filter_map(|name| name.to_string_lossy().strip_prefix("etherd!").map(str::to_owned)).min();
    disk.map_or(Ok(()), |disk| {
        Err(format!(
            "the kernel has the AoE disk {ETHERD}/{disk}, which the study would cut off; detach it first: write \
             {disk} to {FLUSH}"
        ))
    })
}

/// Host, port and export of an NBD URL of this program.
fn nbd_parts(url: &str) -> Option<(&str, &str, &str)> {
    let (address, export) = url.strip_prefix("nbd://")?.split_once('/')?;
    let (host, port) = address.rsplit_once(':')?;
    Some((host, port, export))
}

/// The first NBD device that nobody uses.
fn free_nbd(block: &Path) -> Option<String> {
    let names = (0..MAX_NBD).map(|nth| format!("nbd{nth}"));
    let is_free = |name: &String| {
        let device = block.join(name);
        let has_size = fs::read_to_string(device.join("size")).is_ok_and(|size| size.trim() != "0");
        device.exists() && !has_size && !device.join("pid").exists()
    };
    names.into_iter().find(is_free)
}

fn write(file: &str, text: &str) -> Result<(), String> {
    fs::write(file, text).map_err(|error| format!("{file}: {error}"))
}

/// Asks until the answer is yes, or some time has passed.
fn appears(mut ask: impl FnMut() -> bool) -> bool {
    wait_for(APPEARS, || ask().then_some(())).is_some()
}

const NBD_CLIENT: &str = "nbd-client";
const BLOCK: &str = "/sys/block";
const ETHERD: &str = "/dev/etherd";
const DISCOVER: &str = "/dev/etherd/discover";
const FLUSH: &str = "/dev/etherd/flush";
const INTERFACES: &str = "/dev/etherd/interfaces";
/// More than a machine has devices.
const MAX_NBD: u32 = 1024;
/// The time in which a disk appears.
const APPEARS: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_is_named_by_host_port_and_name() {
        assert_eq!(nbd_parts("nbd://192.0.2.1:10809/bench"), Some(("192.0.2.1", "10809", "bench")));
        assert_eq!(nbd_parts("nbd://192.0.2.1/bench"), None);
        assert_eq!(nbd_parts("aoe://veth/e0.0"), None);
    }

    #[test]
    fn a_device_is_free_if_it_has_neither_a_size_nor_a_process() {
        let block = tempfile::tempdir().unwrap();
        let set = |name: &str, file: &str, text: &str| {
            fs::create_dir_all(block.path().join(name)).unwrap();
            fs::write(block.path().join(name).join(file), text).unwrap();
        };
        assert_eq!(free_nbd(block.path()), None);
        set("nbd0", "size", "2048\n");
        set("nbd1", "size", "0\n");
        set("nbd1", "pid", "7\n");
        assert_eq!(free_nbd(block.path()), None);
        set("nbd2", "size", "0\n");
        assert_eq!(free_nbd(block.path()), Some("nbd2".to_owned()));
    }

    #[test]
    fn a_machine_with_aoe_disks_of_its_own_is_refused() {
        let block = tempfile::tempdir().unwrap();
        let add = |name: &str| fs::create_dir(block.path().join(name)).unwrap();
        add("nbd0");
        assert_eq!(check_no_aoe_disks(block.path()), Ok(()));
        add("etherd!e2.1");
        add("etherd!e1.0");
        let why = check_no_aoe_disks(block.path()).unwrap_err();
        assert!(why.contains("/dev/etherd/e1.0") && why.contains("detach it first"), "{why}");
    }

    #[test]
    fn only_protocols_of_the_study_have_an_initiator_here() {
        let of = KernelInitiator::of;
        assert_eq!((of("nbd"), of("aoe")), (Some(KernelInitiator::Nbd), Some(KernelInitiator::Aoe)));
        assert_eq!((of("iscsi"), of("local")), (None, None));
    }
}
