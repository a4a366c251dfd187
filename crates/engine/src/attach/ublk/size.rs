//! Gives a disk the size of its volume whenever that changes.

use super::control::UblkControl;
use super::node::disk_node;
use blockmux_proto::ublk::sectors;
use blockmux_proto::ublk::wire::ControlOp;
use blockmux_proto::volume_state::{SizeWatch, VolumeState};
use std::sync::{Arc, Mutex, PoisonError};
use tracing::warn;

/// A disk that follows its volume's size until this is dropped. Drop it before the disk is stopped:
/// older drivers crash when they set the size of a disk that is gone.
pub(super) struct SizeFollower {
    _watch: SizeWatch,
    control: Arc<Mutex<Option<UblkControl>>>,
}

impl SizeFollower {
    /// Follows the size of `volume_state` with disk `id`, which has `now` sectors. Without
    /// `can_resize`, the driver cannot change the size, and the user is told.
    pub(super) fn begin(
        control: &UblkControl,
        id: u32,
        now: u64,
        volume_state: &VolumeState,
        can_resize: bool,
    ) -> SizeFollower {
        let control = Arc::new(Mutex::new(Some(control.clone())));
        let follow = {
            let control = control.clone();
            move |size| {
                let control = control.lock().unwrap_or_else(PoisonError::into_inner);
                match &*control {
                    Some(control) if can_resize => {
                        control.send(ControlOp::UPDATE_SIZE, id, sectors(size));
                    }
                    Some(_) => warn!(
                        "{}: the volume has {size} bytes now; the kernel sees that when the volume is attached again, \
                         and at once from Linux 6.16 on",
                        disk_node(id).display()
                    ),
                    None => {}
                }
            }
        };
        let watch = SizeWatch::begin(volume_state, follow.clone());
        // It may have changed before it was watched.
        let size = volume_state.volume().info().size;
        if sectors(size) != now {
            follow(size);
        }
        SizeFollower { _watch: watch, control }
    }
}

impl Drop for SizeFollower {
    fn drop(&mut self) {
        // A call that is under way has sent its command when this returns.
        *self.control.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
