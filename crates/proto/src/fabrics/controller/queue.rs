//! One queue of a controller, for any transport: from commands to completions.
//!
//! ```text
//!   transport ──on_command──▶ accept ─▶ start ──fetch──▶ transport      data that is not in the capsule
//!   transport ──on_data────────────────▶ begin ─▶ nvme::admin, control_commands.rs, nvme::io ─▶ submit ─▶ volume
//!   transport ◀──complete── finish ◀── go_on ◀──────────────────────────────────── on_io ◀── volume
//! ```
//! Commands that wait for room, for memory or for the data of others before their own is fetched
//! are in `unstarted`. Commands that poll for something else are in `waiting`.

use super::commands::{CommandSlot, CommandState, CommandTable, CommandWork};
use super::connect::{ConnectedQueue, HostConnection};
use super::fused::FusedState;
use super::node::NvmeNode;
use super::timers::QueueTimers;
use super::transport::FabricsTransport;
use super::unconnected::ConnectPermit;
use super::unstarted::UnstartedCommands;
use crate::driver::audit_event::{AuditEvent, AuditEvents};
use crate::driver::backoff::Backoff;
use crate::driver::computation::RunJob;
use crate::driver::session::{ProtocolError, Timed};
use crate::driver::target::{Charge, IoSource, SessionStage, TargetLifecycle};
use crate::exports::VolumeId;
use crate::nvme::admin::AdminQueue;
use crate::nvme::auth::controller::Authenticator;
use crate::nvme::event_queue::{EventQueue, QueueEvent};
use crate::nvme::io::{IoCommand, IoRequest, IoStep};
use crate::nvme::{HangUp, MAX_DATA, MAX_EVENT_REQUESTS, MQES, Notifier, NvmeOutcome};
use crate::volume_state::{NotAdmitted, RequiredAccess};
use blockmux_volume::{Completion, Cost, Io, IoError, Op, Pool, Seg, SgList, Tag, Waker};
use blockmux_wire::nvme::opcode::AdminOpcode;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{Fuse, PSDT_MASK, PSDT_SGL, Sqe};
use core::net::SocketAddr;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One queue of a controller, which is one connection of a host.
pub struct ControllerQueue<T: FabricsTransport> {
    pub(crate) transport: T,
    pub(super) node: Arc<NvmeNode>,
    pub(super) pool: Pool,
    pub(super) connection: HostConnection,
    /// `None` until the host's Connect.
    pub(super) queue: Option<ConnectedQueue>,
    /// Present if the host has to authenticate.
    pub(super) authenticator: Option<Box<Authenticator>>,
    pub(super) audit: AuditEvents,
    /// Entries of the submission queue: they bound the outstanding commands but event requests.
    pub(super) depth: u16,
    /// SQHD; `None` if SQ flow control is disabled.
    pub(super) sqhd: Option<u16>,
    pub(super) commands: CommandTable<T::Transfer>,
    /// I/O that the driver has not taken yet.
    io: VecDeque<(VolumeId, Io)>,
    /// Commands that poll whether they can continue.
    pub(super) waiting: VecDeque<usize>,
    /// I/O in flight to be cancelled.
    pub(super) cancels: VecDeque<(VolumeId, Tag)>,
    pub(super) fusing: FusedState,
    /// Events from other cores.
    pub(super) events: Option<Arc<EventQueue>>,
    /// Commands that wait for room or memory to begin or to fetch their data, oldest first.
    pub(super) unstarted: UnstartedCommands,
    /// A Connect that waits for the end of the previous association, and its data.
    pub(super) connecting: Option<(usize, SgList)>,
    /// An Authentication Receive whose message is being computed.
    pub(super) receiving: Option<usize>,
    /// Whether an authentication message is being computed.
    pub(super) is_computing: bool,
    /// Whether new commands are no longer accepted; outstanding ones are finished.
    pub(super) stopping: bool,
    /// Whether an admin queue ends after the I/O queues of its controller, which would end with it.
    pub(super) outlasts_io_queues: bool,
    /// Whether the connection has to be closed.
    pub(super) is_over: bool,
    pub(super) timers: QueueTimers,
    pub(super) make_notifier: Option<MakeNotifier>,
}

