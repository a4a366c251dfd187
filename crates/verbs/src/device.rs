//! Devices that rdma-core can use, and what they can do.
#![expect(unsafe_code, reason = "calls rdma-core, and owns what it allocates")]

use crate::abi::*;
use crate::error::VerbsError;
use crate::library::{Library, LibraryError};
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// The devices of this machine that rdma-core has a provider for.
pub struct DeviceList {
    library: &'static Library,
    /// An array that the library allocated.
    first: NonNull<*mut ibv_device>,
    len: usize,
}

impl DeviceList {
    /// Lists the devices; there may be none.
    ///
    /// # Errors
    /// If rdma-core is not installed, or cannot read what the kernel lists.
    pub fn read() -> Result<DeviceList, ListError> {
        let library = Library::load()?;
        let mut len: c_int = 0;
        // SAFETY: `len` is valid for the call.
        let first = unsafe { (library.verbs.ibv_get_device_list)(&raw mut len) };
        let first = NonNull::new(first).ok_or_else(|| ListError::Refused(io::Error::last_os_error()))?;
        Ok(DeviceList { library, first, len: usize::try_from(len).unwrap_or(0) })
    }

    /// The devices, in the library's order.
    pub fn iter(&self) -> impl Iterator<Item = Device<'_>> {
        (0..self.len).filter_map(|at| {
            // SAFETY: the array has `len` elements, and is freed when `self` is dropped.
            let device = NonNull::new(unsafe { *self.first.add(at).as_ptr() })?;
            Some(Device { library: self.library, device, list: PhantomData })
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: freed once; each `Device` borrows `self`, and open devices do not need the list.
        unsafe { (self.library.verbs.ibv_free_device_list)(self.first.as_ptr()) }
    }
}

/// The devices cannot be listed.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// rdma-core is not there.
    #[error("{0}")]
    Library(#[from] LibraryError),
    /// rdma-core is there, and fails.
    #[error("rdma-core cannot list devices: {0}")]
    Refused(io::Error),
}

/// A device of a [`DeviceList`], not opened.
pub struct Device<'a> {
    library: &'static Library,
    device: NonNull<ibv_device>,
    list: PhantomData<&'a DeviceList>,
}

impl Device<'_> {
    /// The kernel's name of the device, such as `mlx5_0`.
    #[must_use]
    pub fn name(&self) -> String {
        // SAFETY: the list that `self` borrows keeps the device, whose names do not change.
        text(unsafe { &(*self.device.as_ptr()).name })
    }

    /// Opens the device.
    ///
    /// # Errors
    /// If this process may not use it, or it is being removed.
    pub fn open(&self) -> io::Result<Context> {
        // SAFETY: the list keeps the device during the call, and an open one does not need it.
        let context = unsafe { (self.library.verbs.ibv_open_device)(self.device.as_ptr()) };
        let context = NonNull::new(context).ok_or_else(io::Error::last_os_error)?;
        Ok(Context { library: self.library, context })
    }
}

/// An open device; dropping it closes it.
pub struct Context {
    library: &'static Library,
    context: NonNull<ibv_context>,
}

// SAFETY: any thread may call the functions of libibverbs, also at the same time, and this type
// changes nothing by itself.
unsafe impl Send for Context {}
// SAFETY: as for `Send`.
unsafe impl Sync for Context {}

impl Context {
    /// What the device can do.
    ///
    /// # Errors
    /// If the device has been removed.
    pub fn attributes(&self) -> io::Result<DeviceAttributes> {
        // SAFETY: the device is open.
        Ok(unsafe { attributes_of(self.library, self.context) }?)
    }

    /// The state of a port, whose number begins with 1.
    ///
    /// # Errors
    /// If there is no such port, or the device has been removed.
    pub fn port(&self, number: u8) -> io::Result<PortAttributes> {
        // SAFETY: all fields are integers.
        let mut found: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the device is open, and `found` is valid for the call.
        let failed =
            unsafe { (self.library.verbs.ibv_query_port)(self.context.as_ptr(), number, &raw mut found) };
        checked(failed)?;
        Ok(PortAttributes::new(&found))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // The result would only say that the kernel has closed it before.
        // SAFETY: closed once, and nothing else uses it.
        unsafe { (self.library.verbs.ibv_close_device)(self.context.as_ptr()) };
    }
}

/// What an open device can do.
///
/// # Safety
/// The device is open during the call.
pub(crate) unsafe fn attributes_of(
    library: &Library,
    device: NonNull<ibv_context>,
) -> Result<DeviceAttributes, VerbsError> {
    // SAFETY: all fields are integers.
    let mut found: ibv_device_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the device is open, and `found` is valid for the call.
    let failed = unsafe { (library.verbs.ibv_query_device)(device.as_ptr(), &raw mut found) };
    VerbsError::check_number("ibv_query_device", failed)?;
    Ok(DeviceAttributes::new(&found))
}

/// What a device can do, as far as it concerns block storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// Version of its firmware; software has none.
    pub firmware: String,
    /// The number of ports.
    pub ports: u8,
    /// The maximum number of queue pairs.
    pub queue_pairs: u32,
    /// The maximum number of work requests in a queue.
    pub queue_depth: u32,
    /// The maximum number of segments of a work request.
    pub segments: u32,
    /// RDMA Reads of a peer that a queue pair executes at a time.
    pub peer_reads: u32,
    /// RDMA Reads that a queue pair may have in flight.
    pub reads: u32,
    /// The maximum number of memory registrations.
    pub registrations: u32,
    /// The maximum length of a registration in bytes.
    pub registration_len: u64,
    /// The maximum number of shared receive queues; 0 if it has none.
    pub shared_receive_queues: u32,
    /// Memory windows of type 2, which open exactly the bytes of one command.
    pub windows: MemoryWindows,
    /// Whether its completions have the kernel's flags and not those of rdma-core, as those of rxe.
    pub has_kernel_flags: bool,
}

