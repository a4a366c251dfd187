//! Who may log in to a target, for the readers of all formats.
//!
//! A reader adds each statement about access, also one that it cannot read. [`AccessRules::settle`]
//! then makes entries and networks of them that admit nobody whom the config kept out: what could
//! not be read closes what it stood for, and has a comment that is counted.

use super::listeners::network;
use super::model::{ChapUser, ImportedAcl, ImportedChap, ImportedSecret};
use super::notes::Notes;

/// What a config says about the initiators of a target.
#[derive(Clone, Default)]
pub(super) struct AccessRules {
    /// Initiators with their LUNs; `None`: all, with all LUNs.
    entries: Option<Vec<ImportedAcl>>,
    /// `None`: all.
    pub(super) networks: Option<Vec<String>>,
    /// CHAP users in the order of the config; `None`: one that cannot be read.
    pub(super) users: Vec<Option<ImportedChap>>,
    /// Why nobody may log in, and what to do about it.
    closed: Option<String>,
}

impl AccessRules {
    /// Adds an initiator by its name.
    pub(super) fn add_name(&mut self, name: &str, notes: &mut Notes) {
        let entries = self.entries.get_or_insert_default();
        if name.is_empty() {
            return notes.lost("an initiator without a name");
        }
        entries.push(ImportedAcl { initiator: Some(name.to_owned()), ..ImportedAcl::default() });
    }

    /// Adds entries; without any, nobody may log in.
    pub(super) fn add_entries(&mut self, entries: Vec<ImportedAcl>) {
        self.entries.get_or_insert_default().extend(entries);
    }

    /// Adds a network of initiators.
    pub(super) fn add_network(&mut self, keyword: &str, value: &str, notes: &mut Notes) {
        let networks = self.networks.get_or_insert_default();
        match network(value) {
            Some(network) => networks.push(network),
            None => notes.setting(keyword, value),
        }
    }

    /// Admits initiators of all networks.
    pub(super) fn admit_all_networks(&mut self) {
        self.networks = None;
    }

    /// Adds a CHAP user; `None`: the statement cannot be read.
    pub(super) fn add_user(&mut self, keyword: &str, user: Option<ImportedChap>, notes: &mut Notes) {
        if user.is_none() {
            // Without a name, the value may be the secret.
            notes.lost(format!("{keyword}: it needs a name and a secret"));
        }
        self.users.push(user);
    }

    /// Sets the user by which the target authenticates itself to all users without their own.
    pub(super) fn set_target_user(&mut self, user: Option<&ChapUser>) {
        for chap in self.users.iter_mut().flatten().filter(|chap| chap.target.is_none()) {
            chap.target = user.cloned();
        }
    }

    pub(super) fn has_users(&self) -> bool {
        !self.users.is_empty()
    }

    /// Whether nothing was said about initiators.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_none() && self.networks.is_none() && self.users.is_empty()
    }

    /// Lets nobody log in; `why` also says what to do.
    pub(super) fn close(&mut self, why: impl Into<String>) {
        self.closed.get_or_insert(why.into());
    }

    /// Lets nobody log in because of a statement that is not known.
    pub(super) fn close_for(&mut self, keyword: &str) {
        self.close(format!("{keyword} is not known: add an acl entry for it, and remove `allow`"));
    }

    /// Adds a statement that the reader does not know. It may be about access if it begins with one
    /// of `words`, as `IncomingUsers`: nobody may log in then.
    pub(super) fn add_unknown(&mut self, keyword: &str, value: &str, words: &[&str], notes: &mut Notes) {
        notes.setting(keyword, value);
        if begins(keyword, words) {
            self.close_for(keyword);
        }
    }

    /// The ACL of the target, and its networks: `None` for all, empty for nobody.
    ///
    /// Our entries have one user. That is the first one; if it cannot be read, nobody may log in,
    /// because the next one may have been meant for others.
    pub(super) fn settle(mut self, notes: &mut Notes) -> (Vec<ImportedAcl>, Option<Vec<String>>) {
        let mut users = std::mem::take(&mut self.users).into_iter();
        let first = users.next();
        for chap in users.flatten() {
            notes.lost(format!(
                "CHAP user {}: an acl entry has one user; add entries by name",
                chap.user.name
            ));
        }
        if matches!(first, Some(None)) {
            self.close("its CHAP user cannot be read: add it to each acl entry, and remove `allow`");
        }
        let chap = first.flatten();
        let everybody = || vec![ImportedAcl::default()];
        let mut acl = self.entries.unwrap_or_else(everybody);
        for entry in acl.iter_mut().filter(|entry| entry.chap.is_none()) {
            entry.chap.clone_from(&chap);
        }
        let allow = match (self.closed, self.networks) {
            (Some(why), _) => {
                notes.remark(why);
                Some(Vec::new())
            }
            (None, _) if acl.is_empty() => {
                notes.remark(ADMITTED_NOBODY);
                Some(Vec::new())
            }
            (None, networks) => {
                if networks.as_ref().is_some_and(Vec::is_empty) {
                    notes.remark("none of its initiators' networks could be kept: add them to `allow`");
                }
                networks
            }
        };
        // One entry for everybody without anything is what a target without entries means.
        if acl == everybody() {
            acl.clear();
        }
        (acl, allow)
    }
}