/// Creates a notifier, which wakes a session from any thread, from the session's waker.
pub type MakeNotifier = Box<dyn FnOnce(&Waker) -> Notifier>;

impl<T: FabricsTransport> ControllerQueue<T> {
    /// Creates a queue for a host that has just connected. `pool` is the core's pool, for data from
    /// the host. The host has 30 seconds from `now` to connect the queue.
    pub(crate) fn with_transport(
        transport: T,
        node: Arc<NvmeNode>,
        pool: Pool,
        now: Instant,
    ) -> ControllerQueue<T> {
        ControllerQueue {
            transport,
            node,
            pool,
            connection: HostConnection { sgls: T::SGLS, ..HostConnection::default() },
            queue: None,
            authenticator: None,
            audit: AuditEvents::default(),
            depth: 1,
            sqhd: Some(0),
            commands: CommandTable::default(),
            io: VecDeque::new(),
            waiting: VecDeque::new(),
            cancels: VecDeque::new(),
            fusing: FusedState::None,
            events: None,
            unstarted: UnstartedCommands::default(),
            connecting: None,
            receiving: None,
            is_computing: false,
            stopping: false,
            outlasts_io_queues: false,
            is_over: false,
            timers: QueueTimers {
                connect_by: now.checked_add(CONNECT_TIME).unwrap_or(now),
                now,
                message_by: now,
                retry: Backoff::new(now),
                poll_at: now,
                keep_alive: None,
            },
            make_notifier: None,
        }
    }

    /// Sets the permit, the local address and the means to close the connection, which ends an I/O
    /// queue together with its controller.
    #[must_use]
    pub fn admitted(mut self, permit: ConnectPermit, local: Option<SocketAddr>, hang_up: HangUp) -> Self {
        self.connection.peer_ip = permit.peer;
        self.connection.permit = Some(permit);
        self.connection.local = local;
        self.connection.hang_up = Some(hang_up);
        self
    }

    /// Sets the secret random seed without which hosts cannot authenticate.
    #[must_use]
    pub fn with_seed(mut self, seed: [u8; 32]) -> Self {
        self.connection.seed = Some(seed);
        self
    }

    /// Sets the identifier of the port that the host connected to.
    #[must_use]
    pub fn at_port(mut self, port: u16) -> Self {
        self.connection.port = port;
        self
    }

    /// Limits the data that is fetched at a time to `bytes`, or to that of `MIN_FETCHES` commands
    /// if that is more. Without a limit, data is fetched as long as there is room.
    #[must_use]
    pub fn fetching_at_most(mut self, bytes: usize) -> Self {
        self.unstarted.max_fetching = bytes;
        self
    }

    /// Runs computations of the authentication by `run`, if the session has a notifier.
    #[must_use]
    pub fn computing_by(mut self, run: RunJob) -> Self {
        self.connection.run = Some(run);
        self
    }

    /// Sets a notifier, with which other cores wake this session. Without one the session polls its
    /// events ten times a second.
    #[must_use]
    pub fn with_notifier(mut self, make_notifier: MakeNotifier) -> Self {
        self.make_notifier = Some(make_notifier);
        self
    }

    /// Handles the end of the TLS handshake, with the key of `identity`.
    pub(crate) fn on_secured_by(&mut self, identity: &[u8]) -> Result<(), ProtocolError> {
        let gone = ProtocolError {
            what: "used a TLS key that no longer exists",
            reference: "TCP Transport 1.1 §3.6.1",
        };
        self.connection.secured = Some(Box::new(self.node.keyring().find(identity).ok_or(gone)?));
        Ok(())
    }

    /// Records traffic from the host.
    #[inline]
    pub(crate) fn on_traffic(&mut self, now: Instant) {
        self.timers.now = now;
        self.timers.retry.reset(now);
        if let Some(keep_alive) = &mut self.timers.keep_alive {
            keep_alive.has_traffic = true;
        }
    }

    /// Whether the next command may be handled.
    #[inline]
    pub(crate) fn takes_commands(&self) -> bool {
        self.connecting.is_none()
    }

    /// Whether the connection has to be closed.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether everything has ended that has to end before the connection is closed.
    pub(crate) fn is_finished(&self) -> bool {
        self.is_over || (self.stopping && self.commands.is_idle() && !self.waits_for_io_queues())
    }

