//! Sense data in fixed or descriptor format (SPC-5).

use blockmux_wire::scsi::sense::*;
use smallvec::SmallVec;
use zerocopy::{IntoBytes, U16, U32, U64};

/// Encoded sense data; at most 28 bytes.
pub type SenseBytes = SmallVec<[u8; 32]>;

/// Sense data of a CHECK CONDITION status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// SENSE KEY.
    pub key: SenseKey,
    /// ADDITIONAL SENSE CODE and its qualifier.
    pub asc: Asc,
    /// INFORMATION, often an LBA or an offset.
    pub information: Option<u64>,
    /// SENSE KEY SPECIFIC.
    pub specific: Option<SenseKeySpecific>,
    /// Descriptor format, selected by D_SENSE of the Control mode page.
    pub descriptor_format: bool,
}

/// SENSE KEY SPECIFIC (SPC-5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SenseKeySpecific {
    /// Field pointer.
    Field {
        /// Whether the field is in the CDB; otherwise it is in the parameter list.
        in_cdb: bool,
        /// First byte of the field.
        byte: u16,
        /// Highest bit of the field in that byte, if it is smaller than a byte.
        bit: Option<u8>,
    },
    /// Progress indication, in units of 1/65,536.
    Progress(u16),
}

impl Sense {
    /// Sense data with a key and an additional sense code.
    #[must_use]
    pub const fn new(key: SenseKey, asc: Asc) -> Sense {
        Sense { key, asc, information: None, specific: None, descriptor_format: false }
    }

    /// ILLEGAL REQUEST, INVALID FIELD IN CDB, with a pointer to the byte.
    #[must_use]
    pub const fn in_cdb(byte: u16) -> Sense {
        Sense::illegal(Asc::INVALID_FIELD_IN_CDB).field(SenseKeySpecific::Field {
            in_cdb: true,
            byte,
            bit: None,
        })
    }

    /// ILLEGAL REQUEST, INVALID FIELD IN CDB, with a pointer to the field whose highest bit is
    /// `bit` of `byte`.
    #[must_use]
    pub const fn cdb_bit(byte: u16, bit: u8) -> Sense {
        Sense::illegal(Asc::INVALID_FIELD_IN_CDB).field(SenseKeySpecific::Field {
            in_cdb: true,
            byte,
            bit: Some(bit),
        })
    }

    /// ILLEGAL REQUEST, INVALID FIELD IN PARAMETER LIST, with a pointer to the byte.
    #[must_use]
    pub const fn in_parameters(byte: u16) -> Sense {
        Sense::illegal(Asc::INVALID_FIELD_IN_PARAMETER_LIST).field(SenseKeySpecific::Field {
            in_cdb: false,
            byte,
            bit: None,
        })
    }

    /// ILLEGAL REQUEST with an additional sense code.
    #[must_use]
    pub const fn illegal(asc: Asc) -> Sense {
        Sense::new(SenseKey::ILLEGAL_REQUEST, asc)
    }

    /// Sets the INFORMATION field.
    #[must_use]
    pub const fn with_information(self, information: u64) -> Sense {
        Sense { information: Some(information), ..self }
    }

    const fn field(self, specific: SenseKeySpecific) -> Sense {
        Sense { specific: Some(specific), ..self }
    }

    /// Encodes the sense data in its format.
    #[must_use]
    pub fn to_bytes(&self) -> SenseBytes {
        if self.descriptor_format { self.to_descriptors() } else { self.to_fixed() }
    }

    fn to_fixed(self) -> SenseBytes {
        // SPC-5, fixed format sense data: an INFORMATION value that does not fit is omitted, and
        // VALID is 0.
        let information = self.information.and_then(|information| u32::try_from(information).ok());
        let sense = FixedSense {
            response_code: FIXED_CURRENT | if information.is_some() { VALID } else { 0 },
            obsolete: 0,
            flags_and_key: self.key.0,
            information: U32::new(information.unwrap_or(0)),
            additional_sense_length: 10,
            command_specific_information: U32::ZERO,
            additional_sense_code: U16::new(self.asc.0),
            field_replaceable_unit_code: 0,
            sense_key_specific: self.specific.map_or([0; 3], SenseKeySpecific::to_bytes),
        };
        SmallVec::from_slice(sense.as_bytes())
    }

