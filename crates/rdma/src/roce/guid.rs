//! The GUID by which an end says that it is of this implementation.
//!
//! Two such ends notify each other of congestion, acknowledge later, and use longer packets than
//! the standard's. A peer may claim to be one: nothing depends on it but how it is served.

/// A GUID of this implementation, with 40 random bits.
pub(super) fn guid(random: u64) -> u64 {
    GUID_PREFIX << GUID_RANDOM_BITS | random & ((1 << GUID_RANDOM_BITS) - 1)
}

/// Whether a GUID is one of this implementation.
pub(super) fn is_guid(guid: u64) -> bool {
    guid >> GUID_RANDOM_BITS == GUID_PREFIX
}

/// "BMX". Its second-lowest bit says that no manufacturer was assigned these numbers.
const GUID_PREFIX: u64 = 0x42_4d58;
const GUID_RANDOM_BITS: u32 = 40;
