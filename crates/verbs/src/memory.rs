//! Memory that devices access: the protection domain of each device, in which blocks are
//! registered, and the windows that open parts of them to peers.
//!
//! Blocks are registered with local rights only, and stay so until they are freed (decision 53). A
//! peer reaches nothing by a registration: only a window of type 2 opens memory, for one queue
//! pair, and exactly the bytes of one command (decision 103).
#![expect(unsafe_code, reason = "calls libibverbs, and owns what it allocates")]

use crate::abi::*;
use crate::connection::ConnectionId;
use crate::device::{DeviceAttributes, MemoryWindows, attributes_of};
use crate::error::VerbsError;
use crate::library::Library;
use blockmux_volume::{LocalKey, ProtectionDomain, RegistrationError};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The protection domain of one device, with all memory of this process that is registered there.
pub struct Domain {
    library: &'static Library,
    device: NonNull<ibv_context>,
    domain: NonNull<ibv_pd>,
    attributes: DeviceAttributes,
    /// By their local keys.
    regions: Mutex<BTreeMap<u32, NonNull<ibv_mr>>>,
    /// Keeps the device open: librdmacm closes one that is removed with its last identifier.
    _keeps_open: ConnectionId,
}

// SAFETY: any thread may call the functions of libibverbs; the map of regions is locked, and
// nothing uses the identifier.
unsafe impl Send for Domain {}
// SAFETY: as for `Send`.
unsafe impl Sync for Domain {}

/// The domains of this process. They stay until it ends, as librdmacm's devices do: blocks of
/// memory, which refer to them, may be as old as the process.
static DOMAINS: Mutex<Vec<Arc<Domain>>> = Mutex::new(Vec::new());

impl Domain {
    /// The domain of the device that a connection uses.
    pub(crate) fn of(id: &ConnectionId) -> Result<Arc<Domain>, VerbsError> {
        let device = id.device().ok_or(NO_DEVICE)?;
        let mut domains = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(domain) = domains.iter().find(|domain| domain.device() == device) {
            return Ok(domain.clone());
        }
        let domain = Arc::new(Domain::new(id, device)?);
        domains.push(domain.clone());
        Ok(domain)
    }

    fn new(id: &ConnectionId, device: NonNull<ibv_context>) -> Result<Domain, VerbsError> {
        let library = id.library();
        let own = ConnectionId::bound_to(id.local_address().ok_or(NO_DEVICE)?)?;
        if own.device() != Some(device) {
            return Err(VerbsError::Unsupported("the address of the connection belongs to another device"));
        }
        // SAFETY: the device is open, and `own` keeps it so.
        let transport = unsafe { (*(*device.as_ptr()).device).transport_type };
        if transport == IBV_TRANSPORT_IWARP {
            return Err(IWARP);
        }
        // SAFETY: as above.
        let attributes = unsafe { attributes_of(library, device) }?;
        // SAFETY: as above.
        let domain = unsafe { (library.verbs.ibv_alloc_pd)(device.as_ptr()) };
        let domain = NonNull::new(domain).ok_or_else(|| VerbsError::last("ibv_alloc_pd"))?;
        Ok(Domain { library, device, domain, attributes, regions: Mutex::default(), _keeps_open: own })
    }

