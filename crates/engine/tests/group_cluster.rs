//! Members of a gateway group over a real cluster, which `make test-cluster` starts: this process,
//! and two others that are killed and stopped. Each writes to the images that it owns all the time.
#![expect(clippy::print_stdout, reason = "members say what they do, and times are reported")]

#[expect(dead_code, reason = "the cluster of other tests, too")]
mod ceph;

use blockmux_engine::group::{Activation, GroupDriver, GroupOptions, GroupVolumes, VolumeReports};
use blockmux_group::table::ConfiguredVolume;
use blockmux_group::{Command, Epoch, Place, Refusal, Settings, Table};
use blockmux_rbd::cluster::{Cluster, ClusterOptions};
use blockmux_rbd::error::RbdError;
use blockmux_rbd::image::{Image, ImageName};
use blockmux_rbd::requests::{self, Finished, RequestError, RequestQueue};
use blockmux_volume::{Memory, Pages, Seg, SgList};
use ceph::TestImage;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// The images that a member owns, and writes to.
struct ImageVolumes {
    say: Say,
    turn: Option<Arc<Turn>>,
}

/// Where a member says what it does, in lines.
type Say = Arc<dyn Fn(String) + Send + Sync>;

/// The time of one client.
struct Turn {
    cluster: Arc<Cluster>,
    reports: VolumeReports,
    say: Say,
    is_over: AtomicBool,
    /// Those that are active, and whether they are to be released.
    active: Mutex<BTreeMap<String, Arc<AtomicBool>>>,
}

impl GroupVolumes for ImageVolumes {
    fn begin(&mut self, cluster: &Arc<Cluster>, reports: VolumeReports) {
        let (say, is_over, active) = (self.say.clone(), AtomicBool::new(false), Mutex::default());
        self.turn = Some(Arc::new(Turn { cluster: cluster.clone(), reports, say, is_over, active }));
    }

    fn activate(&mut self, activation: Activation) {
        let turn = self.turn.clone().unwrap();
        thread::spawn(move || turn.serve(&activation));
    }

    fn deactivate(&mut self, volume: &str, _epoch: Epoch) {
        let turn = self.turn.as_ref().unwrap();
        turn.active.lock().unwrap()[volume].store(true, Ordering::SeqCst);
    }

    fn end_io(&mut self) {
        let turn = self.turn.take().unwrap();
        turn.is_over.store(true, Ordering::SeqCst);
        (turn.say)("ended".to_owned());
        // The last reference closes the connection, which may block.
        thread::spawn(move || drop(turn));
    }
}

impl Turn {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Owns an image, and writes to it until it is released, or the client's time is over.
    fn serve(&self, Activation { volume, image, epoch }: &Activation) {
        let image = match self.own(image) {
            Ok(image) => image,
            Err(error) => {
                (self.say)(format!("note failed {volume}: {error}"));
                return self.reports.activation_failed(volume, *epoch, &error.to_string());
            }
        };
        let is_released = Arc::new(AtomicBool::new(false));
        self.active.lock().unwrap().insert(volume.clone(), is_released.clone());
        let mut writer =
            Writer { say: self.say.clone(), queue: RequestQueue::new(image.clone()).unwrap(), last: None };
        (self.say)(format!("serves {volume} {}", epoch.0));
        self.reports.activated(volume, *epoch);
        let mut count = 0;
        while !self.is_over() && !is_released.load(Ordering::SeqCst) {
            count += 1;
            match writer.write_checked([epoch.0, count], || self.is_over()) {
                Some(Ok(())) => {}
                // It is asked once more below.
                Some(Err(_)) => {
                    self.reports.client_fenced();
                    break;
                }
                None => break,
            }
        }
        if is_released.load(Ordering::SeqCst) && !self.is_over() {
            self.active.lock().unwrap().remove(volume);
            drop(writer);
            image.release_lock().unwrap();
            (self.say)(format!("released {volume} {}", epoch.0));
            return self.reports.deactivated(volume, *epoch);
        }
        let (write, read) = writer.late();
        (self.say)(format!("late {volume} write {write} read {read}"));
    }

