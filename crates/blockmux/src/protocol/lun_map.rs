//! `luns` in the config file: which volume is which LUN of an iSCSI or SRP target, and what the
//! initiators of an ACL entry see of it.

use super::frontend::TargetsByVolume;
use super::policy::{LiveAccess, PublicAccess};
use super::units::VolumeUnit;
use blockmux_proto::scsi::{
    ListedTarget, LunMapping, MAX_LUN, ScsiTarget, ShownLuns, TargetList, UnitChange,
};
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::collections::btree_map::Iter;
use std::fmt;

/// Maximum number of logical units of one target.
pub(super) const MAX_LUNS: usize = 4096;

/// Volumes by LUN.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "BTreeMap<String, LunEntry>")]
pub(super) struct LunMap(BTreeMap<u16, LunEntry>);

/// One LUN of a map: `"root"`, or `{ volume = "root", read_only = true }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LunEntry {
    pub(super) volume: String,
    /// Initiators may not change the volume through this LUN.
    pub(super) is_read_only: bool,
}

/// `luns` of an ACL entry: what its initiators see.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum AclLuns {
    /// All LUNs of the target.
    #[default]
    All,
    /// These LUNs of the target, as `[0, 2]`.
    Only(Vec<u16>),
    /// Their own LUNs, as `{ 0 = "root" }`.
    Own(LunMap),
}

/// The logical units that the initiators of an ACL entry see, of a target with this map.
pub(super) struct WantedLuns {
    shown: ShownLuns,
    map: BTreeMap<u16, LunMapping>,
}

impl LunMap {
    pub(super) fn has(&self, lun: u16) -> bool {
        self.0.contains_key(&lun)
    }

    pub(super) fn iter(&self) -> Iter<'_, u16, LunEntry> {
        self.0.iter()
    }

    /// The names of the volumes.
    pub(super) fn volumes(&self) -> impl Iterator<Item = &str> {
        self.0.values().map(|entry| entry.volume.as_str())
    }
}

/// The volumes of a target, and what everybody can do with each, given what everybody sees.
pub(super) fn public_access<'a>(
    all: impl Iterator<Item = &'a str>,
    seen_by_everybody: impl Iterator<Item = &'a LunEntry>,
) -> Vec<(String, PublicAccess)> {
    let mut volumes: BTreeMap<&str, PublicAccess> = all.map(|name| (name, PublicAccess::Nothing)).collect();
    for LunEntry { volume, is_read_only } in seen_by_everybody {
        let public = PublicAccess::of_lun(*is_read_only);
        let known = volumes.entry(volume).or_insert(public);
        *known = public.max(*known);
    }
    volumes.into_iter().map(|(name, public)| (name.to_owned(), public)).collect()
}

/// The access that everybody has to a target through which everybody gets this.
fn live_access(target: &impl ListedTarget, public: PublicAccess) -> LiveAccess {
    let networks = target.networks().clone();
    let public = public.only_if(networks.is_everyone());
    LiveAccess { target: target.name().to_string(), public, networks }
}

/// The access that everybody has to the volumes attached to a target, which are not in the LUN map
/// of an ACL entry.
pub(super) fn access_of(target: &impl ListedTarget) -> LiveAccess {
    let is_open = target.views().any(|(view, is_open)| is_open && !view.has_own_luns());
    live_access(target, PublicAccess::all_if(is_open))
}

/// For each volume the targets that show it, and the access that everybody has to it there.
pub(super) fn targets_by_volume(targets: &TargetList<impl ListedTarget>) -> TargetsByVolume {
    let mut all = TargetsByVolume::new();
    for target in targets.all() {
        let mut shown = BTreeMap::new();
        for (view, is_open) in target.views() {
            for (volume, may_write) in view.volumes() {
                let public = PublicAccess::of_lun(!may_write).only_if(is_open);
                let known = shown.entry(volume).or_insert(public);
                *known = public.max(*known);
            }
        }
        for (volume, public) in shown {
            all.entry(volume).or_default().push(live_access(&*target, public));
        }
    }
    all
}

impl AclLuns {
    /// Checks that the target has the LUNs.
    pub(super) fn check(&self, target: &LunMap) -> Result<(), String> {
        let AclLuns::Only(luns) = self else { return Ok(()) };
        match luns.iter().find(|lun| !target.has(**lun)) {
            Some(lun) => {
                Err(format!("an acl entry has LUN {lun}, which `luns` does not map; correct one of them"))
            }
            None => Ok(()),
        }
    }

