//! The table `[group]`, and which volumes fit it.

use crate::api::bodies::Attachment;
use blockmux_engine::volume::rbd::{ClusterOptions, TIMEOUT, USER};
use blockmux_group::table::MAX_TEXT;
use blockmux_volume::Spec;
use blockmux_volume::spec::{ImageOwnership, RbdSpec};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use toml::Table;

/// Which member of which group the daemon is, and where the group's table is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::daemon) struct GroupConfig {
    /// The group's name, which all members have.
    name: String,
    /// The member's own name.
    pub(super) member: String,
    /// Where initiators and operators reach the member, for people.
    pub(super) address: String,
    /// The pool with the group's table.
    pub(super) pool: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) namespace: Option<String>,
    /// Ceph's config.
    #[serde(skip_serializing_if = "Option::is_none")]
    conf: Option<PathBuf>,
    /// The user, without `client.`.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// The file with the user's key.
    #[serde(skip_serializing_if = "Option::is_none")]
    keyring: Option<PathBuf>,
}

impl GroupConfig {
    /// Makes relative paths relative to a directory.
    pub(in crate::daemon) fn anchor(&mut self, directory: &Path) {
        for path in self.conf.iter_mut().chain(&mut self.keyring) {
            *path = directory.join(&*path);
        }
    }

    /// The table, with absolute paths.
    pub(in crate::daemon) fn table(&self, directory: &Path) -> Table {
        let mut own = self.clone();
        own.anchor(directory);
        // It has texts and paths only, which were read from a config.
        Table::try_from(own).unwrap_or_default()
    }

    /// The name of the object with the group's table.
    pub(super) fn object(&self) -> String {
        format!("blockmux.group.{}", self.name)
    }

    /// The group's name.
    pub(super) fn group(&self) -> &str {
        &self.name
    }

    /// How the member connects to the cluster.
    pub(super) fn cluster(&self) -> ClusterOptions {
        ClusterOptions {
            conf: self.conf.clone(),
            user: self.id.clone().unwrap_or_else(|| USER.to_owned()),
            keyring: self.keyring.clone(),
            timeout: TIMEOUT,
        }
    }

    fn check(&self) -> Result<(), String> {
        let texts = [("name", &self.name), ("member", &self.member), ("address", &self.address)];
        let is_text = |text: &str| {
            (1..=MAX_TEXT).contains(&text.len()) && !text.contains(|c: char| c.is_control() || c == ' ')
        };
        if let Some((key, _)) = texts.into_iter().find(|(_, text)| !is_text(text)) {
            return Err(format!("group: `{key}` is not 1 to {MAX_TEXT} bytes without spaces"));
        }
        Ok(())
    }

    /// Whether an image is reached as the group's table is.
    fn reaches(&self, image: &RbdSpec) -> bool {
        (&image.conf, &image.id, &image.keyring) == (&self.conf, &self.id, &self.keyring)
    }
}

/// A volume of the config.
pub(in crate::daemon) struct GroupVolumeConfig<'a> {
    pub(in crate::daemon) name: &'a str,
    pub(in crate::daemon) spec: &'a Spec,
    pub(in crate::daemon) read_only: bool,
}

/// Checks the table `[group]`, and that the volumes whose images the group hands out fit it.
///
/// # Errors
/// If not; the message says what to write.
pub(in crate::daemon) fn check<'a>(
    group: Option<&GroupConfig>,
    volumes: impl Iterator<Item = GroupVolumeConfig<'a>>,
    attachments: &[Attachment],
) -> Result<(), String> {
    group.map_or(Ok(()), GroupConfig::check)?;
    let mut count = 0;
    for GroupVolumeConfig { name, spec, read_only } in volumes {
        let Some(image) = image_in(spec) else { continue };
        let wrong = |what: &str| Err(format!("volume `{name}`: exclusive=group {what}"));
        let Some(group) = group else {
            return wrong("is for gateways of a group; add the table [group], or write exclusive=standby");
        };
        if read_only {
            return wrong("is for volumes that are written to; remove it, or read_only");
        }
        if !group.reaches(image) {
            return wrong(
                "needs the same conf, id and keyring as [group], whose connection opens the image; write both alike",
            );
        }
        if attachments.iter().any(|disk| disk.volume == name) {
            return wrong(
                "cannot be a disk of this machine, which has no path to other gateways; remove the attachment",
            );
        }
        if name.len() > MAX_TEXT || image_text(image).len() > MAX_TEXT {
            return wrong(&format!(
                "allows {MAX_TEXT} bytes for the names of a volume and of its image; shorten them"
            ));
        }
        count += 1;
    }
    if count > MAX_VOLUMES {
        return Err(format!(
            "group: {count} volumes have exclusive=group, and a gateway serves {MAX_VOLUMES} at most"
        ));
    }
    Ok(())
}

