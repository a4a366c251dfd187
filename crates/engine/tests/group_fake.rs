//! Members of a gateway group over functions in the place of librados's, without a cluster: several
//! drivers in one process, whose clients are cut off, refused, or hang in calls as a test chooses.
//! `group_cluster.rs` has the tests with a cluster.

mod group_members;

use blockmux_engine::group::{
    Activation, GroupDriver, GroupOptions, GroupStatus, GroupVolumes, VolumeReports,
};
use blockmux_group::table::ConfiguredVolume;
use blockmux_group::{Client, Command, Epoch, Incarnation, Place, Refusal, Table};
use blockmux_rbd::cluster::Cluster;
use blockmux_rbd::error::{Errno, RbdError};
use blockmux_rbd::fake_cluster::{FakeCluster, POOL};
use group_members::{eventually, settings};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Images in memory: who has the lock of each, by the rules of the cluster.
#[derive(Clone, Default)]
struct Locks(Arc<Mutex<BTreeMap<String, Lock>>>);

#[derive(Clone, Debug)]
struct Lock {
    holder: Option<Client>,
    /// The latest epoch in which somebody had it.
    epoch: Epoch,
}

impl Locks {
    /// Takes the lock of a volume, unless another client has it that the cluster does not refuse.
    fn take(&self, fake: &FakeCluster, volume: &str, client: &Client, epoch: Epoch) -> Result<(), String> {
        let mut locks = self.0.lock().unwrap();
        let lock = locks.entry(volume.to_owned()).or_insert(Lock { holder: None, epoch: Epoch(0) });
        if let Some(holder) = &lock.holder
            && !fake.refused().contains(&holder.0)
        {
            return Err(format!("{holder} has it"));
        }
        assert!(epoch > lock.epoch, "{volume}: {client} has {epoch:?} after {:?}", lock.epoch);
        *lock = Lock { holder: Some(client.clone()), epoch };
        Ok(())
    }

    fn release(&self, volume: &str, client: &Client) {
        let mut locks = self.0.lock().unwrap();
        let lock = locks.get_mut(volume).filter(|lock| lock.holder.as_ref() == Some(client));
        lock.expect("its owner releases it").holder = None;
    }
}

/// The volumes of one member, which acts on them at once.
#[derive(Clone)]
struct FakeVolumes {
    fake: FakeCluster,
    locks: Locks,
    state: Arc<Mutex<VolumesState>>,
}

#[derive(Default)]
struct VolumesState {
    client: Option<(Client, VolumeReports)>,
    active: BTreeMap<String, Epoch>,
    /// How often I/O has ended for all.
    ends: u32,
}

impl GroupVolumes for FakeVolumes {
    fn begin(&mut self, cluster: &Arc<Cluster>, reports: VolumeReports) {
        let client = Client(cluster.client_address().unwrap());
        let mut state = self.state.lock().unwrap();
        assert!(state.client.is_none() && state.active.is_empty());
        state.client = Some((client, reports));
    }

    fn activate(&mut self, activation: Activation) {
        let Activation { volume, image, epoch } = activation;
        assert_eq!(image, format!("image of {volume}"));
        let mut state = self.state.lock().unwrap();
        let (client, reports) = state.client.clone().unwrap();
        match self.locks.take(&self.fake, &volume, &client, epoch) {
            Ok(()) => {
                assert!(state.active.insert(volume.clone(), epoch).is_none());
                reports.activated(&volume, epoch);
            }
            Err(why) => reports.activation_failed(&volume, epoch, &why),
        }
    }

    fn deactivate(&mut self, volume: &str, epoch: Epoch) {
        let mut state = self.state.lock().unwrap();
        let (client, reports) = state.client.clone().unwrap();
        assert_eq!(state.active.remove(volume), Some(epoch));
        self.locks.release(volume, &client);
        reports.deactivated(volume, epoch);
    }

    /// It keeps its locks, as a client that does not reach the cluster any longer.
    fn end_io(&mut self) {
        let mut state = self.state.lock().unwrap();
        state.client.take().expect("it has begun");
        state.active.clear();
        state.ends += 1;
    }
}

struct TestMember {
    driver: GroupDriver,
    volumes: FakeVolumes,
}

impl TestMember {
    fn status(&self) -> Arc<GroupStatus> {
        self.driver.status()
    }

    fn client(&self) -> Client {
        self.status().client.clone().unwrap()
    }

    fn active(&self) -> BTreeMap<String, Epoch> {
        self.volumes.state.lock().unwrap().active.clone()
    }

    fn ends(&self) -> u32 {
        self.volumes.state.lock().unwrap().ends
    }

    /// Whether it belongs to the group now, with another incarnation than this one.
    fn is_up_after(&self, earlier: Option<Incarnation>) -> bool {
        self.status().incarnation > earlier
    }
}

/// A group with members `a`, `b` and `c`, and volumes `v0` to `v5`.
struct TestGroup {
    fake: FakeCluster,
    locks: Locks,
    members: Vec<TestMember>,
}