    /// The volumes that the initiators see, of a target with this map.
    pub(super) fn of<'a>(&'a self, target: &'a LunMap) -> impl Iterator<Item = (u16, &'a LunEntry)> {
        let map = if let AclLuns::Own(map) = self { map } else { target };
        let sees = |lun: &u16| match self {
            AclLuns::All | AclLuns::Own(_) => true,
            AclLuns::Only(luns) => luns.contains(lun),
        };
        map.iter().map(|(lun, entry)| (*lun, entry)).filter(move |(lun, _)| sees(lun))
    }

    /// The names of the volumes of their own map.
    pub(super) fn own_volumes(&self) -> impl Iterator<Item = &str> {
        let map = if let AclLuns::Own(map) = self { Some(map) } else { None };
        map.into_iter().flat_map(LunMap::volumes)
    }

    /// The logical units that the initiators see. `unit` returns the unit of a volume's name.
    pub(super) fn wanted(&self, target: &LunMap, unit: impl Fn(&str) -> Option<VolumeUnit>) -> WantedLuns {
        let (shown, map) = match self {
            AclLuns::All => (ShownLuns::All, target),
            AclLuns::Only(luns) => (ShownLuns::Only(luns.iter().copied().collect()), target),
            AclLuns::Own(map) => (ShownLuns::Own, map),
        };
        let mapping = |(lun, LunEntry { volume, is_read_only }): (&u16, &LunEntry)| {
            let (volume, unit) = unit(volume)?;
            Some((*lun, LunMapping { volume, unit, is_read_only: *is_read_only }))
        };
        WantedLuns { shown, map: map.iter().filter_map(mapping).collect() }
    }
}

impl WantedLuns {
    /// This unit as LUN 0.
    pub(super) fn one((volume, unit): VolumeUnit) -> WantedLuns {
        let mapping = LunMapping { volume, unit, is_read_only: false };
        WantedLuns { shown: ShownLuns::All, map: BTreeMap::from([(0, mapping)]) }
    }

    /// Makes a view of the target show exactly these LUNs.
    pub(super) fn show_in(&self, view: &ScsiTarget, on_added: impl Fn(UnitChange<'_>)) {
        for LunMapping { volume, unit, .. } in view.set_luns(&self.shown, &self.map) {
            on_added(UnitChange::Added(volume, &unit));
        }
    }
}

impl TryFrom<BTreeMap<String, LunEntry>> for LunMap {
    type Error = String;

    fn try_from(written: BTreeMap<String, LunEntry>) -> Result<LunMap, String> {
        let mut map: BTreeMap<u16, LunEntry> = BTreeMap::new();
        for (lun, entry) in written {
            let number = lun.parse::<u16>().ok().filter(|lun| *lun <= MAX_LUN);
            let number =
                number.ok_or_else(|| format!("LUNs are numbers from 0 to {MAX_LUN}, not `{lun}`"))?;
            // Otherwise two different keys could mean one LUN.
            if number.to_string() != lun {
                return Err(format!("write LUN `{lun}` as {number}"));
            }
            // Both LUNs would have one identity, so initiators may send to either what they mean
            // for the other.
            let is_other =
                |own: &&LunEntry| own.volume == entry.volume && own.is_read_only != entry.is_read_only;
            if map.values().any(|own| is_other(&own)) {
                return Err(format!(
                    "`{}` is read-only at one LUN and not at another; choose one",
                    entry.volume
                ));
            }
            map.insert(number, entry);
        }
        match map.len() {
            0..=MAX_LUNS => Ok(LunMap(map)),
            count => Err(format!("has {count} LUNs; the maximum is {MAX_LUNS}")),
        }
    }
}

impl<'de> Deserialize<'de> for LunEntry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<LunEntry, D::Error> {
        from.deserialize_any(LunEntryVisitor)
    }
}

struct LunEntryVisitor;

