//! What has failed, and what to do.

use crate::library::LibraryError;
use std::ffi::c_int;
use std::io;
use std::time::Duration;

/// An image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// Ceph's libraries are not there.
    #[error("{0}")]
    Library(#[from] LibraryError),
    /// A name has a byte 0, or is empty.
    #[error("{0} is not a name for Ceph")]
    Name(&'static str),
    /// The config cannot be read.
    #[error("cannot read Ceph's config {path}: {reason}; give its path, as in conf=/etc/ceph/ceph.conf")]
    Conf {
        /// The path, or where it was looked for.
        path: String,
        /// Why.
        reason: String,
    },
    /// The config names no monitor, or the user has no key.
    #[error(
        "Ceph's config names no monitor, or no keyring has a key for client.{user}; give the user with id=, \
         and a readable file with its key with keyring=PATH"
    )]
    NoKey {
        /// The user, without `client.`.
        user: String,
    },
    /// The cluster refuses the user.
    #[error("the cluster refuses client.{user}: {error}; check id= and the key in its keyring")]
    Refused {
        /// The user, without `client.`.
        user: String,
        /// The reason.
        error: Errno,
    },
    /// No monitor answers.
    #[error(
        "no monitor of the cluster answers within {} s: {monitors}; are they reachable, and have they a quorum?",
        .waited.as_secs()
    )]
    NoMonitor {
        /// Their addresses, as the config has them.
        monitors: String,
        /// Time that was waited.
        waited: Duration,
    },
    /// The monitors answer, but the image does not open.
    #[error(
        "the image does not open within {} s, while {up} of {all} storage daemons of the cluster run; \
         'ceph health detail' says what is missing", .waited.as_secs()
    )]
    NoStorage {
        /// Storage daemons that run, as the monitors know.
        up: u64,
        /// Storage daemons of the cluster.
        all: u64,
        /// Time that was waited.
        waited: Duration,
    },
    /// The connection is there, but neither the image opens nor do the monitors answer.
    #[error(
        "the image does not open within {} s, and the monitors do not answer any longer; are they reachable?",
        .0.as_secs()
    )]
    MonitorsLost(Duration),
    /// The image does not open, and the monitors do not say how many storage daemons run.
    #[error("the image does not open within {} s; 'ceph health detail' says what is missing", .0.as_secs())]
    OpenTimeout(Duration),
    /// A call about an open image does not return.
    #[error("the cluster does not answer within {} s; 'ceph health detail' says what is missing", .0.as_secs())]
    NoAnswer(Duration),
    /// The group's member, by whose client the image is opened, has none now.
    #[error("this gateway has no connection of its group to the cluster now; it is tried again")]
    NoClient,
    /// What the call was for was given up meanwhile.
    #[error("given up meanwhile")]
    GivenUp,
    /// The lock was acquired, but cannot be used, and perhaps is not released.
    #[error("{error}; and the image's lock is not released: {why}")]
    NotReleased {
        /// Why it cannot be used.
        error: String,
        /// Why it is not released.
        why: String,
    },
    /// The pool does not exist.
    #[error("there is no pool {0}; list pools with 'ceph osd pool ls'")]
    NoPool(String),
    /// The image does not exist.
    #[error("there is no image {image} in {place}; list images with 'rbd ls {place}'")]
    NoImage {
        /// The image.
        image: String,
        /// The pool, or pool and namespace.
        place: String,
    },
    /// The snapshot does not exist.
    #[error("the image has no snapshot {0}; list snapshots with 'rbd snap ls'")]
    NoSnapshot(String),
    /// The user may not use the image.
    #[error(
        "client.{user} may not open the image; give it the caps 'mon \"profile rbd\" osd \"profile rbd pool={pool}\"'"
    )]
    NoPermission {
        /// The user, without `client.`.
        user: String,
        /// The pool.
        pool: String,
    },
    /// Another client has acquired the image's lock.
    #[error(
        "another client owns the image: {owner}; stop it, or have the cluster refuse all of its requests \
         (exclusive=take, ctl activate --take, or 'ceph osd blocklist add {owner}' for an image of a gateway group)"
    )]
    Owned {
        /// Its address.
        owner: String,
    },
    /// The image was deleted, and another one has its name.
    #[error("{0} is another image now; remove the volume and add it again")]
    OtherImage(String),
    /// The image has no exclusive lock.
    #[error(
        "the image has no lock that makes it exclusive; enable it with 'rbd feature enable IMAGE exclusive-lock'"
    )]
    NoLock,
    /// A call has failed.
    #[error("{call}: {error}")]
    Call {
        /// The function.
        call: &'static str,
        /// The reason.
        error: Errno,
    },
}

impl RbdError {
    /// The result of a call that returns a negative error number.
    pub(crate) fn check(call: &'static str, result: c_int) -> Result<c_int, RbdError> {
        Errno::check(result).map_err(|error| RbdError::Call { call, error })
    }

    /// Whether the cluster refuses this client.
    #[must_use]
    pub fn is_blocklisted(&self) -> bool {
        matches!(self, RbdError::Call { error: Errno(libc::ESHUTDOWN), .. })
    }
}

/// An error number of Ceph, positive; the same numbers as Linux has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    pub(crate) fn check(result: c_int) -> Result<c_int, Errno> {
        if result < 0 { Err(Errno(result.saturating_neg())) } else { Ok(result) }
    }
}

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            // The number is ESHUTDOWN, whose text says nothing of what has happened.
            libc::ESHUTDOWN => f.write_str("the cluster has blocklisted this client"),
            number => io::Error::from_raw_os_error(number).fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_call_and_the_reason() {
        assert!(RbdError::check("rbd_open", 3).is_ok());
        let error = RbdError::check("rbd_open", -libc::ENOENT).unwrap_err();
        assert_eq!(error.to_string(), "rbd_open: No such file or directory (os error 2)");
        let error = RbdError::check("rbd_get_size", -libc::ESHUTDOWN).unwrap_err();
        assert_eq!(error.to_string(), "rbd_get_size: the cluster has blocklisted this client");
        assert_eq!(Errno::check(c_int::MIN), Err(Errno(c_int::MAX)));
    }
}