    fn waits_for_io_queues(&self) -> bool {
        self.outlasts_io_queues
            && matches!(&self.queue, Some(ConnectedQueue::Admin(admin)) if admin.guard.has_queues())
    }

    /// Whether a command is handled although the queue stops: while the commands of I/O queues are
    /// finished, the host must not think that the controller is lost, and may abort them.
    #[cold]
    fn serves_while_stopping(&self, sqe: &Sqe) -> bool {
        let opcode = AdminOpcode(sqe.opcode);
        (opcode == AdminOpcode::KEEP_ALIVE || opcode == AdminOpcode::ABORT) && self.waits_for_io_queues()
    }

    /// Ends the connection immediately. Returns whether it had ended before.
    pub(crate) fn end(&mut self) -> bool {
        self.waiting.clear();
        self.unstarted.clear();
        (self.connecting, self.receiving) = (None, None);
        std::mem::replace(&mut self.is_over, true)
    }

    /// Handles a command with `capsule_len` bytes of in-capsule data, whose digest was correct if
    /// `is_intact`.
    ///
    /// # Errors
    /// If the host has more commands outstanding than its queue has entries.
    #[inline]
    pub(crate) fn on_command(
        &mut self,
        sqe: &Sqe,
        capsule_len: usize,
        borrow: impl FnOnce() -> Seg,
        is_intact: bool,
    ) -> Result<(), ProtocolError> {
        if self.commands.under_way() >= usize::from(self.depth) {
            self.is_over = true;
            return Err(OVERRUN);
        }
        if self.stopping && !self.serves_while_stopping(sqe) {
            // Not completed: the connection is about to end, and the host retries the command
            // elsewhere or later. A completion would use up one of its few retries.
            return Ok(());
        }
        let descriptor = T::descriptor(sqe);
        let first = if sqe.fuse() == Fuse::NORMAL && self.fusing == FusedState::None {
            None
        } else {
            match self.first_half(sqe) {
                Ok(first) => first,
                Err(status) => {
                    self.complete(sqe, descriptor.transfer, NvmeOutcome::failure(status));
                    return Ok(());
                }
            }
        };
        let accepted = if !is_intact {
            Err(NvmeOutcome::retry(NvmeStatus::TRANSIENT_TRANSPORT_ERROR))
        } else if self.is_taken(sqe.cid.get()) {
            Err(NvmeOutcome::failure(NvmeStatus::COMMAND_ID_CONFLICT))
        } else {
            let accepted = self.accept(sqe, first, descriptor.len).and_then(|(work, out)| {
                let in_capsule = descriptor.locate(sqe, &work, out, capsule_len)?;
                Ok((work, out, in_capsule))
            });
            accepted.map_err(NvmeOutcome::refusal)
        };
        let (work, out, in_capsule) = match accepted {
            Ok(accepted) => accepted,
            Err(outcome) => {
                self.complete(sqe, descriptor.transfer, outcome);
                self.half_refused(sqe, first);
                return Ok(());
            }
        };
        // Commands whose real length differs from the descriptor were refused above.
        let payload = descriptor.len.min(MAX_DATA);
        let slot = self.commands.insert(sqe, work, out, payload, descriptor.transfer);
        if sqe.fuse() != Fuse::NORMAL {
            self.half_accepted(slot, first);
        }
        let data = if let Some(offset) = in_capsule {
            // The offset and length were checked by `locate`.
            borrow().slice(offset, out).into()
        } else if payload == 0 || out == 0 && self.unstarted.is_empty_of_waiting() && self.has_room(payload) {
            SgList::default()
        } else {
            self.unstarted.push(slot);
            self.start();
            return Ok(());
        };
        self.commands.count(slot);
        self.begin(slot, data);
        Ok(())
    }

    /// Whether another command uses this CID. An Asynchronous Event Request gives its CID up:
    /// SPDK's host reuses those CIDs when it shuts a controller down, and no target refuses that.
    #[inline]
    fn is_taken(&mut self, cid: u16) -> bool {
        let Some(slot) = self.commands.find(cid) else { return false };
        let Some(ConnectedQueue::Admin(admin)) = &mut self.queue else { return true };
        let is_waiting = admin.events.abort(slot);
        if is_waiting {
            self.commands.remove(slot);
        }
        !is_waiting
    }

