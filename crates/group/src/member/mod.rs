//! One member of a group: events in, actions out.
//!
//! ```text
//!   Connect ──▶ a client ──▶ read the table, join ──▶ up: beat, read, propose, serve ──┐
//!      ▲                                                                               │
//!      └── EndIo ◀── fenced, ended by the table, or deaf to itself ◀───────────────────┘
//! ```
//! A member does not follow a plan over several steps. It looks at the newest table that it knows
//! and at itself, does what follows ([`Action::Activate`], [`Action::Deactivate`],
//! [`Action::Fence`]), and proposes the table that follows. If somebody else was faster, or nobody
//! says whether the proposal was accepted, it reads the table and looks again. So no answer has to
//! arrive, and no action has to be remembered, for the group to go on.

mod hearing;
mod local;
mod plan;

pub use hearing::Beat;

use crate::table::{Client, Command, Epoch, Generation, Incarnation, MAX_TO_FENCE, Place, Refusal, Table};
use hearing::Hearing;
use local::{LocalEnd, LocalVolumes};
use plan::Planner;
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// How often things are done, and how long members wait. All members have the same settings, but
/// nothing is unsafe if they do not.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Time between beats.
    pub beat_every: Duration,
    /// Time after which the table is read without a reason.
    pub read_every: Duration,
    /// Number of own beats after which a silent member is suspected.
    pub suspect_after: u32,
    /// Time after which a member that does not hear its own beats ends all I/O.
    pub isolated_after: Duration,
    /// Number of beats for which a member without volumes is heard before it is given some.
    pub stable_after: u32,
    /// Number of beats after which a failure is forgotten.
    pub forgive_after: u32,
    /// Time between moves that no operator has asked for.
    pub move_every: Duration,
    /// Time after which what has failed is tried again; longer for a volume that fails again.
    pub retry_every: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            beat_every: Duration::from_millis(200),
            read_every: Duration::from_secs(2),
            suspect_after: 5,
            isolated_after: Duration::from_secs(5),
            stable_after: 50,
            forgive_after: 3000,
            move_every: Duration::from_secs(2),
            retry_every: Duration::from_millis(500),
        }
    }
}

/// Number of a question about the table. Its answer has it, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId(pub u64);

/// The caller's number of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandId(pub u64);

/// What a member is told.
#[derive(Clone, Debug)]
pub enum Event {
    /// Time has passed; at least every half [`Settings::beat_every`].
    Tick,
    /// [`Action::Connect`] is done, with a client that nobody has had.
    Connected {
        /// The client.
        client: Client,
    },
    /// [`Action::Watch`] is done.
    Watching,
    /// Notifications may have been lost.
    WatchLost,
    /// Somebody has replaced the table.
    Changed {
        /// Number of the new one.
        generation: Generation,
    },
    /// A beat was received, also one's own.
    Beat(Beat),
    /// [`Action::Read`] is done; `None` if there is no object.
    TableRead {
        /// The question.
        request: RequestId,
        /// The table.
        table: Option<Table>,
    },
    /// [`Action::Read`] has failed.
    ReadFailed {
        /// The question.
        request: RequestId,
    },
    /// [`Action::Propose`] is done.
    Proposed {
        /// The question.
        request: RequestId,
        /// What has become of it.
        outcome: Outcome,
    },
    /// [`Action::Fence`] is done.
    ClientsFenced {
        /// These are refused by the whole cluster.
        clients: Vec<Client>,
    },
    /// [`Action::Fence`] has failed.
    FenceFailed {
        /// These may not be refused.
        clients: Vec<Client>,
    },
    /// [`Action::Activate`] is done.
    Activated {
        /// The volume.
        volume: String,
        /// Its epoch.
        epoch: Epoch,
    },
    /// [`Action::Activate`] has failed: the volume is not active, and this client does not hold its
    /// lock.
    ActivationFailed {
        /// The volume.
        volume: String,
        /// Its epoch.
        epoch: Epoch,
    },
    /// [`Action::Activate`] could not begin, for a reason that is not the volume's.
    ActivationNotBegun {
        /// The volume.
        volume: String,
        /// Its epoch.
        epoch: Epoch,
    },
    /// [`Action::Deactivate`] is done.
    Deactivated {
        /// The volume.
        volume: String,
        /// Its epoch.
        epoch: Epoch,
    },
    /// An active volume is active no longer, for instance because an administrator broke its lock.
    /// This client does not hold the lock, and all I/O is complete or will be refused.
    Lost {
        /// The volume.
        volume: String,
        /// Its epoch.
        epoch: Epoch,
    },
    /// The cluster refuses this process's client.
    OwnClientFenced,
    /// An operator wants something. [`Action::Answer`] follows.
    Command {
        /// The caller's number.
        id: CommandId,
        /// What.
        command: Command,
    },
}

