//! The cluster: storage daemons with their own maps, blocklisted clients, the table's object,
//! images with locks. What must hold is checked where requests are executed.
//!
//! A storage daemon refuses a client if the map that it has, or that a request shows it, says so.
//! So a write of a fenced client may still be executed by a daemon that has not heard of the fence,
//! until a client that has heard of it comes along, as with Ceph.

use super::Variant;
use super::net::{Happening, Net};
use blockmux_group::table::VolumeRecord;
use blockmux_group::{Beat, Client, Epoch, Generation, Outcome, Place, RequestId, Table};
use std::collections::BTreeMap;

/// A request of a client, with the map that the client had when it sent it.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) gateway: usize,
    pub(crate) process: u64,
    pub(crate) client: Client,
    pub(crate) map: u64,
    pub(crate) request: Request,
}

#[derive(Clone, Debug)]
pub(crate) enum Request {
    Connect,
    Watch,
    ReadTable {
        id: RequestId,
    },
    Propose {
        id: RequestId,
        expected: Generation,
        bytes: Vec<u8>,
    },
    Beat(Beat),
    Fence {
        clients: Vec<Client>,
    },
    FenceAgain {
        clients: Vec<Client>,
    },
    LatestMap {
        volume: usize,
        epoch: Epoch,
    },
    Lock {
        volume: usize,
        epoch: Epoch,
    },
    Unlock {
        volume: usize,
        epoch: Epoch,
    },
    /// Of an activation that was given up: no I/O follows.
    LockLate {
        volume: usize,
    },
    UnlockLate {
        volume: usize,
    },
    ReadReservations {
        volume: usize,
        epoch: Epoch,
    },
    StoreReservations {
        volume: usize,
        epoch: Epoch,
        expected: u64,
    },
    Write {
        volume: usize,
        epoch: Epoch,
        block: usize,
        value: u64,
        session: u64,
    },
    ReadBlock {
        volume: usize,
        epoch: Epoch,
        block: usize,
        session: u64,
    },
}

/// What a gateway is told by the cluster.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Connected { client: Client, map: u64 },
    Watching,
    Table { id: RequestId, bytes: Option<Vec<u8>> },
    Proposed { id: RequestId, outcome: Outcome },
    Fenced { clients: Vec<Client>, map: u64 },
    LatestMap { volume: usize, epoch: Epoch, map: u64 },
    Locked { volume: usize, epoch: Epoch, is_ours: bool },
    Unlocked { volume: usize, epoch: Epoch },
    LockedLate { volume: usize, is_ours: bool },
    UnlockedLate { volume: usize },
    Reservations { volume: usize, epoch: Epoch, generation: u64 },
    Stored { volume: usize, epoch: Epoch, is_stored: bool },
    Written { volume: usize, epoch: Epoch, block: usize, session: u64 },
    Block { volume: usize, epoch: Epoch, block: usize, value: u64, session: u64 },
    Refused,
}

pub(crate) struct Cluster {
    variant: Variant,
    map: u64,
    /// The map in which each was fenced.
    blocklist: BTreeMap<Client, u64>,
    /// The map of each storage daemon.
    osds: Vec<u64>,
    table: Option<Vec<u8>>,
    watchers: BTreeMap<Client, (usize, u64)>,
    pub(crate) images: Vec<Image>,
    clients: u64,
    /// How often a volume got another owner.
    pub(crate) moves: u64,
    pub(crate) fences: u64,
    pub(crate) violation: Option<String>,
}

pub(crate) struct Image {
    lock: Option<Client>,
    locked_in: Epoch,
    /// Generation, and who has stored it.
    reservations: (u64, Epoch),
    pub(crate) blocks: Vec<u64>,
    /// The latest owner that each storage daemon has seen.
    seen: Vec<Epoch>,
}

impl Cluster {
    pub(crate) fn new(volumes: usize, variant: Variant) -> Cluster {
        let image = || Image {
            lock: None,
            locked_in: Epoch(0),
            reservations: (0, Epoch(0)),
            blocks: vec![0; BLOCKS],
            seen: vec![Epoch(0); OSDS],
        };
        Cluster {
            variant,
            map: 1,
            blocklist: BTreeMap::new(),
            osds: vec![1; OSDS],
            table: None,
            watchers: BTreeMap::new(),
            images: (0..volumes).map(|_| image()).collect(),
            clients: 0,
            moves: 0,
            fences: 0,
            violation: None,
        }
    }

