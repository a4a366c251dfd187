//! The host's admin queue: it initializes the controller and holds the association. Its commands
//! are those of the initialization, Keep Alive, and the shutdown at the end.

use super::Names;
use super::bring_up::{NamespaceProbe, ProbeResult};
use super::changes::{NamespaceChanges, QueryTopic};
use super::command;
use super::discovery::FoundSubsystem;
use super::info::{ControllerInfo, NamespaceInfo};
use super::refused::NvmeRefused;
use super::transport::{Commands, HostTransport, NvmeRequest, TransferProgress};
use crate::driver::session::{Control, PathRank, ProtocolError, Timed};
use crate::initiator::command_memory::CommandMemory;
use crate::initiator::command_queue::DataTransfer;
use crate::nvme::auth::HostCredentials;
use crate::nvme::auth::psk::InputPsk;
use crate::slots::{SlotKey, Slots};
use blockmux_volume::{Pool, Seg, SgList};
use blockmux_wire::nvme::Cqe;
use blockmux_wire::nvme::opcode::AdminOpcode;
use blockmux_wire::nvme::property::{
    CC, CC_EN, CC_IOCQES_SHIFT, CC_IOSQES_SHIFT, CC_SHN_NORMAL, CC_SHN_SHIFT,
};
use std::time::{Duration, Instant};

pub use super::bring_up::ControllerQuery;

/// Configuration of an admin queue.
#[derive(Clone, Debug)]
pub struct AdminConfig {
    /// Names of the host and the subsystem.
    pub names: Names,
    /// Credentials for authentication, if there are any.
    pub credentials: Option<HostCredentials>,
    /// Number of I/O queues to request; at least 1.
    pub queues: u16,
    /// The information to request from the controller.
    pub query: ControllerQuery,
    /// Keep Alive Timeout in whole milliseconds; 0 for none.
    pub keep_alive: Duration,
}

/// An admin queue and its connection.
pub struct HostAdmin<T> {
    pub(crate) transport: T,
    pub(super) admin: AdminCommands,
    is_over: bool,
}

/// The values of the methods of [`HostAdmin`] with the same names.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the methods say it")]
pub struct AdminResults<'a> {
    pub controller: Option<&'a ControllerInfo>,
    pub namespaces: &'a [NamespaceInfo],
    pub found: (&'a [FoundSubsystem], u64),
    pub refused: Option<&'a NvmeRefused>,
    pub generated: Option<&'a InputPsk>,
    pub is_over: bool,
}

impl<T: HostTransport> HostAdmin<T> {
    /// Creates a session for a new connection.
    #[must_use]
    pub fn new(config: AdminConfig, options: T::Options, pool: Pool, now: Instant) -> HostAdmin<T> {
        let mut transport = T::new(options, None, pool);
        transport.begin();
        HostAdmin { transport, admin: AdminCommands::new(config, T::USES_KEYED_SGLS, now), is_over: false }
    }

