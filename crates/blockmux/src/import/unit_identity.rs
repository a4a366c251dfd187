//! What SCSI initiators recognize a logical unit by: as foreign configs have it, and as foreign
//! targets derive it.

use super::notes::Notes;
use crate::data::unit_identity;
use std::collections::BTreeSet;
use toml::{Table, Value};

/// What SCSI initiators recognize a logical unit by, as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ScsiIdentity {
    pub(super) vendor: Option<String>,
    pub(super) product: Option<String>,
    pub(super) revision: Option<String>,
    pub(super) serial: Option<String>,
    /// NAA designator, in hexadecimal digits.
    pub(super) naa: Option<String>,
    /// T10 vendor ID based designator.
    pub(super) t10: Option<String>,
    /// EUI-64 based designator, in hexadecimal digits.
    pub(super) eui64: Option<String>,
}

impl ScsiIdentity {
    /// The texts by their keys in our config.
    fn keys(&mut self) -> [(&'static str, &mut Option<String>); 7] {
        let ScsiIdentity { vendor, product, revision, serial, naa, t10, eui64 } = self;
        [
            ("vendor", vendor),
            ("product", product),
            ("revision", revision),
            ("serial", serial),
            ("naa", naa),
            ("t10", t10),
            ("eui64", eui64),
        ]
    }

    /// Makes notes of what our config refuses, and of identifiers that another volume has. `taken`
    /// are those of the volumes before this one.
    pub(super) fn settle(&mut self, taken: &mut BTreeSet<String>, notes: &mut Notes) {
        for (key, text) in self.keys() {
            let Some(own) = text.take() else { continue };
            let table = Table::from_iter([(key.to_owned(), Value::String(own.clone()))]);
            match unit_identity::read(table) {
                Ok(_) => *text = Some(own),
                Err(_) => notes.lost(format!("SCSI {key} {own}")),
            }
        }
        let all = self.texts().map(|(key, text)| (key.to_owned(), Value::from(text)));
        let Ok(given) = unit_identity::read(all.collect::<Table>()) else { return };
        let repeated: Vec<_> =
            unit_identity::unique(&given).filter(|(_, own)| !taken.insert(own.clone())).collect();
        for (key, text) in self.keys() {
            if let Some((_, own)) = repeated.iter().find(|(repeated, _)| *repeated == key) {
                *text = None;
                notes.lost(format!("SCSI {own}: another volume has it"));
            }
        }
    }

    /// The texts that are there by their keys in our config.
    pub(super) fn texts(&self) -> impl Iterator<Item = (&'static str, String)> {
        let mut own = self.clone();
        let texts = own.keys().map(|(key, text)| Some((key, text.take()?)));
        texts.into_iter().flatten()
    }
}

/// The T10 designator with this vendor and the text behind it.
pub(super) fn t10_designator(vendor: &str, text: &str) -> String {
    format!("{vendor:<8.8}{text}")
}

/// Hexadecimal digits as our config has them: without `0x`.
pub(super) fn digits(text: &str) -> String {
    let text = text.trim();
    text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text).to_ascii_lowercase()
}

/// The NAA designator that LIO derives from a unit serial number: NAA 6, the company ID 00 14 05,
/// and the first 25 hexadecimal digits of the serial number, whatever else is between them.
pub(super) fn lio_naa(serial: &str) -> String {
    let digits = serial.chars().filter(char::is_ascii_hexdigit).take(25);
    format!("{:0<32}", "6001405".chars().chain(digits).collect::<String>().to_ascii_lowercase())
}

/// The NAA designator that tgt derives from its `scsi_id`: the value of its hexadecimal digits, of
/// which others count as 0, behind NAA 6.
pub(super) fn tgt_naa(scsi_id: &str) -> String {
    let value = scsi_id.chars().fold(0_u128, |value, c| value << 4 | u128::from(c.to_digit(16).unwrap_or(0)));
    format!("{:032x}", value & (u128::MAX >> 4) | 6 << 124)
}

/// The NAA designator that SPDK derives from the name of a device: NAA 2, the company ID 00 03 47,
/// and parts of the name. Two characters are a byte, the second above the first.
pub(super) fn spdk_naa(name: &str) -> String {
    let nibble =
        |byte: &u8| char::from(*byte).to_digit(16).map_or(byte.to_ascii_lowercase(), |own| own as u8);
    let mut bytes = [0; 8];
    for (place, pair) in bytes.iter_mut().zip(name.as_bytes().chunks(2)) {
        let [low, high] = [0, 1].map(|at| pair.get(at).map_or(0, nibble));
        *place = low | high << 4;
    }
    let value = u64::from_le_bytes(bytes) & 0x0fff_0000_00ff_ffff | 0x2000_0003_4700_0000;
    format!("{value:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn designators_are_derived_as_the_other_targets_do() {
        assert_eq!(lio_naa("5F7A9C1E-2B3D-4E5F-8A6B-7C8D9E0F1A2B"), "60014055f7a9c1e2b3d4e5f8a6b7c8d9");
        assert_eq!(lio_naa("db1"), "6001405db10000000000000000000000");
        // The WWID of the first LUN of tgt's first target, as multipath shows it behind a 3.
        assert_eq!(tgt_naa("IET     00010001"), "60000000000000000e00000000010001");
        assert_eq!(tgt_naa(&"f".repeat(36)), format!("6{}", "f".repeat(31)));
        assert_eq!(t10_designator("LIO-ORG", "mail:1"), "LIO-ORG mail:1");
        assert_eq!(t10_designator("MUCH-TOO-LONG", "1"), "MUCH-TOO1");
        assert_eq!(digits(" 0X6589CFC0"), "6589cfc0");
        // M, a; l, l; o, c: 6d | a0 is ed, 6c | c0 is ec, 6f | c0 is ef. The rest is beyond the
        // mask.
        assert_eq!(spdk_naa("Malloc0"), "2000000347efeced");
        assert_eq!(spdk_naa("0123456789abcdef"), "2edc000347543210");
    }

    #[test]
    fn what_our_config_refuses_and_what_another_volume_has_becomes_a_note() {
        let text = |own: &str| Some(own.to_owned());
        let volume = |serial: &str| ScsiIdentity {
            vendor: text("ACME"),
            product: text("a product with a long name"),
            serial: text(serial),
            naa: text("6001405db10000000000000000000000"),
            ..ScsiIdentity::default()
        };
        let (mut taken, mut notes) = (BTreeSet::new(), Notes::default());
        let mut first = volume("1");
        first.settle(&mut taken, &mut notes);
        assert_eq!((first.product.as_ref(), first.naa.is_some()), (None, true));
        let lines: Vec<_> = notes.lines().collect();
        assert_eq!(lines, ["# no counterpart: SCSI product a product with a long name"]);
        for (serial, is_kept) in [("1", false), ("2", true)] {
            let mut notes = Notes::default();
            let mut other = ScsiIdentity { product: None, ..volume(serial) };
            other.settle(&mut taken, &mut notes);
            assert_eq!((other.naa.as_ref(), other.serial.is_some()), (None, is_kept), "{serial}");
            assert_eq!(notes.count(), if is_kept { 1 } else { 2 });
        }
        let left: Vec<_> = first.texts().map(|(key, _)| key).collect();
        assert_eq!(left, ["vendor", "serial", "naa"]);
    }
}