    /// The table in force.
    pub(crate) fn table(&self) -> Option<Table> {
        self.table.as_ref().map(|bytes| Table::decode(bytes).unwrap())
    }

    pub(crate) fn on_map(&mut self, osd: usize, map: u64) {
        self.osds[osd] = self.osds[osd].max(map);
    }

    /// A watch breaks: what is sent meanwhile is lost.
    pub(crate) fn break_watch(&mut self, gateway: usize) {
        self.watchers.retain(|_, (of, _)| *of != gateway);
    }

    pub(crate) fn on_packet(&mut self, net: &mut Net, packet: &Packet) {
        let Packet { gateway, process, ref client, .. } = *packet;
        if let Some(osd) = osd_of(&packet.request) {
            self.on_map(osd, packet.map);
            if self.is_refused(client, self.osds[osd]) {
                net.note(|| format!("cluster: refuses {client}: {:?}", packet.request));
                return answer(net, packet, Answer::Refused);
            }
        }
        match &packet.request {
            Request::Connect => {
                self.clients += 1;
                let client = Client(format!("{}.{}", super::world::name(gateway), self.clients));
                answer(net, packet, Answer::Connected { client, map: self.map });
            }
            Request::Watch => {
                self.watchers.insert(client.clone(), (gateway, process));
                answer(net, packet, Answer::Watching);
            }
            Request::ReadTable { id } => {
                answer(net, packet, Answer::Table { id: *id, bytes: self.table.clone() });
            }
            Request::Propose { id, expected, bytes } => self.propose(net, packet, (*id, *expected), bytes),
            Request::Beat(beat) => {
                self.notify(net, gateway, super::gateway::Input::Beat(*beat));
            }
            Request::Fence { clients } => self.fence(net, packet, clients),
            Request::FenceAgain { clients } => {
                let table = self.table().unwrap_or_default();
                let is_up = |client: &Client| {
                    table.members().iter().any(|member| member.is_up && member.client == *client)
                };
                if let Some(client) = clients.iter().find(|client| is_up(client)) {
                    self.fail(format!("{client} is up and is fenced again"));
                }
            }
            Request::LatestMap { volume, epoch } => {
                answer(net, packet, Answer::LatestMap { volume: *volume, epoch: *epoch, map: self.map });
            }
            _ => self.on_image(net, packet),
        }
    }

    fn on_image(&mut self, net: &mut Net, packet: &Packet) {
        let client = &packet.client;
        match packet.request {
            Request::Lock { volume, epoch } => {
                let is_ours = self.lock(volume, client, epoch);
                net.note(|| format!("cluster: {client} locks v{volume} in {epoch:?}: {is_ours}"));
                answer(net, packet, Answer::Locked { volume, epoch, is_ours });
            }
            Request::Unlock { volume, epoch } => {
                self.unlock(net, volume, client);
                answer(net, packet, Answer::Unlocked { volume, epoch });
            }
            Request::LockLate { volume } => {
                let is_ours = self.may_lock(volume, client);
                if is_ours {
                    self.images[volume].lock = Some(client.clone());
                }
                net.note(|| format!("cluster: {client} locks v{volume} too late: {is_ours}"));
                answer(net, packet, Answer::LockedLate { volume, is_ours });
            }
            Request::UnlockLate { volume } => {
                self.unlock(net, volume, client);
                answer(net, packet, Answer::UnlockedLate { volume });
            }
            Request::ReadReservations { volume, epoch } => {
                let (generation, _) = self.images[volume].reservations;
                answer(net, packet, Answer::Reservations { volume, epoch, generation });
            }
            Request::StoreReservations { volume, epoch, expected } => {
                let image = &mut self.images[volume];
                let is_stored = image.reservations.0 == expected;
                if is_stored && epoch < image.reservations.1 {
                    self.fail(format!(
                        "v{volume}: reservations of a later owner are overwritten in {epoch:?}"
                    ));
                } else if is_stored {
                    image.reservations = (expected + 1, epoch);
                }
                answer(net, packet, Answer::Stored { volume, epoch, is_stored });
            }
            Request::Write { volume, epoch, block, value, session } => {
                net.note(|| format!("cluster: v{volume}/{block} = {value} by {client} in {epoch:?}"));
                self.see(volume, block, epoch);
                let stored = &mut self.images[volume].blocks[block];
                let last = *stored;
                *stored = value;
                if value < last {
                    self.fail(format!(
                        "v{volume}/{block}: {value} by {client} in {epoch:?} overwrites {last}"
                    ));
                }
                answer(net, packet, Answer::Written { volume, epoch, block, session });
            }
            Request::ReadBlock { volume, epoch, block, session } => {
                self.see(volume, block, epoch);
                let value = self.images[volume].blocks[block];
                answer(net, packet, Answer::Block { volume, epoch, block, value, session });
            }
            _ => {}
        }
    }