    /// The controller's information, independent of the transport.
    #[must_use]
    pub fn answers(&self) -> AdminResults<'_> {
        AdminResults {
            controller: self.controller(),
            namespaces: self.namespaces(),
            found: self.found(),
            refused: self.refused(),
            generated: self.generated(),
            is_over: self.is_over,
        }
    }

    /// The controller, once everything requested is known.
    #[must_use]
    pub fn controller(&self) -> Option<&ControllerInfo> {
        self.admin.bring_up.is_known().then_some(&self.admin.bring_up.controller)
    }

    /// The requested namespaces, once they are known; at most 1,024.
    #[must_use]
    pub fn namespaces(&self) -> &[NamespaceInfo] {
        &self.admin.bring_up.namespaces
    }

    /// Entries of the discovery log page, at most 10,000, and the number of entries beyond those.
    #[must_use]
    pub fn found(&self) -> (&[FoundSubsystem], u64) {
        let (found, left_out) = &self.admin.bring_up.found;
        (found, *left_out)
    }

    /// The refusal for which the session failed.
    #[must_use]
    pub fn refused(&self) -> Option<&NvmeRefused> {
        self.admin.refused.as_ref()
    }

    /// The generated PSK, if the session had to generate one. The session is over then, and a new
    /// one has to connect with TLS and this key.
    #[must_use]
    pub fn generated(&self) -> Option<&InputPsk> {
        self.admin.bring_up.generated.as_ref()
    }

    /// Whether the session is over: everything was learned, the controller refused, or the session
    /// was stopped.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Lets the transport pass on what it received, and continues.
    ///
    /// # Errors
    /// Protocol violations that the transport found.
    pub(crate) fn receive<R>(
        &mut self,
        now: Instant,
        take: impl FnOnce(&mut T, &mut AdminCommands) -> Result<R, ProtocolError>,
    ) -> Result<R, ProtocolError> {
        self.admin.timers.now = now;
        let taken = take(&mut self.transport, &mut self.admin)?;
        self.advance();
        Ok(taken)
    }

    /// Lets the transport work, and continues.
    pub(crate) fn drive<R>(&mut self, step: impl FnOnce(&mut T, &mut AdminCommands) -> R) -> R {
        let result = step(&mut self.transport, &mut self.admin);
        self.advance();
        result
    }

    /// Handles the end of the connection by the controller.
    pub(crate) fn on_lost(&mut self) -> Result<(), ProtocolError> {
        if self.is_over || (self.admin.bring_up.is_known() && self.transport.may_end()) {
            self.is_over = true;
            return Ok(());
        }
        self.admin.on_lost();
        Err(ProtocolError {
            what: "closed the connection of an admin queue that was being brought up",
            reference: "NVMe Base 2.0 §3.5, Controller Initialization",
        })
    }

    /// Sends the next commands, and ends the session when it is time.
    fn advance(&mut self) {
        if !self.transport.is_open() || self.is_over {
            return;
        }
        while let Some(request) = self.admin.next() {
            self.transport.send(&request, &mut self.admin);
        }
        let is_all = self.admin.bring_up.is_known() && !self.admin.stays;
        if is_all || self.refused().is_some() || self.generated().is_some() {
            self.end();
        }
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        self.admin.is_shutting_down = true;
        // The completion of the shutdown is not awaited.
        if self.transport.is_open() && self.admin.bring_up.is_enabled() {
            let request = self.admin.last();
            self.transport.send(&request, &mut self.admin);
        }
    }
}

impl<T: HostTransport> Timed for HostAdmin<T> {
    fn poll_timeout(&self) -> Option<Instant> {
        if self.is_over { None } else { self.admin.poll_timeout() }
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        if self.is_over {
            return Ok(());
        }
        self.admin.on_timeout(now)?;
        self.advance();
        Ok(())
    }
}

impl<T: HostTransport> Control for HostAdmin<T> {
    fn is_ready(&self) -> bool {
        self.admin.is_ready() && !self.is_over
    }

    fn poll_size(&mut self) -> Option<u64> {
        self.admin.changes.as_mut()?.size.take()
    }

    fn poll_path_rank(&mut self) -> Option<PathRank> {
        self.admin.changes.as_mut()?.rank.take()
    }

    fn query_path_rank(&mut self) {
        self.admin.changes.iter_mut().for_each(NamespaceChanges::ask_for_access);
        self.advance();
    }

    fn on_stop(&mut self) {
        self.end();
    }
}

/// The commands of an admin queue.
pub(crate) struct AdminCommands {
    commands: Slots<AdminCommand>,
    bring_up: NamespaceProbe,
    /// Change notifications, for a session that stays.
    changes: Option<NamespaceChanges>,
    stays: bool,
    /// Whether an initialization command is outstanding or delayed.
    is_asked: bool,
    refused: Option<NvmeRefused>,
    keep_alive: Duration,
    /// Whether a Keep Alive has to be sent.
    is_due: bool,
    is_shutting_down: bool,
    timers: AdminTimers,
}