impl TestGroup {
    fn start() -> TestGroup {
        let mut group =
            TestGroup { fake: FakeCluster::default(), locks: Locks::default(), members: Vec::new() };
        for name in ["a", "b", "c"] {
            let member = group.member(name);
            eventually("it joins", || member.is_up_after(None));
            group.members.push(member);
        }
        group.command(0, configure()).unwrap();
        eventually("two volumes each", || group.is_even());
        group
    }

    fn member(&self, name: &str) -> TestMember {
        let (fake, locks, state) = (self.fake.clone(), self.locks.clone(), Arc::default());
        let volumes = FakeVolumes { fake, locks, state };
        let options = GroupOptions {
            name: name.to_owned(),
            address: format!("{name}.example"),
            pool: POOL.to_owned(),
            namespace: None,
            object: OBJECT.to_owned(),
            settings: settings(),
        };
        let fake = self.fake.clone();
        let connect = Arc::new(move || Ok(fake.connect()));
        let driver = GroupDriver::start(options, connect, Box::new(volumes.clone())).unwrap();
        TestMember { driver, volumes }
    }

    /// A command, again while the member does not belong to the group or nobody knows the outcome.
    fn command(&self, member: usize, command: Command) -> Result<(), Refusal> {
        let is_final =
            |result: &Result<(), Refusal>| !matches!(result, Err(Refusal::NotMember | Refusal::Unconfirmed));
        let mut results =
            std::iter::repeat_with(|| self.members[member].driver.command(command.clone())).take(20);
        results.find(is_final).unwrap_or(Err(Refusal::Unconfirmed))
    }

    /// The table in force.
    fn table(&self) -> Table {
        Table::decode(&self.fake.content(OBJECT)).unwrap()
    }

    /// Whether every volume is active where the table says, nobody is to be fenced, and each member
    /// that is up has as many.
    fn is_even(&self) -> bool {
        let table = self.table();
        let members = || self.members.iter();
        let mut counts: Vec<usize> = members().map(|member| member.active().len()).collect();
        counts.sort_unstable();
        table.to_fence().is_empty()
            && table.volumes().len() == VOLUMES
            && table.volumes().iter().all(|volume| {
                let Place::Active(owner) = volume.place else { return false };
                let owner = members().find(|member| member.status().incarnation == Some(owner));
                owner.is_some_and(|owner| owner.active().get(&volume.name) == Some(&volume.epoch))
            })
            && counts.first().zip(counts.last()).is_some_and(|(fewest, most)| most - fewest <= 1)
    }
}

fn configure() -> Command {
    let volume = |nth| ConfiguredVolume::new(&format!("v{nth}"), &format!("image of v{nth}"));
    Command::Configure { version: 1, volumes: (0..VOLUMES).map(volume).collect() }
}

#[test]
fn volumes_are_spread_evenly_and_those_of_a_member_that_is_cut_off_are_taken_over() {
    let mut group = TestGroup::start();
    assert_eq!(group.fake.refused(), [""; 0], "nobody is fenced while all is well");
    let (b, before) = (group.members[1].client(), group.members[1].status().incarnation);
    // It hangs in its calls, and nobody hears it.
    group.fake.cut(&b.0, true);
    group.fake.hang(&b.0, true);
    eventually("the others serve its volumes", || {
        group.members[0].active().len() + group.members[2].active().len() == VOLUMES
    });
    assert_eq!(group.fake.refused(), std::slice::from_ref(&b.0));
    // It notices that it does not hear itself, and joins with another client.
    eventually("it has ended its I/O", || group.members[1].ends() == 1);
    eventually("it joins again", || group.members[1].is_up_after(before));
    assert_ne!(group.members[1].client(), b);
    eventually("two volumes each", || group.is_even());
    // Its first client goes on, is refused, and closes.
    group.fake.hang(&b.0, false);
    eventually("the first client is closed", || group.fake.watches() == 3);
    assert_eq!(group.fake.refused(), [b.0]);
    // One that ends without a word.
    let c = group.members.pop().unwrap();
    let client = c.client();
    drop(c);
    eventually("three volumes each", || group.is_even());
    assert!(group.fake.refused().contains(&client.0));
}

#[test]
fn a_drained_member_gives_its_volumes_away_without_a_fence() {
    let group = TestGroup::start();
    group.command(2, Command::Drain { member: "b".to_owned() }).unwrap();
    eventually("it has no volumes", || group.members[1].active().is_empty());
    eventually("the table says so", || {
        let table = group.members[0].status().table.clone().unwrap();
        let own = group.members[1].status().incarnation;
        table
            .volumes()
            .iter()
            .all(|volume| matches!(volume.place, Place::Active(_)) && volume.place.owner() != own)
    });
    group.command(1, Command::Resume { member: "b".to_owned() }).unwrap();
    eventually("two volumes each", || group.is_even());
    let unknown = group.command(0, Command::Drain { member: "x".to_owned() });
    assert_eq!(unknown, Err(Refusal::UnknownMember("x".to_owned())));
    assert_eq!(group.fake.refused(), [""; 0]);
    assert!(group.members.iter().all(|member| member.ends() == 0));
}

