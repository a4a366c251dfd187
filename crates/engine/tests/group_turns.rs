//! Volumes that become active and standby as members of a gateway group decide: drivers over
//! functions in the place of librados's, and images in memory whose calls hang or fail as a test
//! chooses.

mod group_members;

use blockmux_engine::group::{FindVolume, GroupDriver, GroupOptions, MemberVolume, TurnVolumes};
use blockmux_engine::volume::rbd::MemberClient;
use blockmux_engine::volume::turns::{self, TurnChange, TurnError};
use blockmux_group::table::ConfiguredVolume;
use blockmux_group::{Command, Place, Table};
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::volume_state::{
    Commit, NotAcquired, Ownership, OwnershipQuestion, ServingState, SharedState, StateGeneration,
    StoredState, Transition, VolumeIdentity, VolumeState,
};
use blockmux_rbd::fake_cluster::{FakeCluster, POOL};
use blockmux_volume::MemVolume;
use group_members::{eventually, settings};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// The images of the cluster: which client has the lock of each.
#[derive(Clone)]
struct Images {
    fake: FakeCluster,
    holders: Arc<Mutex<BTreeMap<String, String>>>,
}

/// An image, as one process uses it.
struct Storage {
    images: Images,
    name: String,
    /// By whom it is opened.
    client: Arc<MemberClient>,
    opened_by: Mutex<Option<String>>,
    trouble: Arc<Trouble>,
}

