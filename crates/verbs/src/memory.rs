//! Memory that devices access: protection domains, in which blocks are registered, and the windows
//! that open parts of them to peers.
//!
//! A device has one *shared* domain, for all its connections. Blocks are registered there with
//! local rights only, and stay so until they are freed (decision 53). A peer reaches nothing by
//! such a registration: only a window of type 2 opens memory, for one queue pair, and exactly the
//! bytes of one command.
//!
//! A connection that cannot do without remote rights is *confined*: it has a domain of its own, in
//! which no memory is registered but that of this connection (decision 103).
#![expect(unsafe_code, reason = "calls libibverbs, and owns what it allocates")]

use crate::abi::*;
use crate::connection::ConnectionId;
use crate::device::{DeviceAttributes, MemoryWindows, attributes_of, text};
use crate::error::VerbsError;
use crate::library::Library;
use blockmux_volume::{LocalKey, ProtectionDomain, RegistrationError};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A device that connections use.
pub(crate) struct OpenDevice {
    pub(crate) library: &'static Library,
    pub(crate) device: NonNull<ibv_context>,
    attributes: DeviceAttributes,
    is_iwarp: bool,
    /// Keeps the device open: librdmacm closes one that is removed with its last identifier.
    _keeps_open: ConnectionId,
}

// SAFETY: any thread may call the functions of libibverbs, and nothing uses the identifier.
unsafe impl Send for OpenDevice {}
// SAFETY: as for `Send`.
unsafe impl Sync for OpenDevice {}

impl OpenDevice {
    fn new(id: &ConnectionId, device: NonNull<ibv_context>) -> Result<OpenDevice, VerbsError> {
        let library = id.library;
        let own = ConnectionId::bound_to(id.local_address().ok_or(NO_DEVICE)?)?;
        if own.device() != Some(device) {
            return Err(VerbsError::Unsupported("the address of the connection belongs to another device"));
        }
        // SAFETY: the device is open, and `own` keeps it so.
        let transport = unsafe { (*(*device.as_ptr()).device).transport_type };
        // SAFETY: as above.
        let attributes = unsafe { attributes_of(library, device) }?;
        let is_iwarp = transport == IBV_TRANSPORT_IWARP;
        Ok(OpenDevice { library, device, attributes, is_iwarp, _keeps_open: own })
    }

    /// The kernel's name of the device.
    pub(crate) fn name(&self) -> String {
        // SAFETY: the device is open, and its names do not change.
        text(unsafe { &(*(*self.device.as_ptr()).device).name })
    }
}

/// A protection domain of the device.
struct RawDomain {
    domain: NonNull<ibv_pd>,
    device: Arc<OpenDevice>,
}