    fn own(&self, image: &str) -> Result<Arc<Image>, RbdError> {
        let name =
            ImageName { pool: POOL.to_owned(), namespace: None, image: image.to_owned(), snapshot: None };
        let begun = Instant::now();
        let image = Image::open(&self.cluster, &name, false, Box::new(|| {}))?;
        let opened = begun.elapsed();
        image.acquire_lock()?;
        (self.say)(format!("note open {opened:?}, lock {:?}", begun.elapsed() - opened));
        Ok(image)
    }
}

/// Writes to the first block of an image, and reads before each write what it has written before.
struct Writer {
    say: Say,
    queue: RequestQueue,
    last: Option<[u64; 2]>,
}

const WRITE: usize = 1;
const READ: usize = 2;

impl Writer {
    /// `None` if it is over before the cluster has answered.
    fn write_checked(
        &mut self,
        content: [u64; 2],
        is_over: impl Fn() -> bool,
    ) -> Option<Result<(), RequestError>> {
        self.read(0);
        let read = self.wait(&is_over)?;
        if let Err(error) = read.result {
            return Some(Err(error));
        }
        let found = &read.data.to_vec()[..16];
        if self.last.is_some_and(|last| found != bytes(last)) {
            (self.say)(format!("{VIOLATION}, after {:?}: {found:?}", self.last));
        }
        self.last = Some(content);
        self.write(0, &bytes(content));
        // librbd does not say that a client is refused that writes, but does if it reads.
        let (mut probes, mut written) = (0, None);
        while written.is_none() || probes > 0 {
            let done = match self.wait_for(Duration::from_secs(1)) {
                Some(done) => done,
                None if is_over() => return None,
                None => {
                    self.read(0);
                    probes += 1;
                    continue;
                }
            };
            if done.result.is_err() {
                return Some(done.result);
            }
            match done.token {
                WRITE => written = Some(done.result),
                _ => probes -= 1,
            }
        }
        written
    }

    /// Writes to the second block, and reads, as a gateway that has not noticed anything.
    fn late(&mut self) -> (String, String) {
        self.write(512, &[0xff; 16]);
        self.read(512);
        let (mut write, mut read) = ("unanswered".to_owned(), "unanswered".to_owned());
        while let Some(done) = self.wait_for(Duration::from_secs(5)) {
            let what = match done.result {
                Ok(()) => "done".to_owned(),
                Err(RequestError::Errno(errno)) => format!("errno={}", errno.0),
                Err(other) => format!("{other:?}"),
            };
            *(if done.token == WRITE { &mut write } else { &mut read }) = what;
        }
        (write, read)
    }

    fn write(&mut self, offset: u64, content: &[u8]) {
        let data = Seg::from_slice(&[content, &[0; 496][..]].concat());
        let _ = self.queue.submit(WRITE, requests::Command::Write { offset }, SgList::one(data));
    }

    fn read(&mut self, offset: u64) {
        let data = Memory::from_pages(&Pages::from_heap(4096)).seg(0, 512);
        let _ = self.queue.submit(READ, requests::Command::Read { offset }, SgList::one(data));
    }

    fn wait(&mut self, is_over: impl Fn() -> bool) -> Option<Finished> {
        loop {
            let done = self.wait_for(Duration::from_millis(100));
            if done.is_some() || is_over() {
                return done;
            }
        }
    }

    fn wait_for(&mut self, limit: Duration) -> Option<Finished> {
        let done = self.queue.poll();
        if done.is_some() || self.queue.arm() {
            return done.or_else(|| self.queue.poll());
        }
        let limit = Timespec::try_from(limit).unwrap();
        // If it fails, that is as a wait that ends early.
        let _ = poll(&mut [PollFd::new(&self.queue.as_fd(), PollFlags::IN)], Some(&limit));
        self.queue.poll()
    }
}

fn bytes([epoch, count]: [u64; 2]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&epoch.to_be_bytes());
    bytes[8..].copy_from_slice(&count.to_be_bytes());
    bytes
}

