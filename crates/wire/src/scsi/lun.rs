//! Logical unit numbers (SAM-5 §4.7).

/// ADDRESS METHOD, the first two bits of a LUN: peripheral device addressing.
pub const ADDRESS_METHOD_PERIPHERAL: u8 = 0b00;
/// ADDRESS METHOD: flat space addressing.
pub const ADDRESS_METHOD_FLAT: u8 = 0b01;
/// The well-known logical unit REPORT LUNS (SPC-5).
pub const REPORT_LUNS_WELL_KNOWN: u64 = 0xc101_0000_0000_0000;