    /// Determines how a command is executed, and the length of the host's data in bytes. `first` is
    /// the slot of the first half if this is the second half of a fused operation.
    #[inline]
    fn accept(
        &mut self,
        sqe: &Sqe,
        first: Option<usize>,
        descriptor_len: usize,
    ) -> Result<(CommandWork, usize), NvmeStatus> {
        if sqe.flags & PSDT_MASK != PSDT_SGL {
            return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        }
        let is_fabrics = AdminOpcode(sqe.opcode) == AdminOpcode::FABRICS;
        if !is_fabrics && !self.is_authenticated() {
            return Err(NvmeStatus::AUTHENTICATION_REQUIRED);
        }
        let fuse = sqe.fuse();
        match &mut self.queue {
            Some(ConnectedQueue::Io(queue)) if !is_fabrics => {
                queue.refresh_view_if_changed();
                let mut command = IoCommand::parse(&queue.subsystem, &queue.view, &queue.origin, sqe)?;
                if fuse != Fuse::NORMAL {
                    let first = first.and_then(|first| self.commands.get_mut(first));
                    match first.map(|first| &first.work) {
                        Some(CommandWork::Io(first)) => command.fuse(&queue.view, sqe, first)?,
                        None if command.is_compare() => {}
                        _ => return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
                    }
                }
                let out = command.data_out(descriptor_len);
                Ok((CommandWork::Io(command), out))
            }
            _ if fuse != Fuse::NORMAL => Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
            _ if is_fabrics => Ok((CommandWork::Fabrics, self.fabrics_data_out(sqe)?)),
            None => Err(NvmeStatus::COMMAND_SEQUENCE_ERROR),
            Some(_) => Ok((CommandWork::Admin, AdminQueue::data_out(sqe))),
        }
    }

    /// Begins waiting commands, or fetches their data, as far as there is room. Commands wait here
    /// and not in the transport, because it has to receive the data of earlier commands over the
    /// same stream.
    pub(super) fn start(&mut self) {
        while let Some(slot) = self.unstarted.next(&mut self.commands) {
            let Some(entry) = self.commands.get_mut(slot) else {
                self.unstarted.remove(slot);
                continue;
            };
            let (len, payload) = (entry.data_out, entry.payload);
            // The second half of a begun operation does not wait.
            let is_half = entry.half.is_some();
            if !is_half && !self.has_room(payload) {
                return;
            }
            if len > 0 && T::needs_memory(len) && self.memory_for(slot).is_none() {
                if self.pool.could_hold(len) {
                    return;
                }
                // The pool is too small, so it would wait forever.
                self.unstarted.remove(slot);
                self.finish(slot, NvmeOutcome::retry(NvmeStatus::NAMESPACE_NOT_READY));
                continue;
            }
            self.unstarted.remove(slot);
            self.commands.count(slot);
            if len == 0 {
                self.begin(slot, SgList::default());
            } else if let Some(entry) = self.commands.get_mut(slot) {
                self.transport.fetch(slot, entry);
                self.commands.begin_fetch(slot);
            }
        }
    }

    /// Whether `data_len` more bytes may be in flight.
    #[inline]
    fn has_room(&self, data_len: usize) -> bool {
        let unsent = self.transport.unsent();
        let payload = self.commands.payload.saturating_add(unsent).saturating_add(data_len);
        let is_alone = self.commands.payload == 0 && unsent == 0;
        payload <= blockmux_volume::SHORT_PAYLOAD
            || payload <= PAYLOAD_IN_FLIGHT
                && (is_alone || payload <= self.pool.peer_share() && !self.pool.is_short())
    }

    /// The command in this slot, if its data is being fetched.
    #[inline]
    pub(crate) fn fetching(&mut self, slot: usize) -> Option<&mut CommandSlot<T::Transfer>> {
        let entry = self.commands.get_mut(slot)?;
        (entry.state == CommandState::Data && entry.data_out > 0 && entry.is_counted).then_some(entry)
    }