    /// Checks that no request of an owner is executed after one of the next owner.
    fn see(&mut self, volume: usize, block: usize, epoch: Epoch) {
        let seen = &mut self.images[volume].seen[(volume + block) % OSDS];
        if epoch < *seen {
            let seen = *seen;
            self.fail(format!("v{volume}/{block}: I/O in {epoch:?} after I/O in {seen:?}"));
        } else {
            *seen = epoch;
        }
    }

    fn unlock(&mut self, net: &mut Net, volume: usize, client: &Client) {
        let image = &mut self.images[volume];
        if image.lock.as_ref() == Some(client) {
            image.lock = None;
        }
        net.note(|| format!("cluster: {client} unlocks v{volume}"));
    }

    /// Whether nobody else has the lock whom the cluster serves.
    fn may_lock(&self, volume: usize, client: &Client) -> bool {
        let map = self.osds[volume % OSDS];
        let breaks = |holder: &Client| match self.variant {
            Variant::NoFence => true,
            Variant::NoMap => self.blocklist.contains_key(holder),
            _ => self.is_refused(holder, map),
        };
        self.images[volume].lock.as_ref().is_none_or(|holder| holder == client || breaks(holder))
    }

    fn lock(&mut self, volume: usize, client: &Client, epoch: Epoch) -> bool {
        if !self.may_lock(volume, client) {
            return false;
        }
        let locked_in = self.images[volume].locked_in;
        if epoch <= locked_in {
            self.fail(format!("v{volume}: locked in {epoch:?} by {client} after {locked_in:?}"));
            return true;
        }
        let image = &mut self.images[volume];
        (image.lock, image.locked_in) = (Some(client.clone()), epoch);
        true
    }

    fn fence(&mut self, net: &mut Net, packet: &Packet, clients: &[Client]) {
        if self.variant != Variant::NoFence {
            self.map += 1;
            self.fences += 1;
            for client in clients {
                self.blocklist.entry(client.clone()).or_insert(self.map);
            }
            for osd in 0..OSDS {
                let delay = net.random.below(4000);
                net.after(delay, Happening::Map { osd, epoch: self.map });
            }
        }
        net.note(|| format!("cluster: {} fences {clients:?}", packet.client));
        answer(net, packet, Answer::Fenced { clients: clients.to_vec(), map: self.map });
    }

    fn is_refused(&self, client: &Client, map: u64) -> bool {
        self.blocklist.get(client).is_some_and(|fenced| *fenced <= map)
    }

    fn propose(
        &mut self,
        net: &mut Net,
        packet: &Packet,
        (id, expected): (RequestId, Generation),
        bytes: &[u8],
    ) {
        let head = self.table.as_ref().map(|table| &table[..blockmux_group::table::HEAD_LEN]);
        let is_expected = head.map_or(expected == Generation(0), |head| *head == Table::head(expected));
        if !is_expected && self.variant != Variant::Blind {
            return answer(net, packet, Answer::Proposed { id, outcome: Outcome::Stale });
        }
        let before = self.table().unwrap_or_default();
        self.table = Some(bytes.to_vec());
        let after = self.table().unwrap();
        self.check_tables(net, &before, &after);
        let generation = after.generation();
        self.notify(net, packet.gateway, super::gateway::Input::Changed(generation));
        // The answer is lost at times.
        if !net.chance(5) {
            answer(net, packet, Answer::Proposed { id, outcome: Outcome::Committed });
        }
    }

