//! The configured identifiers of a logical unit: what SCSI initiators recognize it by.
//!
//! Without them a unit's identifiers are derived from its volume's UUID. A unit that moves here
//! from another target keeps its old ones instead, so that its initiators see the disk that they
//! know.

use blockmux_wire::scsi::vpd::{
    CODE_SET_ASCII, CODE_SET_BINARY, DESIGNATOR_EUI64, DESIGNATOR_NAA, DESIGNATOR_T10_VENDOR,
};

/// Configured identifiers of a logical unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GivenUnitIdentity {
    /// T10 VENDOR IDENTIFICATION of the INQUIRY data, padded with spaces.
    pub vendor: Option<[u8; 8]>,
    /// PRODUCT IDENTIFICATION, padded with spaces.
    pub product: Option<[u8; 16]>,
    /// PRODUCT REVISION LEVEL, padded with spaces.
    pub revision: Option<[u8; 4]>,
    /// PRODUCT SERIAL NUMBER of the Unit Serial Number page.
    pub serial: Option<UnitSerial>,
    /// Designators that replace the derived ones; empty: none is configured.
    pub designators: Vec<UnitDesignator>,
}

/// A unit serial number: printable ASCII of at most [`MAX_SERIAL`] bytes, and not only spaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitSerial(String);

/// A designator of a logical unit in the Device Identification page (SPC-5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitDesignator {
    designator_type: u8,
    code_set: u8,
    bytes: Vec<u8>,
}

impl UnitSerial {
    /// `None` if the text is empty, too long or not printable.
    #[must_use]
    pub fn new(text: &str) -> Option<UnitSerial> {
        let is_valid = text.len() <= MAX_SERIAL && is_printable(text.as_bytes()) && !text.trim().is_empty();
        is_valid.then(|| UnitSerial(text.to_owned()))
    }

    /// The serial number as initiators read it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl UnitDesignator {
    /// An NAA designator: IEEE Extended (2), Locally Assigned (3) or IEEE Registered (5) of 8
    /// bytes, or IEEE Registered Extended (6) of 16 bytes. `None` for others.
    #[must_use]
    pub fn naa(bytes: &[u8]) -> Option<UnitDesignator> {
        let naa = bytes.first()? >> 4;
        matches!((naa, bytes.len()), (2 | 3 | 5, 8) | (6, 16))
            .then(|| UnitDesignator::binary(DESIGNATOR_NAA, bytes))
    }

    /// An EUI-64 based designator of 8, 12 or 16 bytes. `None` for other lengths, and if all bytes
    /// are 0.
    #[must_use]
    pub fn eui64(bytes: &[u8]) -> Option<UnitDesignator> {
        let is_valid = [8, 12, 16].contains(&bytes.len()) && bytes.iter().any(|byte| *byte != 0);
        is_valid.then(|| UnitDesignator::binary(DESIGNATOR_EUI64, bytes))
    }

    /// A T10 vendor ID based designator: a vendor identification of 8 bytes, padded with spaces,
    /// and text that is unique among that vendor's units. `None` if the text is missing, too long
    /// for a designator, or not printable ASCII.
    #[must_use]
    pub fn t10_vendor(bytes: &[u8]) -> Option<UnitDesignator> {
        let is_valid = (9..=MAX_DESIGNATOR).contains(&bytes.len()) && is_printable(bytes);
        let (designator_type, code_set) = (DESIGNATOR_T10_VENDOR, CODE_SET_ASCII);
        is_valid.then(|| UnitDesignator { designator_type, code_set, bytes: bytes.to_vec() })
    }

    fn binary(designator_type: u8, bytes: &[u8]) -> UnitDesignator {
        UnitDesignator { designator_type, code_set: CODE_SET_BINARY, bytes: bytes.to_vec() }
    }

    /// Whether it is EUI-64 based.
    #[must_use]
    pub fn is_eui64(&self) -> bool {
        self.designator_type == DESIGNATOR_EUI64
    }

    /// Whether it is T10 vendor ID based.
    #[must_use]
    pub fn is_t10_vendor(&self) -> bool {
        self.designator_type == DESIGNATOR_T10_VENDOR
    }

