//! Volume specs: how a command line or a config file names a volume.
//!
//! ```text
//! SPEC    = mem:SIZE[?OPTION[&OPTION]...]      populate=on|off  BLOCKS
//!         | null:SIZE[?OPTION[&OPTION]...]     BLOCKS
//!         | file:PATH[?OPTION[&OPTION]...]     size=SIZE  mode=OCTAL  DEVICE  BLOCKS
//!         | block:PATH[?OPTION[&OPTION]...]    DEVICE  BLOCKS
//!         | vhost-user:PATH[?OPTION[&OPTION]...]
//!                                              readonly=on|off  reconnect=DURATION
//!                                              timeout=DURATION  BLOCKS
//!         | rbd:POOL/[NAMESPACE/]IMAGE[@SNAPSHOT][?OPTION[&OPTION]...]
//!                                              id=USER  conf=PATH  keyring=PATH
//!                                              readonly=on|off  exclusive=on|off|take|standby|group
//!                                              timeout=DURATION  BLOCKS
//!         | slice:OFFSET[,LEN]:SPEC            sizes; without LEN, up to the end
//!         | stripe:[CHUNK:]SPEC[,SPEC]...      CHUNK is a SIZE, 1m by default
//!         | delay:READ[,WRITE]:SPEC            durations; WRITE (default: READ) also for flushes
//!         | fault:KEY=VALUE[,KEY=VALUE]...:SPEC
//!         | rate:KEY=VALUE[,KEY=VALUE]...:SPEC
//!         | log:PATH:SPEC                      PATH `-` is standard error
//!         | SCHEME://ANYTHING                  a URL, kept unchanged; BLOCKS are parameters of it
//!         | [SPEC]
//! DEVICE  = direct=on|off  readonly=on|off  format=raw
//! BLOCKS  = block_size=SIZE  physical_block_size=SIZE      powers of two from 512 to 64k
//! ```
//! A decorator applies to the rest of its spec. Brackets mark where a spec ends: a member of a
//! stripe that contains a comma must be in brackets, as in `stripe:[delay:1ms,2ms:mem:1g],mem:1g`.
//! In paths, `%` and two hexadecimal digits are a byte, so that every path can be written: `%2C`
//! for a comma, `%3F` for a question mark, `%3A` for a colon (which only log paths need), `%5B` and
//! `%5D` for brackets, `%25` for a per cent sign.
//!
//! Keys of a fault: `op=read+write+flush+zeroes+discard+prefetch+status` (all), `offset=SIZE` (0),
//! `size=SIZE` (to the end), `every=N` (1: all) or `probability=0.01`, `seed=N` (0), and `error=`
//! with `medium` (the default), `nospace`, `readonly`, `reserved`, `unsupported`, `nomemory`,
//! `pathlost`, `aborted`, `shutdown`, `range`, `misaligned`, `length`, or `stuck` for a request
//! that never completes.
//!
//! Keys of a rate, all per second: `iops=N` and `bw=SIZE` limit all requests together; `read_iops`,
//! `read_bw`, `write_iops` and `write_bw` limit reads and writes separately. `burst=DURATION` is
//! the time without requests that a burst makes up for (10ms).

mod parse;
mod path;
mod secrets;
mod url;
mod user;
mod write;

pub use secrets::{with_hidden_secrets, without_secrets};
pub use url::Url;
pub use user::split_user;

use crate::block_sizes::BlockSizes;
use crate::delay::Delays;
use crate::fault::Fault;
use crate::limiter::Limits;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A volume spec, parsed but not opened. Parse it with `str::parse`; it prints as the shortest text
/// that parses to the same spec, except that passwords in URLs are never printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spec {
    /// `mem:`, a volume in RAM.
    Mem(MemSpec),
    /// `null:`, a volume that discards writes and reads zeroes.
    Null(NullSpec),
    /// `file:`, a volume in a file.
    File(FileSpec),
    /// `block:`, a local block device.
    Block(BlockSpec),
    /// `vhost-user:`, the block device of a vhost-user back end.
    VhostUser(VhostUserSpec),
    /// `rbd:`, an image of Ceph RBD.
    Rbd(RbdSpec),
    /// `slice:`, a part of a volume.
    Slice(SliceSpec, Box<Spec>),
    /// `stripe:`, a stripe of volumes.
    Stripe {
        /// Size of a chunk, in bytes.
        chunk: u64,
        /// The striped volumes, at least one.
        members: Vec<Spec>,
    },
    /// A volume that behaves differently, with the same bytes.
    Decorated(Decoration, Box<Spec>),
    /// A URL: any text with `://`, unchanged.
    Url(Url),
}

/// What a volume around another one does; its size and bytes are those of the other one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decoration {
    /// `delay:`, added latency.
    Delay(Delays),
    /// `fault:`, injected errors.
    Fault(Fault),
    /// `rate:`, at least one rate limit.
    Rate(Limits),
    /// `log:`, a log of the requests.
    Log(LogTarget),
}

