//! A gateway: a member, and what does its actions, as an engine would.

use super::Variant;
use super::cluster::{Answer, Packet, Request};
use super::initiator::{Reply, ReplyKind};
use super::net::{Happening, Net};
use super::world::{name, settings};
use blockmux_group::{
    Action, Beat, Client, Command, CommandId, Epoch, Event, Generation, Incarnation, Member, Outcome,
    Refusal, RequestId, Table,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// What a process gets.
#[derive(Clone, Debug)]
pub(crate) enum Input {
    Tick,
    Changed(Generation),
    Beat(Beat),
    WatchLost,
    /// For a client that the process had when it asked.
    Answer {
        client: Client,
        answer: Answer,
    },
    /// It gets to an action, some time after the member has wanted it.
    Do {
        client: Option<Client>,
        action: Action,
    },
    Timeout(RequestId),
    FromInitiator {
        initiator: usize,
        session: u64,
        request: FrontRequest,
    },
    Command(CommandId, Command),
}

/// What an initiator asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FrontRequest {
    Login { volume: usize },
    Write { volume: usize, block: usize, value: u64 },
    Read { volume: usize, block: usize },
}

pub(crate) struct Gateway {
    number: usize,
    /// 0 while it does not run.
    pub(crate) process: u64,
    pub(crate) is_stopped: bool,
    inbox: VecDeque<Input>,
    member: Member,
    client: Option<Client>,
    map: u64,
    volumes: BTreeMap<usize, Serving>,
    /// Volumes whose activation was given up before the cluster had answered.
    late: BTreeSet<usize>,
    sessions: BTreeMap<usize, Session>,
    /// Percentage of real time, and the time at which its clock began.
    clock: (u64, u64),
    variant: Variant,
    /// What operators were told.
    pub(crate) answers: Vec<(CommandId, Result<(), Refusal>)>,
    pub(crate) violation: Option<String>,
}

/// A volume that has this process.
struct Serving {
    epoch: Epoch,
    phase: Phase,
    in_flight: u32,
    reservations: u64,
    is_storing: bool,
    is_lost: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Activating,
    Active,
    Closing,
    Unlocking,
}

/// The latest session of an initiator.
struct Session {
    number: u64,
    volume: usize,
    /// Epoch of the volume when it began, if it was active.
    epoch: Option<Epoch>,
    /// Requests of all of its sessions that the cluster has.
    in_flight: u32,
    is_beginning: bool,
}

impl Gateway {
    pub(crate) fn new(number: usize, variant: Variant) -> Gateway {
        Gateway {
            number,
            process: 0,
            is_stopped: false,
            inbox: VecDeque::new(),
            member: Member::new(name(number), "address", settings()),
            client: None,
            map: 0,
            volumes: BTreeMap::new(),
            late: BTreeSet::new(),
            sessions: BTreeMap::new(),
            clock: (100, 0),
            variant,
            answers: Vec::new(),
            violation: None,
        }
    }

    pub(crate) fn start(&mut self, net: &mut Net, process: u64) {
        *self = Gateway::new(self.number, self.variant);
        self.process = process;
        self.clock = (80 + net.random.below(45), net.random.below(1_000_000));
        net.note(|| format!("{}: starts", name(self.number)));
        self.handle(net, Input::Tick);
    }

    pub(crate) fn crash(&mut self, net: &mut Net) {
        net.note(|| format!("{}: crashes", name(self.number)));
        (self.process, self.is_stopped) = (0, false);
        self.inbox.clear();
    }

    /// It goes on where it was stopped.
    pub(crate) fn go_on(&mut self, net: &mut Net) {
        self.is_stopped = false;
        while let Some(input) = self.inbox.pop_front() {
            self.handle(net, input);
        }
    }

    pub(crate) fn incarnation(&self) -> Option<Incarnation> {
        self.member.incarnation().filter(|_| self.process > 0)
    }

    /// Whether it serves the volume in this epoch.
    pub(crate) fn serves(&self, volume: usize, epoch: Epoch) -> bool {
        self.volumes
            .get(&volume)
            .is_some_and(|serving| serving.epoch == epoch && serving.phase == Phase::Active)
    }

    pub(crate) fn receive(&mut self, net: &mut Net, input: Input) {
        if self.is_stopped {
            self.inbox.push_back(input);
        } else {
            self.handle(net, input);
        }
    }

