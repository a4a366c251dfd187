//! What the logins of a session say, and their responses as they come off the wire.

use crate::iscsi::digests::IscsiDigests;
use crate::iscsi::login::chap::SEED_LEN;
use crate::iscsi::login::initiator::{InitiatorLogin, InitiatorLoginProgress, LoginIdentity};
use crate::iscsi::login::operational::{DEFAULT_DATA_SEGMENT_LENGTH, OperationalParameters};
use crate::iscsi::node::Chap;
use crate::iscsi::pdu::{self, ParsedIscsiPdu};
use crate::iscsi::sender::Sender;
use crate::session::ProtocolError;
use blockmux_wire::iscsi::session::LoginResponse;
use blockmux_wire::iscsi::{BHS_LEN, IscsiOpcode};
use zerocopy::transmute_ref;

/// What every login of a session says.
pub(super) struct Logins {
    identity: LoginIdentity,
    chap: Option<Chap>,
    wishes: OperationalParameters,
    seed: [u8; SEED_LEN],
    is_over_rdma: bool,
    /// How many there were.
    count: u8,
    /// Names the session to those after the first.
    pub(super) tsih: u16,
}

impl Logins {
    pub(super) fn new(
        identity: LoginIdentity,
        chap: Option<Chap>,
        wishes: OperationalParameters,
        seed: [u8; SEED_LEN],
    ) -> Logins {
        Logins { identity, chap, wishes, seed, is_over_rdma: false, count: 0, tsih: 0 }
    }

    /// Logs in over RDMA.
    pub(super) fn over_rdma(mut self) -> Logins {
        self.is_over_rdma = true;
        self
    }

    /// A login that has not begun.
    pub(super) fn next(&mut self) -> InitiatorLogin {
        let mut seed = self.seed;
        // No two logins may ask the same of a target (RFC 7143 §12.1.3).
        seed.iter_mut().take(1).for_each(|byte| *byte ^= self.count);
        self.count = self.count.wrapping_add(1);
        let login = InitiatorLogin::new(self.identity.clone(), self.chap.clone(), self.wishes, seed);
        if self.is_over_rdma { login.over_rdma() } else { login }
    }
}

/// The frame of login responses.
pub(super) struct LoginPhase {
    login: InitiatorLogin,
    /// Bytes in one piece that it needs to go on.
    pub(super) need: usize,
}

impl LoginPhase {
    pub(super) fn start(mut login: InitiatorLogin, sender: &mut Sender) -> LoginPhase {
        login.start(sender);
        LoginPhase { login, need: BHS_LEN }
    }

    /// Takes responses until there are no more or the login is over; returns how many bytes that
    /// were.
    pub(super) fn on_bytes(
        &mut self,
        bytes: &[u8],
        sender: &mut Sender,
    ) -> Result<(usize, InitiatorLoginProgress), ProtocolError> {
        let mut at: usize = 0;
        loop {
            let rest = bytes.get(at..).unwrap_or_default();
            let head = match pdu::parse(rest, IscsiDigests::default())? {
                ParsedIscsiPdu::Needs(need) => {
                    self.need = need;
                    return Ok((at, InitiatorLoginProgress::Continues));
                }
                ParsedIscsiPdu::Head(head) => head,
            };
            let fault = |what| Err(ProtocolError { what, reference: "RFC 7143 §6.3, Login Phase" });
            if head.bhs.opcode() != IscsiOpcode::LOGIN_RESPONSE {
                return fault("sent something else than a login response during login");
            }
            if head.data_len > DEFAULT_DATA_SEGMENT_LENGTH as usize {
                return fault("sent more than 8192 bytes in a login response");
            }
            let (text, whole) = match head.segment(rest, IscsiDigests::default()) {
                Ok(found) => found,
                Err(whole) => {
                    self.need = whole;
                    return Ok((at, InitiatorLoginProgress::Continues));
                }
            };
            let response: &LoginResponse = transmute_ref!(&head.bhs);
            at = at.saturating_add(whole);
            self.need = BHS_LEN;
            match self.login.on_response(response, text, sender)? {
                InitiatorLoginProgress::Continues => {}
                end => return Ok((at, end)),
            }
        }
    }
}
