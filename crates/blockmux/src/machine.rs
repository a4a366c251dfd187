//! The machine, as far as limits are taken from it.

/// Main memory, in bytes.
pub(crate) fn memory_bytes() -> u64 {
    let system = rustix::system::sysinfo();
    (system.totalram as u64).saturating_mul(system.mem_unit.into())
}