    /// What the device can do.
    #[must_use]
    pub fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    /// Number of blocks that are registered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.regions().len()
    }

    /// Whether no block is registered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn raw(&self) -> *mut ibv_pd {
        self.domain.as_ptr()
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.library
    }

    pub(crate) fn device(&self) -> NonNull<ibv_context> {
        self.device
    }

    /// The region with this local key, which its block keeps.
    pub(crate) fn region(&self, key: LocalKey) -> Option<NonNull<ibv_mr>> {
        self.regions().get(&key.0).copied()
    }

    fn regions(&self) -> MutexGuard<'_, BTreeMap<u32, NonNull<ibv_mr>>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProtectionDomain for Domain {
    /// Registers with local rights, and that to bind windows where the device has them.
    fn register(&self, start: NonNull<u8>, len: usize) -> Result<LocalKey, RegistrationError> {
        let windows = match self.attributes.windows {
            MemoryWindows::None => 0,
            MemoryWindows::Type2A | MemoryWindows::Type2B => IBV_ACCESS_MW_BIND,
        };
        let access = (IBV_ACCESS_LOCAL_WRITE | windows) as c_int;
        let start = start.as_ptr().cast();
        // SAFETY: the memory stays in place until it is deregistered; the caller sees to that.
        let region = unsafe { (self.library.verbs.ibv_reg_mr)(self.raw(), start, len, access) };
        let region = NonNull::new(region).ok_or(RegistrationError)?;
        // SAFETY: just made.
        let key = unsafe { region.as_ref() }.lkey;
        self.regions().insert(key, region);
        Ok(LocalKey(key))
    }

    fn deregister(&self, key: LocalKey) {
        if let Some(region) = self.regions().remove(&key.0) {
            // It fails if the device is gone, which then has no access either.
            // SAFETY: made by `register`, and removed from the map, so nothing else uses it.
            unsafe { (self.library.verbs.ibv_dereg_mr)(region.as_ptr()) };
        }
    }
}

/// A memory window of type 2: a key by which a peer reaches a part of a registered block.
pub(crate) struct Window {
    window: NonNull<ibv_mw>,
    /// Keeps the device open.
    domain: Arc<Domain>,
}

impl Window {
    pub(crate) fn new(domain: &Arc<Domain>) -> Result<Window, VerbsError> {
        // SAFETY: the domain keeps the device open.
        let operations = unsafe { &domain.device().as_ref().ops };
        let allocate = operations.alloc_mw.ok_or(NO_WINDOWS)?;
        // SAFETY: the domain is valid.
        let window = unsafe { allocate(domain.raw(), IBV_MW_TYPE_2) };
        let window = NonNull::new(window).ok_or_else(|| VerbsError::last("ibv_alloc_mw"))?;
        Ok(Window { window, domain: domain.clone() })
    }

    pub(crate) fn raw(&self) -> *mut ibv_mw {
        self.window.as_ptr()
    }

    /// The key that the window has, or had last.
    pub(crate) fn key(&self) -> u32 {
        // SAFETY: the window is valid, and only its owner uses it.
        unsafe { self.window.as_ref() }.rkey
    }

    /// Notes the key of a posted bind: devices find the window by it at the next one.
    pub(crate) fn set_key(&mut self, key: u32) {
        // SAFETY: as in `key`.
        unsafe { self.window.as_mut() }.rkey = key;
    }
}

impl Window {
    /// Frees the window. If it is bound, the peer has no access when this returns.
    pub(crate) fn free(self) -> Result<(), VerbsError> {
        let mut window = ManuallyDrop::new(self);
        let freed = window.free_once();
        // SAFETY: taken once, since `drop` is not called.
        drop(unsafe { std::ptr::read(&raw const window.domain) });
        freed
    }

    fn free_once(&mut self) -> Result<(), VerbsError> {
        // SAFETY: the domain keeps the device open.
        let operations = unsafe { &self.domain.device().as_ref().ops };
        let free = operations.dealloc_mw.ok_or(NO_WINDOWS)?;
        // SAFETY: freed once. No work that binds it is in the queue.
        VerbsError::check_number("ibv_dealloc_mw", unsafe { free(self.raw()) })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // Its queue pair is destroyed next, so nobody has access if this fails.
        let _ = self.free_once();
    }
}

pub(crate) const NO_DEVICE: VerbsError =
    VerbsError::Unsupported("the connection has no device yet; its address is not resolved");
const IWARP: VerbsError = VerbsError::Unsupported(
    "it is an iWARP device, which rdma=verbs does not use in this version; use rdma=iwarp over its interface",
);
pub(crate) const NO_WINDOWS: VerbsError = VerbsError::Unsupported(
    "the device has no memory windows of type 2, which open memory to targets safely; use software iWARP \
     or RoCEv2 (rdma=iwarp, rdma=roce)",
);