    fn handle(&mut self, net: &mut Net, input: Input) {
        match input {
            Input::Tick => self.tick(net),
            Input::Changed(generation) => self.tell(net, Event::Changed { generation }),
            Input::Beat(beat) => self.tell(net, Event::Beat(beat)),
            Input::WatchLost => self.tell(net, Event::WatchLost),
            Input::Answer { client, answer } => {
                let is_new = self.client.is_none() && matches!(answer, Answer::Connected { .. });
                if is_new || self.client == Some(client) {
                    self.on_answer(net, answer);
                }
            }
            Input::Do { client, action } if client == self.client => self.perform(net, action),
            Input::Do { .. } => {}
            Input::Timeout(request) => {
                self.tell(net, Event::ReadFailed { request });
                self.tell(net, Event::Proposed { request, outcome: Outcome::Unknown });
            }
            Input::FromInitiator { initiator, session, request } => {
                self.on_request(net, (initiator, session), request);
            }
            Input::Command(id, command) => self.tell(net, Event::Command { id, command }),
        }
    }

    fn tick(&mut self, net: &mut Net) {
        let (gateway, process) = (self.number, self.process);
        let delay = 30 + net.random.below(20);
        net.after(delay, Happening::Gateway { gateway, process, input: Input::Tick });
        let active = self.volumes.iter_mut().filter(|(_, serving)| serving.phase == Phase::Active);
        let mut stores = Vec::new();
        let mut lost = Vec::new();
        for (volume, serving) in active {
            if !serving.is_storing && net.random.below(30) == 0 {
                (serving.is_storing, serving.in_flight) = (true, serving.in_flight + 1);
                let (epoch, expected) = (serving.epoch, serving.reservations);
                stores.push(Request::StoreReservations { volume: *volume, epoch, expected });
            } else if serving.in_flight == 0 && net.random.below(3000) == 0 && !net.is_calm {
                // Something is wrong with the image: the gateway gives it up.
                (serving.phase, serving.is_lost) = (Phase::Unlocking, true);
                lost.push(Request::Unlock { volume: *volume, epoch: serving.epoch });
            }
        }
        stores.into_iter().for_each(|request| self.send(net, request));
        lost.into_iter().for_each(|request| self.send(net, request));
        self.tell(net, Event::Tick);
    }

    fn tell(&mut self, net: &mut Net, event: Event) {
        let (rate, began) = self.clock;
        self.member.handle(Duration::from_millis(began + net.now * rate / 100), event);
        while let Some(action) = self.member.poll() {
            match action {
                Action::Connect | Action::EndIo | Action::Answer { .. } => self.perform(net, action),
                action => {
                    let delay = net.random.below(3);
                    let (gateway, process, client) = (self.number, self.process, self.client.clone());
                    let input = Input::Do { client, action };
                    net.after(delay, Happening::Gateway { gateway, process, input });
                }
            }
        }
    }

    fn perform(&mut self, net: &mut Net, action: Action) {
        if !matches!(action, Action::Beat(_) | Action::Read { .. } | Action::Propose { .. }) {
            net.note(|| format!("{}: {action:?}", name(self.number)));
        }
        match action {
            Action::Connect => self.send(net, Request::Connect),
            Action::Watch => self.send(net, Request::Watch),
            Action::Read { request } => self.ask(net, request, Request::ReadTable { id: request }),
            Action::Propose { request, table } => {
                let expected = Generation(table.generation().0 - 1);
                let bytes = table.encode();
                self.ask(net, request, Request::Propose { id: request, expected, bytes });
            }
            Action::Beat(beat) => self.send(net, Request::Beat(beat)),
            Action::Fence { clients } => self.send(net, Request::Fence { clients }),
            Action::FenceAgain { clients } => self.send(net, Request::FenceAgain { clients }),
            Action::Activate { volume, epoch } => self.activate(net, number(&volume), epoch),
            Action::Deactivate { volume, .. } => {
                let volume = number(&volume);
                if let Some(serving) = self.volumes.get_mut(&volume) {
                    serving.phase = Phase::Closing;
                }
                self.unlock_if_complete(net, volume);
            }
            Action::EndIo => self.end_io(net),
            Action::Answer { id, result } => self.answers.push((id, result)),
        }
    }

    fn send(&mut self, net: &mut Net, request: Request) {
        net.storage(self.number, Happening::Cluster(self.packet(request)));
    }

    fn packet(&self, request: Request) -> Packet {
        let client = self.client.clone().unwrap_or(Client(String::new()));
        Packet { gateway: self.number, process: self.process, client, map: self.map, request }
    }

    /// Sends what has a time limit.
    fn ask(&mut self, net: &mut Net, id: RequestId, request: Request) {
        let (gateway, process) = (self.number, self.process);
        net.after(1500, Happening::Gateway { gateway, process, input: Input::Timeout(id) });
        self.send(net, request);
    }

