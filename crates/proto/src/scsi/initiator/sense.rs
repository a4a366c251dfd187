//! Parsing of sense data in either format (SPC-5).

use blockmux_wire::scsi::sense::{
    Asc, DESCRIPTOR_CURRENT, DESCRIPTOR_DEFERRED, DescriptorSense, FIXED_CURRENT, FIXED_DEFERRED, SenseKey,
};
use std::fmt;
use zerocopy::FromBytes;

/// The fields of sense data that decide how a command continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenseCode {
    /// SENSE KEY.
    pub key: SenseKey,
    /// ADDITIONAL SENSE CODE and its qualifier.
    pub asc: Asc,
}

impl SenseCode {
    /// Parses sense data; truncated fields count as 0. `None` for an unknown format.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<SenseCode> {
        let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
        match byte(0) & RESPONSE_CODE_MASK {
            FIXED_CURRENT | FIXED_DEFERRED => Some(SenseCode {
                key: SenseKey(byte(2) & KEY_MASK),
                asc: Asc(u16::from_be_bytes([byte(12), byte(13)])),
            }),
            DESCRIPTOR_CURRENT | DESCRIPTOR_DEFERRED => {
                let (sense, _) = DescriptorSense::read_from_prefix(bytes).ok()?;
                let key = SenseKey(sense.sense_key & KEY_MASK);
                Some(SenseCode { key, asc: Asc(sense.additional_sense_code.get()) })
            }
            _ => None,
        }
    }
}

impl fmt::Display for SenseCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = |name: &str| name.replace('_', " ");
        match self.key.name() {
            Some(name) => f.write_str(&words(name))?,
            None => write!(f, "sense key {:#x}", self.key.0)?,
        }
        match self.asc.name() {
            Some(name) => write!(f, ", {}", words(name)),
            None => write!(f, ", additional sense {:#06x}", self.asc.0),
        }
    }
}

const RESPONSE_CODE_MASK: u8 = 0x7f;
const KEY_MASK: u8 = 0x0f;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::Sense;

    #[test]
    fn both_sense_formats_are_parsed_alike() {
        let sense = Sense::illegal(Asc::INVALID_FIELD_IN_CDB).with_information(9);
        let code = SenseCode { key: SenseKey::ILLEGAL_REQUEST, asc: Asc::INVALID_FIELD_IN_CDB };
        for descriptor_format in [false, true] {
            let bytes = Sense { descriptor_format, ..sense }.to_bytes();
            assert_eq!(SenseCode::parse(&bytes), Some(code));
        }
        assert_eq!(code.to_string(), "ILLEGAL REQUEST, INVALID FIELD IN CDB");
    }

    #[test]
    fn truncated_or_unknown_sense_data_is_harmless() {
        assert_eq!(SenseCode::parse(&[]), None);
        assert_eq!(SenseCode::parse(&[0x7f; 32]), None);
        assert_eq!(SenseCode::parse(&[0x72, 5]), None);
        let short = SenseCode::parse(&[0xf0, 0, 0x26]).unwrap();
        assert_eq!((short.key, short.asc), (SenseKey::UNIT_ATTENTION, Asc(0)));
        let odd = SenseCode { key: SenseKey(9), asc: Asc(0x8001) };
        assert_eq!(odd.to_string(), "sense key 0x9, additional sense 0x8001");
    }
}