impl Spec {
    /// Resolves relative paths, including those in URLs, against `directory`.
    #[must_use]
    pub fn below(self, directory: &Path) -> Spec {
        let inner = |spec: Box<Spec>| Box::new(spec.below(directory));
        match self {
            Spec::File(file) => Spec::File(FileSpec { path: directory.join(&file.path), ..file }),
            Spec::Block(block) => Spec::Block(BlockSpec { path: directory.join(&block.path), ..block }),
            Spec::VhostUser(device) => {
                Spec::VhostUser(VhostUserSpec { path: directory.join(&device.path), ..device })
            }
            Spec::Rbd(image) => {
                let absolute = |path: Option<PathBuf>| path.map(|path| directory.join(path));
                let (conf, keyring) = (absolute(image.conf), absolute(image.keyring));
                Spec::Rbd(RbdSpec { conf, keyring, ..image })
            }
            Spec::Stripe { chunk, members } => Spec::Stripe {
                chunk,
                members: members.into_iter().map(|spec| spec.below(directory)).collect(),
            },
            Spec::Slice(slice, spec) => Spec::Slice(slice, inner(spec)),
            Spec::Decorated(Decoration::Log(LogTarget::File(path)), spec) => {
                Spec::Decorated(Decoration::Log(LogTarget::File(directory.join(path))), inner(spec))
            }
            Spec::Decorated(decoration, spec) => Spec::Decorated(decoration, inner(spec)),
            Spec::Url(url) => Spec::Url(url.below(directory)),
            Spec::Mem(_) | Spec::Null(_) => self,
        }
    }

    /// The innermost volumes, without slices, stripes and decorators.
    #[must_use]
    pub fn leaves(&self) -> Vec<&Spec> {
        match self {
            Spec::Stripe { members, .. } => members.iter().flat_map(Spec::leaves).collect(),
            Spec::Slice(_, inner) | Spec::Decorated(_, inner) => inner.leaves(),
            Spec::Mem(_)
            | Spec::Null(_)
            | Spec::File(_)
            | Spec::Block(_)
            | Spec::VhostUser(_)
            | Spec::Rbd(_)
            | Spec::Url(_) => vec![self],
        }
    }

    /// Maximum memory that the volume may use, in bytes.
    #[must_use]
    pub fn ram_bytes(&self) -> u64 {
        self.leaves().into_iter().fold(0, |all: u64, leaf| match leaf {
            Spec::Mem(memory) => all.saturating_add(memory.size),
            _ => all,
        })
    }

    /// The volume's size in bytes, if the spec determines it.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        match self {
            Spec::Mem(mem) => Some(mem.size),
            Spec::File(file) => file.size,
            Spec::Slice(slice, inner) => slice.len.or_else(|| inner.size()?.checked_sub(slice.offset)),
            Spec::Decorated(_, inner) => inner.size(),
            Spec::Null(_)
            | Spec::Block(_)
            | Spec::VhostUser(_)
            | Spec::Rbd(_)
            | Spec::Stripe { .. }
            | Spec::Url(_) => None,
        }
    }

    /// The spec of the volume after it was resized to `size` bytes; `None` if the spec does not
    /// determine its size.
    #[must_use]
    pub fn with_size(&self, size: u64) -> Option<Spec> {
        let inside = |inner: &Spec, size: u64| inner.with_size(size).map(Box::new);
        Some(match self {
            Spec::Mem(mem) => Spec::Mem(MemSpec { size, ..*mem }),
            Spec::File(file) => Spec::File(FileSpec { size: Some(size), ..file.clone() }),
            Spec::Slice(slice, inner) if slice.len.is_some() => {
                Spec::Slice(SliceSpec { len: Some(size), ..*slice }, inner.clone())
            }
            Spec::Slice(slice, inner) => Spec::Slice(*slice, inside(inner, slice.offset.checked_add(size)?)?),
            Spec::Decorated(decoration, inner) => Spec::Decorated(decoration.clone(), inside(inner, size)?),
            Spec::Null(_)
            | Spec::Block(_)
            | Spec::VhostUser(_)
            | Spec::Rbd(_)
            | Spec::Stripe { .. }
            | Spec::Url(_) => return None,
        })
    }

    /// The URLs of the remote volumes in the spec.
    #[must_use]
    pub fn urls(&self) -> Vec<&Url> {
        let leaves = self.leaves().into_iter();
        leaves.filter_map(|leaf| if let Spec::Url(url) = leaf { Some(url) } else { None }).collect()
    }

    /// The paths of the files in the spec.
    #[must_use]
    pub fn files(&self) -> Vec<&Path> {
        let leaves = self.leaves().into_iter();
        leaves.filter_map(|leaf| if let Spec::File(file) = leaf { Some(&*file.path) } else { None }).collect()
    }
}

/// A volume in RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemSpec {
    /// Size in bytes.
    pub size: u64,
    /// Fault the memory in before use.
    pub populate: bool,
    /// Block sizes to present.
    pub blocks: BlockSizes,
}

impl MemSpec {
    /// A volume of `size` bytes, populated.
    #[must_use]
    pub fn new(size: u64) -> MemSpec {
        MemSpec { size, populate: true, blocks: BlockSizes::default() }
    }
}

