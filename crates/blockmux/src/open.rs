//! From a spec to a volume that can be used.

use crate::data_key::DataKey;
use crate::failure::Failure;
use crate::image_format::format_of;
use crate::machine::{available_memory_bytes, memory_bytes};
use crate::output::shell_word;
use crate::privileges;
use crate::reach;
use crate::records;
use crate::retry::retry_while_held;
use blockmux_engine::file::{BlockOptions, FileOptions, FileVolume, OpenError};
use blockmux_engine::memory::map_pages;
use blockmux_engine::populate;
use blockmux_engine::sys::address_space_left;
use blockmux_proto::volume_uuid::VolumeUuid;
use blockmux_volume::spec::{FileSpec, LogTarget, MemSpec};
use blockmux_volume::units::human_size;
use blockmux_volume::{
    DelayVolume, FaultVolume, LogSink, LogVolume, MemVolume, NullVolume, Pages, RateVolume, Spec,
    StripeVolume, Volume,
};
use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use tracing::{debug, warn};

/// A volume and what opening it has told.
pub(crate) struct Opened {
    /// The volume.
    pub(crate) volume: Arc<dyn Volume>,
    /// It, or a part of it, is on another server.
    pub(crate) is_remote: bool,
    /// It was made just now, and reads as zeroes everywhere.
    pub(crate) is_fresh: bool,
    /// What its data are known by; `None` if they go with the process, or nothing is known.
    pub(crate) data: Option<DataKey>,
    /// The data on other servers that it is made of.
    pub(crate) remote: Vec<DataKey>,
}

/// How a volume will be used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use<'a> {
    /// What will be done with it.
    pub(crate) access: Access,
    /// Connections of each core to a remote volume, where its URL says nothing and its server lets
    /// several be used.
    pub(crate) connections: u32,
    /// It may be given a larger size later, so that a RAM volume keeps addresses for that.
    pub(crate) may_grow: bool,
    /// When memory of RAM volumes is faulted in.
    pub(crate) populate: Populate,
    /// Where it is noted which files and devices clients could write as they are; `None`: nowhere.
    pub(crate) state: Option<&'a Path>,
}

/// When the memory of a RAM volume is faulted in.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Populate {
    /// When it is used.
    Not,
    /// All before it is used.
    Whole,
    /// Until then before it is used, the rest in the background.
    Until(Instant),
    /// In the background.
    Behind,
}

/// What is done with a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nobody will write it, so that others may use it meanwhile.
    Read,
    /// It is of no use if it cannot be written.
    Write,
    /// As its spec says.
    Either,
}

impl Use<'_> {
    /// For a program that is done with it soon: over one connection, and without populating memory.
    pub(crate) fn briefly(access: Access) -> Use<'static> {
        Use { access, connections: 1, may_grow: false, populate: Populate::Not, state: None }
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
    };
    let around = |inner: &Spec, wrap: &dyn Fn(Arc<dyn Volume>) -> Arc<dyn Volume>| {
        open(inner, how).map(|inner| Opened { volume: wrap(inner.volume), ..inner })
    };
    match spec {
        Spec::Mem(MemSpec { size, .. }) | Spec::Null(size) if *size < SECTOR => Err(no_block(spec)),
        Spec::Mem(MemSpec { size, .. }) | Spec::Null(size) if !size.is_multiple_of(SECTOR) => {
            Err(no_whole_block(spec, *size))
        }
        Spec::Mem(mem) => open_mem(spec, *mem, how).map(|volume| local(volume, true, None)),
        Spec::Null(size) => Ok(local(Arc::new(NullVolume::new(*size)), false, None)),
        Spec::File(file) => {
            let format = check_format("file", &file.path, file.is_raw, DataKey::of_file(file), how)?;
            let volume = open_file(file, how)?;
            let (is_fresh, data) = (volume.is_new(), DataKey::of_file(file));
            note_raw(format, &volume, data.as_ref(), how);
            Ok(local(Arc::new(volume), is_fresh, data))
        }
        Spec::Block(block) => {
            let data = DataKey::of_block(block);
            let format = check_format("block", &block.path, block.is_raw, data.clone(), how)?;
            let options =
                BlockOptions { direct: block.direct, read_only: block.read_only || how.is_read_only() };
            let volume = retry_while_held(|| FileVolume::open_block(&block.path, options), is_held);
            let volume = volume.map_err(|error| cannot_open(error, how))?;
            note_raw(format, &volume, data.as_ref(), how);
            Ok(local(Arc::new(volume), false, data))
        }
        Spec::Stripe { chunk, members } => open_stripe(spec, *chunk, members, how),
        Spec::Delay(delays, inner) => around(inner, &|volume| Arc::new(DelayVolume::new(volume, *delays))),
        Spec::Fault(fault, inner) => around(inner, &|volume| Arc::new(FaultVolume::new(volume, *fault))),
        Spec::Rate(limits, inner) => around(inner, &|volume| Arc::new(RateVolume::new(volume, *limits))),
        Spec::Log(target, inner) => {
            let sink = open_log(target)?;
            around(inner, &|volume| Arc::new(LogVolume::new(volume, sink.clone())))
        }
        Spec::Url(url) => {
            let remote = reach::of_url(url.as_written())?;
            let volume = remote.open(how.connections)?;
            let data = DataKey::of_remote(&*volume, &remote.place());
            let remote = vec![data.clone()];
            Ok(Opened { volume, is_remote: true, is_fresh: false, data: Some(data), remote })
        }
    }
}