    fn check_tables(&mut self, net: &mut Net, before: &Table, after: &Table) {
        if after.generation().0 != before.generation().0 + 1 {
            self.fail(format!("{:?} follows {:?}", after.generation(), before.generation()));
        }
        let begins_to_leave = |volume: &&VolumeRecord| {
            let Place::Leaving { from, .. } = volume.place else { return false };
            let was_leaving = |earlier: &VolumeRecord| matches!(earlier.place, Place::Leaving { .. });
            let is_emptied = after.up(from).is_some_and(|owner| owner.is_draining || owner.is_leaving);
            !is_emptied && !before.volume(&volume.name).is_some_and(was_leaving)
        };
        if after.volumes().iter().filter(begins_to_leave).count() > 1 {
            self.fail("two volumes begin to move at once".to_owned());
        }
        for volume in after.volumes() {
            let earlier = before.volume(&volume.name);
            let (owner, epoch) =
                earlier.map_or((None, Epoch(0)), |volume| (volume.place.owner(), volume.epoch));
            let now = volume.place.owner();
            if volume.epoch < epoch || (now.is_some() && now != owner && volume.epoch <= epoch) {
                self.fail(format!(
                    "{}: {:?} follows {epoch:?} as {owner:?} gives way",
                    volume.name, volume.epoch
                ));
            }
            let was_left = earlier.is_some_and(|earlier| matches!(earlier.place, Place::Leaving { .. }));
            if now != owner && !was_left && owner.is_some_and(|owner| after.up(owner).is_some()) {
                self.fail(format!("{} is taken from {owner:?}, which is up", volume.name));
            }
            self.moves += u64::from(volume.epoch != epoch);
            if earlier.is_none_or(|earlier| earlier.place != volume.place) {
                let (name, place, epoch) = (&volume.name, volume.place, volume.epoch);
                net.note(|| format!("table {}: {name} {place:?} {epoch:?}", after.generation().0));
            }
        }
        for member in after.members() {
            if before.member(&member.name) != Some(member) {
                net.note(|| format!("table {}: {member:?}", after.generation().0));
            }
        }
    }

    fn notify(&self, net: &mut Net, from: usize, input: super::gateway::Input) {
        for (client, (to, process)) in &self.watchers {
            if !self.is_refused(client, self.osds[0]) {
                let (gateway, process, input) = (*to, *process, input.clone());
                net.notify(from, *to, Happening::Gateway { gateway, process, input });
            }
        }
    }

    fn fail(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }
}

/// The storage daemon that executes a request; `None` for the monitors, which refuse nobody.
fn osd_of(request: &Request) -> Option<usize> {
    match request {
        Request::Connect | Request::Fence { .. } | Request::FenceAgain { .. } | Request::LatestMap { .. } => {
            None
        }
        Request::Watch | Request::ReadTable { .. } | Request::Propose { .. } | Request::Beat(_) => Some(0),
        Request::Lock { volume, .. }
        | Request::Unlock { volume, .. }
        | Request::LockLate { volume }
        | Request::UnlockLate { volume }
        | Request::ReadReservations { volume, .. }
        | Request::StoreReservations { volume, .. } => Some(volume % OSDS),
        Request::Write { volume, block, .. } | Request::ReadBlock { volume, block, .. } => {
            Some((volume + block) % OSDS)
        }
    }
}

fn answer(net: &mut Net, packet: &Packet, answer: Answer) {
    let Packet { gateway, process, ref client, .. } = *packet;
    let input = super::gateway::Input::Answer { client: client.clone(), answer };
    net.storage(gateway, Happening::Gateway { gateway, process, input });
}

const OSDS: usize = 3;
/// Each is written by one initiator.
pub(crate) const BLOCKS: usize = 2;