    /// The memory for a command's data; taken from the pool at first use.
    pub(crate) fn memory_for(&mut self, slot: usize) -> Option<Seg> {
        let entry = self.commands.get_mut(slot)?;
        if entry.memory.is_none() {
            let memory = self.pool.take_payload_or_wait(entry.data_out);
            entry.memory = memory.map(|memory| memory.seg(0, entry.data_out));
        }
        entry.memory.clone()
    }

    /// Handles the arrival of all data of a command.
    #[inline]
    pub(crate) fn on_data(&mut self, slot: usize) {
        self.commands.end_fetch(slot);
        if let Some(entry) = self.commands.get_mut(slot) {
            let data = entry.take_memory();
            self.begin(slot, data);
        }
        if self.unstarted.has_unfetched() {
            self.start();
        }
    }

    /// Handles the loss of a command's data in transit, after which a retry may succeed.
    pub(crate) fn on_data_lost(&mut self, slot: usize) {
        self.commands.end_fetch(slot);
        self.finish(slot, NvmeOutcome::retry(NvmeStatus::TRANSIENT_TRANSPORT_ERROR));
    }

    /// Begins a command whose data is complete.
    #[inline]
    fn begin(&mut self, slot: usize, data: SgList) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        if let Some(abort) = &entry.abort {
            if !abort.is_given_up() {
                return self.finish_aborted(slot);
            }
            entry.abort = None;
        }
        if entry.half.is_some() {
            return self.on_half(slot, data);
        }
        match &mut entry.work {
            CommandWork::Io(command) => {
                let step = command.begin(data);
                self.go_on(slot, step);
            }
            CommandWork::Admin => {
                let sqe = entry.sqe;
                self.administer(slot, &sqe, &data);
            }
            CommandWork::Fabrics => {
                let sqe = entry.sqe;
                self.on_fabrics(slot, &sqe, data);
            }
        }
    }

    #[inline]
    pub(super) fn go_on(&mut self, slot: usize, step: IoStep) {
        match step {
            IoStep::Io(wanted) => self.submit(slot, wanted),
            IoStep::Wait => self.wait(slot),
            IoStep::Done(outcome) => {
                if let (Some(entry), Some(ConnectedQueue::Io(queue))) =
                    (self.commands.get_mut(slot), &self.queue)
                    && let CommandWork::Io(command) = &entry.work
                {
                    command.count(&outcome, &queue.counts);
                }
                self.finish(slot, outcome);
            }
        }
    }

    /// Makes a command poll whether it can continue.
    pub(super) fn wait(&mut self, slot: usize) {
        if let Some(entry) = self.commands.get_mut(slot) {
            entry.state = CommandState::Other;
        }
        self.waiting.push_back(slot);
    }

    /// Queues an I/O for the driver.
    #[inline]
    fn submit(&mut self, slot: usize, wanted: IoRequest) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        entry.state = CommandState::Io;
        let IoRequest { volume, op, offset, len, data } = wanted;
        self.io.push_back((volume, Io { tag: Tag(slot as u64), op, offset, len, data }));
    }

    /// Ends a command whose I/O is not admitted, or prepares the first I/O on a volume; returns
    /// whether to try again.
    #[cold]
    fn on_denied(&mut self, slot: usize, volume: VolumeId, error: IoError) -> bool {
        let Some(ConnectedQueue::Io(queue)) = &mut self.queue else { return false };
        if error == IoError::Aborted {
            // Its slot may get another command, whose I/O must not be cancelled.
            self.cancels.retain(|(_, tag)| *tag != Tag(slot as u64));
            self.on_result(slot, Err(error));
            return false;
        }
        queue.refresh_view_if_changed();
        let is_known = queue.admissions.has(volume);
        if !is_known && queue.begin_use(volume) {
            return true;
        }
        if !is_known || error == IoError::ShuttingDown {
            // The namespace was detached while the command was in progress.
            self.finish(slot, NvmeOutcome::failure(NvmeStatus::INVALID_NAMESPACE_OR_FORMAT));
        } else {
            self.on_result(slot, Err(error));
        }
        false
    }

    /// Admits an I/O once; [`NotAdmitted::Denied`] leaves its command in progress.
    #[inline]
    fn admit(
        &mut self,
        slot: usize,
        volume: VolumeId,
        io: &Io,
        is_late: bool,
    ) -> Result<(), NotAdmitted<IoError>> {
        let (Some(entry), Some(ConnectedQueue::Io(queue))) = (self.commands.get_mut(slot), &mut self.queue)
        else {
            return Err(NotAdmitted::Denied(IoError::Aborted));
        };
        if entry.abort.is_some() {
            return Err(NotAdmitted::Denied(IoError::Aborted));
        }
        let needs_write = entry.atomic_range().is_some() || io.op.is_write() || io.op == Op::Flush;
        let needs = if needs_write { RequiredAccess::Writing } else { RequiredAccess::Reading };
        // The volume may have been detached and attached again.
        if is_late && (!queue.reaches(volume, needs) || !queue.begin_use(volume)) {
            // The host's next attempt is answered with the reason.
            return Err(NotAdmitted::Denied(IoError::PathLost));
        }
        let range = (io.offset, io.len);
        entry.io_guard = queue.admissions.admit(volume, io.op, range, needs, entry.atomic_range())?;
        Ok(())
    }

    #[inline]
    fn on_result(&mut self, slot: usize, result: Result<blockmux_volume::Output, IoError>) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        entry.io_guard = None;
        let CommandWork::Io(command) = &mut entry.work else { return };
        let was_cut_short = matches!(result, Err(IoError::Aborted));
        let step = command.on_io(result);
        if self.is_over {
            // The connection is closed, so the rest is not executed.
            return self.commands.remove(slot);
        }
        if entry.abort.is_some() && (was_cut_short || !matches!(step, IoStep::Done(_))) {
            return self.finish_aborted(slot);
        }
        self.go_on(slot, step);
    }

    /// Retries everything that waits.
    pub(super) fn resume(&mut self) {
        for _ in 0..self.waiting.len() {
            let is_last = self.commands.under_way() == 1;
            if let Some(slot) = self.waiting.pop_front()
                && let Some(entry) = self.commands.get_mut(slot)
            {
                match &mut entry.work {
                    CommandWork::Io(command) => {
                        let step = command.resume();
                        self.go_on(slot, step);
                    }
                    // Disconnect.
                    CommandWork::Fabrics if is_last => self.finish(slot, NvmeOutcome::success(0)),
                    _ => self.waiting.push_back(slot),
                }
            }
        }
        while let Some(ConnectedQueue::Admin(admin)) = &mut self.queue
            && let Some((slot, outcome)) = admin.poll_waiting(self.timers.now)
        {
            self.finish(slot, outcome);
        }
        if let Some((slot, data)) = self.connecting.take()
            && let Some(entry) = self.commands.get_mut(slot)
        {
            let sqe = entry.sqe;
            self.connect(slot, &sqe, data);
        }
        self.start();
    }

    /// Completes a command.
    #[inline]
    pub(super) fn finish(&mut self, slot: usize, outcome: NvmeOutcome) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        if let Some(half) = entry.half.take() {
            return self.half_finished(slot, &half, outcome);
        }
        if !outcome.status.is_success() {
            return self.finish_failed(slot, outcome);
        }
        let sqhd = next_sqhd(&mut self.sqhd, self.depth);
        self.transport.complete(entry.sqe.cid.get(), entry.transfer, outcome, sqhd);
        let reservation = entry.reservation();
        self.commands.remove(slot);
        if let Some(reservation) = reservation {
            self.audit_reservation(reservation, true);
        }
    }

    #[cold]
    fn finish_failed(&mut self, slot: usize, outcome: NvmeOutcome) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        let (sqe, transfer, reservation) = (entry.sqe, entry.transfer, entry.reservation());
        self.commands.remove(slot);
        if let Some(reservation) = reservation {
            self.audit_reservation(reservation, false);
        }
        self.complete(&sqe, transfer, outcome);
    }

    /// Completes a failed command that is not in the table: adds it to the controller's error log,
    /// if there is a controller, and sends the completion.
    #[cold]
    fn complete(&mut self, sqe: &Sqe, transfer: T::Transfer, outcome: NvmeOutcome) {
        let status = match &self.queue {
            Some(ConnectedQueue::Admin(admin)) => admin.guard.errors.add(0, sqe, outcome.status),
            Some(ConnectedQueue::Io(queue)) => queue.guard.errors.add(queue.guard.qid, sqe, outcome.status),
            Some(ConnectedQueue::Claimed(_)) | None => outcome.status,
        };
        let sqhd = next_sqhd(&mut self.sqhd, self.depth);
        let outcome = NvmeOutcome { status, ..outcome };
        self.transport.complete(sqe.cid.get(), transfer, outcome, sqhd);
    }

    /// Handles the events from other cores.
    #[inline]
    fn read_events(&mut self) {
        let Some(event) = self.events.as_ref().and_then(|events| events.pop()) else { return };
        self.on_event(event);
        while let Some(event) = self.events.as_ref().and_then(|events| events.pop()) {
            self.on_event(event);
        }
        self.send_events();
    }

    #[cold]
    fn on_event(&mut self, event: QueueEvent) {
        match event {
            QueueEvent::Abort(order) => {
                if let Some(slot) = self.commands.find(order.cid) {
                    self.end_early(slot, NvmeStatus::COMMAND_ABORT_REQUESTED, Some(order));
                }
            }
            QueueEvent::Preempted(volume) => self.preempted(volume),
            QueueEvent::NamespaceChanged(_)
            | QueueEvent::NamespaceShown(_)
            | QueueEvent::Reservation { .. }
            | QueueEvent::AnaChanged { .. }
            | QueueEvent::DiscoveryChanged => {
                if let Some(ConnectedQueue::Admin(admin)) = &mut self.queue {
                    admin.on_event(&event);
                }
            }
        }
    }

    /// Completes Asynchronous Event Requests as long as there are events.
    pub(super) fn send_events(&mut self) {
        while let Some(ConnectedQueue::Admin(admin)) = &mut self.queue
            && let Some((slot, result)) = admin.events.next()
        {
            self.finish(slot, NvmeOutcome::success(result.into()));
        }
    }

    /// Whether the queue has to poll for events because it has no notifier.
    fn polls_events(&self) -> bool {
        let is_notified = self.events.as_ref().is_none_or(|events| events.notifies());
        !is_notified
            && matches!(&self.queue, Some(ConnectedQueue::Admin(admin)) if !admin.events.waiting.is_empty())
    }

    /// Whether something waits that no event is certain to wake. Commands that wait for room while
    /// data is in flight need no timer: each turn that frees room retries them.
    fn polls(&self) -> bool {
        let is_alone = self.commands.payload == 0 && self.transport.unsent() == 0;
        self.waits() || is_alone && !self.unstarted.is_empty()
    }

    fn waits(&self) -> bool {
        !self.waiting.is_empty()
            || matches!(&self.queue, Some(ConnectedQueue::Admin(admin)) if admin.waits())
            || self.connecting.is_some()
            || self.waits_for_io_queues()
    }
}

