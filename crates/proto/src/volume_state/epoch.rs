//! Fencing: a user of a volume belongs to the epoch in which its session began. A fence refuses the
//! I/O of all users, and once theirs in flight is complete, the next epoch begins with new ones
//! (decision 92).
//!
//! A server that shares a volume with others fences it when the others may have taken over. What
//! its clients have sent before is then out of date: they may have sent it again through another
//! server. So sessions are fenced, and not requests: what a client has sent may still be in the
//! buffer of a socket.

use super::VolumeState;
use super::in_flight::Fenced;
use blockmux_volume::IoError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The epoch in which a session began. A session takes it before it answers a login, because all
/// requests are sent afterwards. One number counts the epochs of all volumes, so that a session
/// needs nothing for volumes that it does not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch(pub(super) u32);

impl Epoch {
    /// That of the sessions that another process has handed over to this one: an earlier one than
    /// those of all others, once a volume was fenced.
    pub(crate) const HANDED_OVER: Epoch = Epoch(0);

    /// The epoch of a session that begins now.
    #[must_use]
    pub fn current() -> Epoch {
        Epoch(EPOCHS.load(Ordering::SeqCst))
    }

    /// The number of a new epoch, to which sessions belong that begin from now on.
    pub(super) fn next() -> u32 {
        EPOCHS.fetch_add(1, Ordering::SeqCst).saturating_add(1)
    }
}

/// A fence of a volume: until the next epoch begins, all I/O is refused.
pub struct Fence {
    volume_state: Arc<VolumeState>,
    fenced_at: u64,
}

impl Fence {
    /// Refuses all further I/O of sessions that have begun, with [`IoError::Fenced`], and of others
    /// until [`Fence::begin_epoch`]. A fence that is dropped stays.
    #[must_use]
    pub fn begin(volume_state: &Arc<VolumeState>) -> Fence {
        Fence { volume_state: volume_state.clone(), fenced_at: volume_state.in_flight.fence() }
    }

    /// Begins the next epoch, once all I/O that was admitted before the fence is complete; call it
    /// until it returns true. Then sessions that begin may use the volume, and earlier ones never.
    /// If the volume was fenced again, that fence begins the epoch.
    #[must_use]
    pub fn begin_epoch(&self) -> bool {
        self.volume_state.in_flight.begin_epoch(self.fenced_at, Epoch::next)
    }
}

impl From<Fenced> for IoError {
    fn from(_: Fenced) -> IoError {
        IoError::Fenced
    }
}

/// The number of epochs that have begun after a fence, of all volumes.
static EPOCHS: AtomicU32 = AtomicU32::new(0);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume_state::{Admission, AtomicRange, IoGuard, NotAdmitted, RequiredAccess};
    use blockmux_volume::{MemVolume, Op};

    fn volume_state() -> Arc<VolumeState> {
        VolumeState::new(Arc::new(MemVolume::new(1 << 20)))
    }

    fn user(volume_state: &Arc<VolumeState>) -> Admission {
        Admission::new(volume_state, None, Epoch::current())
    }

    fn write(user: &Admission) -> Result<Option<IoGuard>, NotAdmitted<IoError>> {
        write_in(user, None)
    }

    fn write_in(
        user: &Admission,
        atomic: Option<&mut AtomicRange>,
    ) -> Result<Option<IoGuard>, NotAdmitted<IoError>> {
        user.admit(Op::Write { fua: false }, (0, 512), RequiredAccess::Writing, atomic)
    }

    fn is_fenced(user: &Admission) -> bool {
        matches!(write(user), Err(NotAdmitted::Denied(IoError::Fenced)))
    }

    #[test]
    fn users_of_an_ended_epoch_stay_fenced_and_new_ones_wait_for_their_io() {
        let (volume_state, other) = (volume_state(), volume_state());
        let (mut used, idle, of_other) = (user(&volume_state), user(&volume_state), user(&other));
        let io = write(&used).unwrap();
        assert_eq!(used.complaint(), Some("an initiator has reserved the volume"), "for another reason");
        let fence = Fence::begin(&volume_state);
        assert!(is_fenced(&used) && is_fenced(&idle));
        let early = user(&volume_state);
        assert!(!fence.begin_epoch() && is_fenced(&early), "a write is in flight");
        drop(io);
        assert!(fence.begin_epoch() && fence.begin_epoch());
        assert!(is_fenced(&used) && is_fenced(&idle));
        assert!(is_fenced(&early), "it began when nobody was admitted");
        assert!(write(&user(&volume_state)).is_ok());
        assert!(write(&of_other).is_ok(), "another volume is not fenced");
        assert_eq!(used.complaint(), Some("the volume was fenced; the client must connect again"));
        assert_eq!(used.complaint(), None);
        // What is complete can still be made durable.
        assert!(used.admit(Op::Flush, (0, 0), RequiredAccess::Nothing, None).is_ok());
    }

    #[test]
    fn the_last_of_several_fences_begins_the_epoch() {
        let volume_state = volume_state();
        let first = Fence::begin(&volume_state);
        let second = Fence::begin(&volume_state);
        assert!(first.begin_epoch(), "it has nothing to do");
        assert!(is_fenced(&user(&volume_state)));
        assert!(second.begin_epoch());
        let new = user(&volume_state);
        assert!(write(&new).is_ok());
        // Epochs of other volumes change nothing.
        assert!(Fence::begin(&super::tests::volume_state()).begin_epoch() && write(&new).is_ok());
    }

    #[test]
    fn a_command_that_has_locked_its_range_is_fenced_too() {
        let volume_state = volume_state();
        let old = user(&volume_state);
        let mut range = AtomicRange::new(&volume_state, 0, 512);
        drop(write_in(&old, Some(&mut range)).unwrap());
        let fence = Fence::begin(&volume_state);
        assert!(matches!(write_in(&old, Some(&mut range)), Err(NotAdmitted::Denied(IoError::Fenced))));
        assert!(fence.begin_epoch(), "its lock delays no epoch");
        let new = user(&volume_state);
        assert!(matches!(write(&new), Err(NotAdmitted::Locked(_))));
        assert!(is_fenced(&old), "and not locked");
        drop(range);
        assert!(write(&new).is_ok());
    }

    #[test]
    fn who_may_not_write_locks_no_range() {
        let volume_state = volume_state();
        let old = user(&volume_state);
        assert!(Fence::begin(&volume_state).begin_epoch());
        let mut range = AtomicRange::new(&volume_state, 0, 512);
        assert!(matches!(write_in(&old, Some(&mut range)), Err(NotAdmitted::Denied(IoError::Fenced))));
        assert!(write(&user(&volume_state)).is_ok(), "the range is not locked");
    }
}
