//! Namespaces in the config file: their identifiers, and the serial and model numbers of
//! subsystems.

use blockmux_proto::nvme::identity::GivenIdentity;
use blockmux_proto::nvme::subsystem::MAX_NAMESPACES;
use data_encoding::{HEXLOWER, HEXLOWER_PERMISSIVE};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap, HashSet};

/// One `[[nvme_subsystem.namespace]]`: a namespace with identifiers.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NamespaceEntry {
    nsid: u32,
    volume: String,
    /// NGUID, EUI64 and UUID in hexadecimal digits.
    nguid: Option<String>,
    eui64: Option<String>,
    uuid: Option<String>,
}

/// A validated namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConfiguredNamespace {
    /// Name of its volume.
    pub(super) volume: String,
    pub(super) identity: GivenIdentity,
}

impl ConfiguredNamespace {
    /// A namespace with the identifiers that are derived from its volume.
    pub(super) fn of_volume(volume: &str) -> ConfiguredNamespace {
        ConfiguredNamespace { volume: volume.to_owned(), identity: GivenIdentity::default() }
    }
}

/// Validates the namespaces of one subsystem: `short` maps NSIDs to volumes, `long` has entries
/// with identifiers. Returns them by NSID.
///
/// # Errors
/// If an NSID or an identifier is invalid or not unique.
pub(super) fn prepare(
    short: &BTreeMap<String, String>,
    long: &[NamespaceEntry],
) -> Result<BTreeMap<u32, ConfiguredNamespace>, String> {
    let mut all = BTreeMap::new();
    for (nsid, volume) in short {
        let number = nsid.parse::<u32>().ok().filter(|nsid| (1..=MAX_NSID).contains(nsid));
        let number = number.ok_or_else(|| format!("namespace {nsid}: use an NSID from 1 to {MAX_NSID}"))?;
        // Otherwise two different keys could mean one NSID.
        if number.to_string() != *nsid {
            return Err(format!("write namespace `{nsid}` as {number}"));
        }
        all.insert(number, ConfiguredNamespace::of_volume(volume));
    }
    for entry in long {
        let nsid = entry.nsid;
        if !(1..=MAX_NSID).contains(&nsid) {
            return Err(format!("namespace {nsid}: use an NSID from 1 to {MAX_NSID}"));
        }
        let wrong = |what: String| format!("namespace {nsid}: {what}");
        let identity = entry.identity().map_err(wrong)?;
        let namespace = ConfiguredNamespace { volume: entry.volume.clone(), identity };
        if all.insert(nsid, namespace).is_some() {
            return Err(wrong("is listed twice; remove one".to_owned()));
        }
    }
    refuse_equal_identities(&all)?;
    Ok(all)
}

/// Refuses two namespaces of one volume without configured identifiers. Both identifiers would be
/// derived from the volume, and hosts would treat the two as one namespace or refuse them.
fn refuse_equal_identities(all: &BTreeMap<u32, ConfiguredNamespace>) -> Result<(), String> {
    let mut volumes = HashMap::new();
    for (nsid, ConfiguredNamespace { volume, identity }) in all {
        if identity.nguid.is_some() || identity.uuid.is_some() {
            continue;
        }
        if let Some(first) = volumes.insert(volume, nsid) {
            return Err(format!(
                "volume `{volume}` is namespace {first} and {nsid}, which would have the same identifiers; \
                 set a uuid for one of them in a [[nvme_subsystem.namespace]]"
            ));
        }
    }
    Ok(())
}

/// Refuses a configured identifier that two namespaces of any subsystems have.
pub(super) fn refuse_duplicates<'a>(
    namespaces: impl Iterator<Item = &'a ConfiguredNamespace>,
) -> Result<(), String> {
    let mut given = HashSet::new();
    for namespace in namespaces {
        let GivenIdentity { nguid, eui64, uuid } = namespace.identity;
        let texts = [
            ("nguid", nguid.map(|bytes| HEXLOWER.encode(&bytes))),
            ("uuid", uuid.map(|bytes| HEXLOWER.encode(&bytes))),
            ("eui64", eui64.map(|bytes| HEXLOWER.encode(&bytes))),
        ];
        for (key, text) in texts.into_iter().filter_map(|(key, text)| Some((key, text?))) {
            if !given.insert((key, text.clone())) {
                return Err(format!("two namespaces have the {key} `{text}`; change one"));
            }
        }
    }
    Ok(())
}

impl NamespaceEntry {
    fn identity(&self) -> Result<GivenIdentity, String> {
        Ok(GivenIdentity {
            nguid: identifier("nguid", self.nguid.as_deref())?,
            eui64: identifier("eui64", self.eui64.as_deref())?,
            uuid: identifier("uuid", self.uuid.as_deref())?,
        })
    }
}

/// Parses an identifier of `N` bytes in hexadecimal digits, with or without hyphens.
fn identifier<const N: usize>(key: &str, text: Option<&str>) -> Result<Option<[u8; N]>, String> {
    let Some(text) = text else { return Ok(None) };
    let bytes = HEXLOWER_PERMISSIVE.decode(text.replace('-', "").as_bytes()).ok();
    match bytes.and_then(|bytes| <[u8; N]>::try_from(bytes).ok()) {
        Some(bytes) if bytes == [0; N] => {
            Err(format!("{key} `{text}` has only zeroes, which means no identifier; change it"))
        }
        None => Err(format!("{key} `{text}` is invalid; write {} hexadecimal digits", 2 * N)),
        bytes => Ok(bytes),
    }
}

