//! Opening volumes by their specs.

use crate::data::key::DataKey;
use crate::data::part::{DataPart, Part};
use crate::failure::Failure;
use crate::output::shell_word;
use crate::process::machine::{available_memory_bytes, memory_bytes};
use crate::process::privileges;
use crate::process::regular;
use crate::process::retry::retry_while_held;
use crate::protocol::reach;
use crate::volume_kinds::image_format::format_of;
use crate::volume_kinds::records;
use crate::volume_kinds::shared_files;
use blockmux_engine::sys::address_space_left;
use blockmux_engine::sys::memory::map_pages;
use blockmux_engine::volume::file::{BlockOptions, FileOptions, FileVolume, OpenError, lock_holder};
use blockmux_engine::volume::populate;
use blockmux_engine::volume::rbd::{ClusterOptions, ImageName, RbdError, RbdVolume, TIMEOUT, USER};
use blockmux_engine::volume::state::{self, has_note};
use blockmux_engine::volume::vhost_user::{VhostUserOptions, VhostUserVolume};
use blockmux_proto::names::uri::{DEFAULT_RECONNECT, DEFAULT_TIMEOUT};
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_volume::spec::{
    Decoration, FileSpec, ImageOwnership, LogTarget, MemSpec, NullSpec, RbdSpec, VhostUserSpec,
};
use blockmux_volume::units::human_size;
use blockmux_volume::{
    BlockSizes, DelayVolume, FaultVolume, LogSink, LogVolume, MemVolume, NullVolume, Pages, RateVolume,
    SliceVolume, Spec, StripeVolume, Volume,
};
use std::fmt::Display;
use std::fs::Metadata;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use tracing::{debug, warn};

/// An opened volume with the properties that opening has determined.
pub(crate) struct Opened {
    /// The volume.
    pub(crate) volume: Arc<dyn Volume>,
    /// Whether the volume or one of its members is on another server.
    pub(crate) is_remote: bool,
    /// Whether the volume was just created and reads as zeroes.
    pub(crate) is_fresh: bool,
    /// Key of the data; `None` if the data is lost when the process ends or has no stable key.
    pub(crate) data: Option<DataKey>,
    /// The parts of volumes on other servers that the volume consists of.
    pub(crate) remote: Vec<DataPart>,
    /// The image of Ceph that is the whole volume, if it may be written.
    pub(crate) image: Option<OpenImage>,
}

/// An open image of Ceph, beside which reservations may be stored.
pub(crate) struct OpenImage {
    pub(crate) volume: Arc<RbdVolume>,
    ownership: ImageOwnership,
}

impl OpenImage {
    /// Whether one process owns the image, and its reservations are stored beside it.
    pub(crate) fn is_owned(&self) -> bool {
        self.ownership.is_exclusive()
    }

    /// Whether the image is exported without being owned at first.
    pub(crate) fn is_standby(&self) -> bool {
        self.ownership.begins_standby()
    }

    /// Whether a group of gateways decides which of them owns the image.
    pub(crate) fn is_of_group(&self) -> bool {
        self.ownership == ImageOwnership::Group
    }
}

impl Opened {
    /// Owns the image that is the volume, if its spec says so. Before that, the data is claimed
    /// from other processes of this machine, because the present owner may be shut out now.
    ///
    /// # Errors
    /// If another client owns it, or the spec says that this process does not own it.
    pub(crate) fn own(&self, spec: &Spec) -> Result<(), Failure> {
        if let Some(image) = self.image.as_ref().filter(|image| image.is_standby()) {
            let word = if image.is_of_group() { "group" } else { "standby" };
            return Err(Failure::request(format!(
                "{spec}: exclusive={word} is for daemons, which own the image later; write exclusive=on or leave it out"
            )));
        }
        self.own_now(spec, true)
    }

    /// Owns the image as [`Opened::own`] does, also one that is standby by its spec. Another client
    /// is shut out only if `may_take`, and the spec says so.
    ///
    /// # Errors
    /// If another client owns it.
    pub(crate) fn own_now(&self, spec: &Spec, may_take: bool) -> Result<(), Failure> {
        let Some(image) = self.image.as_ref().filter(|image| image.is_owned()) else { return Ok(()) };
        let take = may_take && image.ownership == ImageOwnership::Take;
        // A daemon whose place this one takes may still be closing the image.
        let is_held = |error: &RbdError| matches!(error, RbdError::Owned { .. });
        let owned = retry_while_held(|| image.volume.own(take, privileges::keep_only_reading), is_held);
        owned.map_err(|error| Failure::request(format!("{spec}: {error}")))
    }
}

