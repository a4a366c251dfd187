//! What a client of the API may request, and the entries of the config file that grant it.

use crate::access::secret;
use serde::Deserialize;
use std::fmt;
use std::path::{Path, PathBuf};
use toml::Table;

/// The role of a client. Each includes those before it. See
/// docs/decisions/0105-clients-of-the-api-have-roles.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Role {
    /// See everything, change nothing.
    Read,
    /// Change what is running: limits, sizes, attached disks, sessions, log levels.
    Operate,
    /// Change everything, also which data is served, and to whom.
    Administer,
}

/// One `[[api_token]]`: a token that clients of the API over TCP may send.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ApiToken {
    /// Its name in logs and messages.
    pub(super) name: String,
    pub(super) token_file: PathBuf,
    pub(super) role: Role,
}

/// One `[[api_certificate]]`: the subject of a certificate that clients of the API over TCP may
/// have.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ApiCertificate {
    pub(super) subject: String,
    pub(super) role: Role,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Read => "read",
            Role::Operate => "operate",
            Role::Administer => "administer",
        })
    }
}

impl ApiToken {
    /// The entry as an `[[api_token]]` table with an absolute path.
    pub(super) fn table(&self, directory: &Path) -> Table {
        let file = secret::below(directory, &self.token_file).display().to_string();
        let all = [("name", self.name.clone()), ("token_file", file), ("role", self.role.to_string())];
        all.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect()
    }
}

impl ApiCertificate {
    /// The entry as an `[[api_certificate]]` table.
    pub(super) fn table(&self) -> Table {
        let all = [("subject", self.subject.clone()), ("role", self.role.to_string())];
        all.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect()
    }
}

/// Key of the list of tokens in a config file, and key of a token's name.
pub(super) const API_TOKENS: (&str, &str) = ("api_token", "name");
/// Key of the list of certificates in a config file, and key of a certificate's subject.
pub(super) const API_CERTIFICATES: (&str, &str) = ("api_certificate", "subject");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_includes_those_before_it() {
        assert!(Role::Read < Role::Operate && Role::Operate < Role::Administer);
    }

    #[test]
    fn a_table_has_what_its_entry_was_read_from() {
        let text = "name = 'prometheus'\ntoken_file = '/t'\nrole = 'read'";
        let (token, written): (ApiToken, Table) = (toml::from_str(text).unwrap(), text.parse().unwrap());
        assert_eq!(token.table(Path::new("/d")), written);
        assert_eq!(ApiToken { token_file: "t".into(), ..token }.table(Path::new("/")), written);
        let text = "subject = 'CN=a'\nrole = 'operate'";
        let (certificate, written): (ApiCertificate, Table) =
            (toml::from_str(text).unwrap(), text.parse().unwrap());
        assert_eq!(certificate.table(), written);
        assert!(toml::from_str::<ApiCertificate>("subject = 'CN=a'\nrole = 'root'").is_err());
    }
}
