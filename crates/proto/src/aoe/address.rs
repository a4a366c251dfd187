//! Addresses of AoE disks: shelf and slot.

use blockmux_wire::aoe::{ANY_SHELF, ANY_SLOT};
use std::fmt;
use std::str::FromStr;

/// Address of a disk, the same on all of its networks. `Display` and `FromStr` use the form `e7.3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AoeAddress {
    /// The major number, below 65,535.
    pub shelf: u16,
    /// The minor number, below 255.
    pub slot: u8,
}

/// Text that is not an AoE address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a disk's address is eSHELF.SLOT with a shelf of 0 to 65534 and a slot of 0 to 254")]
pub struct AddressError;

impl fmt::Display for AoeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "e{}.{}", self.shelf, self.slot)
    }
}

impl FromStr for AoeAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<AoeAddress, AddressError> {
        let (shelf, slot) =
            text.strip_prefix('e').and_then(|rest| rest.split_once('.')).ok_or(AddressError)?;
        let shelf = number(shelf).and_then(|number| u16::try_from(number).ok());
        let slot = number(slot).and_then(|number| u8::try_from(number).ok());
        match (shelf, slot) {
            (Some(shelf), Some(slot)) if shelf != ANY_SHELF && slot != ANY_SLOT => {
                Ok(AoeAddress { shelf, slot })
            }
            _ => Err(AddressError),
        }
    }
}

/// Parses decimal digits; a sign is an error.
fn number(text: &str) -> Option<u32> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_reads_as_it_is_written() {
        for text in ["e0.0", "e7.3", "e65534.254"] {
            assert_eq!(text.parse::<AoeAddress>().unwrap().to_string(), text);
        }
        for text in ["", "e", "7.3", "e7", "e7.", "e.3", "e65535.0", "e0.255", "e+1.0", "e1.-1", "e1.2.3"] {
            assert_eq!(text.parse::<AoeAddress>(), Err(AddressError), "{text}");
        }
    }
}
