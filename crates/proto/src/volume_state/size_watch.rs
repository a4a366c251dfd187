//! Notifications of the size alone, for users of a volume without a protocol.

use super::{Change, VolumeState, Watcher};
use blockmux_volume::Volume;
use std::sync::Arc;

/// Calls a function with the size of a volume after each change. Dropping it ends the calls.
pub struct SizeWatch {
    _watcher: Arc<dyn Watcher>,
}

struct OnSize<F> {
    volume: Arc<dyn Volume>,
    call: F,
}

impl<F: Fn(u64) + Send + Sync> Watcher for OnSize<F> {
    fn on_change(&self, change: &Change<'_>) {
        if let Change::Size = change {
            (self.call)(self.volume.info().size);
        }
    }
}

impl SizeWatch {
    /// Calls `call` with the size in bytes after each change of it, from any thread. It must return
    /// at once, and not use `volume_state`.
    pub fn begin(volume_state: &VolumeState, call: impl Fn(u64) + Send + Sync + 'static) -> SizeWatch {
        let volume = volume_state.volume().clone();
        let watcher: Arc<dyn Watcher> = Arc::new(OnSize { volume, call });
        volume_state.watch(Arc::downgrade(&watcher));
        SizeWatch { _watcher: watcher }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::{MemVolume, Resize};
    use std::sync::Mutex;

    #[test]
    fn a_size_watch_gets_each_new_size_until_it_is_dropped() {
        let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(1 << 20));
        let state = VolumeState::new(volume);
        let sizes: Arc<Mutex<Vec<u64>>> = Arc::default();
        let seen = sizes.clone();
        let watch = SizeWatch::begin(&state, move |size| seen.lock().unwrap().push(size));
        let resize = |size| state.resize(Resize::discard_beyond(size)).unwrap();
        resize(1 << 19);
        drop(watch);
        resize(1 << 20);
        assert_eq!(*sizes.lock().unwrap(), [1 << 19]);
    }

    #[test]
    fn only_the_last_resize_is_undone() {
        let state = VolumeState::new(Arc::new(MemVolume::new(1 << 20)));
        let to = Resize::discard_beyond;
        let first = state.resize(to(1 << 19)).unwrap();
        let second = state.resize(to(1 << 19)).unwrap();
        assert!(!state.is_last_resize(first) && state.is_last_resize(second));
        assert!(!state.resize_again(first, to(1 << 20)).unwrap(), "another has resized it since");
        assert_eq!(state.volume().info().size, 1 << 19);
        assert!(state.resize_again(second, to(1 << 20)).unwrap());
        assert_eq!(state.volume().info().size, 1 << 20);
        assert!(!state.resize_again(second, to(1 << 19)).unwrap(), "it is undone");
    }
}