#[test]
fn a_member_that_an_operator_fences_joins_again_with_another_client() {
    let group = TestGroup::start();
    let (c, before) = (group.members[2].client(), group.members[2].status().incarnation);
    group.command(0, Command::Fence { member: "c".to_owned() }).unwrap();
    eventually("it joins again", || group.members[2].is_up_after(before));
    assert_eq!(group.members[2].ends(), 1);
    eventually("two volumes each", || group.is_even());
    assert_eq!(group.fake.refused(), [c.0]);
}

#[test]
fn a_member_that_leaves_ends_without_a_fence_and_does_not_join_again() {
    let group = TestGroup::start();
    let b = || "b".to_owned();
    group.command(1, Command::Leave { member: b() }).unwrap();
    eventually("it has no volumes", || {
        let (table, own) = (group.table(), group.members[1].status().incarnation);
        table.volumes().iter().all(|volume| volume.place.owner() != own)
    });
    group.members[1].driver.last_command(Command::Fence { member: b() }).unwrap();
    group.members[1].driver.end();
    assert_eq!(group.members[1].ends(), 1);
    let table = group.table();
    assert!(!table.member("b").unwrap().is_up && table.member("b").unwrap().strikes == 0);
    assert_eq!((group.fake.refused(), table.to_fence()), (Vec::new(), &[][..]));
    let resume = Command::Resume { member: b() };
    assert_eq!(group.members[1].driver.command(resume), Err(Refusal::NotMember));
}

#[test]
fn a_member_whose_calls_hang_blocks_nobody_and_goes_on_where_it_was() {
    let group = TestGroup::start();
    let b = &group.members[1];
    let (client, incarnation) = (b.client(), b.status().incarnation);
    let volume = b.active().into_keys().next().unwrap();
    group.fake.hang(&client.0, true);
    let pin = Command::Pin { volume: volume.clone(), member: "a".to_owned() };
    group.command(0, pin).unwrap();
    // It says what is wrong, and is still heard by the others.
    eventually("it notices", || b.status().problem.as_ref().is_some_and(|said| said.contains("no answer")));
    assert!(group.members[0].status().suspected.is_empty());
    assert!(b.active().contains_key(&volume), "it has not read that it is to leave");
    group.fake.hang(&client.0, false);
    eventually("the volume moves", || group.members[0].active().contains_key(&volume));
    eventually("all is well again", || b.status().problem.is_none());
    assert_eq!((b.client(), b.status().incarnation, b.ends()), (client, incarnation, 0));
    assert_eq!(group.fake.refused(), [""; 0]);
}

#[test]
fn a_watch_that_is_interrupted_is_started_again() {
    let group = TestGroup::start();
    for member in &group.members {
        group.fake.interrupt(&member.client().0);
        eventually("it watches again", || group.fake.watches() == 3);
    }
    assert!(group.members.iter().all(|member| member.ends() == 0));
}

#[test]
fn a_table_that_is_damaged_is_neither_followed_nor_overwritten() {
    let group = TestGroup::start();
    let table = group.fake.content(OBJECT);
    group.fake.set_content(OBJECT, Some(b"something else"));
    for member in &group.members {
        let said = || member.status().problem.clone().unwrap_or_default();
        eventually("it says so", || said() == "the object is not the table of a group, or is damaged");
    }
    assert_eq!(group.fake.content(OBJECT), b"something else");
    assert!(group.members.iter().all(|member| member.active().len() == 2));
    group.fake.set_content(OBJECT, Some(&table));
    eventually("all is well again", || {
        group.members.iter().all(|member| member.status().problem.is_none()) && group.is_even()
    });
}

#[test]
fn a_daemon_that_does_not_reach_the_cluster_says_why_and_tries_again() {
    let fake = FakeCluster::default();
    let may_connect = Arc::new(AtomicBool::new(false));
    let (cluster, may) = (fake.clone(), may_connect.clone());
    let connect = Arc::new(move || match may.load(Ordering::SeqCst) {
        true => Ok(cluster.connect()),
        false => Err(RbdError::Call { call: "rados_connect", error: Errno(libc::ENETUNREACH) }),
    });
    let options = GroupOptions {
        name: "b".to_owned(),
        address: "b.example".to_owned(),
        pool: POOL.to_owned(),
        namespace: None,
        object: OBJECT.to_owned(),
        settings: settings(),
    };
    let volumes = FakeVolumes { fake, locks: Locks::default(), state: Arc::default() };
    let driver = GroupDriver::start(options, connect, Box::new(volumes)).unwrap();
    eventually("it says why", || {
        driver.status().problem.as_ref().is_some_and(|said| said.starts_with("the cluster: rados_connect: "))
    });
    assert_eq!(driver.command(configure()), Err(Refusal::NotMember));
    may_connect.store(true, Ordering::SeqCst);
    eventually("it joins", || driver.status().incarnation.is_some());
    assert_eq!(driver.command(configure()), Ok(()));
}

const VOLUMES: usize = 6;
const OBJECT: &str = "blockmux.group.test";