/// What is wrong with the calls of one process.
#[derive(Default)]
struct Trouble {
    /// Images whose calls hang.
    hanging: Mutex<BTreeSet<String>>,
    freed: Condvar,
    /// Calls that hang, or have.
    hung: AtomicUsize,
    /// All calls, with their images.
    calls: Mutex<Vec<(&'static str, String)>>,
    /// Calls that fail, with their images.
    failing: Mutex<BTreeSet<(&'static str, String)>>,
}

impl Storage {
    fn call(&self, call: &'static str) -> Result<(), String> {
        self.trouble.calls.lock().unwrap().push((call, self.name.clone()));
        let mut hanging = self.trouble.hanging.lock().unwrap();
        if hanging.contains(&self.name) {
            self.trouble.hung.fetch_add(1, Ordering::SeqCst);
        }
        while hanging.contains(&self.name) {
            hanging = self.trouble.freed.wait(hanging).unwrap();
        }
        match self.trouble.failing.lock().unwrap().contains(&(call, self.name.clone())) {
            true => Err(format!("{call} fails")),
            false => Ok(()),
        }
    }
}

impl Ownership for Storage {
    fn acquire(&self, take: bool, _transition: &Transition) -> Result<StoredState, NotAcquired> {
        assert!(!take, "only a fence takes a lock");
        let refused = |error| NotAcquired { error, may_own: false };
        let client = self.client.get().ok_or_else(|| refused("no client".to_owned()))?;
        let client = client.client_address().unwrap();
        self.call("acquire").map_err(refused)?;
        let mut holders = self.images.holders.lock().unwrap();
        let refuses = |client: &String| self.images.fake.refused().contains(client);
        let holder = holders.get(&self.name).filter(|holder| **holder != client && !refuses(holder));
        if refuses(&client) || holder.is_some() {
            return Err(refused(format!("{client} does not get what {holder:?} has")));
        }
        holders.insert(self.name.clone(), client.clone());
        *self.opened_by.lock().unwrap() = Some(client);
        Ok(StoredState::default())
    }

    fn question(&self) -> OwnershipQuestion {
        let (images, name) = (self.images.clone(), self.name.clone());
        let opened_by = self.opened_by.lock().unwrap().clone();
        Box::new(move || Ok(images.holders.lock().unwrap().get(&name) == opened_by.as_ref()))
    }

    fn recheck(&self) {}

    fn release(&self, _transition: &Transition) -> Result<(), String> {
        self.call("release")?;
        let opened_by = self.opened_by.lock().unwrap();
        let mut holders = self.images.holders.lock().unwrap();
        if holders.get(&self.name) == opened_by.as_ref() {
            holders.remove(&self.name);
        }
        Ok(())
    }
}

impl SharedState for Storage {
    fn propose(&self, _expected: StateGeneration, _image: &[u8]) -> StateGeneration {
        StateGeneration(1)
    }

    fn outcome(&self, _proposal: StateGeneration) -> Option<Commit> {
        Some(Commit::Committed)
    }
}

struct TestVolume {
    image: String,
    state: Arc<VolumeState>,
    ended: Ended,
}

/// The images whose sessions were asked to end without a change of the volume.
type Ended = Arc<Mutex<Vec<String>>>;

impl MemberVolume for TestVolume {
    fn image(&self) -> &str {
        &self.image
    }

    fn state(&self) -> &Arc<VolumeState> {
        &self.state
    }

    fn activate(&self, begin: &dyn Fn() -> Result<(), String>) -> Result<TurnChange, TurnError<String>> {
        turns::activate(&self.state, false, || (), |_| begin())
    }

    fn deactivate(&self, begin: &dyn Fn() -> Result<(), String>) -> Result<TurnChange, TurnError<String>> {
        turns::deactivate(&self.state, begin, || Ok(()))
    }

    fn end_fenced(self: Box<Self>) {
        self.ended.lock().unwrap().push(self.image);
    }
}

struct TestMember {
    driver: GroupDriver,
    volumes: Arc<Mutex<BTreeMap<String, Arc<VolumeState>>>>,
    trouble: Arc<Trouble>,
    ended: Ended,
    /// By whom its images are opened.
    client: Arc<MemberClient>,
}

impl TestMember {
    /// Number of these calls for a volume.
    fn calls(&self, call: &'static str, volume: &str) -> usize {
        let call = (call, format!("pool/{volume}"));
        self.trouble.calls.lock().unwrap().iter().filter(|made| **made == call).count()
    }

    fn active(&self) -> Vec<String> {
        let volumes = self.volumes.lock().unwrap();
        let active = volumes.iter().filter(|(_, state)| state.serving() == ServingState::Active);
        active.map(|(name, _)| name.clone()).collect()
    }

    fn state(&self, volume: &str) -> Arc<VolumeState> {
        self.volumes.lock().unwrap()[volume].clone()
    }

    fn client(&self) -> String {
        self.driver.status().client.clone().unwrap().0
    }

    fn hang(&self, image: &str, hangs: bool) {
        let mut hanging = self.trouble.hanging.lock().unwrap();
        if hangs {
            hanging.insert(image.to_owned())
        } else {
            hanging.remove(image)
        };
        self.trouble.freed.notify_all();
    }

    fn fail(&self, call: &'static str, volume: &str, fails: bool) {
        let mut failing = self.trouble.failing.lock().unwrap();
        let call = (call, format!("pool/{volume}"));
        if fails {
            failing.insert(call)
        } else {
            failing.remove(&call)
        };
    }

    fn has_problem(&self, with: &str) -> bool {
        self.driver.status().problem.as_ref().is_some_and(|problem| problem.contains(with))
    }
}

struct TestGroup {
    images: Images,
    members: Vec<TestMember>,
}

impl TestGroup {
    /// Members that all have these volumes, which the first one adds to the group.
    fn start(members: &[&str], volumes: &[&str]) -> TestGroup {
        let images = Images { fake: FakeCluster::default(), holders: Arc::default() };
        let mut group = TestGroup { images, members: Vec::new() };
        for name in members {
            let member = group.member(name, volumes);
            eventually("it joins", || member.driver.status().incarnation.is_some());
            group.members.push(member);
        }
        group
    }

    fn member(&self, name: &str, volumes: &[&str]) -> TestMember {
        let (client, trouble) = (Arc::<MemberClient>::default(), Arc::<Trouble>::default());
        let state = |name: &&str| {
            let state = self.volume(name, &client, &trouble);
            ((*name).to_owned(), state)
        };
        let volumes: Arc<Mutex<BTreeMap<_, _>>> = Arc::new(Mutex::new(volumes.iter().map(state).collect()));
        let (found, ended) = (volumes.clone(), Ended::default());
        let noted = ended.clone();
        let find: FindVolume = Arc::new(move |name| {
            let state = found.lock().unwrap().get(name).cloned()?;
            Some(Box::new(TestVolume { image: format!("pool/{name}"), state, ended: noted.clone() }))
        });
        let options = GroupOptions {
            name: name.to_owned(),
            address: format!("{name}.example"),
            pool: POOL.to_owned(),
            namespace: None,
            object: OBJECT.to_owned(),
            settings: settings(),
        };
        let fake = self.images.fake.clone();
        let connect = Arc::new(move || Ok(fake.connect()));
        let turns = Box::new(TurnVolumes::new(find, client.clone()));
        let driver = GroupDriver::start(options, connect, turns).unwrap();
        TestMember { driver, volumes, trouble, ended, client }
    }

    /// A standby volume of a process.
    fn volume(&self, name: &str, client: &Arc<MemberClient>, trouble: &Arc<Trouble>) -> Arc<VolumeState> {
        let storage = Arc::new(Storage {
            images: self.images.clone(),
            name: format!("pool/{name}"),
            client: client.clone(),
            opened_by: Mutex::default(),
            trouble: trouble.clone(),
        });
        let identity = VolumeIdentity {
            uuid: VolumeUuid::of_texts(&[name]),
            unit: Default::default(),
            target_name: name.to_owned(),
            disk_number: None,
            claim: Box::new(()),
        };
        let volume = Arc::new(MemVolume::new(1 << 20));
        VolumeState::owned(volume, identity, storage.clone(), storage, None).unwrap()
    }

    fn add(&self, volumes: &[&str]) {
        let volume = |name: &&str| ConfiguredVolume::new(name, &format!("pool/{name}"));
        let volumes = volumes.iter().map(volume).collect();
        self.members[0].driver.command(Command::Add { volumes }).unwrap();
    }

    fn table(&self) -> Table {
        Table::decode(&self.images.fake.content(OBJECT)).unwrap()
    }

    /// Whether each member has so many active volumes, and the table says that all are active.
    fn serve(&self, counts: &[usize]) -> bool {
        let active: Vec<usize> = self.members.iter().map(|member| member.active().len()).collect();
        let table = self.table();
        active == counts && table.volumes().iter().all(|volume| matches!(volume.place, Place::Active(_)))
    }

    fn pin(&self, volume: &str, member: &str) {
        let (volume, member) = (volume.to_owned(), member.to_owned());
        self.members[0].driver.command(Command::Pin { volume, member }).unwrap();
    }
}

const OBJECT: &str = "group";

#[test]
fn volumes_become_active_where_the_group_says_and_move_without_a_fence() {
    let group = TestGroup::start(&["a", "b"], &["v0", "v1", "v2", "v3"]);
    group.add(&["v0", "v1", "v2", "v3"]);
    eventually("two each", || group.serve(&[2, 2]));
    let moved = group.members[0].active()[0].clone();
    group.pin(&moved, "b");
    eventually("it moves, and another one back", || {
        group.serve(&[2, 2]) && group.members[1].active().contains(&moved)
    });
    group.members[0].driver.command(Command::Leave { member: "a".to_owned() }).unwrap();
    eventually("one that leaves has none", || group.serve(&[0, 4]));
    group.members[0].driver.command(Command::Retire { volume: moved.clone() }).unwrap();
    eventually("it is served by nobody", || group.members[1].active().len() == 3);
    eventually("it is forgotten", || group.table().volume(&moved).is_none());
    assert!(!group.images.holders.lock().unwrap().contains_key(&format!("pool/{moved}")));
    assert_eq!(group.images.fake.refused(), [""; 0]);
}

#[test]
fn a_member_that_is_cut_off_serves_nothing_and_the_other_one_everything() {
    let group = TestGroup::start(&["a", "b"], &["v0", "v1"]);
    group.add(&["v0", "v1"]);
    eventually("one each", || group.serve(&[1, 1]));
    let client = group.members[1].client();
    group.images.fake.cut(&client, true);
    eventually("the other one serves both", || group.members[0].active().len() == 2);
    assert_eq!(group.images.fake.refused(), std::slice::from_ref(&client));
    eventually("it has noticed, and joins again", || group.serve(&[1, 1]));
    assert_ne!(group.members[1].client(), client);
    eventually("its sessions were asked to end", || group.members[1].ended.lock().unwrap().len() == 1);
}

#[test]
fn a_volume_that_was_replaced_in_the_config_is_not_served_elsewhere_before_it_is_closed() {
    let group = TestGroup::start(&["a", "b"], &["v0"]);
    group.add(&["v0"]);
    group.pin("v0", "a");
    eventually("it is active", || group.serve(&[1, 0]));
    let a = &group.members[0];
    let next = group.volume("v0", &a.client, &a.trouble);
    let old = a.volumes.lock().unwrap().insert("v0".to_owned(), next).unwrap();
    let before = group.members[1].calls("acquire", "v0");
    group.pin("v0", "b");
    eventually("it serves nothing any longer", || old.serving() == ServingState::Standby);
    // The group hears of it when it is closed, which releases its lock.
    group.images.holders.lock().unwrap().clear();
    drop(old);
    eventually("it is served by the other one", || group.serve(&[0, 1]));
    assert_eq!(group.members[1].calls("acquire", "v0"), before + 1, "it was free at once");
    assert_eq!(group.images.fake.refused(), [""; 0]);
}

#[test]
fn a_volume_that_is_active_without_the_group_is_released_before_it_is_activated() {
    let group = TestGroup::start(&["a"], &["v0"]);
    let a = &group.members[0];
    let alone = turns::activate(&a.state("v0"), false, || (), |_| Ok::<_, Infallible>(()));
    assert_eq!(alone, Ok(TurnChange::Done));
    group.add(&["v0"]);
    eventually("it is active", || group.serve(&[1]) && a.calls("acquire", "v0") == 2);
    assert_eq!(a.calls("release", "v0"), 1);
    assert_eq!(group.images.fake.refused(), [""; 0]);
}

#[test]
fn a_hanging_call_holds_up_no_other_volume_and_makes_nothing_active_when_its_time_is_over() {
    let group = TestGroup::start(&["a"], &["v0", "v1"]);
    let a = &group.members[0];
    a.hang("pool/v0", true);
    group.add(&["v0", "v1"]);
    eventually("the other one is active", || a.active() == ["v1"]);
    eventually("it hangs", || a.trouble.hung.load(Ordering::SeqCst) == 1);
    let client = a.client();
    // Its I/O ends, in the middle of the call, and it continues with another client.
    a.driver.command(Command::Fence { member: "a".to_owned() }).unwrap();
    eventually("the call of the next client hangs", || a.trouble.hung.load(Ordering::SeqCst) == 2);
    eventually("the other volume is active again", || a.active() == ["v1"]);
    assert_ne!(a.client(), client);
    a.hang("pool/v0", false);
    eventually("both are active", || group.serve(&[2]));
    let holders = group.images.holders.lock().unwrap().clone();
    assert!(holders.values().all(|holder| *holder == a.client()), "{holders:?}");
}

#[test]
fn a_volume_that_does_not_start_says_why_and_is_tried_again() {
    let group = TestGroup::start(&["a"], &["v0"]);
    let a = &group.members[0];
    a.fail("acquire", "v0", true);
    group.add(&["v0", "v1"]);
    eventually("it says why", || a.has_problem("'v0' does not start: acquiring the image: acquire fails"));
    eventually("so does one that it lacks", || a.has_problem("'v1' does not start: this gateway does not"));
    a.fail("acquire", "v0", false);
    eventually("it starts", || a.active() == ["v0"]);
    let other = Command::Add { volumes: vec![ConfiguredVolume::new("v0", "pool/other")] };
    assert!(a.driver.command(other).is_err(), "it is another image");
}

#[test]
fn a_lock_that_may_not_be_released_is_taken_from_the_client_by_a_fence() {
    let group = TestGroup::start(&["a", "b"], &["v0", "v1"]);
    group.add(&["v0", "v1"]);
    eventually("one each", || group.serve(&[1, 1]));
    let (a, volume) = (&group.members[0], group.members[0].active()[0].clone());
    let client = a.client();
    a.fail("release", &volume, true);
    group.pin(&volume, "b");
    eventually("it is served by the other one", || group.members[1].active().contains(&volume));
    assert_eq!(group.images.fake.refused(), [client]);
    a.fail("release", &volume, false);
    eventually("one each", || group.serve(&[1, 1]));
}

#[test]
fn a_volume_that_was_lost_starts_in_another_epoch() {
    let group = TestGroup::start(&["a"], &["v0"]);
    group.add(&["v0"]);
    eventually("it is active", || group.serve(&[1]));
    let (state, before) = (group.members[0].state("v0"), group.table().volume("v0").unwrap().epoch);
    // An administrator has broken its lock.
    group.images.holders.lock().unwrap().clear();
    assert_eq!(VolumeState::check_ownership(&Arc::downgrade(&state), || ()), Ok(false));
    eventually("it is active again", || group.serve(&[1]));
    assert!(group.table().volume("v0").unwrap().epoch > before);
    eventually("its sessions were asked to end", || *group.members[0].ended.lock().unwrap() == ["pool/v0"]);
    assert_eq!(group.images.fake.refused(), [""; 0]);
    // It is closed, and opened again with the next config.
    let name = "v0".to_owned();
    let closed = group.members[0].volumes.lock().unwrap().remove(&name);
    drop((state, closed));
    eventually("it says so", || group.members[0].has_problem("this gateway does not have it"));
}
