//! Alerts that the peer sends and that we send (RFC 8446 §6).

use super::{CredentialKind, TlsError};

/// Returns the error for a connection that the peer ended with this alert, or without one. The hint
/// is the likely cause of an alert during the handshake.
pub(crate) fn received(code: Option<u8>, was_open: bool, kind: CredentialKind) -> TlsError {
    let name = match code {
        None | Some(CLOSE_NOTIFY) => "close_notify".to_owned(),
        Some(UNEXPECTED_MESSAGE) => "unexpected_message".to_owned(),
        Some(BAD_RECORD_MAC) => "bad_record_mac".to_owned(),
        Some(RECORD_OVERFLOW) => "record_overflow".to_owned(),
        Some(HANDSHAKE_FAILURE) => "handshake_failure".to_owned(),
        Some(BAD_CERTIFICATE) => "bad_certificate".to_owned(),
        Some(43) => "unsupported_certificate".to_owned(),
        Some(44) => "certificate_revoked".to_owned(),
        Some(45) => "certificate_expired".to_owned(),
        Some(CERTIFICATE_UNKNOWN) => "certificate_unknown".to_owned(),
        Some(UNKNOWN_CA) => "unknown_ca".to_owned(),
        Some(ACCESS_DENIED) => "access_denied".to_owned(),
        Some(CERTIFICATE_REQUIRED) => "certificate_required".to_owned(),
        Some(47) => "illegal_parameter".to_owned(),
        Some(50) => "decode_error".to_owned(),
        Some(DECRYPT_ERROR) => "decrypt_error".to_owned(),
        Some(70) => "protocol_version".to_owned(),
        Some(71) => "insufficient_security".to_owned(),
        Some(80) => "internal_error".to_owned(),
        Some(109) => "missing_extension".to_owned(),
        Some(UNKNOWN_PSK_IDENTITY) => "unknown_psk_identity".to_owned(),
        Some(code) => code.to_string(),
    };
    let hint = match code {
        Some(CERTIFICATE_REQUIRED) => ": it requires a client certificate",
        Some(BAD_CERTIFICATE..=CERTIFICATE_UNKNOWN | UNKNOWN_CA | ACCESS_DENIED) => {
            ": it does not accept our certificate"
        }
        _ if was_open || kind == CredentialKind::Certificate => "",
        Some(DECRYPT_ERROR) => ": it has a different key of that name",
        None | Some(CLOSE_NOTIFY | HANDSHAKE_FAILURE | UNKNOWN_PSK_IDENTITY) => {
            ": it does not know the key, or has it for other names"
        }
        _ => "",
    };
    TlsError::Alert { name, hint }
}

impl TlsError {
    /// Whether a server may have ended the handshake because it does not know the first identity
    /// that it was offered. OpenSSL sends the alert internal_error then, GnuTLS none.
    #[must_use]
    pub fn may_be_about_the_identity(&self) -> bool {
        match self {
            TlsError::Alert { name, .. } => {
                ["unknown_psk_identity", "internal_error", "handshake_failure"].contains(&name.as_str())
            }
            TlsError::Disconnected => true,
            _ => false,
        }
    }

    /// Level and description of the alert to send to the peer, once records are protected; `None`
    /// if the peer did not violate the protocol.
    #[must_use]
    pub fn alert(&self) -> Option<[u8; 2]> {
        let code = match self {
            TlsError::Unexpected => UNEXPECTED_MESSAGE,
            TlsError::Unprotected => BAD_RECORD_MAC,
            TlsError::TooLong => RECORD_OVERFLOW,
            TlsError::Malformed(_) => DECODE_ERROR,
            _ => return None,
        };
        Some([FATAL, code])
    }
}

/// Returns the unprotected record with which a server ends a handshake.
pub(crate) fn record(error: &TlsError) -> [u8; 7] {
    let code = match error {
        TlsError::UnknownIdentity(_) => UNKNOWN_PSK_IDENTITY,
        TlsError::WrongKey(_) => DECRYPT_ERROR,
        TlsError::Malformed(_) => DECODE_ERROR,
        _ => HANDSHAKE_FAILURE,
    };
    // An alert record of two bytes, fatal; unprotected records have the version of TLS 1.2.
    [21, 3, 3, 0, 2, FATAL, code]
}

const FATAL: u8 = 2;
pub(crate) const CLOSE_NOTIFY: u8 = 0;
pub(crate) const USER_CANCELED: u8 = 90;
const UNEXPECTED_MESSAGE: u8 = 10;
const BAD_RECORD_MAC: u8 = 20;
const RECORD_OVERFLOW: u8 = 22;
const HANDSHAKE_FAILURE: u8 = 40;
const BAD_CERTIFICATE: u8 = 42;
const CERTIFICATE_UNKNOWN: u8 = 46;
const UNKNOWN_CA: u8 = 48;
const ACCESS_DENIED: u8 = 49;
const DECODE_ERROR: u8 = 50;
const DECRYPT_ERROR: u8 = 51;
const UNKNOWN_PSK_IDENTITY: u8 = 115;
const CERTIFICATE_REQUIRED: u8 = 116;