/// Intended use of a volume.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use<'a> {
    /// Required access.
    pub(crate) access: Access,
    /// Connections of each core to a remote volume, if its URL does not set them and its server
    /// supports several.
    pub(crate) connections: u32,
    /// Whether the volume may be enlarged later. A RAM volume reserves address space for that.
    pub(crate) may_grow: bool,
    /// When to populate RAM volumes.
    pub(crate) populate: Populate,
    /// Directory in which files and devices are recorded that were exported as raw; `None`: they
    /// are not recorded.
    pub(crate) state: Option<&'a Path>,
    /// The part of the volume that is used. It is smaller than the volume below a slice.
    pub(crate) part: Part,
}

/// When to populate the memory of a RAM volume.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Populate {
    /// Not at all: page faults occur at the first use.
    Not,
    /// Completely before the first use.
    Whole,
    /// Before the first use until this time, then in the background.
    Until(Instant),
    /// In the background.
    Behind,
}

/// Access to a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read-only; other programs may use the volume at the same time.
    Read,
    /// Writable; opening fails if the volume is read-only.
    Write,
    /// Writable unless the spec or the file is read-only.
    Either,
}

impl Use<'_> {
    /// For a short-lived command: one connection, without populating memory.
    pub(crate) fn briefly(access: Access) -> Use<'static> {
        Use {
            access,
            connections: 1,
            may_grow: false,
            populate: Populate::Not,
            state: None,
            part: Part::WHOLE,
        }
    }

    fn is_read_only(self) -> bool {
        self.access == Access::Read
    }
}

/// Opens a volume.
pub(crate) fn open(spec: &Spec, how: Use<'_>) -> Result<Opened, Failure> {
    let local = |volume: Arc<dyn Volume>, is_fresh, data| Opened {
        volume,
        is_remote: false,
        is_fresh,
        data,
        remote: Vec::new(),
        image: None,
    };
    match spec {
        Spec::Mem(mem) => {
            check_whole_blocks(spec, mem.size, mem.blocks)?;
            open_mem(spec, *mem, how).map(|volume| local(volume, true, None))
        }
        Spec::Null(NullSpec { size, blocks }) => {
            check_whole_blocks(spec, *size, *blocks)?;
            Ok(local(Arc::new(NullVolume::with_blocks(*size, *blocks)), false, None))
        }
        Spec::File(file) => {
            let format = check_format("file", &file.path, file.is_raw, DataKey::of_file(file), how)?;
            let read_only = file.read_only || how.is_read_only();
            let volume = open_or_share(spec, read_only, how, || open_file(file, how))?;
            // Another slice may have written to it.
            let is_fresh = volume.is_new() && how.part.is_whole();
            let data = DataKey::of_file(file);
            note_raw(format, &*volume, data.as_ref(), how);
            Ok(local(volume, is_fresh, data))
        }
        Spec::Block(block) => {
            let data = DataKey::of_block(block);
            let format = check_format("block", &block.path, block.is_raw, data.clone(), how)?;
            let read_only = block.read_only || how.is_read_only();
            let options = BlockOptions { direct: block.direct, blocks: block.blocks, read_only };
            let volume = open_or_share(spec, read_only, how, || {
                let volume = retry_while_held(|| FileVolume::open_block(&block.path, options), is_held);
                volume.map_err(|error| cannot_open(error, how, read_only))
            })?;
            note_raw(format, &*volume, data.as_ref(), how);
            Ok(local(volume, false, data))
        }
        Spec::VhostUser(device) => open_vhost_user(spec, device, how),
        Spec::Rbd(image) => open_rbd(spec, image, how),
        Spec::Slice(slice, inner) => {
            refuse_parts_of_owned(spec)?;
            let below = open(inner, Use { part: how.part.below_slice(*slice), ..how })?;
            let data = below.data.map(|data| DataKey::of_slice(slice.offset, &data));
            let volume = SliceVolume::new(below.volume, slice.offset, slice.len)
                .map_err(|error| Failure::request(format!("{spec}: {error}")))?;
            Ok(Opened { volume: Arc::new(volume), data, image: None, ..below })
        }
        Spec::Stripe { chunk, members } => {
            refuse_parts_of_owned(spec)?;
            open_stripe(spec, *chunk, members, how)
        }
        Spec::Decorated(decoration, inner) => {
            let wrap = decorate(decoration)?;
            open(inner, how).map(|below| Opened { volume: wrap(below.volume), ..below })
        }
        Spec::Url(url) => {
            let remote = reach::of_url(url.as_written())?;
            let volume = remote.open(how.connections)?;
            let data = DataKey::of_remote(&*volume, &remote.volume_key());
            let blocks = url.block_sizes().map_err(Failure::request)?;
            let volume = with_blocks(url, blocks, volume)?;
            let remote = vec![DataPart { key: data.key.clone(), part: how.part, is_exact: true }];
            let data = Some(data);
            Ok(Opened { volume, is_remote: true, is_fresh: false, data, remote, image: None })
        }
    }
}

