//! Logins of a session, and framing of login responses.

use crate::driver::session::ProtocolError;
use crate::iscsi::digests::IscsiDigests;
use crate::iscsi::login::chap::SEED_LEN;
use crate::iscsi::login::initiator::{InitiatorLogin, InitiatorLoginProgress, LoginIdentity};
use crate::iscsi::login::operational::{DEFAULT_DATA_SEGMENT_LENGTH, OperationalParameters};
use crate::iscsi::node::Chap;
use crate::iscsi::pdu::{self, ParsedIscsiPdu};
use crate::iscsi::sender::Sender;
use blockmux_wire::iscsi::session::IscsiLoginResponse;
use blockmux_wire::iscsi::{BHS_LEN, IscsiOpcode};
use zerocopy::transmute_ref;

/// Parameters that all logins of a session share.
pub(super) struct LoginTemplate {
    identity: LoginIdentity,
    chap: Option<Chap>,
    proposal: OperationalParameters,
    seed: [u8; SEED_LEN],
    is_over_rdma: bool,
    /// Number of logins so far.
    count: u8,
    /// TSIH from the first login.
    pub(super) tsih: u16,
}

impl LoginTemplate {
    pub(super) fn new(
        identity: LoginIdentity,
        chap: Option<Chap>,
        proposal: OperationalParameters,
        seed: [u8; SEED_LEN],
    ) -> LoginTemplate {
        LoginTemplate { identity, chap, proposal, seed, is_over_rdma: false, count: 0, tsih: 0 }
    }

    /// Uses RDMA for all logins.
    pub(super) fn over_rdma(mut self) -> LoginTemplate {
        self.is_over_rdma = true;
        self
    }

    /// Creates the next login.
    pub(super) fn next(&mut self) -> InitiatorLogin {
        let mut seed = self.seed;
        // CHAP challenges must not repeat (RFC 7143 §12.1.3).
        seed.iter_mut().take(1).for_each(|byte| *byte ^= self.count);
        self.count = self.count.wrapping_add(1);
        let login = InitiatorLogin::new(self.identity.clone(), self.chap.clone(), self.proposal, seed);
        if self.is_over_rdma { login.over_rdma() } else { login }
    }
}

/// A login with the framing of its responses.
pub(super) struct LoginExchange {
    login: InitiatorLogin,
    /// Number of contiguous bytes needed for the next response.
    pub(super) need: usize,
}

impl LoginExchange {
    pub(super) fn start(mut login: InitiatorLogin, sender: &mut Sender) -> LoginExchange {
        login.start(sender);
        LoginExchange { login, need: BHS_LEN }
    }

    /// Processes login responses; returns the number of consumed bytes and the progress.
    pub(super) fn on_bytes(
        &mut self,
        bytes: &[u8],
        sender: &mut Sender,
    ) -> Result<(usize, InitiatorLoginProgress), ProtocolError> {
        let mut at: usize = 0;
        loop {
            let rest = bytes.get(at..).unwrap_or_default();
            let head = match pdu::parse(rest, IscsiDigests::default())? {
                ParsedIscsiPdu::Incomplete(need) => {
                    self.need = need;
                    return Ok((at, InitiatorLoginProgress::Continues));
                }
                ParsedIscsiPdu::Head(head) => head,
            };
            let fault = |what| Err(ProtocolError { what, reference: "RFC 7143 §6.3, Login Phase" });
            if head.bhs.opcode() != IscsiOpcode::LOGIN_RESPONSE {
                return fault("sent another PDU than a login response during login");
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
            let response: &IscsiLoginResponse = transmute_ref!(&head.bhs);
            at = at.saturating_add(whole);
            self.need = BHS_LEN;
            match self.login.on_response(response, text, sender)? {
                InitiatorLoginProgress::Continues => {}
                end => return Ok((at, end)),
            }
        }
    }
}
