//! The login phase of a connection: the frame of login PDUs, time, and the session that a
//! connection is to join.

use super::local::{LocalSessions, SessionCore};
use super::shared::SharedSession;
use crate::iscsi::digests::IscsiDigests;
use crate::iscsi::login::failure::{LoginFailure, no_such_session};
use crate::iscsi::login::operational::DEFAULT_DATA_SEGMENT_LENGTH;
use crate::iscsi::login::target::{TargetLogin, TargetLoginProgress, TargetLoginResult};
use crate::iscsi::node::IscsiNode;
use crate::iscsi::pdu::{self, ParsedIscsiPdu};
use crate::iscsi::sender::Sender;
use crate::iscsi::sessions::{ConnectionHandle, LoginPermit};
use crate::session::{Demand, Home, ProtocolError};
use blockmux_wire::iscsi::session::{LoginRequest, LoginStatus};
use blockmux_wire::iscsi::{BHS_LEN, IscsiOpcode};
use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::transmute_ref;

/// A connection on its way into full feature phase.
pub(super) struct ConnectionLogin {
    login: TargetLogin,
    /// How many bytes the next PDU has, as far as is known.
    needs: usize,
    deadline: Instant,
    /// The login failed by a wrong secret; the answer waits for the deadline.
    guessed: Option<LoginFailure>,
    /// When to look again whether the initiator's other session of that name is over.
    waits_until: Option<Instant>,
    node: Arc<IscsiNode>,
    local: Rc<LocalSessions>,
    /// The session that the connection is to join. It may end meanwhile.
    invited: Option<Weak<RefCell<SharedSession>>>,
    /// The core that session lives on, if it is not this one.
    moves_to: Option<Home>,
    /// Given back when the login is over.
    _permit: Option<LoginPermit>,
}

impl ConnectionLogin {
    pub(super) fn new(
        login: TargetLogin,
        node: Arc<IscsiNode>,
        local: Rc<LocalSessions>,
        now: Instant,
    ) -> ConnectionLogin {
        let deadline = now.checked_add(LOGIN_TIME).unwrap_or(now);
        ConnectionLogin {
            login,
            needs: BHS_LEN,
            deadline,
            guessed: None,
            waits_until: None,
            node,
            local,
            invited: None,
            moves_to: None,
            _permit: None,
        }
    }

    /// Takes leave to log in, over a connection that `hang_up` cuts.
    pub(super) fn admit(&mut self, permit: LoginPermit, hang_up: ConnectionHandle) {
        self._permit = Some(permit);
        self.login.set_hang_up(hang_up);
    }

    /// The connection is one over RDMA.
    pub(super) fn set_over_rdma(&mut self) {
        self.login.set_over_rdma();
    }

    /// The names of initiator and target, as far as the initiator has sent them.
    pub(super) fn names(&self) -> (String, String) {
        self.login.names()
    }

    /// Whether the login waits for something else than a request.
    pub(super) fn is_waiting(&self) -> bool {
        self.guessed.is_some() || self.waits_until.is_some()
    }

    /// When something must happen.
    pub(super) fn deadline(&self) -> Instant {
        self.waits_until.map_or(self.deadline, |until| until.min(self.deadline))
    }

    pub(super) fn demand(&self) -> Demand {
        match (&self.guessed, self.waits_until, &self.moves_to) {
            (None, None, None) => Demand::Bytes(self.needs),
            _ => Demand::Nothing,
        }
    }

    /// The core that the session lives on which the connection is to join. Nothing was taken then.
    pub(super) fn moves_to(&self) -> Option<&Home> {
        self.moves_to.as_ref()
    }

    /// The session that the connection has just been admitted to.
    pub(super) fn joined(&self) -> Option<Rc<RefCell<SharedSession>>> {
        self.invited.as_ref()?.upgrade()
    }

