//! The life of a disk: connected or taken over, watched, and disconnected.
//!
//! The kernel keeps a disk whose connections are closed, and its requests wait for new ones. It
//! also keeps a text of the server's choice, which here identifies the volume's data. So the next
//! process that attaches the volume finds the disk without a state file.

use super::connections::{self, ConnectionMaker, Ends, NewConnection, OpenSession, wait_for_end};
use super::netlink::{NbdAttributes, NbdNetlink, NetlinkError};
use crate::attach::name;
use crate::attach::node;
use crate::attach::notice::Notice;
use crate::attach::own_io::{HeldDisk, OwnIo};
use crate::attach::wait::wait_for;
use crate::attach::{AttachError, AttachedAs, AttachedDisk, DetachError, DiskOptions};
use crate::core::cores::Cores;
use crate::serve::audit::AUDIT;
use crate::sys::random_bytes;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::kernel_disk::{SECTOR, check_blocks};
use blockmux_proto::nbd::netlink::{NbdAttribute, NbdCommand};
use blockmux_proto::nbd::server::transmission_flags;
use blockmux_proto::volume_state::Origin;
use rustix::param::page_size;
use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use tracing::{debug, info};

/// A disk of the driver.
pub struct NbdDisk {
    device: Arc<NbdDevice>,
    attached_as: AttachedAs,
}

/// A device of the driver that this process serves.
struct NbdDevice {
    netlink: NbdNetlink,
    index: u32,
    /// The text by which the driver knows the disk.
    identifier: String,
    identity: DiskIdentity,
    /// The volume keeps its data when the process ends.
    keeps_data: bool,
    /// `None` once the disk is left: then the volume is released, though this may live on.
    maker: Mutex<Option<Arc<ConnectionMaker>>>,
    /// Connections are no longer replaced.
    is_ending: AtomicBool,
    removal: Notice,
    /// What reads and flushes it.
    io: OwnIo,
}

/// What the driver tells disks of one number apart by: the thread that has connected it, and the
/// text that identifies its data. Nothing if none is connected.
#[derive(PartialEq, Eq)]
struct DiskIdentity {
    thread: Option<String>,
    data: Option<String>,
}

impl NbdDisk {
    /// Attaches a volume of `exports`, and serves it on `cores`. If a process that has ended had
    /// attached the same data, its disk goes on. Returns when the disk can be read.
    ///
    /// # Errors
    /// If the volume cannot be attached; nothing is left behind then, except a disk of a process
    /// that has ended. What fails once such a disk is connected is no error.
    pub fn attach(
        cores: &Cores,
        exports: &Exports,
        volume: VolumeId,
        options: DiskOptions,
    ) -> Result<NbdDisk, AttachError> {
        let netlink = NbdNetlink::open()?;
        let export = exports.get(volume).ok_or_else(|| AttachError::Queue(io::ErrorKind::NotFound.into()))?;
        let export = Export { read_only: export.read_only || options.read_only, ..(*export).clone() };
        let info = export.info();
        let block = info.logical_block;
        check_blocks(block, page_size() as u32)?;
        // The kernel uses several connections only if a flush on one covers all.
        let count = if info.shared_flush { options.queues.max(1) } else { 1 };
        let maker = ConnectionMaker::new(cores, exports, volume);
        let identifier = identifier_of(options.data).map_err(AttachError::Queue)?;
        let left = left_by_another(&identifier);
        let (index, sessions, attached_as) = match left {
            Some(index) => {
                let taken = take_over(&netlink, index, &identifier, (&maker, &export, count))?;
                (index, taken, AttachedAs::Recovered)
            }
            None => {
                let made = connections(&maker, count)?;
                let attributes = new_disk(volume, &export, &options).identifier(&identifier);
                let index = netlink.connect(attributes.sockets(made.iter().map(of_kernel)))?;
                (index, made.into_iter().map(|made| made.session).collect(), AttachedAs::New)
            }
        };
        let (is_ending, removal) = (AtomicBool::new(false), Notice::default());
        let (identity, io) = (DiskIdentity::of(index), options.io.clone());
        let (maker, keeps_data) = (Mutex::new(Some(Arc::new(maker))), options.data.is_some());
        let device =
            NbdDevice { netlink, index, identifier, identity, keeps_data, maker, is_ending, removal, io };
        let device = Arc::new(device);
        let watched = device.clone();
        let watch = thread::Builder::new().name("nbd".to_owned()).spawn(move || watched.watch(sessions));
        let begun = watch.map(drop).map_err(AttachError::Queue);
        let disk = NbdDisk { device, attached_as };
        let node = disk.path();
        let named = begun.and_then(|()| name::publish(options.name.as_ref(), attached_as, &node));
        let name = options.name.filter(|_| named.is_ok());
        let begun = named.and_then(|()| disk.device.read_first_block(block as usize));
        match attached_as.settle(&node, begun) {
            Ok(()) => {
                if let Some(name) = name {
                    name.appear(&node);
                }
                disk.note(&format!("attached: {attached_as:?}"), &export.name);
                Ok(disk)
            }
            Err(error) => {
                if attached_as == AttachedAs::New {
                    disk.device.remove().unwrap_or_else(|error| debug!("{error}"));
                }
                Err(error)
            }
        }
    }