struct AdminTimers {
    /// Time of the latest call.
    now: Instant,
    /// Deadline of the initialization.
    deadline: Instant,
    next_keep_alive: Option<Instant>,
    /// Start and limit (CAP.TO) of the wait for CSTS.RDY.
    unready: Option<(Instant, Duration)>,
    /// Time of the next retry.
    ask_again: Option<Instant>,
    /// Next time to read the ANA log page without an event.
    next_access_query: Option<Instant>,
    /// Deadline of an ANA transition.
    changed_by: Option<Instant>,
}

struct AdminCommand {
    purpose: AdminPurpose,
    transfer: DataTransfer,
    payload: SgList,
    progress: TransferProgress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AdminPurpose {
    Question,
    Changes,
    Access,
    KeepAlive,
    Shutdown,
}

impl AdminCommands {
    fn new(config: AdminConfig, uses_keyed_sgls: bool, now: Instant) -> AdminCommands {
        let kato_ms = u32::try_from(config.keep_alive.as_millis()).unwrap_or(u32::MAX);
        let keep_alive = Duration::from_millis(kato_ms.into());
        AdminCommands {
            commands: Slots::default(),
            changes: None,
            stays: matches!(config.query, ControllerQuery::Use(_)),
            bring_up: NamespaceProbe::new(
                config.query,
                config.names,
                config.credentials,
                (kato_ms, config.queues),
                uses_keyed_sgls,
            ),
            is_asked: false,
            refused: None,
            keep_alive,
            is_due: false,
            is_shutting_down: false,
            timers: AdminTimers {
                now,
                deadline: now.checked_add(BRING_UP_TIMEOUT).unwrap_or(now),
                next_keep_alive: if kato_ms > 0 { half(now, keep_alive) } else { None },
                unready: None,
                ask_again: None,
                next_access_query: None,
                changed_by: None,
            },
        }
    }

    /// Time of the latest call.
    #[cfg(test)]
    pub(super) fn now(&self) -> Instant {
        self.timers.now
    }

    /// Whether I/O queues may connect.
    pub(crate) fn is_ready(&self) -> bool {
        self.bring_up.is_known() && self.changes.as_ref().is_none_or(|changes| changes.knows_access)
    }

    /// The next command to send.
    pub(crate) fn next(&mut self) -> Option<NvmeRequest> {
        if self.is_shutting_down || self.refused.is_some() {
            return None;
        }
        if std::mem::take(&mut self.is_due) {
            let sqe = command::admin(AdminOpcode::KEEP_ALIVE);
            return Some(self.begin(AdminPurpose::KeepAlive, sqe, DataTransfer::Nothing, SgList::default()));
        }
        if self.bring_up.is_known() && self.stays {
            let (controller, namespace) = (&self.bring_up.controller, self.bring_up.namespaces.first()?);
            let changes = self.changes.get_or_insert_with(|| NamespaceChanges::new(controller, namespace));
            let (sqe, transfer, payload, topic) = changes.next()?;
            let purpose = match topic {
                QueryTopic::Events => AdminPurpose::Changes,
                QueryTopic::Access => AdminPurpose::Access,
            };
            return Some(self.begin(purpose, sqe, transfer, payload));
        }
        if std::mem::replace(&mut self.is_asked, true) {
            return None;
        }
        let (sqe, transfer, payload) = self.bring_up.next_command()?;
        Some(self.begin(AdminPurpose::Question, sqe, transfer, payload))
    }