    fn activate(&mut self, net: &mut Net, volume: usize, epoch: Epoch) {
        let gives_up = self.late.contains(&volume) || net.chance(6);
        if gives_up {
            if net.chance(50) && self.late.insert(volume) {
                let delay = net.random.below(4000);
                let packet = self.packet(Request::LockLate { volume });
                net.after(delay, Happening::Cluster(packet));
            }
            return self.tell(net, Event::ActivationFailed { volume: volume_name(volume), epoch });
        }
        let serving = Serving {
            epoch,
            phase: Phase::Activating,
            in_flight: 0,
            reservations: 0,
            is_storing: false,
            is_lost: false,
        };
        assert!(self.volumes.insert(volume, serving).is_none(), "v{volume} is activated twice");
        let first = match self.variant {
            Variant::NoMap => Request::Lock { volume, epoch },
            _ => Request::LatestMap { volume, epoch },
        };
        self.send(net, first);
    }

    fn end_io(&mut self, net: &mut Net) {
        self.client = None;
        self.volumes.clear();
        self.late.clear();
        for initiator in self.sessions.keys().copied().collect::<Vec<_>>() {
            if let Some(session) = self.sessions.get_mut(&initiator) {
                session.in_flight = 0;
            }
            self.begin_session(net, initiator);
        }
    }

    fn on_answer(&mut self, net: &mut Net, answer: Answer) {
        match answer {
            Answer::Connected { client, map } => {
                (self.client, self.map) = (Some(client.clone()), map);
                self.tell(net, Event::Connected { client });
            }
            Answer::Watching => self.tell(net, Event::Watching),
            Answer::Table { id: request, bytes } => {
                let table = bytes.map(|bytes| Table::decode(&bytes).unwrap());
                self.tell(net, Event::TableRead { request, table });
            }
            Answer::Proposed { id: request, outcome } => self.tell(net, Event::Proposed { request, outcome }),
            Answer::Fenced { clients, map } => {
                self.learn_map(map);
                self.tell(net, Event::ClientsFenced { clients });
            }
            Answer::LatestMap { volume, epoch, map } => {
                self.learn_map(map);
                if self.if_serving(volume, epoch, |_| ()).is_some() {
                    self.send(net, Request::Lock { volume, epoch });
                }
            }
            Answer::Locked { volume, epoch, is_ours } => self.on_locked(net, (volume, epoch), is_ours),
            Answer::Unlocked { volume, epoch } => {
                if let Some(is_lost) = self.if_serving(volume, epoch, |serving| serving.is_lost) {
                    self.volumes.remove(&volume);
                    let volume = volume_name(volume);
                    let event = match is_lost {
                        true => Event::Lost { volume, epoch },
                        false => Event::Deactivated { volume, epoch },
                    };
                    self.tell(net, event);
                }
            }
            Answer::LockedLate { is_ours: true, .. } if self.variant == Variant::LateLock => {}
            Answer::LockedLate { volume, is_ours: true } => self.send(net, Request::UnlockLate { volume }),
            Answer::LockedLate { volume, is_ours: false } | Answer::UnlockedLate { volume } => {
                self.late.remove(&volume);
            }
            Answer::Reservations { volume, epoch, generation } => {
                let begins = |serving: &mut Serving| {
                    (serving.phase, serving.reservations) = (Phase::Active, generation);
                };
                if self.if_serving(volume, epoch, begins).is_some() {
                    self.tell(net, Event::Activated { volume: volume_name(volume), epoch });
                }
            }
            Answer::Stored { volume, epoch, is_stored } => {
                // An owner is the only one that stores.
                if !is_stored {
                    let what = format!("v{volume}: another owner than {epoch:?} has stored reservations");
                    self.violation.get_or_insert(what);
                }
                let stored = |serving: &mut Serving| {
                    (serving.is_storing, serving.in_flight) = (false, serving.in_flight - 1);
                    serving.reservations += 1;
                };
                self.if_serving(volume, epoch, stored);
                self.unlock_if_complete(net, volume);
            }
            Answer::Written { volume, epoch, block, session } => {
                self.on_io(net, (volume, epoch, block), session, ReplyKind::Written);
            }
            Answer::Block { volume, epoch, block, value, session } => {
                self.on_io(net, (volume, epoch, block), session, ReplyKind::Value(value));
            }
            Answer::Refused => self.tell(net, Event::OwnClientFenced),
        }
    }

    fn learn_map(&mut self, map: u64) {
        if self.variant != Variant::NoMap {
            self.map = self.map.max(map);
        }
    }