    /// DESIGNATOR TYPE.
    #[must_use]
    pub fn designator_type(&self) -> u8 {
        self.designator_type
    }

    /// CODE SET.
    #[must_use]
    pub fn code_set(&self) -> u8 {
        self.code_set
    }

    /// DESIGNATOR, of at most 255 bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A field of the INQUIRY data of `N` bytes, padded with spaces; `None` if the text is longer or
/// has other characters than printable ASCII.
#[must_use]
pub fn inquiry_field<const N: usize>(text: &str) -> Option<[u8; N]> {
    let text = text.trim_end_matches(' ').as_bytes();
    let mut field = [b' '; N];
    field.get_mut(..text.len())?.copy_from_slice(text);
    is_printable(text).then_some(field)
}

/// Whether all bytes are graphic codes of SPC-5's ASCII fields, 20h to 7Eh.
fn is_printable(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| (b' '..=b'~').contains(byte))
}

/// T10 VENDOR IDENTIFICATION of units without a configured one.
pub const DEFAULT_VENDOR: [u8; 8] = *b"BLOCKMUX";
/// PRODUCT IDENTIFICATION of units without a configured one.
pub const DEFAULT_PRODUCT: [u8; 16] = *b"VOLUME          ";
/// Maximum length of a unit serial number, in bytes: its page is read into 255 bytes, the maximum
/// ALLOCATION LENGTH of SPC-2, and 4 of them are the header.
pub const MAX_SERIAL: usize = 251;
/// Maximum of DESIGNATOR LENGTH, in bytes.
const MAX_DESIGNATOR: usize = 255;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_complete_designators_of_known_formats_exist() {
        let naa = |first: u8, len: usize| {
            let bytes: Vec<u8> = [first].into_iter().chain([1; 15]).take(len).collect();
            UnitDesignator::naa(&bytes).map(|own| (own.designator_type(), own.code_set(), own.bytes().len()))
        };
        for first in [0x2f, 0x30, 0x51] {
            assert_eq!((naa(first, 8), naa(first, 16)), (Some((3, 1, 8)), None), "{first:#x}");
        }
        assert_eq!((naa(0x60, 16), naa(0x60, 8), naa(0x6f, 15)), (Some((3, 1, 16)), None, None));
        assert_eq!((naa(0x10, 8), naa(0x40, 8), naa(0xff, 16), naa(0x50, 0)), (None, None, None, None));
        let eui64 = |len| UnitDesignator::eui64(&vec![7; len]).map(|own| own.designator_type());
        assert_eq!([8, 12, 16].map(eui64), [Some(2); 3]);
        assert_eq!([0, 7, 9, 20].map(eui64), [None; 4]);
        assert_eq!(UnitDesignator::eui64(&[0; 8]), None);
    }

    #[test]
    fn texts_are_printable_and_as_long_as_their_fields() {
        assert_eq!(inquiry_field("LIO-ORG"), Some(*b"LIO-ORG "));
        assert_eq!((inquiry_field("4.0 "), inquiry_field("4.0.1")), (Some(*b"4.0 "), None::<[u8; 4]>));
        assert_eq!(inquiry_field("1234    "), Some(*b"1234"), "spaces are the padding");
        assert_eq!((inquiry_field::<4>("ä"), inquiry_field::<4>("\n")), (None, None));
        let t10 = |text: &str| UnitDesignator::t10_vendor(text.as_bytes()).is_some();
        assert!(t10("LIO-ORG 1") && t10(&"x".repeat(255)));
        assert!(!t10("LIO-ORG ") && !t10(&"x".repeat(256)) && !t10("LIO-ORG \0"));
        let serial = |text: &str| UnitSerial::new(text).map(|serial| serial.as_str().to_owned());
        assert_eq!(serial("    4711").as_deref(), Some("    4711"), "tgt writes it at the right");
        assert!(serial(&"1".repeat(251)).is_some() && serial(&"1".repeat(252)).is_none());
        assert!(["", "  ", "a\0", "é"].iter().all(|text| serial(text).is_none()));
    }
}