    /// The last command: a normal shutdown.
    pub(crate) fn last(&mut self) -> NvmeRequest {
        let sizes = 6 << CC_IOSQES_SHIFT | 4 << CC_IOCQES_SHIFT;
        let sqe = command::property_set(CC, sizes | CC_SHN_NORMAL << CC_SHN_SHIFT | CC_EN);
        self.begin(AdminPurpose::Shutdown, sqe, DataTransfer::Nothing, SgList::default())
    }

    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        let timers = &self.timers;
        // The wait for CSTS.RDY is checked at each poll of it.
        let is_due = !self.is_ready() && timers.unready.is_none();
        let bring_up = is_due.then_some(timers.deadline);
        let queries = self.changes.as_ref().is_some_and(NamespaceChanges::is_to_ask_again);
        let access = queries.then(|| timers.next_access_query.unwrap_or(timers.now));
        let others = [timers.changed_by, timers.ask_again, timers.next_keep_alive];
        others.into_iter().chain([bring_up, access]).flatten().min()
    }

    /// # Errors
    /// If the controller did not respond in time.
    pub(crate) fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        self.timers.now = now;
        if self.timers.ask_again.is_some_and(|at| now >= at) {
            self.on_pause_over(now);
        }
        self.query_access_if_due(now);
        self.wait_for_change(now)?;
        let is_late = now >= self.timers.deadline && self.timers.unready.is_none() && !self.is_ready();
        if is_late && self.refused.is_none() {
            return Err(ProtocolError {
                what: "did not complete its initialization within 30 seconds",
                reference: "NVMe Base 2.0 §3.5, Controller Initialization",
            });
        }
        if self.timers.next_keep_alive.is_some_and(|at| now >= at) {
            let is_unanswered =
                !self.commands.keys_of(|command| command.purpose == AdminPurpose::KeepAlive).is_empty();
            if is_unanswered {
                return Err(ProtocolError {
                    what: "did not answer a Keep Alive in time",
                    reference: "NVMe Base 2.0 §3.9, Keep Alive",
                });
            }
            // Keep Alive is not allowed before the controller is enabled.
            self.is_due = self.bring_up.is_enabled();
            // Sent after half of the timeout, which leaves the other half for the transfer.
            self.timers.next_keep_alive = half(now, self.keep_alive);
        }
        Ok(())
    }

    /// Reads the ANA log page from time to time if no events announce changes.
    fn query_access_if_due(&mut self, now: Instant) {
        let Some(changes) = self.changes.as_mut().filter(|changes| changes.is_to_ask_again()) else {
            self.timers.next_access_query = None;
            return;
        };
        if self.timers.next_access_query.is_none_or(|at| now >= at) {
            if self.timers.next_access_query.is_some() {
                changes.ask_for_access();
            }
            self.timers.next_access_query = now.checked_add(ACCESS_EVERY);
        }
    }

    /// Ends the session if an ANA transition takes longer than ANATT, so that the path reconnects.
    fn wait_for_change(&mut self, now: Instant) -> Result<(), ProtocolError> {
        let time = self.bring_up.controller.ana_transition;
        if time.is_zero() || !self.changes.as_ref().is_some_and(|changes| changes.is_changing) {
            self.timers.changed_by = None;
            return Ok(());
        }
        match self.timers.changed_by {
            None => self.timers.changed_by = now.checked_add(time),
            Some(at) if now >= at => {
                return Err(ProtocolError {
                    what: "did not end a change of an ANA state within ANATT",
                    reference: "NVMe Base 2.0, Asymmetric Namespace Access Reporting",
                });
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Repeats the command, unless the controller's time to become ready is over.
    fn on_pause_over(&mut self, now: Instant) {
        self.timers.ask_again = None;
        self.is_asked = false;
        let Some((since, time)) = self.timers.unready else { return };
        if now.saturating_duration_since(since) >= time {
            self.refused.get_or_insert(NvmeRefused::NotReady(time.as_secs().max(1)));
        }
    }

    fn begin(
        &mut self,
        purpose: AdminPurpose,
        sqe: blockmux_wire::nvme::Sqe,
        transfer: DataTransfer,
        payload: SgList,
    ) -> NvmeRequest {
        let progress = TransferProgress::default();
        let key = self.commands.insert(AdminCommand { purpose, transfer, payload, progress });
        NvmeRequest { key, command: sqe, transfer }
    }

    /// Handles the completion of an initialization command.
    fn on_answer(&mut self, command: &AdminCommand, cqe: &Cqe) {
        let data = command.progress.data(command.transfer, &command.payload);
        if cqe.status.is_success() && data.is_none() {
            // Retried because a digest was wrong. The deadline bounds the retries.
            return self.pause();
        }
        match self.bring_up.on_answer(cqe, &data.unwrap_or_default()) {
            Ok(ProbeResult::More | ProbeResult::All) => {
                self.is_asked = false;
                if self.timers.unready.take().is_some() {
                    let anew = self.timers.now.checked_add(BRING_UP_TIMEOUT);
                    self.timers.deadline = anew.unwrap_or(self.timers.deadline);
                }
            }
            // No further commands are sent on this connection.
            Ok(ProbeResult::GeneratedPsk) => self.is_shutting_down = true,
            Ok(ProbeResult::Later(time)) => {
                self.timers.unready.get_or_insert((self.timers.now, time));
                self.pause();
            }
            Err(refused) => {
                self.refused.get_or_insert(refused);
            }
        }
    }

    /// Handles the unexpected end of the connection.
    pub(crate) fn on_lost(&mut self) {
        if let Some(refused) = self.bring_up.on_lost() {
            self.refused.get_or_insert(refused);
        }
    }

    /// Handles the completion of a command of the change notifications.
    fn on_change(&mut self, command: &AdminCommand, cqe: &Cqe) {
        let Some(changes) = &mut self.changes else { return };
        let result = cqe.status.is_success().then(|| cqe.result.get() as u32);
        let data = result.and_then(|_| command.progress.data(command.transfer, &command.payload));
        match command.purpose {
            AdminPurpose::Access => changes.on_access(data.as_deref()),
            _ => changes.on_answer(result, data.as_deref(), &self.bring_up.controller),
        }
        if changes.is_another {
            let nsid = self.bring_up.namespaces.first().map_or(0, |namespace| namespace.nsid);
            self.refused.get_or_insert(NvmeRefused::Replaced(nsid));
        }
    }

    fn pause(&mut self) {
        self.timers.ask_again = self.timers.now.checked_add(PAUSE);
    }
}

impl CommandMemory for AdminCommands {
    fn data_out(&mut self, key: SlotKey) -> Option<(&SgList, usize)> {
        self.commands.get_mut(key).map(|command| (&command.payload, 0))
    }

    fn data_in(&mut self, key: SlotKey) -> Option<(&SgList, usize)> {
        self.commands.get_mut(key).map(|command| (&command.payload, 0))
    }

    fn can_borrow(&mut self, _key: SlotKey, _len: usize) -> bool {
        false
    }

    fn attach_borrowed(&mut self, _key: SlotKey, _data: Seg) {}
}

impl Commands for AdminCommands {
    fn find(&self, cid: u16) -> Option<SlotKey> {
        self.commands.find_narrow(cid)
    }

    fn transport(&mut self, key: SlotKey) -> Option<(&mut TransferProgress, DataTransfer)> {
        self.commands.get_mut(key).map(|command| (&mut command.progress, command.transfer))
    }

    fn finish(&mut self, key: SlotKey, cqe: &Cqe) {
        let Some(command) = self.commands.remove(key) else { return };
        match command.purpose {
            AdminPurpose::Question => self.on_answer(&command, cqe),
            AdminPurpose::Changes | AdminPurpose::Access => self.on_change(&command, cqe),
            // The status does not matter.
            AdminPurpose::KeepAlive | AdminPurpose::Shutdown => {}
        }
    }
}

/// The time after half of `time`.
fn half(now: Instant, time: Duration) -> Option<Instant> {
    now.checked_add(time.checked_div(2)?)
}

/// Time limit for the initialization, without CAP.TO.
const BRING_UP_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between reads of the ANA log page if no events announce changes.
const ACCESS_EVERY: Duration = Duration::from_secs(1);
/// Interval between reads of CSTS.
const PAUSE: Duration = Duration::from_millis(20);