    /// The disk, while nothing else uses it; `None` if another program has removed it.
    fn hold_unused(&self) -> Result<Option<HeldDisk>, DetachError> {
        if !self.device.is_connected() {
            return Ok(None);
        }
        node::hold_unused(&self.device.io, self.path()).map(Some)
    }

    fn note(&self, what: &str, volume: &str) {
        let disk = disk_node(self.device.index);
        info!(target: AUDIT, protocol = "nbd", disk = %disk.display(), volume, "{what}");
    }
}

impl AttachedDisk for NbdDisk {
    fn path(&self) -> PathBuf {
        disk_node(self.device.index)
    }

    fn attached_as(&self) -> AttachedAs {
        self.attached_as
    }

    fn origin(&self) -> Origin {
        connections::origin()
    }

    fn outlives_process(&self) -> bool {
        self.device.keeps_data
    }

    fn check_unused(&self) -> Result<(), DetachError> {
        self.hold_unused().map(drop)
    }

    fn leave(&self) {
        self.device.is_ending.store(true, Ordering::Release);
        *self.device.maker.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.device.io.leave();
    }

    fn detach(&self) -> Result<(), DetachError> {
        let Some(mut disk) = self.hold_unused()? else {
            self.device.forget();
            self.note("was detached by another program", "");
            return Ok(());
        };
        disk.flush().map_err(|error| DetachError::Flush { node: self.path(), error })?;
        // Nobody can mount it while it is held, and the flush has written all pages.
        self.device.remove()?;
        self.note("detached", "");
        Ok(())
    }

    fn detach_by_force(&self) -> Result<(), DetachError> {
        self.device.remove()?;
        self.note("detached by force", "");
        Ok(())
    }

    fn when_removed(&self, tell: Box<dyn FnOnce() + Send>) {
        self.device.removal.on_given(tell);
    }
}

/// Removes a disk that a process that has ended has left. Requests that wait fail.
///
/// # Errors
/// If it is no disk of ours, or the kernel does not remove it.
pub fn forget(node: &Path) -> Result<(), AttachError> {
    let netlink = NbdNetlink::open()?;
    let is_it = |(index, _): &(u32, String)| disk_node(*index) == node;
    let not_found = || AttachError::Node { node: node.to_owned(), error: io::ErrorKind::NotFound.into() };
    let (index, identifier) = own_disks().find(is_it).ok_or_else(not_found)?;
    // The kernel takes a connection only if it misses one.
    let probe = Ends::new().map_err(AttachError::Queue)?;
    reconfigure(&netlink, index, &identifier, [probe.of_kernel()].into_iter())?;
    if !probe.leave() {
        return Err(in_use(index));
    }
    name::withdraw(node);
    netlink.execute(NbdCommand::NBD_CMD_DISCONNECT, NbdAttributes::default().index(index))?;
    Ok(())
}

impl DiskIdentity {
    fn of(index: u32) -> DiskIdentity {
        DiskIdentity { thread: sysfs(index, "pid"), data: sysfs(index, "backend") }
    }
}

