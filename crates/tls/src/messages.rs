//! The peer's alerts and post-handshake messages (RFC 8446 §4.6, §6), for callers that use exported
//! keys.

use super::{CredentialKind, TlsError, alert};

/// Reads alerts and post-handshake messages, also where they span records.
#[derive(Default)]
pub struct PostHandshakeMessages {
    /// The first bytes of an incomplete handshake message.
    begun: Vec<u8>,
}

/// What the caller must do after a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostHandshakeAction {
    /// Nothing.
    Nothing,
    /// The peer's next record uses its next traffic secret.
    KeyUpdate {
        /// Whether the peer requests a KeyUpdate of our secret, too.
        is_requested: bool,
    },
    /// The peer sent close_notify.
    Ended,
}

impl PostHandshakeMessages {
    /// Processes the content of one or several records of one content type; `is_client` is our
    /// role.
    ///
    /// # Errors
    /// [`TlsError::Alert`] if the peer ended the connection with an error; [`TlsError::Unexpected`]
    /// if it violated the protocol, in which case send [`TlsError::alert`].
    pub fn take(
        &mut self,
        content_type: u8,
        bytes: &[u8],
        is_client: bool,
    ) -> Result<PostHandshakeAction, TlsError> {
        match content_type {
            // Records of other types do not interrupt a handshake message (RFC 8446 §5.1).
            HANDSHAKE => self.handshake(bytes, is_client),
            _ if !self.begun.is_empty() => Err(TlsError::Unexpected),
            ALERT => alert(bytes),
            _ => Err(TlsError::Unexpected),
        }
    }

    fn handshake(&mut self, bytes: &[u8], is_client: bool) -> Result<PostHandshakeAction, TlsError> {
        self.begun.extend_from_slice(bytes);
        while let [kind, high, mid, low, rest @ ..] = self.begun.as_slice() {
            let len = usize::from(*high) << 16 | usize::from(*mid) << 8 | usize::from(*low);
            let is_valid = match *kind {
                KEY_UPDATE => len == 1,
                NEW_SESSION_TICKET => is_client && len <= MAX_TICKET,
                _ => false,
            };
            if !is_valid {
                return Err(TlsError::Unexpected);
            }
            let Some((body, rest)) = rest.split_at_checked(len) else { break };
            if *kind == KEY_UPDATE {
                // A KeyUpdate must end its record, as the next record uses the next secret (RFC
                // 8446 §5.1).
                return match (body, rest) {
                    ([request @ 0..=1], []) => {
                        let is_requested = *request == 1;
                        self.begun.clear();
                        Ok(PostHandshakeAction::KeyUpdate { is_requested })
                    }
                    _ => Err(TlsError::Unexpected),
                };
            }
            // Tickets are ignored: there is no resumption.
            self.begun = rest.to_vec();
        }
        Ok(PostHandshakeAction::Nothing)
    }
}

/// Processes the first alert of a record. Bytes after a close_notify are ignored (RFC 8446 §6.1).
fn alert(bytes: &[u8]) -> Result<PostHandshakeAction, TlsError> {
    match bytes {
        // TLS 1.3 ignores the level (RFC 8446 §6).
        [_, alert::CLOSE_NOTIFY, ..] => Ok(PostHandshakeAction::Ended),
        [_, alert::USER_CANCELED] => Ok(PostHandshakeAction::Nothing),
        [_, alert::USER_CANCELED, rest @ ..] => alert(rest),
        [_, code, ..] => Err(alert::received(Some(*code), true, CredentialKind::Psk)),
        _ => Err(TlsError::Unexpected),
    }
}

/// A KeyUpdate message of ours that does not request one of the peer (RFC 8446 §4.6.3).
pub const OUR_KEY_UPDATE: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 0];
/// Our close_notify alert, of the level warning.
pub const OUR_CLOSE_NOTIFY: [u8; 2] = [1, alert::CLOSE_NOTIFY];
/// Content type of alerts (RFC 8446 §5.1).
pub const ALERT: u8 = 21;
/// Content type of handshake and post-handshake messages.
pub const HANDSHAKE: u8 = 22;
/// Content type of application data.
pub const APPLICATION_DATA: u8 = 23;
// Handshake types (RFC 8446 §4).
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;
/// Maximum length in bytes of a NewSessionTicket. The specification allows longer ones, but no
/// implementation sends them.
const MAX_TICKET: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn take(content_type: u8, bytes: &[u8]) -> Result<PostHandshakeAction, TlsError> {
        PostHandshakeMessages::default().take(content_type, bytes, true)
    }

    #[test]
    fn tickets_are_ignored_however_they_are_split() {
        let ticket = [&[NEW_SESSION_TICKET, 0, 1, 44][..], &[7; 300]].concat();
        let all = [&ticket[..], &ticket, &OUR_KEY_UPDATE].concat();
        for step in [1, 3, 4, 5, 303, 304, 305, all.len()] {
            let mut messages = PostHandshakeMessages::default();
            let mut actions = Vec::new();
            for part in all.chunks(step) {
                actions.push(messages.take(HANDSHAKE, part, true).unwrap());
            }
            assert_eq!(actions.pop(), Some(PostHandshakeAction::KeyUpdate { is_requested: false }), "{step}");
            assert!(
                actions.iter().all(|action| *action == PostHandshakeAction::Nothing)
                    && messages.begun.is_empty()
            );
        }
        assert_eq!(
            PostHandshakeMessages::default().take(HANDSHAKE, &ticket, false),
            Err(TlsError::Unexpected)
        );
    }

    #[test]
    fn a_key_update_is_the_last_in_its_record() {
        assert_eq!(
            take(HANDSHAKE, &[24, 0, 0, 1, 1]),
            Ok(PostHandshakeAction::KeyUpdate { is_requested: true })
        );
        for wrong in [&[24, 0, 0, 1, 2][..], &[24, 0, 0, 2, 0, 0], &[24, 0, 0, 1, 0, 24], &[1, 0, 0, 0], &[0]]
        {
            let actions = take(HANDSHAKE, wrong);
            assert!(actions == Err(TlsError::Unexpected) || wrong.len() < 4, "{wrong:?}: {actions:?}");
        }
        // An oversized ticket is refused as soon as its header is complete.
        assert_eq!(take(HANDSHAKE, &[NEW_SESSION_TICKET, 0xff, 0, 0]), Err(TlsError::Unexpected));
    }

    #[test]
    fn an_alert_ends_the_connection_with_a_reason_or_without_one() {
        assert_eq!(take(ALERT, &OUR_CLOSE_NOTIFY), Ok(PostHandshakeAction::Ended));
        assert_eq!(take(ALERT, &[2, 0]), Ok(PostHandshakeAction::Ended));
        assert_eq!(take(ALERT, &[1, 90]), Ok(PostHandshakeAction::Nothing));
        assert_eq!(take(ALERT, &[1, 90, 1, 0, 2, 20]), Ok(PostHandshakeAction::Ended));
        let actions = take(ALERT, &[2, 20]).unwrap_err().to_string();
        assert!(actions.ends_with("bad_record_mac"), "{actions}");
        assert_eq!(take(ALERT, &[2]), Err(TlsError::Unexpected));
        assert_eq!(take(APPLICATION_DATA + 1, &[2]), Err(TlsError::Unexpected));
        let mut messages = PostHandshakeMessages::default();
        messages.take(HANDSHAKE, &[24, 0], true).unwrap();
        assert_eq!(messages.take(ALERT, &OUR_CLOSE_NOTIFY, true), Err(TlsError::Unexpected));
    }
}