impl<T: FabricsTransport> Timed for ControllerQueue<T> {
    fn poll_timeout(&self) -> Option<Instant> {
        if self.is_over {
            return None;
        }
        let timers = &self.timers;
        let connect = (!self.is_usable()).then_some(timers.connect_by);
        let prove = self.is_authenticating().then_some(timers.message_by);
        let retry = self.polls().then_some(timers.retry.at());
        let keep_alive = timers.keep_alive.as_ref().map(|keep_alive| keep_alive.next_check);
        let poll = self.polls_events().then_some(timers.poll_at);
        [connect, prove, retry, keep_alive, poll].into_iter().flatten().min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        let is_authenticating = self.is_authenticating();
        let timers = &mut self.timers;
        timers.now = now;
        let late = if now >= timers.connect_by && (is_authenticating || self.queue.is_none()) {
            Some(ProtocolError {
                what: "did not connect a queue and authenticate within 30 seconds",
                reference: "NVMe Base 2.0 §3.3.2.2",
            })
        } else if is_authenticating && now >= timers.message_by {
            Some(ProtocolError {
                what: "did not continue its authentication within 15 seconds",
                reference: "NVMe Base 2.0 §8.13.2",
            })
        } else {
            None
        };
        if let Some(late) = late {
            self.is_over = true;
            return Err(late);
        }
        timers.poll_at = now.checked_add(POLL).unwrap_or(now);
        timers.retry.on_try(now);
        self.read_events();
        self.resume();
        // A host that is authenticating cannot send Keep Alive yet; `connect_by` bounds it.
        let is_excused = !self.is_authenticated();
        let checked = match &mut self.timers.keep_alive {
            Some(keep_alive) => keep_alive.check(now, is_excused),
            None => Ok(()),
        };
        self.is_over |= checked.is_err();
        checked
    }
}