fn open_mem(spec: &Spec, mem: MemSpec, how: Use<'_>) -> Result<Arc<dyn Volume>, Failure> {
    let size = mem.size;
    // Untouched blocks cost nothing but their states, so a volume may be larger than memory, within
    // reason.
    let most = memory_bytes().saturating_mul(MEMORY_TIMES);
    let refuse = || {
        no_addresses(spec, size).unwrap_or_else(|| {
            let most = human_size(most);
            Failure::request(format!("{spec}: more RAM than this machine can promise; take at most {most}"))
        })
    };
    let len = usize::try_from(size).ok().filter(|_| size <= most).ok_or_else(refuse)?;
    let room = if how.may_grow { size.saturating_mul(ROOM_TIMES).max(LEAST_ROOM).min(most) } else { size };
    // A limit on addresses may leave less than that.
    let pages = usize::try_from(room).ok().and_then(|room| map_pages(room).ok());
    let pages = pages.map_or_else(|| map_pages(len).map_err(|_| refuse()), Ok)?;
    // Nobody writes to it, and blocks that were never written are read without memory.
    let populate = if mem.populate && !how.is_read_only() { how.populate } else { Populate::Not };
    populate_mem(spec, &pages, len, populate);
    Ok(Arc::new(MemVolume::within(pages, size)))
}

/// Populates the first `len` bytes as far as memory allows, and has all page faults that are left
/// bring in small pages.
fn populate_mem(spec: &Spec, pages: &Arc<Pages>, len: usize, populate: Populate) {
    let free = available_memory_bytes().saturating_sub(populate::pending_bytes());
    let share = usize::try_from(free / POPULATED_SHARE).unwrap_or(usize::MAX);
    let wanted = len.min(share);
    // Each thread takes addresses, which serving may need.
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
            "{spec}: only the first {wanted} of {len} are populated, half of the memory that is free; the first write elsewhere is slower"
        );
    }
    pages.expect_populated(wanted);
    let done = populate::populate_at_once(pages, wanted, end);
    populate::populate_behind(pages, done, wanted, privileges::give_up_all);
}

/// That a RAM volume of so many bytes fails by the limit of address space; `None` if that leaves
/// room for it.
fn no_addresses(spec: &Spec, size: u64) -> Option<Failure> {
    let left = address_space_left().filter(|left| *left < size)?;
    Some(Failure::request(format!(
        "{spec}: the limit of address space (RLIMIT_AS, `ulimit -v`) leaves {}; raise the limit, or take a smaller volume",
        human_size(left)
    )))
}

fn no_block(spec: &Spec) -> Failure {
    Failure::request(format!("{spec}: is smaller than one block; take at least {SECTOR}"))
}

fn no_whole_block(spec: &Spec, size: u64) -> Failure {
    let next = size.next_multiple_of(SECTOR);
    Failure::request(format!("{spec}: is no whole number of blocks of {SECTOR} bytes; take {next}"))
}

fn open_file(file: &FileSpec, how: Use<'_>) -> Result<FileVolume, Failure> {
    let options = FileOptions {
        size: file.size,
        direct: file.direct,
        read_only: file.read_only || how.is_read_only(),
        create: true,
    };
    let opened = retry_while_held(|| FileVolume::open(&file.path, options), is_held);
    let volume = opened.map_err(|error| match error {
        OpenError::Missing(path) if options.read_only => {
            Failure::request(format!("file:{}: does not exist; check its path", path.display()))
        }
        other => cannot_open(other, how),
    })?;
    let (len, size) = (file.path.metadata().map_or(0, |found| found.len()), volume.info().size);
    if file.size.is_none() && len < size {
        let path = file.path.display();
        warn!("file:{path}: has {len} bytes, no whole blocks: reads as {size}, zeroes behind its end");
    }
    Ok(volume)
}

