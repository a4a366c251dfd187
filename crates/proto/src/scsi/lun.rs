//! Logical unit numbers (SAM-5 §4.7).

use blockmux_wire::scsi::lun::{ADDRESS_METHOD_FLAT, ADDRESS_METHOD_PERIPHERAL, REPORT_LUNS_WELL_KNOWN};

/// A logical unit number as transports carry it: 64 bits, big-endian.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lun(pub u64);

impl Lun {
    /// A single-level LUN: peripheral device addressing below 256, flat space addressing otherwise
    /// (SAM-5 §4.7.7.1 to 4.7.7.3). The lower 14 bits of `number` count.
    #[must_use]
    pub fn new(number: u16) -> Lun {
        let method = if number < 256 { ADDRESS_METHOD_PERIPHERAL } else { ADDRESS_METHOD_FLAT };
        let first = (u16::from(method) << 14) | (number & 0x3fff);
        Lun(u64::from(first) << 48)
    }

    /// The logical unit's number, for a single-level LUN of either addressing method.
    #[inline]
    #[must_use]
    pub fn number(self) -> Option<u16> {
        let first = (self.0 >> 48) as u16;
        let method = (first >> 14) as u8;
        let number = first & 0x3fff;
        // SAM-5 §4.7.7.2: a bus number other than 0 addresses another device, and there is none.
        let is_here = method == ADDRESS_METHOD_FLAT || method == ADDRESS_METHOD_PERIPHERAL && number < 256;
        (self.0 << 16 == 0 && is_here).then_some(number)
    }

    /// Whether both LUNs address the same unit, possibly by different addressing methods.
    pub(crate) fn names_same_unit(self, other: Lun) -> bool {
        self == other || (self.number().is_some() && self.number() == other.number())
    }

    /// Whether this is the REPORT LUNS well-known logical unit (SPC-5).
    #[must_use]
    pub fn is_report_luns(self) -> bool {
        self.0 == REPORT_LUNS_WELL_KNOWN
    }
}

impl std::fmt::Debug for Lun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.number() {
            Some(number) => write!(f, "Lun({number})"),
            None => write!(f, "Lun({:#018x})", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_addressing_methods_name_the_same_unit() {
        assert_eq!(Lun::new(7), Lun(0x0007_0000_0000_0000));
        assert_eq!(Lun(0x4007_0000_0000_0000).number(), Some(7));
        assert_eq!(Lun::new(300), Lun(0x412c_0000_0000_0000));
        assert_eq!(Lun::new(300).number(), Some(300));
    }

    #[test]
    fn other_lun_formats_have_no_number() {
        for lun in
            [0x0107_0000_0000_0000, 0x0007_0001_0000_0000, 0x8007_0000_0000_0000, REPORT_LUNS_WELL_KNOWN]
        {
            assert_eq!(Lun(lun).number(), None, "{lun:x}");
        }
        assert!(Lun(REPORT_LUNS_WELL_KNOWN).is_report_luns());
    }
}