impl NbdDevice {
    /// Replaces the connections of sessions that end, until the disk is removed.
    fn watch(&self, mut sessions: Vec<OpenSession>) {
        loop {
            let Some(ended) = wait_for_end(&sessions) else { return };
            if self.is_ending.load(Ordering::Acquire) {
                return;
            }
            match self.replace(ended) {
                Ok(session) => sessions[ended] = session,
                Err(error) => {
                    debug!("{}: {error}", disk_node(self.index).display());
                    if !self.is_connected() {
                        return self.removal.give();
                    }
                }
            }
            // The kernel does not take a connection if it misses none, and resources may come back.
            thread::park_timeout(REPLACES);
        }
    }

    fn replace(&self, nth: usize) -> Result<OpenSession, AttachError> {
        let maker = self.maker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let left = || AttachError::Queue(io::ErrorKind::NotFound.into());
        let made = maker.ok_or_else(left)?.connect(nth).map_err(AttachError::Queue)?;
        let ends = [made.ends.of_kernel()].into_iter();
        reconfigure(&self.netlink, self.index, &self.identifier, ends)?;
        Ok(made.session)
    }

    fn read_first_block(&self, block: usize) -> Result<(), AttachError> {
        let node = disk_node(self.index);
        node::read_first_block(&self.io, &node, block).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => AttachError::Node { node, error },
            _ => AttachError::FirstRead { node, error },
        })
    }

    /// Whether the disk is still the one that this process serves: another program may have removed
    /// it, and then have used its number.
    fn is_connected(&self) -> bool {
        DiskIdentity::of(self.index) == self.identity
    }

    /// Leaves a disk that is removed.
    fn forget(&self) {
        self.is_ending.store(true, Ordering::Release);
        name::withdraw(&disk_node(self.index));
    }

    /// Disconnects the disk; what is in flight fails.
    fn remove(&self) -> Result<(), NetlinkError> {
        self.forget();
        if !self.is_connected() {
            return Ok(());
        }
        let disconnect = NbdAttributes::default().index(self.index);
        self.netlink.execute(NbdCommand::NBD_CMD_DISCONNECT, disconnect).map(drop)
    }
}

fn connections(maker: &ConnectionMaker, count: u16) -> Result<Vec<NewConnection>, AttachError> {
    (0..count.into()).map(|nth| maker.connect(nth)).collect::<io::Result<_>>().map_err(AttachError::Queue)
}

fn of_kernel(connection: &NewConnection) -> BorrowedFd<'_> {
    connection.ends.of_kernel()
}

/// Gives the kernel ends of connections instead of those that are closed. It keeps as many as it
/// misses.
fn reconfigure<'a>(
    netlink: &NbdNetlink,
    index: u32,
    identifier: &str,
    ends: impl Iterator<Item = BorrowedFd<'a>>,
) -> Result<(), NetlinkError> {
    let attributes = NbdAttributes::default().index(index).identifier(identifier).sockets(ends);
    netlink.execute(NbdCommand::NBD_CMD_RECONFIGURE, attributes).map(drop)
}

/// Continues with the disk of a process that has ended.
fn take_over(
    netlink: &NbdNetlink,
    index: u32,
    identifier: &str,
    (maker, export, count): (&ConnectionMaker, &Export, u16),
) -> Result<Vec<OpenSession>, AttachError> {
    if !is_described_by(index, export) {
        return Err(AttachError::Changed { node: disk_node(index) });
    }
    // The kernel may not have noticed yet that the process has ended.
    let taken = wait_for(RELEASES, || {
        let connect = || -> Result<Vec<OpenSession>, AttachError> {
            let made = connections(maker, count)?;
            reconfigure(netlink, index, identifier, made.iter().map(of_kernel))?;
            Ok(made.into_iter().filter_map(|made| made.ends.leave().then_some(made.session)).collect())
        };
        match connect() {
            Ok(made) if made.is_empty() => None,
            done => Some(done),
        }
    });
    taken.unwrap_or_else(|| Err(in_use(index)))
}