/// Whether a keyword begins with one of these words, which are in lower case.
pub(super) fn begins(keyword: &str, words: &[&str]) -> bool {
    let keyword = keyword.to_ascii_lowercase();
    words.iter().any(|word| keyword.starts_with(word))
}

/// A CHAP user of which only the name or only the secret is there.
pub(super) struct UnreadableUser;

/// A user that may be missing: neither name nor secret means no authentication.
pub(super) fn optional_user(
    name: Option<String>,
    secret: Option<ImportedSecret>,
) -> Result<Option<ChapUser>, UnreadableUser> {
    let has_name = name.as_ref().is_some_and(|name| !name.is_empty());
    let has_secret = secret.as_ref().is_some_and(|secret| !secret.0.is_empty());
    if has_name == has_secret { Ok(ChapUser::of(name, secret)) } else { Err(UnreadableUser) }
}

/// The user of discovery for one that cannot be read. Discovery has no `allow`, so it gets a random
/// secret, as each secret that is too short.
pub(super) fn unknown_discovery_user(keyword: &str, notes: &mut Notes) -> ChapUser {
    notes.lost(format!("{keyword}: it needs a name and a secret; nobody can discover targets without"));
    ChapUser { name: "discovery".to_owned(), secret: ImportedSecret::new("") }
}

/// About a target that was disabled.
pub(super) const DISABLED: &str = "it was disabled: nobody may log in until `allow` is removed";
/// About a target that had no initiators.
pub(super) const ADMITTED_NOBODY: &str = "nobody could log in: add an acl entry, and remove `allow`";

#[cfg(test)]
mod tests {
    use super::*;

    fn chap(name: &str) -> Option<ImportedChap> {
        let secret = ImportedSecret::new("a secret of twelve");
        let user = ChapUser::of(Some(name.to_owned()), Some(secret))?;
        Some(ImportedChap { user, target: None })
    }

    #[test]
    fn a_user_that_cannot_be_read_is_not_replaced_by_the_next() {
        let mut notes = Notes::default();
        let mut rules = AccessRules::default();
        rules.add_user("chap", None, &mut notes);
        rules.add_user("chap", chap("eve"), &mut notes);
        let (acl, allow) = rules.settle(&mut notes);
        assert!(acl.is_empty() && allow == Some(Vec::new()));
        assert_eq!(notes.count(), 2);
    }

    #[test]
    fn the_first_user_is_that_of_all_names() {
        let mut notes = Notes::default();
        let mut rules = AccessRules::default();
        for name in ["iqn.a", "", "iqn.b"] {
            rules.add_name(name, &mut notes);
        }
        rules.add_user("chap", chap("joe"), &mut notes);
        rules.add_user("chap", None, &mut notes);
        let (acl, allow) = rules.settle(&mut notes);
        let names: Vec<_> = acl.iter().filter_map(|entry| entry.initiator.as_deref()).collect();
        assert_eq!(names, ["iqn.a", "iqn.b"]);
        assert!(acl.iter().all(|entry| entry.chap == chap("joe")) && allow.is_none());
        assert_eq!(notes.count(), 2);
    }

    #[test]
    fn names_and_networks_of_which_none_can_be_read_admit_nobody() {
        let mut notes = Notes::default();
        let mut names = AccessRules::default();
        names.add_name("", &mut notes);
        let mut networks = AccessRules::default();
        networks.add_network("initiator-address", "storage.example.com", &mut notes);
        let mut unknown = AccessRules::default();
        unknown.add_unknown("IncomingUsers", "joe", &["incominguser"], &mut notes);
        for rules in [names, networks, unknown] {
            assert_eq!(rules.settle(&mut notes).1, Some(Vec::new()));
        }
        let mut other = AccessRules::default();
        other.add_unknown("nop_interval", "5", &["incominguser"], &mut notes);
        assert_eq!(other.settle(&mut notes).1, None);
        assert_eq!(notes.count(), 4);
    }
}
