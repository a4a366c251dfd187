//! The loop around a member, on the group's thread.

use super::MAX_CLOSING;
use super::client::{ClientOutput, GroupClient};
use super::input::{ClientSender, GroupConnection, GroupInput, Report};
use super::options::{ConnectToCluster, GroupOptions, GroupStatus};
use super::volumes::{Activation, GroupVolumes, VolumeReports};
use blockmux_group::table::VolumeRecord;
use blockmux_group::{Action, Client, CommandId, Event, Incarnation, Member, Notice, Place, Refusal};
use blockmux_rbd::error::RbdError;
use blockmux_rbd::object::PoolObject;
use blockmux_rbd::pool::Pool;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};

pub(super) struct Runner {
    options: GroupOptions,
    connect: ConnectToCluster,
    volumes: Box<dyn GroupVolumes>,
    sender: Sender<GroupInput>,
    started: Instant,
    tick_at: Duration,
    member: Member,
    /// The latest, until its I/O ends.
    client: Option<GroupClient>,
    last_client: u64,
    /// When the next one is connected, unless that is under way.
    connect_at: Option<Duration>,
    /// Earlier clients that are not closed yet.
    closing: Arc<AtomicUsize>,
    answers: BTreeMap<u64, SyncSender<Result<(), Refusal>>>,
    last_command: u64,
    /// The last command was given: it does not connect again.
    is_ending: bool,
    problem: Option<String>,
    /// What is wrong with each volume.
    volume_problems: BTreeMap<String, String>,
    /// Another process with the member's name.
    rival: Option<Client>,
    status: Arc<Mutex<Arc<GroupStatus>>>,
}

impl Runner {
    pub(super) fn new(
        options: GroupOptions,
        connect: ConnectToCluster,
        volumes: Box<dyn GroupVolumes>,
        sender: &Sender<GroupInput>,
        status: &Arc<Mutex<Arc<GroupStatus>>>,
    ) -> Runner {
        let member = Member::new(&options.name, &options.address, options.settings.clone());
        Runner {
            options,
            connect,
            volumes,
            sender: sender.clone(),
            started: Instant::now(),
            tick_at: Duration::ZERO,
            member,
            client: None,
            last_client: 0,
            connect_at: None,
            closing: Arc::default(),
            answers: BTreeMap::new(),
            last_command: 0,
            is_ending: false,
            problem: None,
            volume_problems: BTreeMap::new(),
            rival: None,
            status: status.clone(),
        }
    }