// SAFETY: any thread may call the functions of libibverbs.
unsafe impl Send for RawDomain {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawDomain {}

impl RawDomain {
    fn new(device: &Arc<OpenDevice>) -> Result<Arc<RawDomain>, VerbsError> {
        // SAFETY: `OpenDevice` keeps it open.
        let domain = unsafe { (device.library.verbs.ibv_alloc_pd)(device.device.as_ptr()) };
        let domain = NonNull::new(domain).ok_or_else(|| VerbsError::last("ibv_alloc_pd"))?;
        Ok(Arc::new(RawDomain { domain, device: device.clone() }))
    }
}

impl Drop for RawDomain {
    fn drop(&mut self) {
        // It fails if the device is gone.
        // SAFETY: freed once; what was made in the domain has kept it, and is gone.
        unsafe { (self.device.library.verbs.ibv_dealloc_pd)(self.domain.as_ptr()) };
    }
}

/// Registrations in a protection domain, all with the same rights.
pub struct Domain {
    raw: Arc<RawDomain>,
    /// `enum ibv_access_flags` of its registrations.
    rights: c_uint,
    /// By their local keys.
    regions: Mutex<BTreeMap<u32, NonNull<ibv_mr>>>,
}

// SAFETY: any thread may call the functions of libibverbs, and the map of regions is locked.
unsafe impl Send for Domain {}
// SAFETY: as for `Send`.
unsafe impl Sync for Domain {}

/// The shared domains of this process. They stay until it ends, as librdmacm's devices do: blocks
/// of memory, which refer to them, may be as old as the process.
static DOMAINS: Mutex<Vec<Arc<Domain>>> = Mutex::new(Vec::new());

/// How a connection uses memory.
pub(crate) enum DomainUse {
    /// By the device's shared domain.
    Shared(Arc<Domain>),
    /// By a domain of its own, in two parts: without remote rights, and with them.
    Confined { local: Arc<Domain>, exposed: Arc<Domain> },
}

impl DomainUse {
    /// For a connection of `shared` whose peer may need access to its memory.
    pub(crate) fn of(shared: Arc<Domain>, opens_memory: bool) -> Result<DomainUse, VerbsError> {
        let device = &shared.raw.device;
        if !(device.is_iwarp || opens_memory && shared.is_confining()) {
            return Ok(DomainUse::Shared(shared));
        }
        let raw = RawDomain::new(device)?;
        // RFC 5040 §4.4: the peer's answer to an RDMA Read writes by a key of this side.
        let to_read = if opens_memory { IBV_ACCESS_REMOTE_READ } else { 0 };
        let rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | to_read;
        let local = Arc::new(Domain::new(raw.clone(), IBV_ACCESS_LOCAL_WRITE));
        Ok(DomainUse::Confined { local, exposed: Arc::new(Domain::new(raw, rights)) })
    }
}

impl Domain {
    /// The shared domain of the device that a connection uses.
    pub(crate) fn of(id: &ConnectionId) -> Result<Arc<Domain>, VerbsError> {
        let device = id.device().ok_or(NO_DEVICE)?;
        let mut domains = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(domain) = domains.iter().find(|domain| domain.device() == device) {
            return Ok(domain.clone());
        }
        let device = Arc::new(OpenDevice::new(id, device)?);
        let windows = match device.attributes.windows {
            MemoryWindows::None => 0,
            MemoryWindows::Type2A | MemoryWindows::Type2B => IBV_ACCESS_MW_BIND,
        };
        let domain = Arc::new(Domain::new(RawDomain::new(&device)?, IBV_ACCESS_LOCAL_WRITE | windows));
        domains.push(domain.clone());
        Ok(domain)
    }

    fn new(raw: Arc<RawDomain>, rights: c_uint) -> Domain {
        Domain { raw, rights, regions: Mutex::default() }
    }

    /// What the device can do.
    #[must_use]
    pub fn attributes(&self) -> &DeviceAttributes {
        &self.raw.device.attributes
    }

    /// Whether the device opens memory to peers only by registrations, so that connections which do
    /// so are confined.
    pub(crate) fn is_confining(&self) -> bool {
        self.raw.device.is_iwarp || self.attributes().windows == MemoryWindows::None
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
        self.raw.domain.as_ptr()
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.raw.device.library
    }

    pub(crate) fn device(&self) -> NonNull<ibv_context> {
        self.raw.device.device
    }

    pub(crate) fn open_device(&self) -> &Arc<OpenDevice> {
        &self.raw.device
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
    fn register(&self, start: NonNull<u8>, len: usize) -> Result<LocalKey, RegistrationError> {
        let (start, rights) = (start.as_ptr().cast(), self.rights as c_int);
        // SAFETY: the memory stays in place until it is deregistered; the caller sees to that.
        let region = unsafe { (self.library().verbs.ibv_reg_mr)(self.raw(), start, len, rights) };
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
            unsafe { (self.library().verbs.ibv_dereg_mr)(region.as_ptr()) };
        }
    }
}

/// A memory window of type 2: a key by which a peer reaches a part of a registered block.
pub(crate) struct Window {
    pub(crate) window: NonNull<ibv_mw>,
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
        // SAFETY: freed once. No work that binds it will be executed.
        VerbsError::check_number("ibv_dealloc_mw", unsafe { free(self.window.as_ptr()) })
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
pub(crate) const NO_WINDOWS: VerbsError =
    VerbsError::Unsupported("the device has no memory windows of type 2, by which memory was to be opened");
