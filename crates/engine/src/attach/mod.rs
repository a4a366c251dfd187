//! Volumes as disks of this machine.
//!
//! An attached disk is a source of I/O without a peer: its queues run on the cores as any target,
//! with [`Channels`](crate::serve::channels::Channels), and so with meters, limits and admission.
//! Each way to attach is a module.

mod error;
pub mod fuse;
mod mount_table;
mod name;
pub mod nbd;
mod node;
mod notice;
pub mod own_io;
pub mod program;
mod removal;
pub mod ublk;
pub mod vhost_user;
mod wait;

use blockmux_proto::volume_state::Origin;
pub use error::{AttachError, DetachError};
pub use name::{DiskName, InvalidDiskName};
pub use node::mount_points;
use own_io::OwnIo;
pub use program::is_installed;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use tracing::warn;
pub use wait::wait_for;

/// A volume that is attached as a disk. Dropping it leaves the disk to the kernel.
///
/// A disk with something more, such as a mounted file system, returns the disk below as
/// [`AttachedDisk::inner`], whose answers are then the defaults.
pub trait AttachedDisk: Send + Sync {
    /// The disk below this one.
    fn inner(&self) -> Option<&dyn AttachedDisk> {
        None
    }

    /// Where the disk is.
    fn path(&self) -> PathBuf;

    /// Where each of its volumes is, if it has several.
    fn paths(&self) -> Vec<PathBuf> {
        vec![self.path()]
    }

    /// How the disk came to be.
    fn attached_as(&self) -> AttachedAs {
        self.inner().map_or(AttachedAs::New, AttachedDisk::attached_as)
    }

    /// Where its I/O is counted among the users of its volume.
    fn origin(&self) -> Origin;

    /// Whether the disk, with what waits for it, outlives the process.
    fn outlives_process(&self) -> bool {
        self.inner().is_some_and(AttachedDisk::outlives_process)
    }

    /// Checks that nobody uses the disk, as far as its way can tell. Somebody may at once.
    ///
    /// # Errors
    /// If it is in use.
    fn check_unused(&self) -> Result<(), DetachError>;

    /// Takes no further requests, and answers those in flight. Once the process has ended, or its
    /// cores have, a disk that outlives it waits for the next one that attaches its volume.
    fn leave(&self) {
        if let Some(inner) = self.inner() {
            inner.leave();
        }
    }

    /// Flushes and removes the disk. May block for as long as the volume takes. After
    /// [`AttachedDisk::leave`], a front end of a disk by vhost-user is disconnected, and waits for
    /// the next process.
    ///
    /// # Errors
    /// If it is in use or cannot be flushed, and stays; or if the kernel does not remove it.
    fn detach(&self) -> Result<(), DetachError>;

    /// Removes the disk although it is in use, or although its volume does not answer. Its users
    /// get errors, and lose what they have not flushed. May be called while `detach` blocks.
    ///
    /// # Errors
    /// If the kernel does not remove it.
    fn detach_by_force(&self) -> Result<(), DetachError>;

    /// Calls `tell` once the disk is removed by anybody, as by `umount`, if this way of attaching
    /// notices that.
    fn when_removed(&self, tell: Box<dyn FnOnce() + Send>) {
        if let Some(inner) = self.inner() {
            inner.when_removed(tell);
        }
    }
}

/// Options of a disk.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Number of queues; each is served by one core.
    pub queues: u16,
    /// Maximum number of requests in flight on each queue.
    pub depth: u16,
    /// Identifies the volume's data; `None` if it is lost with the process. Then the kernel removes
    /// the disk when the process ends.
    pub data: Option<NonZeroU64>,
    /// Refuse writes, also if the volume is writable.
    pub read_only: bool,
    /// Its name, if it gets one.
    pub name: Option<DiskName>,
    /// What reads and flushes the disk for the process that serves it.
    pub io: OwnIo,
    /// The disk may be one that the kernel grants to users without privileges, and trusts less: it
    /// kills the process if a request takes long.
    pub may_be_unprivileged: bool,
}

/// How a disk came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachedAs {
    /// It is new.
    New,
    /// A process that has ended had left it, and its requests go on.
    Recovered,
}

impl AttachedAs {
    /// What a failure of a disk that is served means: a new one is given up. One that was recovered
    /// goes on, because its users have it already and nobody else could serve it.
    fn settle(self, node: &Path, begun: Result<(), AttachError>) -> Result<(), AttachError> {
        match (self, begun) {
            (AttachedAs::Recovered, Err(error)) => {
                let node = node.display();
                warn!(
                    "{node}: goes on, because it may have been in use before, although this failed: {error}"
                );
                Ok(())
            }
            (_, begun) => begun,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn a_failed_first_read_gives_up_a_new_disk_only() {
        let node = Path::new("/dev/disk");
        let failed = || Err(AttachError::FirstRead { node: node.to_owned(), error: io::Error::other("no") });
        assert!(AttachedAs::New.settle(node, failed()).is_err());
        assert!(AttachedAs::Recovered.settle(node, failed()).is_ok());
        assert!(AttachedAs::New.settle(node, Ok(())).is_ok());
    }
}