impl<T: FabricsTransport> IoSource for ControllerQueue<T> {
    fn depth(&self) -> u32 {
        MAX_COMMANDS as u32
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.io.pop_front()
    }

    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        self.cancels.pop_front()
    }

    #[inline]
    fn on_io(&mut self, done: Completion, now: Instant) {
        self.timers.now = now;
        self.timers.retry.reset(now);
        if let Ok(slot) = usize::try_from(done.tag.0) {
            self.on_result(slot, done.result);
        }
        if self.waits() || !self.unstarted.is_empty() {
            self.resume();
        }
    }

    fn charge(&mut self, io: &Io) -> Charge {
        let entry = usize::try_from(io.tag.0).ok().and_then(|slot| self.commands.get_mut(slot));
        let range = entry.and_then(CommandSlot::atomic_range);
        Charge { cost: range.map_or_else(|| Cost::of(io), |range| range.cost()), station: None }
    }

    #[inline]
    fn begin(&mut self, volume: VolumeId, io: &Io, is_late: bool) -> Result<(), NotAdmitted<IoError>> {
        let slot = usize::try_from(io.tag.0).unwrap_or(usize::MAX);
        let mut admitted = self.admit(slot, volume, io, is_late);
        if let Err(NotAdmitted::Denied(error)) = admitted
            && self.on_denied(slot, volume, error)
        {
            admitted = self.admit(slot, volume, io, is_late);
            if let Err(NotAdmitted::Denied(error)) = admitted {
                self.on_denied(slot, volume, error);
            }
        }
        admitted
    }
}