fn start(name: &str, conf: &Path, object: &str, say: Say) -> GroupDriver {
    let cluster = ClusterOptions { conf: Some(conf.to_owned()), ..ClusterOptions::new() };
    let options = GroupOptions {
        name: name.to_owned(),
        address: format!("{name}.example"),
        pool: POOL.to_owned(),
        namespace: None,
        object: object.to_owned(),
        settings: settings(),
    };
    let connect = Arc::new(move || Cluster::connect(&cluster));
    GroupDriver::start(options, connect, Box::new(ImageVolumes { say, turn: None })).unwrap()
}

/// Those of a group, except that volumes move to new members sooner.
fn settings() -> Settings {
    Settings { stable_after: 10, move_every: Duration::from_millis(200), ..Settings::default() }
}

/// Another process that is a member, and what it says.
struct Process {
    name: &'static str,
    child: Child,
}

impl Process {
    fn start(group: &Group, name: &'static str) -> Process {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", TEST, "--nocapture"]).env(MEMBER, name).env(OBJECT, &group.object);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let errors = BufReader::new(child.stderr.take().unwrap()).lines();
        let sender = group.said.0.clone();
        thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| drop(sender.send(Said::new(name, line))))
        });
        let sender = group.said.0.clone();
        let error = move |line| drop(sender.send(Said::new(name, format!("error {line}"))));
        thread::spawn(move || errors.map_while(Result::ok).for_each(error));
        Process { name, child }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A line of a member.
struct Said {
    at: Instant,
    by: &'static str,
    line: String,
}

impl Said {
    fn new(by: &'static str, line: String) -> Said {
        Said { at: Instant::now(), by, line }
    }

    fn words(&self) -> Vec<&str> {
        self.line.split(' ').collect()
    }
}

struct Group {
    object: String,
    driver: GroupDriver,
    said: (Sender<Said>, Receiver<Said>),
}

impl Group {
    fn table(&self) -> Option<Table> {
        self.driver.status().table.clone()
    }

    /// Volumes of the member with this name, and their epochs.
    fn volumes_of(&self, name: &str) -> Vec<(String, Epoch)> {
        let Some(table) = self.table() else { return Vec::new() };
        let owner = table.member(name).filter(|member| member.is_up).map(|member| member.incarnation);
        let is_its = |place: Place| owner.is_some() && place == Place::Active(owner.unwrap());
        let its = table.volumes().iter().filter(|volume| is_its(volume.place));
        its.map(|volume| (volume.name.clone(), volume.epoch)).collect()
    }

    fn wait_until_even(&self) {
        eventually("two volumes each", || NAMES.iter().all(|name| self.volumes_of(name).len() == 2));
    }

    /// Lines until each of these volumes is served in a later epoch by another member, and when the
    /// last one was.
    fn wait_until_served(&self, volumes: &[(String, Epoch)], not_by: &str) -> Instant {
        let mut left = volumes.to_vec();
        loop {
            let said = self.next();
            if let ["serves", volume, epoch] = said.words()[..]
                && said.by != not_by
            {
                let epoch = Epoch(epoch.parse().unwrap());
                left.retain(|(of, before)| of != volume || epoch <= *before);
            }
            if left.is_empty() {
                return said.at;
            }
        }
    }

    /// The next line that this member says which begins so.
    fn wait_for(&self, by: &str, begin: &str) -> Said {
        loop {
            let said = self.next();
            if said.by == by && said.line.starts_with(begin) {
                return said;
            }
        }
    }

    fn next(&self) -> Said {
        let said = self.said.1.recv_timeout(LIMIT).expect("somebody says something");
        println!("    {}: {}", said.by, said.line);
        let is_bad = ["panicked", VIOLATION].iter().any(|bad| said.line.contains(bad));
        assert!(!is_bad, "{}: {}", said.by, said.line);
        said
    }
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: it does not happen");
        thread::park_timeout(Duration::from_millis(20));
    }
}

/// The other process of the test.
fn be_member(name: &str, conf: PathBuf) {
    // Ends a line of the test's own.
    println!();
    let say = Arc::new(|line: String| println!("{line}"));
    let object = std::env::var(OBJECT).unwrap();
    let _driver = start(name, &conf, &object, say);
    loop {
        thread::park();
    }
}