fn open_vhost_user(spec: &Spec, device: &VhostUserSpec, how: Use<'_>) -> Result<Opened, Failure> {
    let options = VhostUserOptions {
        read_only: device.read_only || how.is_read_only(),
        reconnect_timeout: device.reconnect.unwrap_or(DEFAULT_RECONNECT),
        request_timeout: Some(device.timeout.unwrap_or(DEFAULT_TIMEOUT)).filter(|time| !time.is_zero()),
    };
    let volume = VhostUserVolume::open(&device.path, options);
    let volume = volume.map_err(|error| Failure::request(format!("{spec}: {error}")))?;
    let (volume, data) =
        (with_blocks(spec, device.blocks, Arc::new(volume))?, Some(DataKey::of_vhost_user(device)));
    Ok(Opened { volume, is_remote: true, is_fresh: false, data, remote: Vec::new(), image: None })
}

fn open_rbd(spec: &Spec, image: &RbdSpec, how: Use<'_>) -> Result<Opened, Failure> {
    let failed = |error: RbdError| Failure::request(format!("{spec}: {error}"));
    let refuse = |what: &str| Err(Failure::request(format!("{spec}: is read-only: {what}")));
    if how.access == Access::Write {
        if image.snapshot.is_some() {
            return refuse("it is a snapshot; write to the image, or to a clone of the snapshot");
        } else if image.read_only {
            return refuse("remove readonly=on");
        }
    }
    let cluster = ClusterOptions {
        conf: image.conf.clone(),
        user: image.id.clone().unwrap_or_else(|| USER.to_owned()),
        keyring: image.keyring.clone(),
        timeout: image.timeout.unwrap_or(TIMEOUT),
    };
    let name = ImageName {
        pool: image.pool.clone(),
        namespace: image.namespace.clone(),
        image: image.image.clone(),
        snapshot: image.snapshot.clone(),
    };
    let read_only = image.read_only || how.is_read_only();
    let on_start = privileges::keep_only_reading;
    let opened = Arc::new(RbdVolume::open(&cluster, &name, read_only, on_start).map_err(failed)?);
    let is_owned = image.ownership.is_exclusive() && !read_only;
    let data = DataKey::of_rbd(&opened, is_owned);
    let remote = vec![DataPart { key: data.key.clone(), part: how.part, is_exact: true }];
    let volume = with_blocks(spec, image.blocks, opened.clone())?;
    let may_write = !volume.info().read_only;
    let ownership = image.ownership;
    let image = may_write.then_some(OpenImage { volume: opened, ownership });
    Ok(Opened { volume, is_remote: true, is_fresh: false, data: Some(data), remote, image })
}

/// Refuses slices and stripes of images that are to be owned: their reservations would stay on this
/// machine.
fn refuse_parts_of_owned(spec: &Spec) -> Result<(), Failure> {
    let is_owned = |leaf: &&Spec| matches!(leaf, Spec::Rbd(image) if image.ownership.is_exclusive());
    match spec.leaves().into_iter().find(is_owned) {
        None => Ok(()),
        Some(image) => Err(Failure::request(format!(
            "{spec}: {image} is exclusive, which only a whole image can be; leave exclusive out, or serve the image itself"
        ))),
    }
}

type Decorate = Box<dyn FnOnce(Arc<dyn Volume>) -> Arc<dyn Volume>>;