    pub(super) fn run(mut self, inputs: &Receiver<GroupInput>) {
        loop {
            self.settle();
            self.look_for_rival();
            self.publish();
            let input = inputs.recv_timeout(self.tick_at.saturating_sub(self.now()));
            match input {
                Ok(GroupInput::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(input) => self.on_input(input),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = self.now();
            if now >= self.tick_at {
                self.tick(now);
            }
        }
        self.end_io();
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn on_input(&mut self, input: GroupInput) {
        let now = self.now();
        match input {
            GroupInput::Connected(Ok(connection)) => self.on_connected(connection),
            GroupInput::Connected(Err(error)) => {
                self.on_problem(format!("the cluster: {error}"));
                self.connect_later();
            }
            GroupInput::OfClient { client, report } => {
                let current = self.client.as_mut().filter(|current| current.number() == client);
                match current {
                    Some(current) => current.on_report(now, report),
                    None => drop_late(report),
                }
            }
            GroupInput::Command { command, answer, is_last } => {
                self.is_ending |= is_last;
                self.last_command = self.last_command.saturating_add(1);
                self.answers.insert(self.last_command, answer);
                self.tell(Event::Command { id: CommandId(self.last_command), command });
            }
            GroupInput::Stop => {}
        }
    }

    fn tick(&mut self, now: Duration) {
        // Four for each beat, where the member needs two.
        self.tick_at = now.saturating_add((self.options.settings.beat_every / 4).max(MIN_TICK));
        if let Some(client) = &mut self.client {
            client.on_tick(now);
        }
        if self.connect_at.is_some_and(|at| at <= now) {
            self.connect();
        }
        self.tell(Event::Tick);
    }

    fn tell(&mut self, event: Event) {
        self.member.handle(self.now(), event);
    }

    /// Does what the member wants, and tells it what follows, until there is nothing left.
    fn settle(&mut self) {
        loop {
            if let Some(action) = self.member.poll() {
                self.perform(action);
            } else if let Some(output) = self.client.as_mut().and_then(GroupClient::poll) {
                self.on_output(output);
            } else {
                return;
            }
        }
    }

    fn on_output(&mut self, output: ClientOutput) {
        match output {
            ClientOutput::Event(event) => self.tell(event),
            ClientOutput::Activate(activation) => self.volumes.activate(activation),
            ClientOutput::Problem(problem) => self.on_problem(problem),
            ClientOutput::OfVolume { volume, problem } => self.on_volume(volume, problem),
            ClientOutput::Well => self.problem = None,
        }
    }

    fn perform(&mut self, action: Action) {
        let now = self.now();
        match action {
            Action::Connect => return self.connect(),
            Action::EndIo => return self.end_io(),
            Action::Answer { id, result } => {
                if let Some(answer) = self.answers.remove(&id.0) {
                    // Nobody may wait for it any longer; there is room for one.
                    let _ = answer.try_send(result);
                }
                return;
            }
            _ => {}
        }
        let Some(client) = &mut self.client else { return };
        match action {
            Action::Watch => client.watch(),
            Action::Read { request } => client.read(now, request),
            Action::Propose { request, table } => client.propose(now, request, table),
            Action::Beat(beat) => client.notify(Notice::Beat(beat)),
            Action::Fence { clients } => {
                warn!("group: fencing {clients:?}");
                client.fence(now, clients);
            }
            Action::FenceAgain { clients } => client.fence_again(clients),
            Action::Activate { volume, epoch } => {
                let record = self.member.table().and_then(|table| table.volume(&volume));
                match record.map(|record| record.image.clone()) {
                    Some(image) => client.activate(now, Activation { volume, image, epoch }),
                    None => self.tell(Event::ActivationNotBegun { volume, epoch }),
                }
            }
            Action::Deactivate { volume, epoch } => self.volumes.deactivate(&volume, epoch),
            Action::Connect | Action::EndIo | Action::Answer { .. } => {}
        }
    }

    fn connect(&mut self) {
        self.connect_at = None;
        if self.is_ending {
            return;
        }
        if self.closing.load(Ordering::SeqCst) >= MAX_CLOSING {
            self.on_problem("earlier connections to the cluster do not close".to_owned());
            return self.connect_later();
        }
        let (connect, options, sender) = (self.connect.clone(), self.options.clone(), self.sender.clone());
        let run = move || {
            // If nobody receives it, it is closed here.
            let _ = sender.send(GroupInput::Connected(connection(&connect, &options)));
        };
        if let Err(error) = thread::Builder::new().name("group connect".to_owned()).spawn(run) {
            self.on_problem(format!("no thread: {error}"));
            self.connect_later();
        }
    }

    fn connect_later(&mut self) {
        self.connect_at = Some(self.now().saturating_add(self.options.settings.retry_every));
    }

    fn on_connected(&mut self, connection: GroupConnection) {
        self.last_client = self.last_client.saturating_add(1);
        let sender = ClientSender::new(self.last_client, &self.sender);
        match GroupClient::new(connection, sender) {
            Ok(client) => {
                info!("group: connected as {}", client.address());
                self.volumes.begin(client.cluster(), VolumeReports::new(client.sender()));
                let address = client.address().clone();
                self.client = Some(client);
                self.tell(Event::Connected { client: address });
            }
            Err(error) => {
                self.on_problem(format!("no thread: {error}"));
                self.connect_later();
            }
        }
    }

    /// No volume admits I/O from now on; all of the client is given up.
    fn end_io(&mut self) {
        if let Some(client) = self.client.take() {
            match self.is_ending {
                true => info!("group: ending as {}", client.address()),
                false => warn!("group: ending all I/O of {}", client.address()),
            }
            self.volumes.end_io();
            client.close(&self.closing);
        }
    }

    fn on_problem(&mut self, problem: String) {
        if self.problem.as_ref() != Some(&problem) {
            warn!("group: {problem}");
            self.problem = Some(problem);
        }
    }

    /// Each volume has a problem of its own, so that several of them do not flood the log.
    fn on_volume(&mut self, volume: String, problem: Option<String>) {
        let known = match problem.clone() {
            Some(problem) => self.volume_problems.insert(volume, problem),
            None => self.volume_problems.remove(&volume),
        };
        if let Some(problem) = problem.filter(|problem| known.as_ref() != Some(problem)) {
            warn!("group: {problem}");
        }
    }

    fn look_for_rival(&mut self) {
        let rival = self.member.rival();
        if self.rival.as_ref() != rival {
            self.rival = rival.cloned();
            if let Some(problem) = self.rival_problem() {
                warn!("group: {problem}");
            }
        }
    }

    fn rival_problem(&self) -> Option<String> {
        let (client, name) = (self.rival.as_ref()?, &self.options.name);
        Some(format!(
            "another process is member '{name}', as {client}; this one waits before it ends it; give each \
             gateway a name of its own"
        ))
    }

    /// What is wrong now. A volume's problem ends when another member serves it.
    fn find_problem(&mut self) -> Option<String> {
        if let Some(table) = self.member.table() {
            let is_served = |volume: &VolumeRecord| matches!(volume.place, Place::Active(_));
            self.volume_problems
                .retain(|name, _| table.volume(name).is_some_and(|volume| !is_served(volume)));
        }
        let of_volumes = self.volume_problems.values().take(MAX_TOLD).cloned();
        let all: Vec<String> =
            self.problem.iter().cloned().chain(self.rival_problem()).chain(of_volumes).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Publishes what is known, if that has changed.
    fn publish(&mut self) {
        let problem = self.find_problem();
        let last = self.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let suspected = self.suspected();
        let (incarnation, client) =
            (self.member.incarnation(), self.client.as_ref().map(GroupClient::address));
        let generation = |table: Option<&blockmux_group::Table>| table.map(blockmux_group::Table::generation);
        let is_same = generation(last.table.as_ref()) == generation(self.member.table())
            && (last.incarnation, last.client.as_ref()) == (incarnation, client)
            && last.suspected == suspected
            && last.problem == problem;
        if is_same {
            return;
        }
        let table = self.member.table().cloned();
        let client = client.cloned();
        let status = Arc::new(GroupStatus { table, incarnation, client, suspected, problem });
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    fn suspected(&self) -> Vec<Incarnation> {
        let up = self.member.table().map(blockmux_group::Table::seniority).unwrap_or_default();
        up.into_iter().filter(|member| self.member.suspects(*member)).collect()
    }
}

/// A new client, and the group's object. May block.
fn connection(connect: &ConnectToCluster, options: &GroupOptions) -> Result<GroupConnection, RbdError> {
    let cluster = Arc::new(connect()?);
    let address = Client(cluster.client_address()?);
    let pool = Pool::open(&cluster, &options.pool, options.namespace.as_deref())?;
    let object = Arc::new(PoolObject::new(pool, &options.object)?);
    Ok(GroupConnection { cluster, address, object })
}

/// Drops what a client has reported that was given up.
fn drop_late(report: Report) {
    if let Report::Watching(watch) = report {
        // Ending it may block. Without a thread, that is done here.
        let _ = thread::Builder::new().name("group close".to_owned()).spawn(move || drop(watch));
    }
}

/// Shortest time between ticks.
const MIN_TICK: Duration = Duration::from_millis(5);
/// Maximum number of volumes whose problems are told at once.
const MAX_TOLD: usize = 8;
