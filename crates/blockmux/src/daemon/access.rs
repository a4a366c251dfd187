//! What clients of the API over TCP need: a token, a certificate, or both; and the role that it
//! gives them.

use super::role::{API_CERTIFICATES, API_TOKENS, ApiCertificate, ApiToken, Role};
use crate::access::{certificates, secret};
use crate::failure::Failure;
use crate::protocol::address::ListenerAddress;
use crate::protocol::address::{ApiListener, is_local};
use blockmux_engine::carrier::tls::{ServerCertificates, TlsPeer};
use blockmux_engine::net::socket::Address;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// Settings of the API over TCP; the config file has the same names.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct ApiAccess {
    /// File with the token of --api's clients
    #[arg(long, value_name = "FILE")]
    pub(super) api_token_file: Option<PathBuf>,
    /// Serve the API over https: directory with server-cert.pem and server-key.pem, and with
    /// ca-cert.pem for client certificates, which replace the token
    #[arg(long = "api-tls-certs", alias = "api-tls-certificates", value_name = "DIR")]
    pub(super) api_tls_certificates: Option<PathBuf>,
    /// Allow only API clients whose certificate has this subject, as CN=admin; repeatable
    #[arg(long, value_name = "DN")]
    pub(super) api_tls_subject: Vec<String>,
    /// Further tokens, each with its role.
    #[arg(skip)]
    pub(super) api_token: Vec<ApiToken>,
    /// Further certificates, each with its role.
    #[arg(skip)]
    pub(super) api_certificate: Vec<ApiCertificate>,
}

/// The credentials of the API over TCP. Two are equal if clients need the same.
#[derive(PartialEq)]
pub(super) struct RequiredCredentials {
    /// The bearer tokens (RFC 6750) of which each request must have one, if there are any.
    pub(super) tokens: Vec<RequiredToken>,
    pub(super) tls: Option<RequiredTls>,
}

/// A token of clients of the API.
#[derive(PartialEq)]
pub(super) struct RequiredToken {
    pub(super) name: String,
    pub(super) role: Role,
    pub(super) token: Zeroizing<String>,
}

/// TLS of the API.
#[derive(PartialEq)]
pub(super) struct RequiredTls {
    pub(super) certificates: ServerCertificates,
    /// The subjects of the certificates of clients with their roles, if not all are allowed.
    subjects: Option<BTreeMap<String, Role>>,
}

/// The address of the API over TCP.
///
/// # Errors
/// If it is not an address of TCP, or its name cannot be resolved.
pub(super) fn tcp_address(listener: &ApiListener) -> Result<Address, Failure> {
    match listener.address.resolve(DEFAULT_PORT)? {
        ListenerAddress::Socket(address @ Address::Tcp(_)) => Ok(address),
        _ => Err(Failure::request("--api: write host:port; --control takes unix:PATH")),
    }
}

/// What to warn of if machines that are not named can connect without encryption.
pub(super) fn plain_warning(listener: &ApiListener, credentials: &RequiredCredentials) -> Option<String> {
    let address = tcp_address(listener).ok()?;
    let is_open = credentials.tls.is_none() && !is_local(&address) && listener.networks.is_everyone();
    is_open.then(|| {
        format!(
            "{address}: the API and its token are not encrypted; add --api-tls-certs, or make it reachable from \
             trusted networks only"
        )
    })
}

impl ApiAccess {
    /// Adds the settings of the config file; those of the command line have priority.
    pub(super) fn or(self, written: ApiAccess) -> ApiAccess {
        let has_subjects = !self.api_tls_subject.is_empty();
        ApiAccess {
            api_token_file: self.api_token_file.or(written.api_token_file),
            api_tls_certificates: self.api_tls_certificates.or(written.api_tls_certificates),
            api_tls_subject: if has_subjects { self.api_tls_subject } else { written.api_tls_subject },
            api_token: written.api_token,
            api_certificate: written.api_certificate,
        }
    }