/// Opens what the decorator needs before the volume itself, which may create files.
fn decorate(decoration: &Decoration) -> Result<Decorate, Failure> {
    Ok(match *decoration {
        Decoration::Delay(delays) => Box::new(move |volume| Arc::new(DelayVolume::new(volume, delays))),
        Decoration::Fault(fault) => Box::new(move |volume| Arc::new(FaultVolume::new(volume, fault))),
        Decoration::Rate(limits) => Box::new(move |volume| Arc::new(RateVolume::new(volume, limits))),
        Decoration::Log(ref target) => {
            let sink = open_log(target)?;
            Box::new(move |volume| Arc::new(LogVolume::new(volume, sink)))
        }
    })
}

/// Opens a file or device, or shares it with other slices that have opened it.
fn open_or_share(
    spec: &Spec,
    read_only: bool,
    how: Use<'_>,
    open: impl FnOnce() -> Result<FileVolume, Failure>,
) -> Result<Arc<FileVolume>, Failure> {
    if how.part.is_whole() { open().map(Arc::new) } else { shared_files::open(spec, read_only, open) }
}

/// A volume with the block sizes that its spec sets.
fn with_blocks(
    spec: &dyn Display,
    blocks: BlockSizes,
    volume: Arc<dyn Volume>,
) -> Result<Arc<dyn Volume>, Failure> {
    if blocks.is_own() {
        return Ok(volume);
    }
    let whole = volume.info().size;
    let volume = SliceVolume::with_blocks(volume, blocks)
        .map_err(|error| Failure::request(format!("{spec}: {error}")))?;
    let info = volume.info();
    if info.size < whole {
        let (size, block) = (info.size, info.logical_block);
        warn!(
            "{spec}: has {whole} bytes, not a multiple of the block size {block}; only the first {size} are used"
        );
    }
    Ok(Arc::new(volume))
}

fn open_mem(spec: &Spec, mem: MemSpec, how: Use<'_>) -> Result<Arc<dyn Volume>, Failure> {
    let size = mem.size;
    // Unwritten blocks need memory only for their states, so a volume may be larger than the
    // memory, up to a limit.
    let most = memory_bytes().saturating_mul(MEMORY_TIMES);
    let too_large = || {
        let most = human_size(most);
        let memory = human_size(memory_bytes());
        Failure::request(format!(
            "{spec}: is too large for this machine's {memory} of memory; use at most {most}"
        ))
    };
    let refuse = || no_addresses(spec).unwrap_or_else(too_large);
    let len = usize::try_from(size).ok().filter(|_| size <= most).ok_or_else(too_large)?;
    let room = if how.may_grow { size.saturating_mul(ROOM_TIMES).max(MIN_ROOM).min(most) } else { size };
    // A limit of address space may leave less than `room`.
    let pages = usize::try_from(room).ok().and_then(|room| map_pages(room).ok());
    let pages = pages.map_or_else(|| map_pages(len).map_err(|_| refuse()), Ok)?;
    // A read-only volume needs no memory: unwritten blocks are read without it.
    let populate = if mem.populate && !how.is_read_only() { how.populate } else { Populate::Not };
    populate_mem(spec, &pages, len, populate);
    Ok(Arc::new(MemVolume::within(pages, size, mem.blocks)))
}

/// Populates the first `len` bytes as far as memory allows; later page faults use small pages.
fn populate_mem(spec: &Spec, pages: &Arc<Pages>, len: usize, populate: Populate) {
    let free = available_memory_bytes().saturating_sub(populate::pending_bytes());
    let share = usize::try_from(free / POPULATED_SHARE).unwrap_or(usize::MAX);
    let wanted = len.min(share);
    // Each thread needs address space, which may be short.
    let is_tight = address_space_left().is_some_and(|left| left < POPULATING_ADDRESSES);
    let end = match populate {
        _ if is_tight => return pages.use_small_pages(),
        Populate::Not => return pages.use_small_pages(),
        Populate::Whole => None,
        Populate::Until(end) => Some(end),
        Populate::Behind => Some(Instant::now()),
    };
    if wanted < len {
        let (wanted, len) = (human_size(wanted as u64), human_size(len as u64));
        warn!(
            "{spec}: only the first {wanted} of {len} are populated, which is half of the free memory; first writes to the rest are slower"
        );
    }
    pages.expect_populated(wanted);
    let done = populate::populate_at_once(pages, wanted, end);
    populate::populate_in_background(pages, done, wanted, privileges::drop_all_capabilities);
}

/// The error for a RAM volume that cannot be mapped within the limit of address space; `None` if
/// there is no limit.
fn no_addresses(spec: &Spec) -> Option<Failure> {
    let left = address_space_left()?;
    Some(Failure::request(format!(
        "{spec}: the limit of address space (RLIMIT_AS, `ulimit -v`) leaves {}; raise the limit or use a smaller volume",
        human_size(left)
    )))
}

