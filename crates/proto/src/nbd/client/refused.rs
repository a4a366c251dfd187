//! A server that says no, properly: not a breach of the protocol, and one good line for the user.

use blockmux_wire::nbd::handshake::{Opt, Rep};

/// Why a handshake ended without what was asked for, although nobody broke the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NbdRefused {
    /// There is no export of that name.
    #[error("server has no export {export:?}{}", said(message))]
    UnknownExport {
        /// The name that was asked for.
        export: String,
        /// What the server says about it; may be empty.
        message: String,
    },
    /// The server talks only over TLS, at least about this export.
    #[error("server requires TLS for export {export:?}{}", said(message))]
    TlsRequired {
        /// The name that was asked for.
        export: String,
        /// What the server says about it; may be empty.
        message: String,
    },
    /// TLS is required here, and the server has none.
    #[error("server has no TLS, which the URL requires{}", said(message))]
    NoTls {
        /// What the server says about it; may be empty.
        message: String,
    },
    /// The server refused an option that cannot be done without.
    #[error("server refused {option} with {reply}{}", said(message))]
    Option {
        /// What was asked.
        option: Opt,
        /// The error that came back.
        reply: Rep,
        /// What the server says about it; may be empty.
        message: String,
    },
    /// The server hung up instead of serving the export, as old servers do when they have none of
    /// that name.
    #[error(
        "server closed the connection when asked for export {export:?}: it has no such export, or wants TLS"
    )]
    Closed {
        /// The name that was asked for.
        export: String,
    },
    /// The server speaks the oldstyle handshake.
    #[error(
        "server speaks only the oldstyle handshake, which is not supported; it needs newstyle (nbd 2.9.17)"
    )]
    Oldstyle,
    /// A server without fixed newstyle cannot list its exports.
    #[error("server cannot list its exports: it lacks the fixed newstyle handshake; name an export instead")]
    CannotList,
}

impl NbdRefused {
    /// The error that the server sent, if it sent one.
    #[must_use]
    pub fn reply(&self) -> Option<Rep> {
        match self {
            NbdRefused::UnknownExport { .. } => Some(Rep::NBD_REP_ERR_UNKNOWN),
            NbdRefused::TlsRequired { .. } => Some(Rep::NBD_REP_ERR_TLS_REQD),
            NbdRefused::Option { reply, .. } => Some(*reply),
            NbdRefused::NoTls { .. }
            | NbdRefused::Closed { .. }
            | NbdRefused::Oldstyle
            | NbdRefused::CannotList => None,
        }
    }

    /// Whether the same server may well serve the export a little later: it is being stopped, or
    /// hung up without a word, which is also what stopping looks like.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, NbdRefused::Closed { .. }) || self.reply() == Some(Rep::NBD_REP_ERR_SHUTDOWN)
    }

    /// What an error reply to `option` means when there is no way around it.
    pub(super) fn from_reply(export: &str, option: Opt, reply: Rep, data: &[u8]) -> NbdRefused {
        let (export, message) = (export.to_owned(), one_line(data));
        let has_no_tls = matches!(reply, Rep::NBD_REP_ERR_UNSUP | Rep::NBD_REP_ERR_POLICY);
        match reply {
            _ if option == Opt::NBD_OPT_STARTTLS && has_no_tls => NbdRefused::NoTls { message },
            Rep::NBD_REP_ERR_UNKNOWN => NbdRefused::UnknownExport { export, message },
            Rep::NBD_REP_ERR_TLS_REQD => NbdRefused::TlsRequired { export, message },
            _ => NbdRefused::Option { option, reply, message },
        }
    }
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

/// A peer's text as the end of one line: nothing that a terminal would act on, and not too much of
/// it.
fn one_line(data: &[u8]) -> String {
    let text = String::from_utf8_lossy(data.get(..MAX_MESSAGE).unwrap_or(data));
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    line.trim().to_owned()
}

/// How much of a server's message is kept, in bytes.
const MAX_MESSAGE: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_line_whatever_the_server_says() {
        let refused =
            |reply, data: &[u8]| NbdRefused::from_reply("x", Opt::NBD_OPT_GO, reply, data).to_string();
        assert_eq!(refused(Rep::NBD_REP_ERR_UNKNOWN, b""), "server has no export \"x\"");
        assert_eq!(
            refused(Rep::NBD_REP_ERR_TLS_REQD, b"use TLS\n"),
            "server requires TLS for export \"x\": use TLS"
        );
        assert_eq!(
            refused(Rep::NBD_REP_ERR_POLICY, b"not\n\x1b[31mtoday\xff"),
            "server refused NBD_OPT_GO with NBD_REP_ERR_POLICY: not  [31mtoday\u{fffd}"
        );
        assert!(refused(Rep::NBD_REP_ERR_SHUTDOWN, &[b'a'; 9000]).len() < 600);
    }

    #[test]
    fn only_a_server_that_is_going_may_come_back() {
        let refused = |reply| NbdRefused::from_reply("x", Opt::NBD_OPT_GO, reply, b"");
        assert!(refused(Rep::NBD_REP_ERR_SHUTDOWN).may_pass());
        assert!(NbdRefused::Closed { export: "x".into() }.may_pass());
        assert!(!refused(Rep::NBD_REP_ERR_UNKNOWN).may_pass() && !NbdRefused::Oldstyle.may_pass());
    }
}