    /// Checks that no setting is given without a TCP address of the API.
    ///
    /// # Errors
    /// If one is; the message says what to write.
    pub(super) fn check_unused(&self) -> Result<(), Failure> {
        let ApiAccess { api_token_file, api_tls_certificates, api_tls_subject, api_token, api_certificate } =
            self;
        let given = [
            (TOKEN_FILE, api_token_file.is_some()),
            (TLS_CERTIFICATES, api_tls_certificates.is_some()),
            (TLS_SUBJECT, !api_tls_subject.is_empty()),
            (API_TOKENS.0, !api_token.is_empty()),
            (API_CERTIFICATES.0, !api_certificate.is_empty()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((key, _)) => Err(Failure::request(format!(
                "{key} has no effect, because the API is not served over TCP; add api = \"HOST:PORT\", or remove {key}"
            ))),
        }
    }

    /// Reads the tokens and the certificates. `secrets` is the directory of secrets with names.
    ///
    /// # Errors
    /// If clients would need neither, a file cannot be used, or two entries have the same name or
    /// token.
    pub(super) fn load(&self, secrets: Option<&Path>) -> Result<RequiredCredentials, Failure> {
        let tokens = self.load_tokens(secrets)?;
        let subjects = self.subjects()?;
        let Some(directory) = &self.api_tls_certificates else {
            if subjects.is_some() {
                let key = if self.api_certificate.is_empty() { TLS_SUBJECT } else { API_CERTIFICATES.0 };
                let text = format!("{key} requires https; add api_tls_certificates = \"DIR\"");
                return Err(Failure::request(text));
            }
            if tokens.is_empty() {
                return Err(Failure::request(WITHOUT_CREDENTIALS));
            }
            return Ok(RequiredCredentials { tokens, tls: None });
        };
        let verifies_clients = tokens.is_empty() || subjects.is_some();
        let certificates = certificates::of_server(std::slice::from_ref(directory), verifies_clients);
        let certificates =
            certificates.map_err(|failure| Failure::request(format!("api_tls_certificates: {failure}")))?;
        Ok(RequiredCredentials { tokens, tls: Some(RequiredTls { certificates, subjects }) })
    }

    /// Reads the files of all tokens.
    fn load_tokens(&self, secrets: Option<&Path>) -> Result<Vec<RequiredToken>, Failure> {
        let read = |what: &str, file: &Path| {
            let file = secret::resolve(file, secrets);
            let file = file.map_err(|problem| Failure::request(format!("{what}: {problem}")))?;
            secret::read(what, &file, secret::api_token)
        };
        let mut all: Vec<RequiredToken> = Vec::new();
        if let Some(file) = &self.api_token_file {
            let token = read("--api-token-file", file)?;
            all.push(RequiredToken { name: DEFAULT_TOKEN.to_owned(), role: Role::Administer, token });
        }
        for ApiToken { name, token_file, role } in &self.api_token {
            let wrong = |problem: &str| Failure::request(format!("{} `{name}`: {problem}", API_TOKENS.0));
            if !is_token_name(name) {
                return Err(wrong("this is no name; write 1 to 64 letters, digits, `.`, `_` and `-`"));
            }
            if all.iter().any(|own| own.name == *name) {
                return Err(wrong(
                    "another token has this name, which is `default` for that of api_token_file; \
                                  choose another one",
                ));
            }
            let token = read(&format!("{} `{name}`: token_file", API_TOKENS.0), token_file)?;
            if let Some(same) = all.iter().find(|own| own.token == token) {
                let same = &same.name;
                return Err(wrong(&format!(
                    "it is the same as that of {same}; create another one with `openssl rand -hex 32`"
                )));
            }
            all.push(RequiredToken { name: name.clone(), role: *role, token });
        }
        Ok(all)
    }

    /// The subjects of allowed certificates with their roles; `None` if all are allowed.
    fn subjects(&self) -> Result<Option<BTreeMap<String, Role>>, Failure> {
        certificates::check_subjects(TLS_SUBJECT, &self.api_tls_subject)?;
        let mut all: BTreeMap<_, _> =
            self.api_tls_subject.iter().map(|subject| (subject.clone(), Role::Administer)).collect();
        for ApiCertificate { subject, role } in &self.api_certificate {
            certificates::check_subjects(API_CERTIFICATES.0, std::slice::from_ref(subject))?;
            if all.insert(subject.clone(), *role).is_some() {
                return Err(Failure::request(format!(
                    "{} `{subject}`: another entry or api_tls_subject has this subject; remove one",
                    API_CERTIFICATES.0
                )));
            }
        }
        Ok((!all.is_empty()).then_some(all))
    }
}

/// Whether a text may be the name of a token, which is part of log lines.
fn is_token_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(is_plain)
}

impl RequiredCredentials {
    /// The entries of the config whose files have another content than those of `before`.
    pub(super) fn renewed_files(&self, before: &RequiredCredentials) -> Vec<String> {
        let is_renewed = |own: &&RequiredToken| {
            before.tokens.iter().any(|old| old.name == own.name && old.token != own.token)
        };
        let entry = |own: &RequiredToken| match own.name.as_str() {
            DEFAULT_TOKEN => TOKEN_FILE.to_owned(),
            name => format!("{} {name}: token_file", API_TOKENS.0),
        };
        let tokens = self.tokens.iter().filter(is_renewed).map(entry);
        let certificates = |own: &RequiredCredentials| own.tls.as_ref().map(|tls| tls.certificates.clone());
        let are_certificates = certificates(self) != certificates(before);
        tokens.chain(are_certificates.then(|| TLS_CERTIFICATES.to_owned())).collect()
    }
}

