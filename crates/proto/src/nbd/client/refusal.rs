//! A server's valid refusal during the handshake, as one line for the user.

use blockmux_volume::text::replaced;
use blockmux_wire::nbd::handshake::{Opt, Rep};

/// Reason for which a server refused a session without violating the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NbdHandshakeRefusal {
    /// The server has no export of this name.
    #[error("server has no export {export:?}{}", said(message))]
    UnknownExport {
        /// The requested name.
        export: String,
        /// The server's message; may be empty.
        message: String,
    },
    /// The server requires TLS, at least for this export.
    #[error("server requires TLS for export {export:?}{}", said(message))]
    TlsRequired {
        /// The requested name.
        export: String,
        /// The server's message; may be empty.
        message: String,
    },
    /// The client requires TLS, and the server does not support it.
    #[error("server has no TLS, which the URL requires{}", said(message))]
    NoTls {
        /// The server's message; may be empty.
        message: String,
    },
    /// The server refused a required option.
    #[error("server refused {option} with {reply}{}", said(message))]
    Option {
        /// The refused option.
        option: Opt,
        /// The error reply.
        reply: Rep,
        /// The server's message; may be empty.
        message: String,
    },
    /// The server closed the connection after `NBD_OPT_EXPORT_NAME`, as servers do that have no
    /// export of this name.
    #[error(
        "server closed the connection after the request for export {export:?}: it has no such export, or requires TLS"
    )]
    Closed {
        /// The requested name.
        export: String,
    },
    /// The server supports only the oldstyle handshake.
    #[error(
        "server speaks only the oldstyle handshake, which is not supported; it needs newstyle (nbd 2.9.17)"
    )]
    Oldstyle,
    /// The server does not support fixed newstyle, so it cannot list its exports.
    #[error("server cannot list its exports: it lacks the fixed newstyle handshake; name an export instead")]
    CannotList,
}

impl NbdHandshakeRefusal {
    /// The server's error reply, if it sent one.
    #[must_use]
    pub fn reply(&self) -> Option<Rep> {
        match self {
            NbdHandshakeRefusal::UnknownExport { .. } => Some(Rep::NBD_REP_ERR_UNKNOWN),
            NbdHandshakeRefusal::TlsRequired { .. } => Some(Rep::NBD_REP_ERR_TLS_REQD),
            NbdHandshakeRefusal::Option { reply, .. } => Some(*reply),
            NbdHandshakeRefusal::NoTls { .. }
            | NbdHandshakeRefusal::Closed { .. }
            | NbdHandshakeRefusal::Oldstyle
            | NbdHandshakeRefusal::CannotList => None,
        }
    }

    /// Whether a retry may succeed: the server is shutting down, or it closed the connection
    /// without a reply, as a server does that shuts down.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, NbdHandshakeRefusal::Closed { .. }) || self.reply() == Some(Rep::NBD_REP_ERR_SHUTDOWN)
    }

    /// The refusal for an error reply to a required `option`.
    pub(super) fn from_reply(export: &str, option: Opt, reply: Rep, data: &[u8]) -> NbdHandshakeRefusal {
        let (export, message) = (export.to_owned(), one_line(data));
        let has_no_tls = matches!(reply, Rep::NBD_REP_ERR_UNSUP | Rep::NBD_REP_ERR_POLICY);
        match reply {
            _ if option == Opt::NBD_OPT_STARTTLS && has_no_tls => NbdHandshakeRefusal::NoTls { message },
            Rep::NBD_REP_ERR_UNKNOWN => NbdHandshakeRefusal::UnknownExport { export, message },
            Rep::NBD_REP_ERR_TLS_REQD => NbdHandshakeRefusal::TlsRequired { export, message },
            _ => NbdHandshakeRefusal::Option { option, reply, message },
        }
    }
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

/// A peer's text as part of one line: without characters that must not be printed, and truncated.
fn one_line(data: &[u8]) -> String {
    let text = String::from_utf8_lossy(data.get(..MAX_MESSAGE).unwrap_or(data));
    replaced(&text, ' ').trim().to_owned()
}

/// The maximum length of a server's message, in bytes.
const MAX_MESSAGE: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_line_whatever_the_server_sends() {
        let refusal = |reply, data: &[u8]| {
            NbdHandshakeRefusal::from_reply("x", Opt::NBD_OPT_GO, reply, data).to_string()
        };
        assert_eq!(refusal(Rep::NBD_REP_ERR_UNKNOWN, b""), "server has no export \"x\"");
        assert_eq!(
            refusal(Rep::NBD_REP_ERR_TLS_REQD, b"use TLS\n"),
            "server requires TLS for export \"x\": use TLS"
        );
        assert_eq!(
            refusal(Rep::NBD_REP_ERR_POLICY, b"not\n\x1b[31mtoday\xff"),
            "server refused NBD_OPT_GO with NBD_REP_ERR_POLICY: not  [31mtoday\u{fffd}"
        );
        assert!(refusal(Rep::NBD_REP_ERR_SHUTDOWN, &[b'a'; 9000]).len() < 600);
    }

    #[test]
    fn only_refusals_during_a_shutdown_are_retried() {
        let refusal = |reply| NbdHandshakeRefusal::from_reply("x", Opt::NBD_OPT_GO, reply, b"");
        assert!(refusal(Rep::NBD_REP_ERR_SHUTDOWN).is_retryable());
        assert!(NbdHandshakeRefusal::Closed { export: "x".into() }.is_retryable());
        assert!(
            !refusal(Rep::NBD_REP_ERR_UNKNOWN).is_retryable()
                && !NbdHandshakeRefusal::Oldstyle.is_retryable()
        );
    }
}