/// What has become of a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The table was replaced.
    Committed,
    /// The table has another generation, and was not replaced.
    Stale,
    /// It was replaced, or was not, or will be.
    Unknown,
}

/// What a member wants done. Each is done or has failed some time later, and an event says so; none
/// of them waits for another one. All are done by the client of the latest [`Event::Connected`],
/// and what that client has not done yet is cancelled by [`Action::EndIo`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make a new connection to the cluster, which is a new client. It is tried until it succeeds.
    Connect,
    /// Watch the table's object, also if it does not exist yet, and instead of an earlier watch.
    Watch,
    /// Read the table.
    Read {
        /// For the answer.
        request: RequestId,
    },
    /// Replace the table if it has the generation before that of this one, and notify all
    /// watchers. If that one is 0, create the object.
    Propose {
        /// For the answer.
        request: RequestId,
        /// The table.
        table: Table,
    },
    /// Send a beat to all watchers, this process included. No answer is expected.
    Beat(Beat),
    /// Have the cluster refuse what these clients send, for ever.
    Fence {
        /// The clients.
        clients: Vec<Client>,
    },
    /// Have the cluster refuse them for ever once more, because breaking a lock of one that is
    /// fenced may have shortened its fence. No event is expected.
    FenceAgain {
        /// The clients.
        clients: Vec<Client>,
    },
    /// Wait until this connection has the newest map of the cluster, acquire the lock of the
    /// volume's image, read its reservations, and begin to admit I/O, only of sessions that begin
    /// in this epoch. A lock whose holder the cluster refuses is broken; if another client has it,
    /// this fails.
    Activate {
        /// The volume.
        volume: String,
        /// Of what is admitted.
        epoch: Epoch,
    },
    /// Admit no I/O to the volume; when all that was admitted is complete, release the lock.
    Deactivate {
        /// The volume.
        volume: String,
        /// Of [`Action::Activate`].
        epoch: Epoch,
    },
    /// Admit no I/O to any volume from now on; what is in flight may fail. Then close what this
    /// client has opened. No event is expected.
    EndIo,
    /// A command is done or refused.
    Answer {
        /// The caller's number.
        id: CommandId,
        /// Whether the table was changed.
        result: Result<(), Refusal>,
    },
}

/// A member of a group.
pub struct Member {
    name: String,
    address: String,
    settings: Settings,
    now: Duration,
    client: Option<Client>,
    /// While the client is a member.
    incarnation: Option<Incarnation>,
    /// Failures of the member when it joined.
    strikes: u8,
    /// The newest that is known.
    table: Option<Table>,
    quiet_since: Duration,
    volumes: LocalVolumes,
    hearing: Hearing,
    beats: u64,
    beat_at: Duration,
    /// When it has heard itself.
    heard_at: Duration,
    /// Own beats since then.
    unheard: u32,
    fencing: BTreeSet<Client>,
    fenced: BTreeSet<Client>,
    fence_at: Duration,
    /// Clients that were to be fenced, and when they were seen last.
    fenced_lately: VecDeque<(Client, Duration)>,
    fence_again_at: Option<Duration>,
    /// The latest clients of this process.
    own_clients: VecDeque<Client>,
    /// Another process with this name, which is up.
    rival: Option<Rival>,
    /// How often it has joined in the place of one.
    ousted: u32,
    joined_at: Duration,
    wants_read: bool,
    read_at: Duration,
    /// Nothing is asked before this time.
    request_at: Duration,
    request: Option<Request>,
    last_request: u64,
    commands: VecDeque<WaitingCommand>,
    actions: VecDeque<Action>,
}

