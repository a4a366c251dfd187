//! Why a volume cannot be attached, or its disk not detached, in any way.

use super::fuse::FuseError;
use super::nbd::NetlinkError;
use super::ublk::ControlError;
use blockmux_proto::kernel_disk::UnsupportedBlocks;
use std::io;
use std::path::PathBuf;

/// Why a volume cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The driver cannot be used.
    #[error(transparent)]
    Ublk(#[from] ControlError),
    /// The NBD driver cannot be used.
    #[error(transparent)]
    Nbd(#[from] NetlinkError),
    /// The file system cannot be mounted.
    #[error(transparent)]
    Fuse(#[from] FuseError),
    /// The kernel's disks have no such blocks.
    #[error(transparent)]
    Blocks(#[from] UnsupportedBlocks),
    /// Another process has attached the volume.
    #[error("is attached as {} by process {process}; use that disk, or stop the process first", node.display())]
    InUse {
        /// The node of the disk.
        node: PathBuf,
        /// The process ID of its server.
        process: i32,
    },
    /// Another process, which is not known, has attached the volume.
    #[error("is attached as {} by another process; use that disk, or stop the process first", node.display())]
    InUseBySomebody {
        /// The node of the disk.
        node: PathBuf,
    },
    /// The process that had attached the volume has left its disk, and the volume is another one
    /// now.
    #[error(
        "{} was left by a process that has ended, with another size, block size, cache or write protection; attach \
         the volume with these, or remove the disk with --forget",
        node.display()
    )]
    Changed {
        /// The node of the disk.
        node: PathBuf,
    },
    /// Another disk has the name.
    #[error("{} is {}; choose another name, or detach that disk", link.display(), other.display())]
    NameInUse {
        /// The link of the name.
        link: PathBuf,
        /// The node of the other disk.
        other: PathBuf,
    },
    /// The node in `/dev` does not appear, or cannot be used.
    #[error("{}: {error}; is there such a disk, and is devtmpfs mounted at /dev?", node.display())]
    Node {
        /// The node.
        node: PathBuf,
        /// What failed.
        error: io::Error,
    },
    /// The node in `/dev` does not become the user's.
    #[error(
        "{} does not become yours: udev does not give it to you; enable the lines for users in 90-blockmux.rules of \
         udev, or run as root",
        node.display()
    )]
    NotOwned {
        /// The node.
        node: PathBuf,
    },
    /// The disk cannot be read.
    #[error("{}: the first read failed: {error}; is the volume available?", node.display())]
    FirstRead {
        /// The node.
        node: PathBuf,
        /// What failed.
        error: io::Error,
    },
    /// A socket cannot be made.
    #[error("cannot listen at {}: {error}; is the directory there, and is no other program at this socket?", path.display())]
    Socket {
        /// The file of the socket.
        path: PathBuf,
        /// What failed.
        error: io::Error,
    },
    /// A core cannot serve a queue.
    #[error("a core cannot serve a queue of the disk: {0}")]
    Queue(io::Error),
}

/// Why a disk is not detached.
#[derive(Debug, thiserror::Error)]
pub enum DetachError {
    /// It is in use.
    #[error("{} is in use{}; unmount it first", node.display(), at(places))]
    InUse {
        /// The node of the disk.
        node: PathBuf,
        /// Where it is mounted, as far as known.
        places: Vec<String>,
    },
    /// Its file is open, or somebody is in its directory.
    #[error("{} is in use{}; close it first", file.display(), by(users))]
    Open {
        /// The file.
        file: PathBuf,
        /// Loop devices on it.
        users: Vec<String>,
    },
    /// A front end is connected, whose virtual machine has the disk.
    #[error("{} is in use by {}; remove the disk from its virtual machine first", socket.display(), process(*id))]
    Connected {
        /// The file of the socket.
        socket: PathBuf,
        /// The process ID of the front end, if it is known.
        id: Option<u32>,
    },
    /// Its data is not on the volume.
    #[error("{}: flush failed: {error}; see whether the volume is available", node.display())]
    Flush {
        /// The node of the disk.
        node: PathBuf,
        /// What failed.
        error: io::Error,
    },
    /// The driver cannot be used.
    #[error(transparent)]
    Ublk(#[from] ControlError),
    /// The NBD driver cannot be used.
    #[error(transparent)]
    Nbd(#[from] NetlinkError),
    /// The file system cannot be unmounted.
    #[error(transparent)]
    Fuse(#[from] FuseError),
}

fn at(places: &[String]) -> String {
    if places.is_empty() { String::new() } else { format!(" at {}", places.join(", ")) }
}

fn process(id: Option<u32>) -> String {
    id.map_or_else(|| "a front end".to_owned(), |id| format!("a front end, process {id}"))
}

fn by(users: &[String]) -> String {
    if users.is_empty() { String::new() } else { format!(" by {}", users.join(", ")) }
}
