//! `[[nvme_subsystem]]` of the config file.

use super::super::Settings;
use crate::failure::Failure;
use blockmux_proto::nvme::nqn::Nqn;
use serde::Deserialize;
use std::collections::{BTreeMap, HashSet};

/// A subsystem as it is written; keys are the specification's words.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SubsystemEntry {
    nqn: String,
    /// Volumes by namespace identifiers, which TOML has as text.
    namespaces: BTreeMap<String, String>,
    /// Who may connect; without any, everybody.
    #[serde(default)]
    hosts: Vec<String>,
}

/// A subsystem whose names and numbers are right.
#[derive(Clone, Debug)]
pub(crate) struct ConfiguredSubsystem {
    pub(super) nqn: Nqn,
    /// Names of volumes by namespace identifiers.
    pub(super) namespaces: BTreeMap<u32, String>,
    pub(super) hosts: Vec<Nqn>,
}

impl ConfiguredSubsystem {
    /// Checks an entry.
    pub(crate) fn prepare(entry: SubsystemEntry) -> Result<ConfiguredSubsystem, Failure> {
        let wrong = |what: String| Failure::request(format!("nvme_subsystem `{}`: {what}", entry.nqn));
        let name = |text: &str| {
            Nqn::new(text).ok_or_else(|| {
                wrong(format!("`{text}` is no NVMe name; write one as nqn.2026-11.com.example:a"))
            })
        };
        let nqn = name(&entry.nqn)?;
        let hosts = entry.hosts.iter().map(|host| name(host)).collect::<Result<_, _>>()?;
        let namespaces = entry.namespaces.iter().map(|(nsid, volume)| {
            let number = nsid.parse().ok().filter(|nsid| (1..=MAX_NSID).contains(nsid));
            let number =
                number.ok_or_else(|| wrong(format!("namespace {nsid} is not from 1 to {MAX_NSID}")))?;
            Ok((number, volume.clone()))
        });
        let namespaces = namespaces.collect::<Result<_, Failure>>()?;
        Ok(ConfiguredSubsystem { nqn, namespaces, hosts })
    }
}

/// Whether the settings fit these volumes.
pub(super) fn check(settings: &Settings, volumes: &[&str]) -> Result<(), String> {
    let mut names = HashSet::new();
    for subsystem in &settings.nvme {
        let nqn = &subsystem.nqn;
        if !names.insert(nqn) {
            return Err(format!("two nvme_subsystems are called `{nqn}`; rename one"));
        }
        if let Some(missing) = subsystem.namespaces.values().find(|name| !volumes.contains(&name.as_str())) {
            return Err(format!("nvme_subsystem `{nqn}`: there is no volume `{missing}`; add a [[volume]]"));
        }
    }
    Ok(())
}

/// Of one subsystem.
const MAX_NSID: u32 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn prepare(text: &str) -> Result<ConfiguredSubsystem, String> {
        let entry: SubsystemEntry = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        ConfiguredSubsystem::prepare(entry).map_err(|failure| failure.to_string())
    }

    #[test]
    fn a_subsystem_has_what_its_table_says() {
        let subsystem =
            prepare("nqn = 'nqn.a'\nnamespaces = { 1 = 'x', 256 = 'y' }\nhosts = ['nqn.h']").unwrap();
        assert_eq!(subsystem.nqn.as_str(), "nqn.a");
        assert_eq!(subsystem.namespaces.get(&256).map(String::as_str), Some("y"));
        assert_eq!(subsystem.hosts, [Nqn::new("nqn.h").unwrap()]);
        let settings = Settings { nvme: vec![subsystem.clone()], ..Settings::default() };
        assert_eq!(check(&settings, &["x", "y"]), Ok(()));
        assert!(check(&settings, &["x"]).unwrap_err().contains("there is no volume `y`"));
        let settings = Settings { nvme: vec![subsystem.clone(), subsystem], ..Settings::default() };
        assert!(check(&settings, &["x", "y"]).unwrap_err().starts_with("two nvme_subsystems are called"));
    }

    #[test]
    fn wrong_names_and_numbers_are_told() {
        for (text, said) in [
            ("nqn = 'iqn.a'\nnamespaces = {}", "`iqn.a` is no NVMe name"),
            ("nqn = 'nqn.a'\nnamespaces = { 0 = 'x' }", "namespace 0 is not from 1"),
            ("nqn = 'nqn.a'\nnamespaces = { x = 'x' }", "namespace x is not from 1"),
            ("nqn = 'nqn.a'\nnamespaces = {}\nhosts = ['h']", "`h` is no NVMe name"),
            ("nqn = 'nqn.a'\nnamespaces = {}\nhost = []", "unknown field"),
        ] {
            let failure = prepare(text).unwrap_err();
            assert!(failure.contains(said), "{failure}");
        }
    }
}