/// Another process with a member's name.
struct Rival {
    client: Client,
    /// When the member joins in its place.
    until: Duration,
}

/// A command that is not in the table yet.
struct WaitingCommand {
    id: CommandId,
    command: Command,
    until: Duration,
}

/// A question about the table that has no answer yet.
enum Request {
    Read(RequestId),
    Propose { id: RequestId, table: Table, commands: Vec<CommandId> },
}

impl Member {
    /// A member that has just started. Its name is its own in the group: another process with this
    /// name is taken for an earlier start.
    #[must_use]
    pub fn new(name: &str, address: &str, settings: Settings) -> Member {
        Member {
            name: name.to_owned(),
            address: address.to_owned(),
            settings,
            now: Duration::ZERO,
            client: None,
            incarnation: None,
            strikes: 0,
            table: None,
            quiet_since: Duration::ZERO,
            volumes: LocalVolumes::default(),
            hearing: Hearing::default(),
            beats: 0,
            beat_at: Duration::ZERO,
            heard_at: Duration::ZERO,
            unheard: 0,
            fencing: BTreeSet::new(),
            fenced: BTreeSet::new(),
            fence_at: Duration::ZERO,
            fenced_lately: VecDeque::new(),
            fence_again_at: None,
            own_clients: VecDeque::new(),
            rival: None,
            ousted: 0,
            joined_at: Duration::ZERO,
            wants_read: false,
            read_at: Duration::ZERO,
            request_at: Duration::ZERO,
            request: None,
            last_request: 0,
            commands: VecDeque::new(),
            actions: VecDeque::from([Action::Connect]),
        }
    }

    /// The newest table that is known. Another one may be in force.
    #[must_use]
    pub fn table(&self) -> Option<&Table> {
        self.table.as_ref()
    }