/// Checks that the size of a RAM or null volume is one or more whole blocks.
fn check_whole_blocks(spec: &Spec, size: u64, blocks: BlockSizes) -> Result<(), Failure> {
    let block = blocks.logical.map_or(SECTOR, u64::from);
    if size < block {
        return Err(Failure::request(format!("{spec}: is smaller than one block; use at least {block}")));
    }
    if !size.is_multiple_of(block) {
        let fits = size.checked_next_multiple_of(block).unwrap_or(size - size % block);
        return Err(Failure::request(format!(
            "{spec}: is not a multiple of the block size, {block} bytes; use {fits}"
        )));
    }
    Ok(())
}

fn open_file(file: &FileSpec, how: Use<'_>) -> Result<FileVolume, Failure> {
    let options = FileOptions {
        size: file.size,
        mode: file.mode,
        direct: file.direct,
        blocks: file.blocks,
        read_only: file.read_only || how.is_read_only(),
        create: true,
    };
    let opened = retry_while_held(|| FileVolume::open(&file.path, options), is_held);
    let volume = opened.map_err(|error| match error {
        OpenError::Missing(path) => match with_question_mark(&path) {
            Some(meant) => Failure::request(format!(
                "file:{}: does not exist; options follow a question mark, as in 'file:{meant}'",
                path.display()
            )),
            None if options.read_only => {
                Failure::request(format!("file:{}: does not exist; check its path", path.display()))
            }
            None => Failure::request(OpenError::Missing(path)),
        },
        other => cannot_open(other, how, options.read_only),
    })?;
    let found = file.path.metadata().ok();
    if let Some(rest) = found.as_ref().and_then(|found| unused_rest(file, found)) {
        warn!("{rest}");
    }
    let (len, size) = (found.map_or(0, |found| found.len()), volume.info().size);
    if file.size.is_none() && len < size {
        let path = file.path.display();
        warn!(
            "file:{path}: {len} bytes are not a multiple of the block size: it reads as {size} with zeroes at the end"
        );
    }
    Ok(volume)
}

/// A message about a file of which its `size` uses only the beginning.
pub(crate) fn unused_rest(file: &FileSpec, found: &Metadata) -> Option<String> {
    let size = file.size.filter(|size| found.is_file() && *size < found.len())?;
    let (path, len) = (file.path.display(), found.len());
    Some(format!(
        "file:{path}: has {len} bytes, of which only the first {size} are used; leave out ?size= to use all"
    ))
}

/// Refuses a disk image in another format than raw, unless a client may have written its magic
/// number. Returns the detected format.
fn check_format(
    kind: &str,
    path: &Path,
    is_raw: bool,
    data: Option<DataKey>,
    how: Use<'_>,
) -> Result<Option<&'static str>, Failure> {
    let Some(format) = format_of(path) else { return Ok(None) };
    let shown = path.display();
    if is_raw {
        return Ok(Some(format));
    }
    if how.state.zip(data).is_some_and(|(state, data)| has_note(state, &raw_note(&data))) {
        warn!(
            "{kind}:{shown}: begins like a {format} image, but did not when it was first exported: it is exported as raw. \
             A client may have written that header to deceive programs that guess formats; give QEMU format=raw"
        );
        return Ok(Some(format));
    }
    let word = path.to_string_lossy();
    let word = shell_word(&word);
    Err(Failure::request(format!(
        "{kind}:{shown}: is a {format} image, not a raw disk; start \
         `qemu-nbd -t -f {format} -k /run/qemu-nbd.sock {word}` and use 'nbd+unix:///?socket=/run/qemu-nbd.sock' instead, \
         or add ?format=raw to export the file itself, if it was exported before and a client may have written that header"
    )))
}

/// Records that a file or device was exported as raw, so that it is accepted again whatever clients
/// write to it.
fn note_raw(format: Option<&str>, volume: &dyn Volume, data: Option<&DataKey>, how: Use<'_>) {
    let (Some(state), Some(data)) = (how.state, data) else { return };
    let note = raw_note(data);
    if format.is_some() || volume.info().read_only || has_note(state, &note) {
        return;
    }
    if let Err(error) = state::note(state, &note) {
        debug!("{note} cannot be written: {error}");
    }
}

