//! Numbers of 24 bits.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A big-endian number of 24 bits.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(transparent)]
pub struct U24([u8; 3]);

impl U24 {
    /// The largest value.
    pub const MAX: u32 = (1 << 24) - 1;

    /// The low 24 bits of `value`.
    #[inline]
    #[must_use]
    pub const fn new(value: u32) -> U24 {
        let [_, high, middle, low] = value.to_be_bytes();
        U24([high, middle, low])
    }

    /// The value.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u32 {
        let [high, middle, low] = self.0;
        u32::from_be_bytes([0, high, middle, low])
    }
}

impl core::fmt::Debug for U24 {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:#08x}", self.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_bytes_hold_24_bits() {
        assert_eq!(U24::new(0x01_0203).as_bytes(), [1, 2, 3]);
        assert_eq!(U24::new(U24::MAX).get(), 0x00ff_ffff);
        assert_eq!(U24::new(0x0100_0001).get(), 1);
    }
}