    /// Its incarnation, if it belongs to the group.
    #[must_use]
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.incarnation
    }

    /// Whether another member seems to be dead. One without volumes stays up in the table.
    #[must_use]
    pub fn suspects(&self, member: Incarnation) -> bool {
        self.hearing.silence(member) >= self.settings.suspect_after
    }

    /// The client of another process with this name that is up. This one joins in its place, but
    /// waits before that, because the other one may do the same.
    #[must_use]
    pub fn rival(&self) -> Option<&Client> {
        self.rival.as_ref().filter(|rival| self.now < rival.until).map(|rival| &rival.client)
    }

    /// The next action to begin. Asked after every event until there is none.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Something has happened. `now` is the time on a clock that never goes back.
    pub fn handle(&mut self, now: Duration, event: Event) {
        self.now = self.now.max(now);
        match event {
            Event::Tick => {}
            Event::Connected { client } => self.on_connected(client),
            Event::Watching => self.wants_read = true,
            Event::WatchLost => self.actions.push_back(Action::Watch),
            Event::Changed { generation } => self.wants_read |= generation > self.generation(),
            Event::Beat(beat) => self.on_beat(beat),
            Event::TableRead { request, table } => self.on_read(request, table),
            Event::ReadFailed { request } => self.on_read_failed(request),
            Event::Proposed { request, outcome } => self.on_proposed(request, outcome),
            Event::ClientsFenced { clients } => self.on_fenced(clients),
            Event::FenceFailed { clients } => {
                self.fencing.retain(|client| !clients.contains(client));
                self.fence_at = self.retry_at();
            }
            Event::Activated { volume, epoch } => {
                self.volumes.on_end(&volume, epoch, LocalEnd::Activated);
                if !self.fenced_lately.is_empty() {
                    self.fence_again_at.get_or_insert(after(self.now, FENCE_AGAIN_AFTER));
                }
            }
            Event::Deactivated { volume, epoch } => {
                self.volumes.on_end(&volume, epoch, LocalEnd::Deactivated);
            }
            Event::ActivationFailed { volume, epoch } | Event::Lost { volume, epoch } => {
                let (now, retry) = (self.now, self.settings.retry_every);
                self.volumes.on_end(&volume, epoch, LocalEnd::Failed { now, retry });
            }
            Event::ActivationNotBegun { volume, epoch } => {
                self.volumes.on_end(&volume, epoch, LocalEnd::NotBegun(self.retry_at()));
            }
            Event::OwnClientFenced => self.end(),
            Event::Command { id, command } => self.on_command(id, command),
        }
        self.advance();
    }

    fn on_connected(&mut self, client: Client) {
        if self.own_clients.len() >= MAX_OWN_CLIENTS {
            self.own_clients.pop_front();
        }
        self.own_clients.push_back(client.clone());
        self.client = Some(client);
        self.wants_read = true;
        self.request_at = self.now;
        self.fence_at = self.now;
        self.actions.push_back(Action::Watch);
    }

    fn on_beat(&mut self, beat: Beat) {
        self.wants_read |= beat.generation > self.generation();
        if let Some(own) = self.incarnation
            && self.hearing.on_beat(beat, own, self.settings.suspect_after)
        {
            self.heard_at = self.now;
            self.unheard = 0;
        }
    }

    fn on_read(&mut self, request: RequestId, table: Option<Table>) {
        if !matches!(self.request, Some(Request::Read(id)) if id == request) {
            return;
        }
        self.request = None;
        self.read_at = after(self.now, self.settings.read_every);
        let table = table.unwrap_or_default();
        if table.generation() < self.generation() {
            // Somebody has removed the object, or restored an older one: nothing is proposed on it.
            self.request_at = self.retry_at();
        }
        self.adopt(table);
    }

    fn on_read_failed(&mut self, request: RequestId) {
        if matches!(self.request, Some(Request::Read(id)) if id == request) {
            self.request = None;
            self.wants_read = true;
            self.request_at = self.retry_at();
        }
    }

    fn on_proposed(&mut self, request: RequestId, outcome: Outcome) {
        match self.request.take() {
            Some(Request::Propose { id, table, commands }) if id == request => match outcome {
                Outcome::Committed => {
                    for id in commands {
                        self.answer(id, Ok(()));
                    }
                    self.adopt(table);
                }
                Outcome::Stale => self.wants_read = true,
                Outcome::Unknown => {
                    self.wants_read = true;
                    self.request_at = self.retry_at();
                }
            },
            other => self.request = other,
        }
    }

    fn on_fenced(&mut self, clients: Vec<Client>) {
        for client in clients {
            // Otherwise another connection has asked for it.
            if self.fencing.remove(&client) {
                self.fenced.insert(client);
            }
        }
    }

    fn on_command(&mut self, id: CommandId, command: Command) {
        if let Command::Pin { volume, .. } | Command::Unpin { volume } = &command {
            self.volumes.retry(volume);
        }
        if self.incarnation.is_none() {
            self.answer(id, Err(Refusal::NotMember));
        } else if self.commands.len() >= MAX_COMMANDS {
            self.answer(id, Err(Refusal::Full { what: "waiting commands", limit: MAX_COMMANDS }));
        } else {
            let until = after(self.now, COMMAND_TIMEOUT);
            self.commands.push_back(WaitingCommand { id, command, until });
        }
    }

    fn answer(&mut self, id: CommandId, result: Result<(), Refusal>) {
        self.commands.retain(|waiting| waiting.id != id);
        self.actions.push_back(Action::Answer { id, result });
    }

    /// Goes on with a table, unless it is older than the one that is known.
    fn adopt(&mut self, table: Table) {
        if self.table.as_ref().is_some_and(|known| known.generation() >= table.generation()) {
            return;
        }
        let places = |table: &Table| -> Vec<(Epoch, Place)> {
            table.volumes().iter().map(|volume| (volume.epoch, volume.place)).collect()
        };
        if self.table.as_ref().map(places) != Some(places(&table)) {
            self.quiet_since = self.now;
        }
        self.hearing.follow(&table);
        self.fenced.retain(|client| table.to_fence().contains(client));
        for client in table.to_fence() {
            self.fenced_lately.retain(|(known, _)| known != client);
            if self.fenced_lately.len() >= MAX_TO_FENCE {
                self.fenced_lately.pop_front();
            }
            self.fenced_lately.push_back((client.clone(), self.now));
        }
        self.table = Some(table);
        self.find_itself();
    }

    /// Looks whether the table has this client as a member.
    fn find_itself(&mut self) {
        let record = self.table.as_ref().and_then(|table| table.member(&self.name));
        match record.filter(|record| self.client.as_ref() == Some(&record.client)) {
            Some(record) if record.is_up && self.incarnation.is_none() => {
                self.incarnation = Some(record.incarnation);
                self.strikes = record.strikes;
                self.ousted = self.ousted.saturating_add(u32::from(self.rival.take().is_some()));
                self.joined_at = self.now;
                self.beat_at = self.now;
                self.heard_at = self.now;
                self.unheard = 0;
            }
            Some(record) if record.is_up => {}
            Some(_) => self.end(),
            None if self.incarnation.is_some() => self.end(),
            None => {}
        }
    }

    /// This incarnation is over: another one begins with another client.
    fn end(&mut self) {
        if self.client.take().is_none() {
            return;
        }
        if self.incarnation.is_some() && self.now >= after(self.joined_at, RIVAL_LIMIT.saturating_mul(2)) {
            self.ousted = 0;
        }
        self.incarnation = None;
        self.volumes.clear();
        self.fencing.clear();
        self.fenced.clear();
        self.request = None;
        self.actions.retain(|action| matches!(action, Action::Answer { .. }));
        self.actions.extend([Action::EndIo, Action::Connect]);
    }

    /// Does what follows from the table, the time, and what this process has.
    fn advance(&mut self) {
        let isolated_at = after(self.heard_at, self.settings.isolated_after);
        if self.incarnation.is_some() && self.now >= isolated_at {
            self.end();
        }
        let late = |command: &&WaitingCommand| command.until <= self.now;
        for id in self.commands.iter().filter(late).map(|command| command.id).collect::<Vec<_>>() {
            self.answer(id, Err(Refusal::Unconfirmed));
        }
        if self.client.is_none() {
            return;
        }
        self.beat();
        self.fence();
        self.fence_again();
        self.follow_table();
        if self.request.is_none() && self.now >= self.request_at {
            self.ask();
        }
    }

    fn beat(&mut self) {
        let Some(incarnation) = self.incarnation.filter(|_| self.now >= self.beat_at) else { return };
        // A watch may end without a word. Who does not hear the others cannot decide about them.
        self.unheard = self.unheard.saturating_add(1);
        if self.unheard > self.settings.suspect_after {
            self.unheard = 0;
            self.actions.push_back(Action::Watch);
        }
        self.beats = self.beats.saturating_add(1);
        self.beat_at = after(self.now, self.settings.beat_every);
        let beat = Beat { incarnation, count: self.beats, generation: self.generation() };
        self.actions.push_back(Action::Beat(beat));
    }

    /// Fences whom the table says, as every member does.
    fn fence(&mut self) {
        let Some(table) = self.table.as_ref().filter(|_| self.now >= self.fence_at) else { return };
        let is_new = |client: &&Client| !self.fenced.contains(*client) && !self.fencing.contains(*client);
        let clients: Vec<Client> = table.to_fence().iter().filter(is_new).cloned().collect();
        if !clients.is_empty() {
            self.fencing.extend(clients.iter().cloned());
            self.actions.push_back(Action::Fence { clients });
        }
    }

    /// Some time after a volume has become active, fences once more who was to be fenced lately.
    fn fence_again(&mut self) {
        let now = self.now;
        if self.fence_again_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        self.fenced_lately.retain(|(_, seen_at)| now < after(*seen_at, FENCED_LATELY));
        let clients: Vec<Client> = self.fenced_lately.iter().map(|(client, _)| client.clone()).collect();
        if !clients.is_empty() {
            self.actions.push_back(Action::FenceAgain { clients });
        }
    }

    fn follow_table(&mut self) {
        let (Some(table), Some(own)) = (&self.table, self.incarnation) else { return };
        let may_start = table.to_fence().iter().all(|client| self.fenced.contains(client));
        let steps = self.volumes.steps(table, own, may_start, self.now);
        self.actions.extend(steps);
    }

    /// Reads the table if it may have changed, or else proposes what should change.
    fn ask(&mut self) {
        if self.wants_read || self.table.is_none() || self.now >= self.read_at {
            self.wants_read = false;
            let request = self.next_request();
            self.request = Some(Request::Read(request));
            self.actions.push_back(Action::Read { request });
        } else if let Some((table, commands)) = self.draft() {
            let request = self.next_request();
            self.request = Some(Request::Propose { id: request, table: table.clone(), commands });
            self.actions.push_back(Action::Propose { request, table });
        }
    }

    /// The next table, if it differs from the one that is known, with the commands in it.
    fn draft(&mut self) -> Option<(Table, Vec<CommandId>)> {
        let may_join = self.incarnation.is_some() || self.may_join();
        let known = self.table.as_ref()?;
        let mut next = known.clone();
        next.fenced(|client| self.fenced.contains(client));
        let mut done = Vec::new();
        if let Some(own) = self.incarnation {
            self.volumes.report(known, own, &mut next);
            self.forgive(own, &mut next);
            for WaitingCommand { id, command, .. } in &self.commands {
                done.push((*id, next.apply(command)));
            }
            let quiet = self.now.saturating_sub(self.quiet_since);
            Planner { own, hearing: &self.hearing, settings: &self.settings, quiet }.decide(&mut next);
        } else if let Some(client) = self.client.as_ref().filter(|_| may_join) {
            // If it cannot join now, it tries again when the table has changed.
            let _ = next.join(&self.name, &self.address, client);
        }
        let is_changed = next != *known;
        let mut commands = Vec::new();
        for (id, result) in done {
            match result {
                Ok(()) if is_changed => commands.push(id),
                result => self.answer(id, result),
            }
        }
        next.advance();
        is_changed.then_some((next, commands))
    }

    /// Whether it joins now. If another process with this name is up, joining ends that one, which
    /// may be an honest one from before a restart, or do the same: so each time takes longer.
    fn may_join(&mut self) -> bool {
        let record = self.table.as_ref().and_then(|table| table.member(&self.name));
        let other = record.filter(|record| record.is_up && !self.own_clients.contains(&record.client));
        let Some(client) = other.map(|record| record.client.clone()) else {
            self.rival = None;
            return true;
        };
        let wait = match self.ousted.checked_sub(1) {
            Some(times) => doubled(RIVAL_FIRST, times, RIVAL_LIMIT),
            None => Duration::ZERO,
        };
        let until = self.rival.as_ref().map_or(after(self.now, wait), |rival| rival.until);
        self.rival = Some(Rival { client, until });
        until <= self.now
    }

    /// Forgets one of the failures before it joined for each time that it was up for long enough.
    fn forgive(&self, own: Incarnation, next: &mut Table) {
        let forgiven = self.hearing.steady(own).checked_div(self.settings.forgive_after).unwrap_or(0);
        let left = self.strikes.saturating_sub(u8::try_from(forgiven).unwrap_or(u8::MAX));
        if next.up(own).is_some_and(|member| member.strikes > left) {
            next.forgive(&self.name);
        }
    }

    fn next_request(&mut self) -> RequestId {
        self.last_request = self.last_request.saturating_add(1);
        RequestId(self.last_request)
    }

    fn generation(&self) -> Generation {
        self.table.as_ref().map(Table::generation).unwrap_or_default()
    }

    fn retry_at(&self) -> Duration {
        after(self.now, self.settings.retry_every)
    }
}

fn after(time: Duration, wait: Duration) -> Duration {
    time.saturating_add(wait)
}

/// A time, doubled as often, with a limit.
fn doubled(first: Duration, times: u32, limit: Duration) -> Duration {
    first.saturating_mul(1_u32.checked_shl(times).unwrap_or(u32::MAX)).min(limit)
}

/// Time after which a command that was not committed is forgotten, so that it is not done later.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of commands that wait for their commit.
const MAX_COMMANDS: usize = 16;
/// Number of own clients that are known again in a table.
const MAX_OWN_CLIENTS: usize = 16;
/// How long a member waits before it joins in the place of another process for the second time.
const RIVAL_FIRST: Duration = Duration::from_secs(5);
/// Maximum time that it waits. After twice that time in the group, it begins anew.
const RIVAL_LIMIT: Duration = Duration::from_secs(300);
/// Time after an activation in which others follow, before clients are fenced again.
const FENCE_AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Time for which an activation may break a lock of a client that was to be fenced.
const FENCED_LATELY: Duration = Duration::from_secs(300);