impl<'de> Visitor<'de> for LunEntryVisitor {
    type Value = LunEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a volume, or { volume = \"NAME\", read_only = true }")
    }

    fn visit_str<E: Error>(self, volume: &str) -> Result<LunEntry, E> {
        Ok(LunEntry { volume: volume.to_owned(), is_read_only: false })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LunEntry, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct LunEntryTable {
            volume: String,
            #[serde(default)]
            read_only: bool,
        }
        let LunEntryTable { volume, read_only } = Deserialize::deserialize(MapAccessDeserializer::new(map))?;
        Ok(LunEntry { volume, is_read_only: read_only })
    }
}

impl<'de> Deserialize<'de> for AclLuns {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<AclLuns, D::Error> {
        from.deserialize_any(AclLunsVisitor)
    }
}

struct AclLunsVisitor;

impl<'de> Visitor<'de> for AclLunsVisitor {
    type Value = AclLuns;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of the target's LUNs, or a table of volumes by LUN")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<AclLuns, A::Error> {
        Deserialize::deserialize(SeqAccessDeserializer::new(list)).map(AclLuns::Only)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<AclLuns, A::Error> {
        Deserialize::deserialize(MapAccessDeserializer::new(map)).map(AclLuns::Own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Written {
        luns: LunMap,
        #[serde(default)]
        acl: AclLuns,
    }

    fn read(text: &str) -> Result<Written, String> {
        toml::from_str(text).map_err(|error| error.message().to_owned())
    }

    /// LUN, volume and write protection.
    fn seen(text: &str) -> Vec<(u16, String, bool)> {
        let Written { luns, acl } = read(text).unwrap();
        acl.of(&luns).map(|(lun, entry)| (lun, entry.volume.clone(), entry.is_read_only)).collect()
    }

    #[test]
    fn an_acl_entry_sees_all_luns_or_some_or_its_own() {
        let luns = "luns = { 0 = 'x', 7 = { volume = 'y', read_only = true }, 16383 = { volume = 'z' } }";
        let with = |acl: &str| seen(&format!("{luns}\n{acl}"));
        let [x, y, z] = [(0, "x", false), (7, "y", true), (16_383, "z", false)]
            .map(|(lun, volume, is_read_only)| (lun, volume.to_owned(), is_read_only));
        assert_eq!(with(""), [x, y.clone(), z]);
        assert_eq!(with("acl = [7]"), [y]);
        assert_eq!(with("acl = []"), []);
        let own = [(0, "y".to_owned(), false), (1, "w".to_owned(), true)];
        assert_eq!(with("acl = { 0 = 'y', 1 = { volume = 'w', read_only = true } }"), own);
        assert_eq!(with("acl = {}"), []);
    }

    #[test]
    fn an_invalid_map_is_refused() {
        let luns = |luns: &str| read(&format!("luns = {luns}")).err().unwrap();
        for (map, expected) in [
            ("{ 16384 = 'x' }", "LUNs are numbers from 0 to 16383, not `16384`"),
            ("{ a = 'x' }", "LUNs are numbers from 0 to 16383, not `a`"),
            ("{ 0 = 'x', '00' = 'y' }", "write LUN `00` as 0"),
            ("{ '+1' = 'x' }", "write LUN `+1` as 1"),
            (
                "{ 0 = 'x', 1 = { volume = 'x', read_only = true } }",
                "`x` is read-only at one LUN and not at another; choose one",
            ),
            ("{ 0 = 1 }", "invalid type: integer `1`, expected the name of a volume, or { volume ="),
            ("{ 0 = { name = 'x' } }", "unknown field `name`, expected `volume` or `read_only`"),
            ("{ 0 = { read_only = true } }", "missing field `volume`"),
        ] {
            let error = luns(map);
            assert!(error.starts_with(expected), "{map}: {error}");
        }
        let many = (0..4097).map(|lun| format!("{lun} = 'v{lun}'")).collect::<Vec<_>>().join(", ");
        assert_eq!(luns(&format!("{{ {many} }}")), "has 4097 LUNs; the maximum is 4096");
        let acl = read("luns = {}\nacl = 'x'").err().unwrap();
        assert!(acl.contains("expected a list of the target's LUNs, or a table of volumes by LUN"), "{acl}");
        let Written { luns, acl } = read("luns = { 0 = 'x' }\nacl = [0, 1]").unwrap();
        let error = "an acl entry has LUN 1, which `luns` does not map; correct one of them";
        assert_eq!(acl.check(&luns), Err(error.to_owned()));
    }
}
