//! `[volume.scsi]` in the config file: what initiators recognize the logical unit of a volume by.

use blockmux_proto::names::unit_identity::{
    DEFAULT_PRODUCT, DEFAULT_VENDOR, GivenUnitIdentity, MAX_SERIAL, UnitDesignator, UnitSerial, inquiry_field,
};
use data_encoding::{HEXLOWER, HEXLOWER_PERMISSIVE};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::marker::PhantomData;
use toml::{Table, Value};

/// The keys of the table.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct WrittenIdentity {
    vendor: Option<Written<[u8; 8]>>,
    product: Option<Written<[u8; 16]>>,
    revision: Option<Written<[u8; 4]>>,
    serial: Option<Written<UnitSerial>>,
    naa: Option<Written<Naa>>,
    t10: Option<Written<T10Vendor>>,
    eui64: Option<Written<Eui64>>,
}

/// A value that is written as text. Digits may be written as a number: `ctl set` takes them for
/// one.
struct Written<T>(T);

/// A value of the table.
trait IdentityValue: Sized {
    /// # Errors
    /// Says what is valid.
    fn parse(text: &str) -> Result<Self, String>;
}

struct Naa(UnitDesignator);
struct T10Vendor(UnitDesignator);
struct Eui64(UnitDesignator);

impl<const N: usize> IdentityValue for [u8; N] {
    fn parse(text: &str) -> Result<[u8; N], String> {
        inquiry_field(text).ok_or_else(|| format!("write at most {N} printable ASCII characters"))
    }
}

impl IdentityValue for UnitSerial {
    fn parse(text: &str) -> Result<UnitSerial, String> {
        UnitSerial::new(text)
            .ok_or_else(|| format!("a serial number has 1 to {MAX_SERIAL} printable ASCII characters"))
    }
}

impl IdentityValue for Naa {
    fn parse(text: &str) -> Result<Naa, String> {
        let naa = digits(text).and_then(|bytes| UnitDesignator::naa(&bytes));
        naa.map(Naa).ok_or_else(|| {
            "an NAA designator has 16 hexadecimal digits and begins with 2, 3 or 5, or 32 and begins with 6".to_owned()
        })
    }
}

impl IdentityValue for T10Vendor {
    fn parse(text: &str) -> Result<T10Vendor, String> {
        UnitDesignator::t10_vendor(text.as_bytes()).map(T10Vendor).ok_or_else(|| {
            "a T10 designator has a vendor of 8 characters, padded with spaces, and 1 to 247 more, all printable ASCII"
                .to_owned()
        })
    }
}

impl IdentityValue for Eui64 {
    fn parse(text: &str) -> Result<Eui64, String> {
        let eui64 = digits(text).and_then(|bytes| UnitDesignator::eui64(&bytes));
        eui64
            .map(Eui64)
            .ok_or_else(|| "an EUI-64 designator has 16, 24 or 32 hexadecimal digits, not all 0".to_owned())
    }
}

fn digits(text: &str) -> Option<Vec<u8>> {
    HEXLOWER_PERMISSIVE.decode(text.as_bytes()).ok()
}

impl<'de, T: IdentityValue> Deserialize<'de> for Written<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Written<T>, D::Error> {
        struct Text<T>(PhantomData<T>);
        impl<T: IdentityValue> Visitor<'_> for Text<T> {
            type Value = Written<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Written<T>, E> {
                T::parse(text)
                    .map(Written)
                    .map_err(|advice| E::custom(format!("`{}`: {advice}", text.escape_debug())))
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Written<T>, E> {
                self.visit_str(&number.to_string())
            }
        }
        deserializer.deserialize_any(Text(PhantomData))
    }
}

/// Reads the table.
pub(crate) fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<GivenUnitIdentity, D::Error> {
    WrittenIdentity::deserialize(deserializer).map(WrittenIdentity::given)
}

impl WrittenIdentity {
    fn given(self) -> GivenUnitIdentity {
        let naa = self.naa.map(|Written(Naa(own))| own);
        let t10 = self.t10.map(|Written(T10Vendor(own))| own);
        let eui64 = self.eui64.map(|Written(Eui64(own))| own);
        GivenUnitIdentity {
            vendor: self.vendor.map(|Written(own)| own),
            product: self.product.map(|Written(own)| own),
            revision: self.revision.map(|Written(own)| own),
            serial: self.serial.map(|Written(own)| own),
            designators: naa.into_iter().chain(t10).chain(eui64).collect(),
        }
    }
}

/// The table of an identity; `None` if nothing is configured.
pub(crate) fn table(given: &GivenUnitIdentity) -> Option<Value> {
    let GivenUnitIdentity { vendor, product, revision, serial, designators } = given;
    let fields = [
        ("vendor", vendor.as_ref().map(|own| text(own))),
        ("product", product.as_ref().map(|own| text(own))),
        ("revision", revision.as_ref().map(|own| text(own))),
        ("serial", serial.as_ref().map(|own| own.as_str().to_owned())),
    ];
    let fields = fields.into_iter().filter_map(|(key, value)| Some((key, value?)));
    let all = fields.chain(designators.iter().map(key_and_text));
    let table: Table = all.map(|(key, value)| (key.to_owned(), Value::String(value))).collect();
    (!table.is_empty()).then_some(Value::Table(table))
}