    /// Takes one request at a time; returns how many bytes that were, and what the login agreed on
    /// at its end.
    pub(super) fn on_bytes(
        &mut self,
        input: &[u8],
        now: Instant,
        sender: &mut Sender,
    ) -> Result<(usize, Option<Box<TargetLoginResult>>), ProtocolError> {
        let mut taken: usize = 0;
        while self.guessed.is_none() && self.waits_until.is_none() && self.moves_to.is_none() {
            let rest = input.get(taken..).unwrap_or_default();
            let head = match pdu::parse(rest, IscsiDigests::default())? {
                ParsedIscsiPdu::Needs(len) => {
                    self.needs = len;
                    break;
                }
                ParsedIscsiPdu::Head(head) => head,
            };
            if head.bhs.opcode() != IscsiOpcode::LOGIN_REQUEST {
                return Err(error("sent something else than a login request before it was logged in"));
            }
            if head.data_len > DEFAULT_DATA_SEGMENT_LENGTH as usize {
                return Err(error("sent more than 8192 bytes in a login request"));
            }
            let (text, whole) = match head.segment(rest, IscsiDigests::default()) {
                Ok(found) => found,
                Err(whole) => {
                    self.needs = whole;
                    break;
                }
            };
            let request: &LoginRequest = transmute_ref!(&head.bhs);
            if self.login.is_new() && request.tsih.get() != 0 && !self.find(request.tsih.get()) {
                break;
            }
            taken = taken.saturating_add(whole);
            self.needs = BHS_LEN;
            let invited = self.invited.clone();
            let progress =
                self.login.on_request(request, text, sender, &mut |cid| admit(invited.as_ref(), cid));
            match progress {
                TargetLoginProgress::Continues => {}
                TargetLoginProgress::Waits => self.waits_until = Some(now),
                TargetLoginProgress::Established(established) => return Ok((taken, Some(established))),
                TargetLoginProgress::Failed(failure) if failure.is_wrong_answer() => {
                    self.deadline = now.checked_add(GUESS_DELAY).unwrap_or(now);
                    self.guessed = Some(failure);
                }
                TargetLoginProgress::Failed(failure) => {
                    self.login.refuse(&failure, sender);
                    return Err(error(failure.what));
                }
            }
        }
        Ok((taken, None))
    }

    /// Time has passed. Returns what the login agreed on, if it has waited and waits no more.
    pub(super) fn on_timeout(
        &mut self,
        now: Instant,
        sender: &mut Sender,
    ) -> Result<Option<Box<TargetLoginResult>>, ProtocolError> {
        if self.waits_until.is_some() {
            self.waits_until = now.checked_add(REINSTATEMENT_POLL);
            let invited = self.invited.clone();
            match self.login.establish(sender, &mut |cid| admit(invited.as_ref(), cid)) {
                TargetLoginProgress::Established(established) => return Ok(Some(established)),
                TargetLoginProgress::Failed(failure) => {
                    self.login.refuse(&failure, sender);
                    return Err(error(failure.what));
                }
                TargetLoginProgress::Waits | TargetLoginProgress::Continues => {}
            }
        }
        if now < self.deadline {
            return Ok(None);
        }
        match self.guessed.take() {
            Some(failure) => {
                self.login.refuse(&failure, sender);
                Err(error(failure.what))
            }
            None if self.waits_until.is_some() => {
                self.login.refuse(&LoginFailure::of(LoginStatus::OUT_OF_RESOURCES), sender);
                Err(error("logged in again, and its old session did not end within 30 seconds"))
            }
            None => Err(error("did not log in within 30 seconds")),
        }
    }

    /// Finds the session that the first request names. Whether it can be looked for on this core.
    fn find(&mut self, tsih: u16) -> bool {
        match self.local.find(&self.node, tsih) {
            SessionCore::Here(session) => {
                if let Some(invitation) = session.borrow().invitation() {
                    self.login.invite(invitation);
                    self.invited = Some(Rc::downgrade(&session));
                }
            }
            SessionCore::Elsewhere(home) => self.moves_to = Some(home),
            // The login is refused.
            SessionCore::Nowhere => {}
        }
        self.moves_to.is_none()
    }

    /// The target is stopping: whoever is not in yet is sent away.
    pub(super) fn on_stop(&mut self, sender: &mut Sender) {
        self.login.refuse(&LoginFailure::of(LoginStatus::SERVICE_UNAVAILABLE), sender);
    }
}

/// Whether a session has room for a connection, or will have.
fn admit(invited: Option<&Weak<RefCell<SharedSession>>>, cid: u16) -> Result<bool, LoginFailure> {
    let session = invited.and_then(Weak::upgrade).ok_or_else(no_such_session)?;
    session.borrow_mut().admit(cid)
}

fn error(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "RFC 7143 §6.3, Login Phase" }
}

/// How long a login may take.
const LOGIN_TIME: Duration = Duration::from_secs(30);

/// How often a login looks whether the session that it takes the place of is over.
const REINSTATEMENT_POLL: Duration = Duration::from_millis(2);

/// A wrong answer to a CHAP challenge is refused no sooner than this after the connection was made,
/// so that secrets are not guessed fast.
const GUESS_DELAY: Duration = Duration::from_secs(3);