impl RequiredTls {
    /// The role of a client's certificate. A token, if one is required, decides for clients that
    /// need no certificate.
    ///
    /// # Errors
    /// If the client may send no request; the message says why.
    pub(super) fn role(&self, peer: &TlsPeer) -> Result<Role, String> {
        let Some(subjects) = &self.subjects else { return Ok(Role::Administer) };
        match peer {
            TlsPeer::Certificate(subject) => subjects.get(subject).copied().ok_or_else(|| {
                format!(
                    "the API does not allow the certificate `{subject}`; add it to api_tls_subject, or an \
                     api_certificate for it"
                )
            }),
            _ => Err("the API requires a certificate; send one".to_owned()),
        }
    }
}

/// The keys of [`ApiAccess`] in a config file.
pub(super) const ACCESS_KEYS: [&str; 5] =
    [TOKEN_FILE, TLS_CERTIFICATES, TLS_SUBJECT, API_TOKENS.0, API_CERTIFICATES.0];
const TOKEN_FILE: &str = "api_token_file";
const TLS_CERTIFICATES: &str = "api_tls_certificates";
const TLS_SUBJECT: &str = "api_tls_subject";
/// The name of the token in `api_token_file`, whose role is `administer`.
const DEFAULT_TOKEN: &str = "default";
/// Maximum length of a token's name.
const MAX_NAME: usize = 64;