/// A volume that discards writes and reads zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NullSpec {
    /// Size in bytes.
    pub size: u64,
    /// Block sizes to present.
    pub blocks: BlockSizes,
}

impl NullSpec {
    /// A volume of `size` bytes.
    #[must_use]
    pub fn new(size: u64) -> NullSpec {
        NullSpec { size, blocks: BlockSizes::default() }
    }
}

/// A part of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceSpec {
    /// Start of the part in the volume, in bytes.
    pub offset: u64,
    /// Length in bytes; `None`: up to the end of the volume.
    pub len: Option<u64>,
}

/// A file that holds a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSpec {
    /// The file's path.
    pub path: PathBuf,
    /// Size in bytes: creates the file if it is missing, and extends it to this length.
    pub size: Option<u64>,
    /// Permissions of the file if it is created; `None`: only for its owner.
    pub mode: Option<u32>,
    /// Direct I/O; `None`: where the file system supports it.
    pub direct: Option<bool>,
    /// Refuse writes.
    pub read_only: bool,
    /// Serve the bytes as they are, even if they look like an image of another format.
    pub is_raw: bool,
    /// Block sizes to present.
    pub blocks: BlockSizes,
}

impl FileSpec {
    /// A file that exists, without options.
    #[must_use]
    pub fn new(path: PathBuf) -> FileSpec {
        let blocks = BlockSizes::default();
        FileSpec { path, size: None, mode: None, direct: None, read_only: false, is_raw: false, blocks }
    }
}

/// A local block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSpec {
    /// The path of the device node.
    pub path: PathBuf,
    /// Direct I/O; `None`: if the device supports it.
    pub direct: Option<bool>,
    /// Refuse writes.
    pub read_only: bool,
    /// Serve the bytes as they are, even if they look like an image of another format.
    pub is_raw: bool,
    /// Block sizes to present.
    pub blocks: BlockSizes,
}

/// The block device of a vhost-user back end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserSpec {
    /// The Unix socket where the back end listens.
    pub path: PathBuf,
    /// Refuse writes.
    pub read_only: bool,
    /// How long requests wait for a back end that is lost; `None`: the default.
    pub reconnect: Option<Duration>,
    /// How long a request may take before the back end counts as lost; 0: no limit; `None`: the
    /// default.
    pub timeout: Option<Duration>,
    /// Block sizes to present.
    pub blocks: BlockSizes,
}

/// An image of Ceph RBD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdSpec {
    /// The pool.
    pub pool: String,
    /// The namespace in the pool.
    pub namespace: Option<String>,
    /// The image.
    pub image: String,
    /// A snapshot of it, which is read-only.
    pub snapshot: Option<String>,
    /// Ceph's user, without `client.`; `None`: the default.
    pub id: Option<String>,
    /// Ceph's config; `None`: where Ceph's own programs look for it.
    pub conf: Option<PathBuf>,
    /// The file with the user's key; `None`: as the config says.
    pub keyring: Option<PathBuf>,
    /// Refuse writes.
    pub read_only: bool,
    /// Which other clients may write.
    pub ownership: ImageOwnership,
    /// Time for connecting; `None`: the default.
    pub timeout: Option<Duration>,
    /// Block sizes to present.
    pub blocks: BlockSizes,
}

/// Whether a client owns an image of Ceph: all others are refused, and its reservations are stored
/// beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageOwnership {
    /// Any client may write.
    #[default]
    Shared,
    /// One client owns it; a second one is refused.
    Exclusive,
    /// One client owns it; the present owner is shut out.
    Take,
    /// One client owns it, and this one may later.
    Standby,
    /// One client owns it, and a group of gateways decides which.
    Group,
}

impl ImageOwnership {
    /// The words of the option `exclusive`.
    pub(super) const WORDS: [(&'static str, ImageOwnership); 5] = [
        ("off", ImageOwnership::Shared),
        ("on", ImageOwnership::Exclusive),
        ("take", ImageOwnership::Take),
        ("standby", ImageOwnership::Standby),
        ("group", ImageOwnership::Group),
    ];

    /// Whether one client owns it.
    #[must_use]
    pub fn is_exclusive(self) -> bool {
        self != ImageOwnership::Shared
    }

    /// Whether this client does not own it at first.
    #[must_use]
    pub fn begins_standby(self) -> bool {
        matches!(self, ImageOwnership::Standby | ImageOwnership::Group)
    }
}

impl RbdSpec {
    /// An image without options.
    #[must_use]
    pub fn new(pool: String, image: String) -> RbdSpec {
        RbdSpec {
            pool,
            namespace: None,
            image,
            snapshot: None,
            id: None,
            conf: None,
            keyring: None,
            read_only: false,
            ownership: ImageOwnership::Shared,
            timeout: None,
            blocks: BlockSizes::default(),
        }
    }
}

/// Destination of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogTarget {
    /// Standard error.
    Stderr,
    /// A file, appended to.
    File(PathBuf),
}

/// Why a text is not a volume spec: one line that names the spec and a remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SpecError(String);

/// Depth of nesting; bounds the stack that a hostile text can use.
pub const MAX_NESTING: u32 = 32;

#[cfg(test)]
mod tests;