/// The identifiers of a configured identity that no two units may share: their keys, and their
/// texts in messages.
pub(crate) fn unique(given: &GivenUnitIdentity) -> impl Iterator<Item = (&'static str, String)> {
    let GivenUnitIdentity { vendor, product, serial, designators, .. } = given;
    // Initiators without designators combine these three, as names in /dev/disk/by-id do.
    let serial = serial.as_ref().map(|serial| {
        let (vendor, product) = (vendor.unwrap_or(DEFAULT_VENDOR), product.unwrap_or(DEFAULT_PRODUCT));
        let serial = serial.as_str().trim();
        let own = format!("serial `{serial}` of vendor `{}` and product `{}`", text(&vendor), text(&product));
        ("serial", own)
    });
    let designators = designators.iter().map(|own| {
        let (key, value) = key_and_text(own);
        (key, format!("{key} `{value}`"))
    });
    designators.chain(serial)
}

fn key_and_text(designator: &UnitDesignator) -> (&'static str, String) {
    match designator {
        own if own.is_t10_vendor() => ("t10", String::from_utf8_lossy(own.bytes()).into_owned()),
        own if own.is_eui64() => ("eui64", HEXLOWER.encode(own.bytes())),
        own => ("naa", HEXLOWER.encode(own.bytes())),
    }
}

/// A field without its padding. Its bytes are ASCII.
fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).trim_end_matches(' ').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(lines: &str) -> Result<GivenUnitIdentity, String> {
        let table: Table = lines.parse().unwrap();
        read(table).map_err(|error| error.to_string())
    }

    #[test]
    fn a_table_is_written_as_it_is_read() {
        let lines = "vendor = 'LIO-ORG'\nproduct = 'mail store'\nrevision = '4.0'\nserial = '    4711'\n\
                     naa = '60014055f7a9c1e2b3d4e5f8a6b7c8d9'\nt10 = 'LIO-ORG mail:4711 '\neui64 = '0014051122334455'";
        let given = parse(lines).unwrap();
        assert_eq!(given.designators.len(), 3);
        assert_eq!(table(&given), Some(Value::Table(lines.parse().unwrap())));
        assert_eq!(table(&parse("").unwrap()), None);
        let upper = parse("naa = '500140550F7A9C1E'").unwrap();
        assert_eq!(table(&upper).unwrap()["naa"].as_str(), Some("500140550f7a9c1e"));
        assert_eq!(parse("serial = 4711"), parse("serial = '4711'"), "from ctl");
    }

    #[test]
    fn values_that_no_initiator_would_accept_are_refused_with_advice() {
        let long = format!("serial = '{}'", "1".repeat(252));
        for (lines, expected) in [
            ("vendor = 'BLOCKMUX9'", "`BLOCKMUX9`: write at most 8 printable ASCII characters"),
            ("product = 'a\u{e9}'", "write at most 16 printable"),
            ("revision = '1.2.3'", "write at most 4 printable"),
            ("serial = ' '", "a serial number has 1 to 251 printable"),
            (&long, "a serial number has 1 to 251 printable"),
            (
                "naa = '1001405000000001'",
                "`1001405000000001`: an NAA designator has 16 hexadecimal digits and begins with 2, 3 or 5",
            ),
            ("naa = '6001405000000001'", "or 32 and begins with 6"),
            ("naa = '0x500140550f7a9c1e'", "an NAA designator has 16 hexadecimal digits"),
            ("eui64 = '00140511'", "an EUI-64 designator has 16, 24 or 32"),
            ("t10 = 'LIO-ORG'", "a T10 designator has a vendor of 8"),
            ("wwn = 'x'", "unknown field `wwn`"),
            ("naa = true", "expected a string"),
        ] {
            let said = parse(lines).unwrap_err();
            assert!(said.contains(expected), "{said}");
        }
    }

    #[test]
    fn units_are_the_same_by_any_designator_or_by_vendor_product_and_serial_together() {
        let same = |one: &str, other: &str| {
            let [one, other] = [one, other].map(|lines| parse(lines).unwrap());
            unique(&one).find(|own| unique(&other).any(|others| others == *own)).map(|(_, own)| own)
        };
        let naa = "naa = '500140550f7a9c1e'";
        let both = same(&format!("{naa}\nserial = '1'"), &format!("{naa}\nserial = '2'"));
        assert_eq!(both.as_deref(), Some("naa `500140550f7a9c1e`"));
        assert_eq!(
            same("serial = '1'", "serial = ' 1'\nvendor = 'BLOCKMUX'").as_deref(),
            Some("serial `1` of vendor `BLOCKMUX` and product `VOLUME`")
        );
        assert_eq!(same("serial = '1'", "serial = '1'\nproduct = 'other'"), None);
        assert_eq!(same("eui64 = '500140550f7a9c1e'", naa), None, "another kind of designator");
        assert_eq!(same("vendor = 'a'", "vendor = 'a'"), None);
    }
}
