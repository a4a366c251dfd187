//! Directories of certificates. Their files have the names that nbdkit, libnbd and QEMU use:
//! `ca-cert.pem`, and `server-cert.pem` with `server-key.pem` or `client-cert.pem` with
//! `client-key.pem`.

use crate::access::secret;
use crate::failure::Failure;
use blockmux_engine::carrier::tls::{
    CertifiedKey, ClientCertificates, ServerCertificates, TlsError, Trust, canonical_subject,
};
use std::path::{Path, PathBuf};

/// Reads the certificates of a server, one from each directory. If it verifies clients, their
/// certificates must be signed by an authority in `ca-cert.pem`.
///
/// # Errors
/// If a file cannot be read or used, or other users can read a key.
pub(crate) fn of_server(
    directories: &[PathBuf],
    verifies_clients: bool,
) -> Result<ServerCertificates, Failure> {
    let mut own = Vec::with_capacity(directories.len());
    let mut authorities = Vec::new();
    for directory in directories {
        refuse_revocations(directory)?;
        own.push(certified_key(directory, "server")?);
        if verifies_clients {
            authorities.extend(read_authorities(directory)?);
        }
    }
    let certificates = ServerCertificates::new(&own, verifies_clients.then_some(&authorities));
    certificates.map_err(|error| in_directory(&directories[0], &error))
}

/// Reads the authorities that a client of `host` trusts, and its own certificate if there is one.
/// Without a directory it trusts the authorities of the system.
///
/// # Errors
/// If a file cannot be read or used, or other users can read a key.
pub(crate) fn of_client(
    directory: Option<&Path>,
    host: &str,
    verify_peer: bool,
) -> Result<ClientCertificates, Failure> {
    let mut own = None;
    if let Some(directory) = directory {
        refuse_revocations(directory)?;
        if directory.join("client-cert.pem").exists() {
            own = Some(certified_key(directory, "client")?);
        }
    }
    let trust = match directory {
        _ if !verify_peer => Trust::Anybody,
        Some(directory) => Trust::Authorities(read_authorities(directory)?),
        None => Trust::System,
    };
    let place = directory.unwrap_or(Path::new("TLS"));
    ClientCertificates::new(&trust, own.as_ref(), host).map_err(|error| in_directory(place, &error))
}

/// Checks the subjects in the list of allowed certificates `key`, which are compared as text.
///
/// # Errors
/// If a subject can match no certificate; the message says what to write.
pub(crate) fn check_subjects(key: &str, subjects: &[String]) -> Result<(), Failure> {
    subjects.iter().try_for_each(|subject| {
        let what = match canonical_subject(subject) {
            Some(canonical) if canonical == *subject => return Ok(()),
            Some(canonical) => format!("matches no certificate; write `{canonical}`"),
            None => "is not a subject of a certificate; write it as in RFC 4514, such as CN=NAME".to_owned(),
        };
        Err(Failure::request(format!("{key}: `{subject}` {what}")))
    })
}

fn read_authorities(directory: &Path) -> Result<Vec<u8>, Failure> {
    let mut pem = secret::read_public("TLS certificate", &directory.join("ca-cert.pem"))?;
    // Separates it from the next file.
    pem.push(b'\n');
    Ok(pem)
}

/// A certificate with its key; `side` is `server` or `client`.
fn certified_key(directory: &Path, side: &str) -> Result<CertifiedKey, Failure> {
    let chain = secret::read_public("TLS certificate", &directory.join(format!("{side}-cert.pem")))?;
    let key = directory.join(format!("{side}-key.pem"));
    let key = secret::read_all("TLS key", &key, |bytes| Ok::<_, String>(bytes.to_vec().into()))?;
    Ok(CertifiedKey { chain, key })
}

/// Refuses a directory with a certificate revocation list, because it would be ignored.
fn refuse_revocations(directory: &Path) -> Result<(), Failure> {
    let list = directory.join("ca-crl.pem");
    match list.exists() {
        false => Ok(()),
        true => Err(Failure::request(format!(
            "{}: certificate revocation lists are not supported; list the allowed clients in nbd_tls_subject or \
             api_tls_subject, and remove the file",
            list.display()
        ))),
    }
}

fn in_directory(directory: &Path, error: &TlsError) -> Failure {
    Failure::request(format!("TLS certificates in {}: {error}", directory.display()))
}