impl<T: FabricsTransport> TargetLifecycle for ControllerQueue<T> {
    type Source = Self;

    #[inline]
    fn source(&mut self) -> &mut Self {
        self
    }

    fn protocol(&self) -> Option<&'static str> {
        Some(T::NAME)
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.audit.pop()
    }

    fn on_start(&mut self, waker: &Waker, _now: Instant) {
        self.connection.notifier = self.make_notifier.take().map(|make| make(waker));
    }

    #[inline]
    fn on_turn(&mut self, now: Instant) {
        self.timers.now = now;
        self.read_events();
        if self.is_computing {
            self.go_on_authenticating();
        }
        // Data that was sent meanwhile has made room.
        if !self.unstarted.is_empty() {
            self.start();
        }
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        match self.is_usable() {
            true if self.is_open_discovery() => SessionStage::Discovery,
            true => SessionStage::Established,
            false => SessionStage::Handshake,
        }
    }

    fn owed(&self) -> Option<u64> {
        self.commands.owed()
    }

    fn on_stop(&mut self, _now: Instant) {
        (self.stopping, self.outlasts_io_queues) = (true, true);
        self.end_fusing();
    }
}

/// SQHD of the next completion, for a queue of `entries` entries. Before Connect it only counts.
#[inline]
fn next_sqhd(sqhd: &mut Option<u16>, entries: u16) -> Option<u16> {
    let next = sqhd.as_mut()?;
    *next = next.wrapping_add(1);
    if *next >= entries && entries > 1 {
        *next = 0;
    }
    Some(*next)
}

/// Most outstanding commands of one queue: its entries, and those that wait for events.
const MAX_COMMANDS: usize = MQES as usize + 1 + MAX_EVENT_REQUESTS;
/// Most data in flight for one session, in bytes, including data that the transport has not sent
/// yet.
const PAYLOAD_IN_FLIGHT: usize = 64 << 20;
/// Time limit for Connect and authentication.
pub(super) const CONNECT_TIME: Duration = Duration::from_secs(30);
/// Interval at which a queue without a notifier polls its events.
const POLL: Duration = Duration::from_millis(100);
/// The host has more commands outstanding than its queue has entries. The connection ends; no
/// status would report this to the host.
const OVERRUN: ProtocolError = ProtocolError {
    what: "sent more commands than its queue has entries",
    reference: "NVMe Base 2.0, SQ flow control",
};