/// What the group calls the image of a volume that it hands out: its place in the cluster.
pub(in crate::daemon) fn image_of_group(spec: &Spec) -> Option<String> {
    image_in(spec).map(image_text)
}

fn image_in(spec: &Spec) -> Option<&RbdSpec> {
    spec.leaves().into_iter().find_map(|leaf| match leaf {
        Spec::Rbd(image) if image.ownership == ImageOwnership::Group => Some(image),
        _ => None,
    })
}

fn image_text(image: &RbdSpec) -> String {
    let place = image.namespace.iter().map(String::as_str);
    let place: Vec<_> =
        [image.pool.as_str()].into_iter().chain(place).chain([image.image.as_str()]).collect();
    place.join("/")
}

/// Maximum number of volumes of a gateway that its group hands out. Each may have a thread.
const MAX_VOLUMES: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn group(more: &str) -> GroupConfig {
        let own = "name = 'gw'\nmember = 'a'\naddress = '192.0.2.1'\npool = 'rbd'";
        toml::from_str(&format!("{own}\n{more}")).unwrap()
    }

    fn said(group: Option<&GroupConfig>, spec: &str, disks: &[Attachment]) -> String {
        let spec = spec.parse().unwrap();
        let volume = GroupVolumeConfig { name: "a", spec: &spec, read_only: false };
        check(group, [volume].into_iter(), disks).err().unwrap_or_default()
    }

    #[test]
    fn a_volume_of_a_group_needs_what_the_group_has() {
        let own = group("");
        let spec = "rbd:rbd/i?exclusive=group";
        assert_eq!(said(Some(&own), spec, &[]), "");
        assert_eq!(said(None, "rbd:rbd/i?exclusive=standby", &[]), "");
        assert!(said(None, spec, &[]).contains("add the table [group]"));
        let image = spec.parse().unwrap();
        let read_only = [GroupVolumeConfig { name: "a", spec: &image, read_only: true }];
        assert!(check(Some(&own), read_only.into_iter(), &[]).unwrap_err().contains("written to"));
        let other = group("id = 'gw'\nkeyring = '/k'");
        assert!(said(Some(&other), spec, &[]).contains("the same conf, id and keyring"));
        assert_eq!(said(Some(&other), &format!("{spec}&id=gw&keyring=/k"), &[]), "");
        let disk =
            Attachment { volume: "a".to_owned(), via: None, socket: None, name: None, read_only: false };
        assert!(said(Some(&own), spec, &[disk]).contains("remove the attachment"));
        assert!(said(Some(&GroupConfig { member: "a b".to_owned(), ..own }), spec, &[]).contains("`member`"));
    }

    #[test]
    fn an_image_is_named_by_its_place() {
        let image = |text: &str| image_of_group(&text.parse().unwrap());
        assert_eq!(image("rbd:p/i?exclusive=group").as_deref(), Some("p/i"));
        assert_eq!(image("rbd:p/n/i?exclusive=group&id=x").as_deref(), Some("p/n/i"));
        assert_eq!(image("rate:iops=5:rbd:p/i?exclusive=group").as_deref(), Some("p/i"));
        assert_eq!(image("rbd:p/i?exclusive=standby"), None);
    }

    #[test]
    fn the_table_is_written_as_it_is_read() {
        let own = group("conf = 'ceph.conf'\nnamespace = 'n'");
        let written = own.table(Path::new("/etc"));
        assert_eq!(written["conf"].as_str(), Some("/etc/ceph.conf"));
        let mut expected = own;
        expected.anchor(Path::new("/etc"));
        assert_eq!(written.try_into::<GroupConfig>().unwrap(), expected);
    }
}