/// The memory windows of type 2 of a device (InfiniBand Architecture Specification, volume 1,
/// §10.6.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryWindows {
    /// None: memory is opened to peers by registrations.
    None,
    /// Bound to a queue pair by its number.
    Type2A,
    /// Bound to a queue pair by its number and protection domain.
    Type2B,
}

impl DeviceAttributes {
    fn new(found: &ibv_device_attr) -> DeviceAttributes {
        // Devices report "as many as you like" as a negative number.
        let count = |count: c_int| u32::try_from(count).unwrap_or(u32::MAX);
        DeviceAttributes {
            firmware: text(&found.fw_ver),
            ports: found.phys_port_cnt,
            queue_pairs: count(found.max_qp),
            queue_depth: count(found.max_qp_wr),
            segments: count(found.max_sge),
            peer_reads: count(found.max_qp_rd_atom),
            reads: count(found.max_qp_init_rd_atom),
            registrations: count(found.max_mr),
            registration_len: found.max_mr_size,
            shared_receive_queues: count(found.max_srq),
            windows: MemoryWindows::new(found.device_cap_flags),
            has_kernel_flags: found.vendor_id == VENDOR_OF_RXE,
        }
    }
}

impl MemoryWindows {
    fn new(flags: c_uint) -> MemoryWindows {
        if flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B != 0 {
            MemoryWindows::Type2B
        } else if flags & IBV_DEVICE_MEM_WINDOW_TYPE_2A != 0 {
            MemoryWindows::Type2A
        } else {
            MemoryWindows::None
        }
    }
}

/// The state of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttributes {
    /// Whether it transmits.
    pub is_active: bool,
    /// The largest payload of a packet in bytes.
    pub mtu: u32,
    /// The longest message in bytes.
    pub message_len: u32,
}

impl PortAttributes {
    fn new(found: &ibv_port_attr) -> PortAttributes {
        // `enum ibv_mtu` counts powers of two from 256.
        let mtu = u32::try_from(found.active_mtu).ok().filter(|mtu| (1..=5).contains(mtu));
        PortAttributes {
            is_active: found.state == IBV_PORT_ACTIVE,
            mtu: mtu.map_or(0, |mtu| 128 << mtu),
            message_len: found.max_msg_sz,
        }
    }
}

/// Linux's software RoCEv2.
const VENDOR_OF_RXE: u32 = 0x00ff_ffff;

/// The result of a call that returns an error number.
fn checked(error: c_int) -> io::Result<()> {
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// A text that ends with a zero byte, or with its field.
pub(crate) fn text(field: &[c_char]) -> String {
    // `c_char` is signed on some architectures.
    let bytes: Vec<u8> = field.iter().map(|byte| byte.to_ne_bytes()[0]).collect();
    match CStr::from_bytes_until_nul(&bytes) {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(&bytes).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeroed<T>() -> T {
        // SAFETY: used for structures of integers.
        unsafe { std::mem::zeroed() }
    }

    #[test]
    fn attributes_are_those_of_the_device() {
        let mut found: ibv_device_attr = zeroed();
        b"16.35.2000\0".iter().zip(&mut found.fw_ver).for_each(|(byte, to)| *to = *byte as c_char);
        (found.phys_port_cnt, found.max_qp, found.max_mr) = (2, 131_072, -1);
        found.device_cap_flags = IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
        let attributes = DeviceAttributes::new(&found);
        assert_eq!((attributes.firmware.as_str(), attributes.ports), ("16.35.2000", 2));
        assert_eq!((attributes.queue_pairs, attributes.registrations), (131_072, u32::MAX));
        assert_eq!(attributes.windows, MemoryWindows::Type2B);
    }

    #[test]
    fn windows_of_type_1_are_none() {
        assert_eq!(MemoryWindows::new(IBV_DEVICE_MEM_WINDOW), MemoryWindows::None);
        assert_eq!(MemoryWindows::new(IBV_DEVICE_MEM_WINDOW_TYPE_2A), MemoryWindows::Type2A);
    }

    #[test]
    fn an_mtu_is_in_bytes_and_an_unknown_one_is_0() {
        let mtu = |active_mtu| PortAttributes::new(&ibv_port_attr { active_mtu, ..zeroed() }).mtu;
        assert_eq!([0, 1, 3, 5, 6, -1].map(mtu), [0, 256, 1024, 4096, 0, 0]);
    }

    #[test]
    fn a_text_may_fill_its_field() {
        let field = [b'a' as c_char; 4];
        assert_eq!(text(&field), "aaaa");
    }

    #[test]
    fn listed_devices_can_be_queried() {
        let devices = match DeviceList::read() {
            Ok(devices) => devices,
            Err(error) => return println!("skipped: {error}"),
        };
        if devices.iter().next().is_none() {
            println!("skipped: no RDMA device");
        }
        for device in devices.iter() {
            let context = match device.open() {
                Ok(context) => context,
                Err(error) => {
                    println!("skipped: {}: {error}", device.name());
                    continue;
                }
            };
            let attributes = context.attributes().unwrap();
            assert!(attributes.queue_pairs > 0 && attributes.ports > 0, "{attributes:?}");
            assert!((1..=attributes.ports).all(|port| context.port(port).is_ok_and(|port| port.mtu >= 256)));
            assert!(context.port(attributes.ports + 1).is_err());
        }
    }
}
