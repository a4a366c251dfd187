//! Packet sequence numbers: 24 bits, compared modulo 2^24.

use blockmux_wire::roce::bth::U24;

/// A packet sequence number. Of two numbers, the one that is less than 2^23 ahead is the later one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Psn(u32);

impl Psn {
    /// The low 24 bits of `value`.
    #[inline]
    pub(super) fn new(value: u32) -> Psn {
        Psn(value & MASK)
    }

    #[inline]
    pub(super) fn plus(self, packets: u32) -> Psn {
        Psn::new(self.0.wrapping_add(packets))
    }

    /// The number before this one.
    #[inline]
    pub(super) fn previous(self) -> Psn {
        Psn::new(self.0.wrapping_sub(1))
    }

    /// How many packets this one is ahead of `earlier`, from 0 to 2^24 - 1.
    #[inline]
    pub(super) fn since(self, earlier: Psn) -> u32 {
        self.0.wrapping_sub(earlier.0) & MASK
    }

    /// Whether `later` is ahead of this one.
    #[inline]
    pub(super) fn is_before(self, later: Psn) -> bool {
        self != later && later.since(self) < HALF
    }
}

impl From<U24> for Psn {
    #[inline]
    fn from(number: U24) -> Psn {
        Psn::new(number.get())
    }
}

impl From<Psn> for U24 {
    #[inline]
    fn from(psn: Psn) -> U24 {
        U24::new(psn.0)
    }
}

/// Number of packets with `mtu` bytes of payload that `len` bytes need: at least one.
#[inline]
pub(super) fn packets(len: u32, mtu: u16) -> u32 {
    len.div_ceil(u32::from(mtu).max(1)).max(1)
}

const MASK: u32 = 0xff_ffff;
/// Number of packets by which one number may be ahead of another.
pub(super) const HALF: u32 = 1 << 23;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_compared_across_the_wrap() {
        let last = Psn::new(MASK);
        assert_eq!((last.plus(1), Psn::new(0).previous()), (Psn::new(0), last));
        assert!(last.is_before(Psn::new(0)) && !Psn::new(0).is_before(last));
        assert!(!last.is_before(last));
        assert_eq!((Psn::new(5).since(last), last.since(Psn::new(5))), (6, MASK - 5));
        assert!(Psn::new(0).is_before(Psn::new(HALF - 1)) && !Psn::new(0).is_before(Psn::new(HALF)));
    }

    #[test]
    fn even_nothing_is_one_packet() {
        let counts = [0, 1, 1024, 1025, 1 << 30].map(|len| packets(len, 1024));
        assert_eq!(counts, [1, 1, 1, 2, 1 << 20]);
    }
}