    fn if_serving<T>(
        &mut self,
        volume: usize,
        epoch: Epoch,
        then: impl FnOnce(&mut Serving) -> T,
    ) -> Option<T> {
        self.volumes.get_mut(&volume).filter(|serving| serving.epoch == epoch).map(then)
    }

    fn on_locked(&mut self, net: &mut Net, (volume, epoch): (usize, Epoch), is_ours: bool) {
        if self.if_serving(volume, epoch, |_| ()).is_none() {
            return;
        }
        if is_ours {
            self.send(net, Request::ReadReservations { volume, epoch });
        } else {
            self.volumes.remove(&volume);
            self.tell(net, Event::ActivationFailed { volume: volume_name(volume), epoch });
        }
    }

    fn unlock_if_complete(&mut self, net: &mut Net, volume: usize) {
        let is_drained = self.variant != Variant::NoDrain;
        let Some(serving) = self.volumes.get_mut(&volume) else { return };
        if serving.phase == Phase::Closing && (serving.in_flight == 0 || !is_drained) {
            serving.phase = Phase::Unlocking;
            let epoch = serving.epoch;
            self.send(net, Request::Unlock { volume, epoch });
        }
    }

    fn on_request(&mut self, net: &mut Net, (initiator, number): (usize, u64), request: FrontRequest) {
        if let FrontRequest::Login { volume } = request {
            let earlier = self.sessions.get(&initiator);
            if earlier.is_none_or(|earlier| number > earlier.number) {
                let in_flight = earlier.map_or(0, |earlier| earlier.in_flight);
                let session = Session { number, volume, epoch: None, in_flight, is_beginning: true };
                self.sessions.insert(initiator, session);
                self.begin_session(net, initiator);
            }
            return;
        }
        let Some(session) = self.sessions.get_mut(&initiator) else { return };
        // The connection of an earlier session is closed.
        if session.number != number || session.is_beginning {
            return;
        }
        let is_current =
            |serving: &Serving| session.epoch == Some(serving.epoch) || self.variant == Variant::OldSessions;
        let serving = self.volumes.get_mut(&session.volume);
        let Some(serving) = serving.filter(|serving| serving.phase == Phase::Active && is_current(serving))
        else {
            return self.reply(net, initiator, ReplyKind::PathError);
        };
        serving.in_flight += 1;
        session.in_flight += 1;
        let (epoch, session) = (serving.epoch, number);
        let request = match request {
            FrontRequest::Write { volume, block, value } => {
                Request::Write { volume, epoch, block, value, session }
            }
            FrontRequest::Read { volume, block } => Request::ReadBlock { volume, epoch, block, session },
            FrontRequest::Login { .. } => return,
        };
        self.send(net, request);
    }

    /// Answers a login once no request of an earlier session is in flight.
    fn begin_session(&mut self, net: &mut Net, initiator: usize) {
        let Some(session) = self.sessions.get_mut(&initiator) else { return };
        if !session.is_beginning || session.in_flight > 0 {
            return;
        }
        session.is_beginning = false;
        let serving = self.volumes.get(&session.volume).filter(|serving| serving.phase == Phase::Active);
        session.epoch = serving.map(|serving| serving.epoch);
        let is_active = session.epoch.is_some();
        self.reply(net, initiator, ReplyKind::LoggedIn { is_active });
    }

    fn on_io(
        &mut self,
        net: &mut Net,
        (volume, epoch, block): (usize, Epoch, usize),
        number: u64,
        kind: ReplyKind,
    ) {
        // With this variant it may have released the volume.
        let is_served = self.if_serving(volume, epoch, |serving| serving.in_flight -= 1).is_some();
        if !is_served && self.variant != Variant::NoDrain {
            return;
        }
        let initiator = super::initiator::number(volume, block);
        let Some(session) = self.sessions.get_mut(&initiator) else { return };
        session.in_flight = session.in_flight.saturating_sub(1);
        if session.number == number {
            self.reply(net, initiator, kind);
        }
        self.begin_session(net, initiator);
        self.unlock_if_complete(net, volume);
    }

    fn reply(&mut self, net: &mut Net, initiator: usize, kind: ReplyKind) {
        let Some(session) = self.sessions.get(&initiator) else { return };
        let reply = Reply::Of { process: self.process, session: session.number, kind };
        net.front(self.number, Happening::Initiator { initiator, reply });
    }
}

fn volume_name(number: usize) -> String {
    format!("v{number}")
}

fn number(volume: &str) -> usize {
    volume[1..].parse().unwrap()
}
