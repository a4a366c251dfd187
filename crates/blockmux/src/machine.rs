//! The machine, as far as limits are taken from it.

/// Main memory, in bytes.
pub(crate) fn memory_bytes() -> u64 {
    let system = rustix::system::sysinfo();
    (system.totalram as u64).saturating_mul(system.mem_unit.into())
}

/// What tells this machine from others: two of them that serve a volume of one name must not look like two paths to one
/// volume, which some initiators would then use as that. Empty if it has none.
pub(crate) fn machine_id() -> String {
    std::fs::read_to_string("/etc/machine-id").unwrap_or_default().trim().to_owned()
}
