//! Registration of memory with devices that access it by DMA.
//!
//! An RDMA adapter accesses only memory that its driver has pinned, and a work request names it by
//! a local key (L_Key of the verbs). A block of memory is registered as a whole, for each
//! protection domain, at the first call of [`Seg::local_key`](crate::Seg::local_key), and stays
//! registered until it is freed: pool buffers are reused. The pages of a RAM volume are one block,
//! which the verbs provider never asks for: it copies their data (decision 103). Without such a
//! device this costs nothing.
//!
//! `docs/decisions/0053-memory-is-registered-in-blocks.md` has the reasons.

use std::ptr::NonNull;
use std::sync::Arc;

/// A protection domain of the verbs: the scope of a device's memory registrations.
pub trait ProtectionDomain: Send + Sync {
    /// Registers the `len` bytes at `start`, which stay in place until
    /// [`ProtectionDomain::deregister`]. Returns their local key.
    ///
    /// # Errors
    /// If the device or the system has no room for another registration.
    fn register(&self, start: NonNull<u8>, len: usize) -> Result<LocalKey, RegistrationError>;

    /// Ends a registration. No work request with its key is in flight.
    fn deregister(&self, key: LocalKey);
}

/// Names registered memory in work requests to one device (L_Key).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LocalKey(pub u32);

/// Memory cannot be registered: the device, or the system, has no room for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device cannot register more memory")]
pub struct RegistrationError;

/// The registrations of one block of memory, one for each protection domain.
#[derive(Default)]
pub(crate) struct Registrations(Vec<Arc<Registration>>);

/// One block in one protection domain; dropping it deregisters the block.
pub(crate) struct Registration {
    domain: Arc<dyn ProtectionDomain>,
    pub(crate) key: LocalKey,
}

impl Registrations {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The registration in `domain`; made by `register` if there is none.
    #[inline]
    pub(crate) fn get_or_insert(
        &mut self,
        domain: &Arc<dyn ProtectionDomain>,
        register: impl FnOnce() -> Result<Arc<Registration>, RegistrationError>,
    ) -> Result<&Arc<Registration>, RegistrationError> {
        let found = self.0.iter().position(|registration| registration.is_in(domain));
        let index = match found {
            Some(index) => index,
            None => {
                self.0.push(register()?);
                self.0.len() - 1
            }
        };
        Ok(&self.0[index])
    }
}

impl Registration {
    #[cold]
    pub(crate) fn new(
        domain: &Arc<dyn ProtectionDomain>,
        start: NonNull<u8>,
        len: usize,
    ) -> Result<Arc<Registration>, RegistrationError> {
        let key = domain.register(start, len)?;
        Ok(Arc::new(Registration { domain: domain.clone(), key }))
    }

    #[inline]
    fn is_in(&self, domain: &Arc<dyn ProtectionDomain>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.domain), Arc::as_ptr(domain))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.domain.deregister(self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Memory, Pages, Pool, Seg};
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    /// Registers up to `room` blocks.
    struct Device {
        room: usize,
        blocks: Mutex<BTreeMap<LocalKey, (usize, usize)>>,
    }

    impl Device {
        fn with_room(room: usize) -> Arc<Device> {
            Arc::new(Device { room, blocks: Mutex::default() })
        }

        fn blocks(&self) -> usize {
            self.blocks.lock().unwrap().len()
        }

        fn covers(&self, key: LocalKey, seg: &Seg) -> bool {
            let (start, len) = self.blocks.lock().unwrap()[&key];
            let at = seg.as_ptr().addr();
            at >= start && at + seg.len() <= start + len
        }
    }

    impl ProtectionDomain for Device {
        fn register(&self, start: NonNull<u8>, len: usize) -> Result<LocalKey, RegistrationError> {
            let mut blocks = self.blocks.lock().unwrap();
            if blocks.len() == self.room {
                return Err(RegistrationError);
            }
            let key = LocalKey(blocks.last_key_value().map_or(1, |(last, _)| last.0 + 1));
            blocks.insert(key, (start.addr().get(), len));
            Ok(key)
        }

        fn deregister(&self, key: LocalKey) {
            assert!(self.blocks.lock().unwrap().remove(&key).is_some(), "it is registered");
        }
    }

    #[test]
    fn a_block_is_registered_once_with_each_device_until_it_is_freed() {
        let (device, other) = (Device::with_room(9), Device::with_room(9));
        let domains: [Arc<dyn ProtectionDomain>; 2] = [device.clone(), other.clone()];
        let memory = Memory::from_heap(8192);
        let (first, second) = (memory.seg(0, 512), memory.seg(4096, 4096).slice(7, 9));
        let key = first.local_key(&domains[0]).unwrap();
        assert_eq!(second.local_key(&domains[0]).unwrap(), key);
        assert!(device.covers(key, &first) && device.covers(key, &second));
        let key = second.local_key(&domains[1]).unwrap();
        assert!(other.covers(key, &first));
        assert_eq!((device.blocks(), other.blocks()), (1, 1));
        drop((memory, first));
        assert_eq!((device.blocks(), other.blocks()), (1, 1));
        drop(second);
        assert_eq!((device.blocks(), other.blocks()), (0, 0));
    }

    #[test]
    fn a_pool_buffer_stays_registered_when_it_is_reused() {
        let device = Device::with_room(1);
        let domain: Arc<dyn ProtectionDomain> = device.clone();
        let pool = Pool::new(1 << 20);
        for _ in 0..3 {
            let memory = pool.take(4096).unwrap();
            memory.seg(0, 4096).local_key(&domain).unwrap();
        }
        assert_eq!(device.blocks(), 1);
        drop(pool);
        assert_eq!(device.blocks(), 0);
    }

    #[test]
    fn a_failed_registration_is_retried() {
        let device = Device::with_room(1);
        let domain: Arc<dyn ProtectionDomain> = device.clone();
        let (first, second) = (Seg::from_slice(&[1; 512]), Seg::from_slice(&[2; 512]));
        first.local_key(&domain).unwrap();
        assert_eq!(second.local_key(&domain), Err(RegistrationError));
        drop(first);
        assert!(device.covers(second.local_key(&domain).unwrap(), &second));
    }

    #[test]
    fn shared_pages_are_registered_once_for_all_cores() {
        let device = Device::with_room(1);
        let domain: Arc<dyn ProtectionDomain> = device.clone();
        let pages = Pages::from_heap(16384);
        let first = Memory::from_pages(&pages).seg(0, 4096).local_key(&domain).unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| Memory::from_pages(&pages).seg(8192, 512).local_key(&domain).unwrap());
            assert_eq!(other.join().unwrap(), first);
        });
        assert_eq!(device.blocks(), 1);
        drop(pages);
        assert_eq!(device.blocks(), 0);
    }
}
