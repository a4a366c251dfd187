//! `[[attachment]]`: a volume of the daemon that is also a disk of its machine.

use crate::api::bodies::Attachment;
use crate::attach::way::Way;
use blockmux_engine::attach::DiskName;
use std::collections::HashSet;
use std::path::Path;
use toml::{Table, Value};

impl Attachment {
    /// How to attach it: as asked for, or as its socket says.
    pub(super) fn via(&self) -> Option<Way> {
        self.via.or(self.socket.as_ref().map(|_| Way::VhostUser))
    }

    /// Whether attaching it needs capabilities that a serving daemon drops.
    pub(super) fn needs_privileges(&self) -> bool {
        self.via() != Some(Way::VhostUser)
    }

    /// Makes the path of its socket absolute, below `directory`: attachments are compared.
    pub(super) fn below(mut self, directory: &Path) -> Attachment {
        self.socket = self.socket.map(|path| directory.join(path));
        self
    }

    /// Checks that its keys fit each other.
    ///
    /// # Errors
    /// If not; the message says what to write.
    pub(super) fn check(&self) -> Result<(), String> {
        let Attachment { volume, socket, name, .. } = self;
        match (self.via(), socket) {
            (Some(Way::VhostUser), None) => {
                Err(format!("attachment `{volume}`: vhost-user needs a socket; set socket to its path"))
            }
            (Some(Way::VhostUser), Some(_)) if name.is_some() => Err(format!(
                "attachment `{volume}`: the disk of a virtual machine has no name on this machine; omit name"
            )),
            (Some(way), Some(_)) if way != Way::VhostUser => {
                let way = way.name();
                Err(format!("attachment `{volume}`: a socket is for vhost-user; omit it, or omit {way}"))
            }
            _ => Ok(()),
        }
    }

    /// The entry as a `[[attachment]]` table.
    pub(super) fn table(&self) -> Table {
        // The request or the config had its values as text.
        Table::try_from(self).unwrap_or_default()
    }
}

/// Checks that each attachment has one of these volumes, and no volume two.
///
/// # Errors
/// If not; the message says what to write.
pub(super) fn check_all(attachments: &[Attachment], volumes: &[&str]) -> Result<(), String> {
    let (mut seen, mut links, mut sockets) = (HashSet::new(), HashSet::new(), HashSet::new());
    let known: HashSet<&str> = volumes.iter().copied().collect();
    for attachment in attachments {
        attachment.check()?;
        let Attachment { volume, name, socket, .. } = attachment;
        if let Some(twice) = socket.as_ref().filter(|path| !sockets.insert(*path)) {
            let twice = twice.display();
            return Err(format!(
                "attachment `{volume}`: another one has the socket {twice}; choose another path"
            ));
        }
        if let Some(twice) = name.as_ref().map(DiskName::link).filter(|link| !links.insert(link.clone())) {
            let twice = twice.display();
            return Err(format!(
                "attachment `{volume}`: another one has the name of {twice}; choose another name"
            ));
        }
        if !known.contains(volume.as_str()) {
            return Err(format!(
                "attachment `{volume}`: no volume has this name; add it, or correct the name"
            ));
        }
        if !seen.insert(volume) {
            return Err(format!(
                "attachment `{volume}`: the volume is attached twice; two disks of one volume would each cache its \
                 data: remove one"
            ));
        }
    }
    Ok(())
}

/// The attachments of a config in the form of a table.
pub(super) fn of_table(table: &Table) -> Vec<Attachment> {
    let list = table.get(ATTACHMENTS.0).and_then(Value::as_array);
    list.into_iter().flatten().filter_map(|entry| entry.clone().try_into().ok()).collect()
}

/// Key of the list of attachments in a config file, and key of an attachment's name.
pub(super) const ATTACHMENTS: (&str, &str) = ("attachment", "volume");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_attachment_has_a_volume_of_its_own() {
        let check = |names: &[&str]| {
            let one = |name: &&str| Attachment {
                volume: (*name).to_owned(),
                via: None,
                socket: None,
                name: "data".parse().ok().filter(|_| name.len() > 1),
                read_only: false,
            };
            check_all(&names.iter().map(one).collect::<Vec<_>>(), &["a", "b", "aa", "bb"])
        };
        assert_eq!(check(&["b", "a"]), Ok(()));
        assert!(check(&["c"]).unwrap_err().starts_with("attachment `c`: no volume has this name"));
        assert!(check(&["aa", "bb"]).unwrap_err().contains("has the name of /dev/blockmux/data; choose"));
        assert!(check(&["a", "a"]).unwrap_err().starts_with("attachment `a`: the volume is attached twice"));
    }

    #[test]
    fn a_table_has_what_it_was_made_of() {
        let all = [
            Attachment { volume: "a".to_owned(), via: None, socket: None, name: None, read_only: false },
            Attachment {
                volume: "c".to_owned(),
                via: None,
                socket: Some("/run/c.sock".into()),
                name: None,
                read_only: false,
            },
            Attachment {
                volume: "b".to_owned(),
                via: Some(Way::Ublk),
                socket: None,
                name: "data".parse().ok(),
                read_only: true,
            },
        ];
        let list = all.iter().map(|one| Value::Table(one.table())).collect();
        let table = [(ATTACHMENTS.0.to_owned(), Value::Array(list))].into_iter().collect();
        assert_eq!(of_table(&table), all);
    }
}