/// Default port of `--api`.
const DEFAULT_PORT: u16 = 9810;
const WITHOUT_CREDENTIALS: &str = "--api: without a token, every client that can connect could control this daemon; run \
    `(umask 077; openssl rand -hex 32 > api.token)` and add --api-token-file api.token, or add --api-tls-certs for \
    client certificates";

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn clients_need_a_token_or_a_certificate() {
        let load = |access: ApiAccess| access.load(None).map(drop).unwrap_err().to_string();
        assert!(load(ApiAccess::default()).contains("without a token, every client that can connect"));
        let subject = ApiAccess { api_tls_subject: vec!["CN=a".to_owned()], ..ApiAccess::default() };
        assert!(load(subject).contains("api_tls_subject requires https; add api_tls_certificates"));
        for (subject, expected) in [
            ("", "api_tls_subject: `` is not a subject of a certificate; write it as in RFC 4514"),
            ("admin", "is not a subject of a certificate; write it as in RFC 4514, such as CN=NAME"),
            ("cn = admin", "api_tls_subject: `cn = admin` matches no certificate; write `CN=admin`"),
        ] {
            let said = load(ApiAccess {
                api_tls_certificates: Some("/nowhere".into()),
                api_tls_subject: vec!["CN=a".to_owned(), subject.to_owned()],
                ..ApiAccess::default()
            });
            assert!(said.contains(expected), "{said}");
        }
    }

    #[test]
    fn an_open_listener_without_encryption_is_warned_of() {
        let plain = RequiredCredentials { tokens: Vec::new(), tls: None };
        let warned = |listener: &str| plain_warning(&listener.parse().unwrap(), &plain);
        assert!(warned("0.0.0.0:9810").unwrap().starts_with("0.0.0.0:9810: the API and its token"));
        assert_eq!((warned("127.0.0.1:9810"), warned("0.0.0.0:9810?allow=192.0.2.0/24")), (None, None));
    }

    #[test]
    fn settings_without_a_tcp_address_are_refused() {
        let refused = |access: ApiAccess| access.check_unused().unwrap_err().to_string();
        let token = ApiAccess { api_token_file: Some("t".into()), ..ApiAccess::default() };
        let certificates = ApiAccess { api_tls_certificates: Some("d".into()), ..ApiAccess::default() };
        let subject = ApiAccess { api_tls_subject: vec!["CN=a".to_owned()], ..ApiAccess::default() };
        for (access, key) in
            [(token, "api_token_file"), (certificates, "api_tls_certificates"), (subject, "api_tls_subject")]
        {
            let said = refused(access);
            assert!(
                said.starts_with(&format!("{key} has no effect")) && said.contains("add api = "),
                "{said}"
            );
        }
        ApiAccess::default().check_unused().unwrap();
    }

    #[test]
    fn the_command_line_has_priority() {
        let said = ApiAccess { api_tls_subject: vec!["CN=a".to_owned()], ..ApiAccess::default() };
        let written = ApiAccess {
            api_token_file: Some("t".into()),
            api_tls_certificates: Some("d".into()),
            api_tls_subject: vec!["CN=b".to_owned()],
            ..ApiAccess::default()
        };
        let both = said.or(written);
        assert_eq!(both.api_tls_subject, ["CN=a"]);
        assert_eq!(both.api_tls_certificates.as_deref(), Some(Path::new("d")));
    }
    /// A file with a token, which exists as long as the directory.
    fn token(directory: &tempfile::TempDir, name: &str, content: &str) -> ApiToken {
        let token_file = directory.path().join(name);
        std::fs::write(&token_file, content).unwrap();
        std::fs::set_permissions(&token_file, Permissions::from_mode(0o600)).unwrap();
        ApiToken { name: name.to_owned(), token_file, role: Role::Read }
    }

    #[test]
    fn tokens_have_different_names_and_contents() {
        let files = tempfile::tempdir().unwrap();
        let load = |all: &[&ApiToken]| {
            let api_token = all.iter().map(|own| (*own).clone()).collect();
            let api_token_file = Some(token(&files, "first", "of-the-first").token_file);
            let loaded = ApiAccess { api_token_file, api_token, ..ApiAccess::default() }.load(None);
            loaded.map_err(|failure| failure.to_string())
        };
        let (one, same) = (token(&files, "one", "of-the-other"), token(&files, "same", "of-the-first"));
        let loaded = load(&[&one]).unwrap_or_else(|error| panic!("{error}"));
        let of = |own: &RequiredToken| (own.name.clone(), own.role, own.token.to_string());
        let expected = [
            ("default".to_owned(), Role::Administer, "of-the-first".to_owned()),
            ("one".to_owned(), Role::Read, "of-the-other".to_owned()),
        ];
        assert_eq!(loaded.tokens.iter().map(of).collect::<Vec<_>>(), expected);
        let refused = |all: &[&ApiToken]| load(all).err().unwrap();
        let said = refused(&[&one, &same]);
        assert!(said.starts_with("api_token `same`: it is the same as that of default; create"), "{said}");
        assert!(!said.contains("of-the-first"), "{said}");
        let renamed = |name: &str| ApiToken { name: name.to_owned(), ..one.clone() };
        assert!(
            refused(&[&one, &renamed("one")]).starts_with("api_token `one`: another token has this name")
        );
        assert!(refused(&[&renamed("default")]).contains("another token has this name"));
        for name in ["", "a b", "a\nb", "a\"b", &"x".repeat(65)] {
            assert!(refused(&[&renamed(name)]).contains("this is no name; write 1 to 64"), "{name}");
        }
        let without = ApiToken { token_file: "/nowhere".into(), ..one.clone() };
        assert!(refused(&[&without]).starts_with("api_token `one`: token_file /nowhere: "));
    }

    #[test]
    fn only_renewed_files_are_named() {
        let files = tempfile::tempdir().unwrap();
        let load = |api_token: Vec<ApiToken>| {
            ApiAccess { api_token, ..ApiAccess::default() }
                .load(None)
                .unwrap_or_else(|error| panic!("{error}"))
        };
        let before = load(vec![token(&files, "a", "before-12345"), token(&files, "b", "of-b-1234567")]);
        let after = load(vec![token(&files, "a", "after-123456"), token(&files, "b", "of-b-1234567")]);
        assert_eq!(after.renewed_files(&before), ["api_token a: token_file"]);
        assert!(before == before && before != after);
    }

    #[test]
    fn a_subject_has_one_role() {
        let subjects = |listed: &[&str], with_role: &[(&str, Role)]| {
            let certificate = |(subject, role): &(&str, Role)| ApiCertificate {
                subject: (*subject).to_owned(),
                role: *role,
            };
            let access = ApiAccess {
                api_tls_subject: listed.iter().map(|subject| (*subject).to_owned()).collect(),
                api_certificate: with_role.iter().map(certificate).collect(),
                ..ApiAccess::default()
            };
            access.subjects().map_err(|failure| failure.to_string())
        };
        assert_eq!(subjects(&[], &[]), Ok(None));
        let both = subjects(&["CN=a"], &[("CN=b", Role::Read)]).unwrap().unwrap();
        assert_eq!(
            both.into_iter().collect::<Vec<_>>(),
            [("CN=a".to_owned(), Role::Administer), ("CN=b".to_owned(), Role::Read)]
        );
        let twice = subjects(&["CN=a"], &[("CN=a", Role::Read)]).unwrap_err();
        assert!(twice.starts_with("api_certificate `CN=a`: another entry or api_tls_subject has"), "{twice}");
        let wrong = subjects(&[], &[("cn = a", Role::Read)]).unwrap_err();
        assert_eq!(wrong, "api_certificate: `cn = a` matches no certificate; write `CN=a`");
    }
}
