//! What a peer says by records that have no data, once the handshake is done (RFC 8446 §4.6, §6),
//! for who goes on in the library's place.

use super::{CredentialKind, TlsError, alert};

/// Reads them, across records.
#[derive(Default)]
pub struct Messages {
    /// Of a message of which the rest has not come.
    begun: Vec<u8>,
}

/// What there is to be done about what a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Nothing.
    Nothing,
    /// The peer's next record is protected by the next secret.
    KeyUpdate {
        /// And so is to be ours.
        is_requested: bool,
    },
    /// The peer sends nothing any more.
    Ended,
}

impl Messages {
    /// Takes what one record or several of one type have, which a client or a server has received.
    ///
    /// # Errors
    /// If the peer ends the connection for a reason, or breaks the protocol; [`TlsError::alert`] is
    /// what it is told then.
    pub fn take(&mut self, content_type: u8, bytes: &[u8], is_client: bool) -> Result<Told, TlsError> {
        match content_type {
            // A message is not interrupted by records of other types (§5.1).
            HANDSHAKE => self.handshake(bytes, is_client),
            _ if !self.begun.is_empty() => Err(TlsError::Unexpected),
            ALERT => alert(bytes),
            _ => Err(TlsError::Unexpected),
        }
    }

    fn handshake(&mut self, bytes: &[u8], is_client: bool) -> Result<Told, TlsError> {
        self.begun.extend_from_slice(bytes);
        while let [kind, high, mid, low, rest @ ..] = self.begun.as_slice() {
            let len = usize::from(*high) << 16 | usize::from(*mid) << 8 | usize::from(*low);
            let is_right = match *kind {
                KEY_UPDATE => len == 1,
                NEW_SESSION_TICKET => is_client && len <= MOST_TICKET,
                _ => false,
            };
            if !is_right {
                return Err(TlsError::Unexpected);
            }
            let Some((body, rest)) = rest.split_at_checked(len) else { break };
            if *kind == KEY_UPDATE {
                // What follows is protected by the next secret, and so it is in no record with what
                // comes before (§5.1).
                return match (body, rest) {
                    ([request @ 0..=1], []) => {
                        let is_requested = *request == 1;
                        self.begun.clear();
                        Ok(Told::KeyUpdate { is_requested })
                    }
                    _ => Err(TlsError::Unexpected),
                };
            }
            // A ticket, which we have no use for.
            self.begun = rest.to_vec();
        }
        Ok(Told::Nothing)
    }
}

/// Several that came together count as the first; what comes after that of the end is to be ignored
/// (§6.1).
fn alert(bytes: &[u8]) -> Result<Told, TlsError> {
    match bytes {
        // The level means nothing any more (§6).
        [_, alert::CLOSE_NOTIFY, ..] => Ok(Told::Ended),
        [_, alert::USER_CANCELED] => Ok(Told::Nothing),
        [_, alert::USER_CANCELED, rest @ ..] => alert(rest),
        [_, code, ..] => Err(alert::received(Some(*code), true, CredentialKind::Psk)),
        _ => Err(TlsError::Unexpected),
    }
}

/// Says that our next record is protected by the next secret; nothing is asked of the peer
/// (§4.6.3).
pub const OUR_KEY_UPDATE: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 0];
/// The alert that ends a connection in order, whose level is a warning's.
pub const OUR_CLOSE_NOTIFY: [u8; 2] = [1, alert::CLOSE_NOTIFY];
/// Content types (§5.1).
pub const ALERT: u8 = 21;
/// Of a handshake's messages, and of those after it.
pub const HANDSHAKE: u8 = 22;
/// Of all else.
pub const APPLICATION_DATA: u8 = 23;
/// Types of messages (§4).
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;
/// In bytes: a ticket itself has up to 64 KiB by the specification, and nobody makes such.
const MOST_TICKET: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn take(content_type: u8, bytes: &[u8]) -> Result<Told, TlsError> {
        Messages::default().take(content_type, bytes, true)
    }

    #[test]
    fn tickets_are_passed_over_however_they_are_split() {
        let ticket = [&[NEW_SESSION_TICKET, 0, 1, 44][..], &[7; 300]].concat();
        let all = [&ticket[..], &ticket, &OUR_KEY_UPDATE].concat();
        for step in [1, 3, 4, 5, 303, 304, 305, all.len()] {
            let mut messages = Messages::default();
            let mut told = Vec::new();
            for part in all.chunks(step) {
                told.push(messages.take(HANDSHAKE, part, true).unwrap());
            }
            assert_eq!(told.pop(), Some(Told::KeyUpdate { is_requested: false }), "{step}");
            assert!(told.iter().all(|told| *told == Told::Nothing) && messages.begun.is_empty());
        }
        assert_eq!(Messages::default().take(HANDSHAKE, &ticket, false), Err(TlsError::Unexpected));
    }

    #[test]
    fn a_key_update_is_the_last_in_its_record() {
        assert_eq!(take(HANDSHAKE, &[24, 0, 0, 1, 1]), Ok(Told::KeyUpdate { is_requested: true }));
        for wrong in [&[24, 0, 0, 1, 2][..], &[24, 0, 0, 2, 0, 0], &[24, 0, 0, 1, 0, 24], &[1, 0, 0, 0], &[0]]
        {
            let told = take(HANDSHAKE, wrong);
            assert!(told == Err(TlsError::Unexpected) || wrong.len() < 4, "{wrong:?}: {told:?}");
        }
        // Long before it is there.
        assert_eq!(take(HANDSHAKE, &[NEW_SESSION_TICKET, 0xff, 0, 0]), Err(TlsError::Unexpected));
    }

    #[test]
    fn an_alert_ends_the_connection_with_a_reason_or_without_one() {
        assert_eq!(take(ALERT, &OUR_CLOSE_NOTIFY), Ok(Told::Ended));
        assert_eq!(take(ALERT, &[2, 0]), Ok(Told::Ended));
        assert_eq!(take(ALERT, &[1, 90]), Ok(Told::Nothing));
        assert_eq!(take(ALERT, &[1, 90, 1, 0, 2, 20]), Ok(Told::Ended));
        let told = take(ALERT, &[2, 20]).unwrap_err().to_string();
        assert!(told.ends_with("bad_record_mac"), "{told}");
        assert_eq!(take(ALERT, &[2]), Err(TlsError::Unexpected));
        assert_eq!(take(APPLICATION_DATA + 1, &[2]), Err(TlsError::Unexpected));
        let mut messages = Messages::default();
        messages.take(HANDSHAKE, &[24, 0], true).unwrap();
        assert_eq!(messages.take(ALERT, &OUR_CLOSE_NOTIFY, true), Err(TlsError::Unexpected));
    }
}