/// The properties of a new disk.
fn new_disk(volume: VolumeId, export: &Export, options: &DiskOptions) -> NbdAttributes {
    let info = export.volume.info();
    let keeps = if options.data.is_some() { KEEPS_S } else { 0 };
    NbdAttributes::default()
        .number(NbdAttribute::NBD_ATTR_SIZE_BYTES, info.size)
        .number(NbdAttribute::NBD_ATTR_BLOCK_SIZE_BYTES, info.logical_block.into())
        .number(NbdAttribute::NBD_ATTR_SERVER_FLAGS, transmission_flags(volume, export).bits().into())
        .number(NbdAttribute::NBD_ATTR_TIMEOUT, REQUEST_TIMEOUT_S)
        .number(NbdAttribute::NBD_ATTR_DEAD_CONN_TIMEOUT, keeps)
}

/// Whether a disk may go on with a volume: size, block and write protection are the same.
fn is_described_by(index: u32, export: &Export) -> bool {
    let info = export.info();
    let has =
        |attribute: &str, value: u64| sysfs(index, attribute).is_some_and(|text| text.parse() == Ok(value));
    has("size", info.size / u64::from(SECTOR))
        && has("queue/logical_block_size", info.logical_block.into())
        && has("ro", info.read_only.into())
}

/// The text by which the disk of this data is found again. That of a volume whose data is lost with
/// its process is only found to be ours, and removed.
fn identifier_of(data: Option<NonZeroU64>) -> io::Result<String> {
    Ok(match data {
        Some(data) => format!("{OURS}{data:016x}"),
        None => format!("{OURS}lost-{:016x}", u64::from_ne_bytes(random_bytes()?)),
    })
}

/// The disk of this data that a process has made, if there is one.
#[must_use]
pub fn disk_of(data: NonZeroU64) -> Option<PathBuf> {
    left_by_another(&identifier_of(Some(data)).ok()?).map(disk_node)
}

/// The disk that a process had made for this data.
fn left_by_another(identifier: &str) -> Option<u32> {
    own_disks().find(|(_, of_disk)| of_disk == identifier).map(|(index, _)| index)
}

/// Disks with our identifiers.
fn own_disks() -> impl Iterator<Item = (u32, String)> {
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let index = entry.file_name().to_str()?.strip_prefix("nbd")?.parse().ok()?;
        // Linux 5.14.
        let identifier = sysfs(index, "backend")?;
        identifier.starts_with(OURS).then_some((index, identifier))
    })
}

/// Another process serves the disk. The driver knows only the one that has made it.
fn in_use(index: u32) -> AttachError {
    let made_by = sysfs(index, "pid").and_then(|pid| pid.parse::<i32>().ok()).unwrap_or_default();
    let runs =
        fs::read_to_string(format!("/proc/{made_by}/comm")).is_ok_and(|name| name.trim() == "blockmux");
    match runs {
        true => AttachError::InUse { node: disk_node(index), process: made_by },
        false => AttachError::InUseBySomebody { node: disk_node(index) },
    }
}

fn sysfs(index: u32, attribute: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/sys/block/nbd{index}/{attribute}")).ok()?;
    Some(text.trim().to_owned())
}

fn disk_node(index: u32) -> PathBuf {
    PathBuf::from(format!("/dev/nbd{index}"))
}

/// Begins the identifiers of our disks.
const OURS: &str = "blockmux-";
/// Timeout of a request. The kernel then sends it again on another connection, also those that
/// were in flight when a process was killed.
const REQUEST_TIMEOUT_S: u64 = 30;
/// How long requests wait for the next process: as good as for ever.
const KEEPS_S: u64 = 365 * 24 * 3600;
/// The time in which the kernel notices that a process has ended.
const RELEASES: Duration = Duration::from_secs(2);
/// The pause after a replacement.
const REPLACES: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_disk_is_found_to_be_ours_and_only_the_same_data_finds_it() {
        let [data, other] = [7, 8].map(NonZeroU64::new);
        let of = |data| identifier_of(data).unwrap();
        assert_eq!(of(data), "blockmux-0000000000000007");
        assert_ne!(of(data), of(other));
        let lost = [of(None), of(None)];
        assert!(lost.iter().all(|lost| lost.starts_with(OURS) && *lost != of(data)));
        assert_ne!(lost[0], lost[1]);
    }
}