/// Validates a serial or model number of Identify Controller: at most `max` ASCII characters.
///
/// # Errors
/// If the text is empty or too long, or has other characters.
pub(super) fn ascii(key: &str, text: &str, max: usize) -> Result<String, String> {
    let is_valid = (1..=max).contains(&text.len())
        && text.bytes().all(|byte| (b' '..=b'~').contains(&byte))
        && !text.starts_with(' ')
        && !text.ends_with(' ');
    if is_valid {
        return Ok(text.to_owned());
    }
    Err(format!(
        "{key} `{}` is invalid; write 1 to {max} ASCII characters without spaces at the ends",
        text.escape_debug()
    ))
}

/// Maximum NSID of a subsystem.
const MAX_NSID: u32 = MAX_NAMESPACES as u32;
/// Length of SN in Identify Controller, in bytes.
pub(super) const SERIAL_LEN: usize = 20;
/// Length of MN in Identify Controller, in bytes.
pub(super) const MODEL_LEN: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(text: &str) -> Result<BTreeMap<u32, ConfiguredNamespace>, String> {
        #[derive(Deserialize)]
        struct Table {
            #[serde(default)]
            namespaces: BTreeMap<String, String>,
            #[serde(default)]
            namespace: Vec<NamespaceEntry>,
        }
        let table: Table = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        prepare(&table.namespaces, &table.namespace)
    }

    #[test]
    fn identifiers_have_the_right_number_of_digits() {
        let all = prepared(
            "namespaces = { 1 = 'a' }\n[[namespace]]\nnsid = 7\nvolume = 'b'\n\
             nguid = '0123456789abcdef0123456789ABCDEF'\neui64 = '00-11-22-33-44-55-66-77'\n\
             uuid = '6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d'\n",
        );
        let all = all.unwrap();
        assert_eq!(all[&1], ConfiguredNamespace::of_volume("a"));
        let identity = all[&7].identity;
        assert_eq!(identity.nguid.unwrap()[..8], [0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef]);
        assert_eq!(identity.eui64, Some([0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77]));
        assert_eq!((identity.uuid.unwrap()[0], identity.uuid.unwrap()[15]), (0x6f, 0x4d));
    }

    #[test]
    fn an_error_names_its_key() {
        let with =
            |more: &str| prepared(&format!("[[namespace]]\nnsid = 7\nvolume = 'b'\n{more}")).unwrap_err();
        for (more, said) in [
            ("nguid = '0123'", "namespace 7: nguid `0123` is invalid; write 32 hexadecimal digits"),
            ("nguid = '0123456789abcdef0123456789abcdeg'", "is invalid; write 32 hexadecimal digits"),
            ("eui64 = '0000000000000000'", "namespace 7: eui64 `0000000000000000` has only zeroes"),
            (
                "uuid = '6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4'",
                "uuid `6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4` is invalid",
            ),
            ("uuid = 'ä'", "is invalid; write 32 hexadecimal digits"),
            ("euid = ''", "unknown field `euid`"),
            ("[[namespace]]\nnsid = 7\nvolume = 'c'", "namespace 7: is listed twice"),
            ("[[namespace]]\nnsid = 0\nvolume = 'c'", "namespace 0: use an NSID from 1"),
        ] {
            let failure = with(more);
            assert!(failure.contains(said), "{failure}");
        }
        assert!(prepared("namespaces = { 01 = 'a' }").unwrap_err().contains("write namespace `01` as 1"));
    }

    #[test]
    fn a_volume_has_two_namespaces_only_with_different_identifiers() {
        let failure = prepared("namespaces = { 1 = 'a', 2 = 'a' }").unwrap_err();
        assert!(failure.starts_with("volume `a` is namespace 1 and 2"), "{failure}");
        let uuid = "uuid = '6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d'";
        let two = format!("namespaces = {{ 1 = 'a' }}\n[[namespace]]\nnsid = 2\nvolume = 'a'\n{uuid}");
        assert_eq!(prepared(&two).unwrap().len(), 2);
        let three = prepared(&format!("{two}\n[[namespace]]\nnsid = 3\nvolume = 'b'\n{uuid}")).unwrap();
        let failure = refuse_duplicates(three.values()).unwrap_err();
        assert!(
            failure.starts_with("two namespaces have the uuid `6f9a4c2e1d3b4f5a8c7d9e0f1a2b3c4d`"),
            "{failure}"
        );
    }

    #[test]
    fn serial_and_model_numbers_are_ascii() {
        assert_eq!(ascii("serial_number", "S 1", SERIAL_LEN).as_deref(), Ok("S 1"));
        for text in ["", " S", "S ", "Sé", "S\n", "012345678901234567890"] {
            let failure = ascii("serial_number", text, SERIAL_LEN).unwrap_err();
            assert!(failure.starts_with("serial_number `") && !failure.contains('\n'), "{failure}");
        }
    }
}