fn raw_note(data: &DataKey) -> String {
    format!("volume-{}.raw", VolumeUuid::of_texts(&["raw", &data.key]))
}

/// The path and options that a user meant who has written the options behind a comma, as for QEMU.
fn with_question_mark(path: &Path) -> Option<String> {
    let (path, options) = path.to_str()?.split_once(',')?;
    let keys = ["size=", "mode=", "direct=", "readonly=", "format=", "block_size=", "physical_block_size="];
    let options: Vec<_> = options.split(',').map(str::trim).collect();
    let are_options = options.iter().all(|option| keys.iter().any(|key| option.starts_with(key)));
    are_options.then(|| format!("{path}?{}", options.join("&")))
}

/// The error for a volume that cannot be opened for the intended use, or not even read-only.
fn cannot_open(error: OpenError, how: Use<'_>, read_only: bool) -> Failure {
    let may_be_read_only = how.access != Access::Write && !read_only;
    if let OpenError::Locked(path) = &error
        && let Some(holder) = lock_holder(path)
    {
        let advice = if may_be_read_only { ", or give ?readonly=on" } else { "" };
        return Failure::request(format!("{}: is locked by {holder}{advice}", path.display()));
    }
    if may_be_read_only {
        return Failure::request(error);
    }
    match error {
        OpenError::Permission(path) => Failure::request(format!(
            "{}: permission denied; run as a user who can {} it",
            path.display(),
            if read_only { "read" } else { "read and write" }
        )),
        OpenError::ReadOnly(path) => Failure::request(format!(
            "{}: is on a read-only file system or device; give another path",
            path.display()
        )),
        OpenError::Locked(path) => Failure::request(format!(
            "{}: is locked by another program, such as QEMU, qemu-nbd or another blockmux, or given twice; stop that program",
            path.display()
        )),
        OpenError::InUse(path) => {
            Failure::request(format!("block:{}: is mounted or in use; unmount it", path.display()))
        }
        other => Failure::request(other),
    }
}

fn is_held(error: &OpenError) -> bool {
    matches!(error, OpenError::Locked(_) | OpenError::InUse(_))
}

fn open_stripe(spec: &Spec, chunk: u64, members: &[Spec], how: Use<'_>) -> Result<Opened, Failure> {
    let members = how.part.of_members(chunk, members);
    let members =
        members.map(|(part, member)| open(member, Use { part, ..how })).collect::<Result<Vec<_>, _>>()?;
    let is_remote = members.iter().any(|member| member.is_remote);
    let is_fresh = members.iter().all(|member| member.is_fresh);
    let data: Vec<_> = members.iter().map(|member| member.data.clone()).collect();
    let data = DataKey::of_stripe(chunk, &data);
    let remote = members.iter().flat_map(|member| member.remote.clone()).collect();
    let volumes = members.into_iter().map(|member| member.volume).collect();
    let volume =
        StripeVolume::new(chunk, volumes).map_err(|error| Failure::request(format!("{spec}: {error}")))?;
    Ok(Opened { volume: Arc::new(volume), is_remote, is_fresh, data, remote, image: None })
}

fn open_log(target: &LogTarget) -> Result<Arc<dyn LogSink>, Failure> {
    match target {
        LogTarget::Stderr => records::to(std::io::stderr()),
        LogTarget::File(path) => {
            let file = regular::append(path).map_err(|error| no_log(path, &error))?;
            records::to(file)
        }
    }
}

fn no_log(path: &Path, error: &std::io::Error) -> Failure {
    let path = path.display();
    match error.get_ref() {
        // Not an error of the system: it says what to do.
        Some(_) => Failure::request(format!("log:{path}: {error}")),
        None => Failure::request(format!("log:{path}: cannot append to it: {error}; give another file")),
    }
}

/// Default block size of RAM and null volumes, in bytes.
const SECTOR: u64 = 512;
/// Address space reserved for growth of a RAM volume, as a multiple of its size.
const ROOM_TIMES: u64 = 4;
/// Minimum address space reserved for growth of a RAM volume, in bytes.
const MIN_ROOM: u64 = 16 << 30;
/// The minimum address space that must remain to populate volumes, in bytes.
const POPULATING_ADDRESSES: u64 = 4 << 30;
/// Divisor of the free memory: a RAM volume is populated up to that share.
const POPULATED_SHARE: u64 = 2;
/// The maximum size of a RAM volume, as a multiple of the machine's memory.
const MEMORY_TIMES: u64 = 16;