/// Refuses an image in a format of its own, whose bytes are not the disk's, unless clients can have
/// written what it begins with; answers what it looks like.
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
    if how.state.zip(data).is_some_and(|(state, data)| raw_note(state, &data).exists()) {
        warn!(
            "{kind}:{shown}: begins like a {format} image, and did not when it was first served: it is served as it is. A \
             client may have written that for a program that guesses formats; give QEMU format=raw"
        );
        return Ok(Some(format));
    }
    let word = path.to_string_lossy();
    let word = shell_word(&word);
    Err(Failure::request(format!(
        "{kind}:{shown}: is a {format} image, whose bytes are not the disk's; start \
         `qemu-nbd -t -f {format} -k /run/qemu-nbd.sock {word}` and name 'nbd+unix:///?socket=/run/qemu-nbd.sock' instead, \
         or give ?format=raw to serve the file itself, as where it was served before and a client may have written that"
    )))
}

/// Notes that clients can write a file or device that is in no format of its own, so that it is
/// served again whatever they write.
fn note_raw(format: Option<&str>, volume: &dyn Volume, data: Option<&DataKey>, how: Use<'_>) {
    let (Some(state), Some(data)) = (how.state, data) else { return };
    let note = raw_note(state, data);
    if format.is_some() || volume.info().read_only || note.exists() {
        return;
    }
    let made = DirBuilder::new().recursive(true).mode(0o700).create(state).and_then(|()| File::create(&note));
    if let Err(error) = made {
        debug!("{}: cannot be kept: {error}", note.display());
    }
}

fn raw_note(state: &Path, data: &DataKey) -> PathBuf {
    state.join(format!("volume-{}.raw", VolumeUuid::of_texts(&["raw", &data.text])))
}

/// To whom it has to be written, it is of no use that it could be read.
fn cannot_open(error: OpenError, how: Use<'_>) -> Failure {
    if how.access != Access::Write {
        return Failure::request(error);
    }
    match error {
        OpenError::Permission(path) => Failure::request(format!(
            "{}: permission denied; run as a user who may read and write it",
            path.display()
        )),
        OpenError::ReadOnly(path) => Failure::request(format!(
            "{}: is on a read-only file system or device; name another",
            path.display()
        )),
        OpenError::Locked(path) => Failure::request(format!(
            "{}: is in use by another program that locked it, such as QEMU, qemu-nbd or another blockmux, or named twice; stop that one",
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
    let members = members.iter().map(|member| open(member, how)).collect::<Result<Vec<_>, _>>()?;
    let is_remote = members.iter().any(|member| member.is_remote);
    let is_fresh = members.iter().all(|member| member.is_fresh);
    let data: Vec<_> = members.iter().map(|member| member.data.clone()).collect();
    let data = DataKey::of_stripe(chunk, &data);
    let remote = members.iter().flat_map(|member| member.remote.clone()).collect();
    let volumes = members.into_iter().map(|member| member.volume).collect();
    let volume =
        StripeVolume::new(chunk, volumes).map_err(|error| Failure::request(format!("{spec}: {error}")))?;
    Ok(Opened { volume: Arc::new(volume), is_remote, is_fresh, data, remote })
}

fn open_log(target: &LogTarget) -> Result<Arc<dyn LogSink>, Failure> {
    match target {
        LogTarget::Stderr => records::to(std::io::stderr()),
        LogTarget::File(path) => {
            let file = File::options().create(true).append(true).open(path);
            let file = file.map_err(|error| no_log(path, &error))?;
            records::to(file)
        }
    }
}

fn no_log(path: &Path, error: &std::io::Error) -> Failure {
    Failure::request(format!("log:{}: cannot append to it: {error}; name another file", path.display()))
}

/// The blocks of RAM volumes and of such as hold nothing, in bytes.
const SECTOR: u64 = 512;
/// How far a RAM volume can grow: so many times its size, and at least so many bytes.
const ROOM_TIMES: u64 = 4;
const LEAST_ROOM: u64 = 16 << 30;
/// With less address space left, in bytes, nothing is populated.
const POPULATING_ADDRESSES: u64 = 4 << 30;
/// A RAM volume is populated up to the free memory divided by this.
const POPULATED_SHARE: u64 = 2;
/// A RAM volume may have so many times the machine's memory.
const MEMORY_TIMES: u64 = 16;