#[test]
fn volumes_of_members_that_are_killed_or_stopped_move_and_their_clients_are_refused() {
    let conf = std::env::var_os("BLOCKMUX_CEPH_CONF").map(PathBuf::from);
    if let (Ok(name), Some(conf)) = (std::env::var(MEMBER), conf) {
        return be_member(&name, conf);
    }
    let images: Option<Vec<TestImage>> =
        (0..6).map(|nth| TestImage::new(&format!("group{nth}"), &["--size", "8M"])).collect();
    let Some(images) = images else { return };
    let (sender, receiver) = channel();
    let (said, object) = (sender.clone(), format!("blockmux.group.{}", std::process::id()));
    let say = Arc::new(move |line: String| drop(said.send(Said::new("a", line))));
    let driver = start("a", &images[0].conf, &object, say);
    let group = Group { object, driver, said: (sender, receiver) };
    eventually("the first one joins", || group.driver.status().incarnation.is_some());
    let volume = |(nth, image): (usize, &TestImage)| ConfiguredVolume::new(&format!("v{nth}"), &image.name);
    let volumes = images.iter().enumerate().map(volume).collect();
    group.driver.command(Command::Configure { version: 1, volumes }).unwrap();
    let [b, mut c] = ["b", "c"].map(|name| Process::start(&group, name));
    group.wait_until_even();
    assert_eq!(group.table().unwrap().to_fence(), []);

    // Killed, without a word.
    let lost = group.volumes_of("b");
    let killed = Instant::now();
    drop(b);
    let served = group.wait_until_served(&lost, "b");
    println!("  killed: its volumes are served by others after {:?}", served - killed);
    let b = Process::start(&group, "b");
    group.wait_until_even();

    // Moved by decision.
    let (moved, decided) = (group.volumes_of("c"), Instant::now());
    group.driver.command(Command::Drain { member: "c".to_owned() }).unwrap();
    let served = group.wait_until_served(&moved, "c");
    println!("  drained: {} volumes are served by others after {:?}", moved.len(), served - decided);
    group.driver.command(Command::Resume { member: "c".to_owned() }).unwrap();
    group.wait_until_even();

    // Stopped, with its connections open and I/O in flight.
    let lost = group.volumes_of("c");
    let stopped = Instant::now();
    c.signal(Signal::STOP);
    let served = group.wait_until_served(&lost, "c");
    println!("  stopped: its volumes are served by others after {:?}", served - stopped);
    c.signal(Signal::CONT);
    for _ in &lost {
        let said = group.wait_for("c", "late ");
        let [_, volume, _, write, _, read] = said.words()[..] else { panic!("{}", said.line) };
        assert!(lost.iter().any(|(of, _)| of == volume));
        assert!(write == REFUSED || write == "unanswered", "{write}");
        assert_eq!(read, REFUSED);
    }
    group.wait_until_even();
    assert!(c.child.try_wait().unwrap().is_none() && c.name == "c", "the same process serves again");
    // Nothing of what the old client has written late is there.
    let place = tempfile::tempdir().unwrap();
    for (volume, _) in &lost {
        let (image, file) = (&images[volume[1..].parse::<usize>().unwrap()], place.path().join(volume));
        image.rbd(&["export", "--no-progress", &image.name, file.to_str().unwrap()]);
        assert!(std::fs::read(file).unwrap()[512..1024].iter().all(|byte| *byte == 0), "{volume}");
    }
    let unknown = group.driver.command(Command::Drain { member: "x".to_owned() });
    assert_eq!(unknown, Err(Refusal::UnknownMember("x".to_owned())));
    drop(b);
}

const TEST: &str = "volumes_of_members_that_are_killed_or_stopped_move_and_their_clients_are_refused";
const NAMES: [&str; 3] = ["a", "b", "c"];
const POOL: &str = "rbd";
/// Set in the processes that are members.
const MEMBER: &str = "BLOCKMUX_GROUP_MEMBER";
const OBJECT: &str = "BLOCKMUX_GROUP_OBJECT";
const VIOLATION: &str = "another client has written meanwhile";
const LIMIT: Duration = Duration::from_secs(60);
/// ESHUTDOWN: the cluster has blocklisted the client.
const REFUSED: &str = "errno=108";
