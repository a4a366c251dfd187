//! The login phase of a connection: framing of login PDUs, deadlines, and joining a session.

use super::local::{LocalSessions, SessionCore};
use super::shared::SharedSession;
use crate::driver::session::{ConnectionHandle, CoreHandle, Demand, ProtocolError};
use crate::iscsi::digests::IscsiDigests;
use crate::iscsi::login::failure::{LoginFailure, no_such_session};
use crate::iscsi::login::operational::DEFAULT_DATA_SEGMENT_LENGTH;
use crate::iscsi::login::target::{TargetLogin, TargetLoginProgress, TargetLoginResult};
use crate::iscsi::node::IscsiNode;
use crate::iscsi::pdu::{self, ParsedIscsiPdu};
use crate::iscsi::sender::Sender;
use crate::iscsi::sessions::LoginPermit;
use blockmux_wire::iscsi::session::{IscsiLoginRequest, LoginStatus};
use blockmux_wire::iscsi::{BHS_LEN, IscsiOpcode};
use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::transmute_ref;

/// A connection in the login phase.
pub(super) struct ConnectionLogin {
    pub(super) login: TargetLogin,
    /// Number of contiguous bytes needed for the next PDU, as far as known.
    needs: usize,
    deadline: Instant,
    /// The login failed with a wrong CHAP response; the refusal waits for the deadline.
    wrong_response: Option<LoginFailure>,
    /// Next check whether the initiator's older session has ended (session reinstatement).
    next_poll: Option<Instant>,
    node: Arc<IscsiNode>,
    local: Rc<LocalSessions>,
    /// The session that the connection joins. It may end meanwhile.
    joining: Option<Weak<RefCell<SharedSession>>>,
    /// The core of that session, if it is not this one.
    pub(super) moves_to: Option<CoreHandle>,
    /// Released when the login is over.
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
            wrong_response: None,
            next_poll: None,
            node,
            local,
            joining: None,
            moves_to: None,
            _permit: None,
        }
    }

    /// Admits the connection to login; `hang_up` closes it on session reinstatement.
    pub(super) fn admit(&mut self, permit: LoginPermit, hang_up: ConnectionHandle) {
        self._permit = Some(permit);
        self.login.set_hang_up(hang_up);
    }

    /// Whether the login waits for something other than a request.
    pub(super) fn is_waiting(&self) -> bool {
        self.wrong_response.is_some() || self.next_poll.is_some()
    }

    /// Time of the next timeout call.
    pub(super) fn deadline(&self) -> Instant {
        self.next_poll.map_or(self.deadline, |until| until.min(self.deadline))
    }

    pub(super) fn demand(&self) -> Demand {
        match (&self.wrong_response, self.next_poll, &self.moves_to) {
            (None, None, None) => Demand::Bytes(self.needs),
            _ => Demand::Nothing,
        }
    }

    /// The session that the connection has just been admitted to.
    pub(super) fn joined(&self) -> Option<Rc<RefCell<SharedSession>>> {
        self.joining.as_ref()?.upgrade()
    }

    /// Processes login requests; returns the number of consumed bytes and the result of a completed
    /// login.
    pub(super) fn on_bytes(
        &mut self,
        input: &[u8],
        now: Instant,
        sender: &mut Sender,
    ) -> Result<(usize, Option<Box<TargetLoginResult>>), ProtocolError> {
        let mut taken: usize = 0;
        while self.wrong_response.is_none() && self.next_poll.is_none() && self.moves_to.is_none() {
            let rest = input.get(taken..).unwrap_or_default();
            let head = match pdu::parse(rest, IscsiDigests::default())? {
                ParsedIscsiPdu::Incomplete(len) => {
                    self.needs = len;
                    break;
                }
                ParsedIscsiPdu::Head(head) => head,
            };
            if head.bhs.opcode() != IscsiOpcode::LOGIN_REQUEST {
                return Err(error("sent another PDU than a login request before the login"));
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
            let request: &IscsiLoginRequest = transmute_ref!(&head.bhs);
            if self.login.first.is_none() && request.tsih.get() != 0 && !self.find(request.tsih.get()) {
                break;
            }
            taken = taken.saturating_add(whole);
            self.needs = BHS_LEN;
            let joining = self.joining.clone();
            let progress =
                self.login.on_request(request, text, sender, &mut |cid| admit(joining.as_ref(), cid));
            match progress {
                TargetLoginProgress::Continues => {}
                TargetLoginProgress::Waits => self.next_poll = Some(now),
                TargetLoginProgress::Established(established) => return Ok((taken, Some(established))),
                TargetLoginProgress::Failed(failure) if failure.is_wrong_chap_response() => {
                    self.deadline = now.checked_add(CHAP_FAILURE_DELAY).unwrap_or(now);
                    self.wrong_response = Some(failure);
                }
                TargetLoginProgress::Failed(failure) => {
                    self.login.refuse(&failure, sender);
                    return Err(error(failure.what));
                }
            }
        }
        Ok((taken, None))
    }

    /// Handles a timeout; returns the result of a login that waited for an older session to end.
    pub(super) fn on_timeout(
        &mut self,
        now: Instant,
        sender: &mut Sender,
    ) -> Result<Option<Box<TargetLoginResult>>, ProtocolError> {
        if self.next_poll.is_some() {
            self.next_poll = now.checked_add(REINSTATEMENT_POLL);
            let joining = self.joining.clone();
            match self.login.establish(sender, &mut |cid| admit(joining.as_ref(), cid)) {
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
        match self.wrong_response.take() {
            Some(failure) => {
                self.login.refuse(&failure, sender);
                Err(error(failure.what))
            }
            None if self.next_poll.is_some() => {
                self.login.refuse(&LoginFailure::of(LoginStatus::OUT_OF_RESOURCES), sender);
                Err(error("logged in again, and its old session did not end within 30 seconds"))
            }
            None => Err(error("did not log in within 30 seconds")),
        }
    }

    /// Looks up the session that the first request names; `false` if it lives on another core.
    fn find(&mut self, tsih: u16) -> bool {
        if self.login.is_over_rdma() {
            // A session has one connection there, so the login is refused.
            return true;
        }
        match self.local.find(&self.node, tsih) {
            SessionCore::Here(session) => {
                if let Some(joinable) = session.borrow().joinable() {
                    self.login.set_joinable(joinable);
                    self.joining = Some(Rc::downgrade(&session));
                }
            }
            SessionCore::Elsewhere(core) => self.moves_to = Some(core),
            // The login is refused.
            SessionCore::Nowhere => {}
        }
        self.moves_to.is_none()
    }

    /// Refuses a login in progress because the target stops.
    pub(super) fn on_stop(&mut self, sender: &mut Sender) {
        self.login.refuse(&LoginFailure::of(LoginStatus::SERVICE_UNAVAILABLE), sender);
    }
}

/// Whether the session has room for a connection, or will have: see [`SharedSession::admit`].
fn admit(joining: Option<&Weak<RefCell<SharedSession>>>, cid: u16) -> Result<bool, LoginFailure> {
    let session = joining.and_then(Weak::upgrade).ok_or_else(no_such_session)?;
    session.borrow_mut().admit(cid)
}

fn error(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "RFC 7143 §6.3, Login Phase" }
}

/// Time limit of a login.
const LOGIN_TIME: Duration = Duration::from_secs(30);

/// Interval of checks whether the replaced session has ended.
const REINSTATEMENT_POLL: Duration = Duration::from_millis(2);

/// Minimum time from the connection's start to the refusal of a wrong CHAP response; slows down
/// guessing.
const CHAP_FAILURE_DELAY: Duration = Duration::from_secs(3);