    fn to_descriptors(self) -> SenseBytes {
        let information = self.information.map(|information| InformationDescriptor {
            descriptor_type: 0,
            additional_length: 10,
            valid: VALID,
            reserved: 0,
            information: U64::new(information),
        });
        let specific = self.specific.map(|specific| SenseKeySpecificDescriptor {
            descriptor_type: 2,
            additional_length: 6,
            reserved: [0; 2],
            sense_key_specific: specific.to_bytes(),
            reserved_too: 0,
        });
        let length = match (self.information, self.specific) {
            (None, None) => 0,
            (None, Some(_)) => size_of::<SenseKeySpecificDescriptor>(),
            (Some(_), None) => size_of::<InformationDescriptor>(),
            (Some(_), Some(_)) => {
                const { size_of::<SenseKeySpecificDescriptor>() + size_of::<InformationDescriptor>() }
            }
        };
        let head = DescriptorSense {
            response_code: DESCRIPTOR_CURRENT,
            sense_key: self.key.0,
            additional_sense_code: U16::new(self.asc.0),
            flags: 0,
            reserved: [0; 2],
            additional_sense_length: length as u8,
        };
        let mut bytes = SenseBytes::from_slice(head.as_bytes());
        if let Some(information) = information {
            bytes.extend_from_slice(information.as_bytes());
        }
        if let Some(specific) = specific {
            bytes.extend_from_slice(specific.as_bytes());
        }
        bytes
    }
}

impl SenseKeySpecific {
    fn to_bytes(self) -> [u8; 3] {
        match self {
            SenseKeySpecific::Field { in_cdb, byte, bit } => {
                let [high, low] = byte.to_be_bytes();
                let place = if in_cdb { COMMAND_DATA } else { 0 };
                [SKSV | place | bit.map_or(0, |bit| BPV | bit & 7), high, low]
            }
            SenseKeySpecific::Progress(progress) => {
                let [high, low] = progress.to_be_bytes();
                [SKSV, high, low]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_format_points_at_the_field() {
        let sense = Sense::cdb_bit(1, 7);
        assert_eq!(
            sense.to_bytes().as_slice(),
            [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0xcf, 0, 1]
        );
    }

    #[test]
    fn fixed_format_leaves_out_information_that_is_too_large() {
        let sense = Sense::new(SenseKey::MISCOMPARE, Asc::MISCOMPARE_DURING_VERIFY_OPERATION);
        assert_eq!(sense.with_information(27).to_bytes()[..8], [0xf0, 0, 0xe, 0, 0, 0, 27, 10]);
        assert_eq!(sense.with_information(1 << 32).to_bytes()[..8], [0x70, 0, 0xe, 0, 0, 0, 0, 10]);
    }

    #[test]
    fn descriptor_format_has_a_descriptor_for_each_part() {
        let sense =
            Sense { descriptor_format: true, ..Sense::in_parameters(0x102).with_information(1 << 40) };
        assert_eq!(
            sense.to_bytes().as_slice(),
            [
                0x72, 5, 0x26, 0, 0, 0, 0, 20, 0, 10, 0x80, 0, 0, 0, 1, 0, 0, 0, 0, 0, 2, 6, 0, 0, 0x80, 1,
                2, 0
            ]
        );
        let bare = Sense { information: None, specific: None, ..sense };
        assert_eq!(bare.to_bytes().as_slice(), [0x72, 5, 0x26, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn progress_is_in_the_sense_key_specific_field() {
        let sense = Sense::new(SenseKey::NOT_READY, Asc::SANITIZE_IN_PROGRESS);
        let sense = Sense { specific: Some(SenseKeySpecific::Progress(0x8000)), ..sense };
        assert_eq!(sense.to_bytes()[15..], [0x80, 0x80, 0]);
    }
}
