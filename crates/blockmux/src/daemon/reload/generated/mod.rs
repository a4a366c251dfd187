//! Tests with generated configs: a reload leads from any config to any other one, and the state
//! that it leads to is that of a start.
//!
//! A seed determines a test, and a failure prints it. `BLOCKMUX_CONFIG_SEEDS=17..18 cargo test -p
//! blockmux generated` runs that seed alone. For many seeds, `--profile long-test` is several times
//! as fast, and as daemons wait most of the time, `BLOCKMUX_CONFIG_THREADS=8` runs so many at once.

mod attachments;
mod config;
mod daemon;
mod edits;
mod fabric;
mod pairs;

use self::config::{Genome, seeds};
use self::daemon::{TestDaemon, TestPlace};
use crate::api::bodies::{AddVolume, AttachVolume, Attachment, LimitVolume};
use crate::api::fragment::{ApplyOptions, Fragment};
use crate::api::plan::PlanReport;
use crate::api::request::{Answer, Request};
use crate::api::{ApiError, limits};
use crate::attach::way::Way;
use blockmux_volume::random::SplitMix;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Runs a test with `count` seeds, or those of the environment.
fn for_each_seed(count: u64, run: impl Fn(u64) + Sync) {
    let seeds = seeds(count);
    let threads = std::env::var("BLOCKMUX_CONFIG_THREADS").map_or(1, |text| text.parse().unwrap());
    let next = AtomicU64::new(seeds.start);
    let run_next = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            run(seed);
        }
    };
    thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(run_next))));
}

/// A sequence of valid configs, each with few or many differences from the one before.
struct Configs {
    seed: u64,
    random: SplitMix,
    genome: Genome,
    place: TestPlace,
    /// The texts so far, for the message of a failure.
    texts: Vec<String>,
}

impl Configs {
    fn new(seed: u64) -> Configs {
        let mut random = SplitMix::new(seed);
        let genome = Genome::new(&mut random);
        // To look at everything with the initiators of all protocols takes most of the time.
        let has_clients = seed < ALL_WITH_CLIENTS || seed.is_multiple_of(ONE_WITH_CLIENTS);
        let place = TestPlace::new().with_clients(has_clients);
        Configs { seed, random, genome, place, texts: Vec::new() }
    }

    /// Writes the next config into the file. A generated config may be invalid; it is drawn again.
    fn write_next(&mut self) -> String {
        for _ in 0..MAX_DRAWS {
            let genome = match self.random.below(3) {
                0 => Genome::new(&mut self.random),
                few => self.genome.changed(&mut self.random, few * few),
            };
            let text = genome.text(self.place.ip());
            let text = self.with_attachments(text);
            self.place.write(&text);
            if self.place.check().is_ok() {
                self.genome = genome;
                self.texts.push(text.clone());
                return text;
            }
        }
        panic!("no config of {MAX_DRAWS} is valid");
    }
}

impl Configs {
    /// A config that attaches some of its volumes that have names, as disks that are none.
    fn with_attachments(&mut self, mut text: String) -> String {
        let table: toml::Table = text.parse().unwrap_or_default();
        let volumes = table.get("volume").and_then(toml::Value::as_array).into_iter().flatten();
        for name in volumes.filter_map(|volume| volume.get("name")?.as_str()) {
            match self.random.below(6) {
                0 => text += &format!("[[attachment]]\nvolume = '{name}'\nvia = 'fake'\n"),
                1 => text += &format!("[[attachment]]\nvia = 'fake'\nvolume = '{name}'\nread_only = true\n"),
                _ => {}
            }
        }
        text
    }
}

impl Drop for Configs {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let texts = self.texts.join("\n# ---\n");
            eprintln!("BLOCKMUX_CONFIG_SEEDS={}..{}:\n{texts}", self.seed, self.seed + 1);
        }
    }
}

/// The lines of a plan, without the sessions that it affects, which may have ended meanwhile.
fn lines(report: &PlanReport) -> Vec<String> {
    let now = report.changes.iter().map(|change| change.change.clone());
    now.chain(report.next_start.iter().map(|later| format!("later: {}", later.change))).collect()
}

/// What a daemon serves, by name.
type Snapshot = BTreeMap<String, String>;

#[track_caller]
fn assert_same(what: &str, before: &Snapshot, after: &Snapshot) {
    let keys = before.keys().chain(after.keys());
    let differs = |key: &&String| before.get(*key) != after.get(*key);
    let different: Vec<_> = keys.filter(differs).map(|key| (key, before.get(key), after.get(key))).collect();
    assert!(different.is_empty(), "{what}: {different:#?}");
}

/// Reloads the config file of a daemon in the state `before`. What the plan did not refuse
/// beforehand is applied, and a refusal changes nothing.
fn reload(daemon: &TestDaemon, before: &Snapshot) -> Result<PlanReport, ApiError> {
    let plan = daemon.plan().unwrap();
    let refusals: Vec<_> = lines(&plan).into_iter().filter(|line| line.contains("; refused: ")).collect();
    let reloaded = daemon.reload();
    match &reloaded {
        Err(error) => {
            assert!(!refusals.is_empty(), "the plan did not say that it is refused: {error}: {plan:#?}");
            assert_same("a refused reload has changed", before, &daemon.snapshot());
            assert_eq!(lines(&daemon.plan().unwrap()), lines(&plan), "a refused reload has no effect");
        }
        Ok(done) => {
            assert_eq!(refusals, [""; 0], "the reload did what the plan refuses");
            assert_eq!((lines(done), &done.warnings), (lines(&plan), &Vec::new()));
            let later = PlanReport { changes: Vec::new(), ..plan.clone() };
            assert_eq!(lines(&daemon.plan().unwrap()), lines(&later), "after the reload");
        }
    }
    reloaded
}

/// Applies the config that a daemon returns as JSON: then there is nothing to change.
fn apply_own(daemon: &TestDaemon) {
    let (content, tag) = daemon.control.reloader.export(true);
    let options = ApplyOptions { prune: true, if_match: Some(tag), ..ApplyOptions::default() };
    let fragment = Fragment { path: None, content };
    let answer = match daemon.change(&Request::Apply { fragment, options }) {
        Answer::Noted { answer, .. } => *answer,
        answer => answer,
    };
    let Answer::Plan(report) = answer else { panic!("its own config is refused: {answer:?}") };
    assert_eq!((report.changes, report.warnings), (Vec::new(), Vec::new()));
}

#[test]
fn a_reload_leads_to_the_state_of_a_start_with_the_same_config() {
    for_each_seed(10, |seed| {
        let mut configs = Configs::new(seed);
        configs.write_next();
        let mut daemon = configs.place.start().unwrap();
        let mut started = daemon.snapshot();
        for _ in 0..CHANGES {
            let text = configs.write_next();
            let reloaded = reload(&daemon, &started);
            let waits = reloaded.as_ref().is_ok_and(|report| !report.next_start.is_empty());
            let is_applied = reloaded.is_ok() && !waits;
            let (running, exported, desired) = (daemon.snapshot(), daemon.exported(), daemon.desired());
            apply_own(&daemon);
            assert_same("its own config has changed a daemon", &running, &daemon.snapshot());
            // What runs can be loaded again, and then nothing changes.
            configs.place.write(&exported);
            assert_eq!(lines(&daemon.plan().unwrap()), [""; 0], "{exported}");
            daemon.stop();
            if !is_applied {
                let again = configs.place.start().unwrap();
                assert_same("a start with the exported config differs", &running, &again.snapshot());
                again.stop();
            }
            let with_desired = waits.then(|| {
                configs.place.write(&desired);
                let again = configs.place.start().unwrap();
                let snapshot = again.snapshot();
                again.stop();
                snapshot
            });
            configs.place.write(&text);
            daemon = configs.place.start().unwrap();
            started = daemon.snapshot();
            if is_applied {
                assert_same("a start with the config differs", &running, &started);
            }
            if let Some(snapshot) = with_desired {
                assert_same("a start with what was to wait differs", &started, &snapshot);
            }
            configs.place.check_files();
        }
        daemon.stop();
    });
}

#[test]
fn what_is_refused_and_what_waits_is_said_beforehand() {
    for (before, after, expected) in [
        (
            "iscsi = ['IP:3260']\n[[volume]]\nname = 'a'\nspec = 'null:1m'",
            "iser = ['IP:3260']\n[[volume]]\nname = 'a'\nspec = 'null:1m'",
            "+ iser IP:3260; refused: cannot listen on IP:3260 while this daemon listens on IP:3260, for iSCSI; remove",
        ),
        (
            "nbd = ['unix:n.sock']\n[[volume]]\nname = 'a'\nspec = 'slice:0,1m:file:shared.img'",
            "nbd = ['unix:n.sock']\n[[volume]]\nname = 'b'\nspec = 'slice:0,1m:file:shared.img'",
            "+ volume b: slice:0,1m:file:DIR/shared.img; refused: one disk cannot be exported twice; remove",
        ),
        (
            "nbd = ['unix:n.sock']\n[[volume]]\nname = 'a'\nspec = 'slice:0,1m:file:shared.img'\n[[volume]]\n\
             name = 'b'\nspec = 'slice:1m,1m:file:shared.img'",
            "nbd = ['unix:n.sock']\n[[volume]]\nname = 'a'\nspec = 'slice:0,2m:file:shared.img'\n[[volume]]\n\
             name = 'b'\nspec = 'slice:1m,1m:file:shared.img'",
            "~ volume a: spec: \"slice:0,1m:file:DIR/shared.img\" -> \"slice:0,2m:file:DIR/shared.img\"; refused: it would",
        ),
        (
            "nbd = ['unix:n.sock']\n[[volume]]\nspec = 'null:1m'",
            "nbd = ['unix:n.sock']\n[[volume]]\nname = 'disk0'\nspec = 'null:1m'",
            "later: + volume disk0: name added",
        ),
    ] {
        let place = TestPlace::new();
        place.write(&before.replace("IP", place.ip()));
        let daemon = place.start().unwrap();
        place.write(&after.replace("IP", place.ip()));
        let planned = lines(&daemon.plan().unwrap());
        let expected = expected.replace("IP", place.ip()).replace("DIR", &place.directory());
        assert!(planned.iter().any(|line| line.starts_with(&expected)), "{planned:#?}");
        assert_eq!(reload(&daemon, &daemon.snapshot()).is_err(), expected.contains("refused"));
        daemon.stop();
    }
}

#[test]
fn a_description_changes_together_with_a_size() {
    let config = |volume: &str| format!("nbd = ['unix:n.sock']\n[[volume]]\nname = 'a'\n{volume}");
    let place = TestPlace::new();
    place.write(&config("spec = 'mem:1m'"));
    let daemon = place.start().unwrap();
    place.write(&config("spec = 'mem:2m'\ndescription = 'x'"));
    reload(&daemon, &daemon.snapshot()).unwrap();
    let (_, export) = daemon.control.exports.find("a").unwrap();
    assert_eq!((export.description.as_str(), export.volume.info().size), ("x", 2 << 20));
    daemon.stop();
}

/// A command of `ctl` that changes something, on the volumes and targets that configs have.
fn command(random: &mut SplitMix, volumes: &[String], directory: &str) -> Request {
    let mut pick = |all: &[&str]| all[random.below(all.len() as u64) as usize].to_owned();
    let name = pick(&volumes.iter().map(String::as_str).collect::<Vec<_>>());
    let target =
        pick(&["iqn.2026-11.test:t0", "iqn.2026-11.test:t1", "nqn.2026-11.test:s0", "nqn.2026-11.test:s1"]);
    let number = pick(&["", "1", "2", "5"]).parse().ok();
    match &*pick(&[
        "add",
        "remove",
        "limit",
        "resize",
        "attach",
        "attach",
        "detach",
        "attach-disk",
        "detach-disk",
    ]) {
        "add" => Request::Add(AddVolume {
            volume: pick(&[
                "x=mem:1m",
                "y=null:2m?block_size=4k",
                "z=file:DIR/z.img?size=1m",
                "file:DIR/w.img?size=1m",
            ])
            .replace("DIR", directory)
            .parse()
            .unwrap(),
            read_only: number == Some(1),
            description: pick(&["", "three"]),
            protocols: Some(vec![pick(&["nbd", "iscsi", "nvme_tcp", "srp"])]).filter(|_| number.is_some()),
            allow: None,
            limits: None,
            client_limits: None,
        }),
        "remove" => Request::Remove { name, force: true },
        "limit" => Request::Limit {
            name,
            limits: LimitVolume {
                limits: limits::parse(&pick(&["iops=900", "none", "write_bandwidth=1m"]))
                    .ok()
                    .map(Into::into),
                client_limits: None,
            },
        },
        "resize" => Request::Resize {
            name,
            size: (number != Some(2)).then_some(if number == Some(5) { 1 << 20 } else { 8 << 20 }),
            shrink: number == Some(1) || number == Some(5),
        },
        "attach-disk" => Request::AttachDisk(Attachment {
            volume: name,
            via: Some(Way::Fake),
            socket: None,
            name: None,
            read_only: false,
        }),
        "detach-disk" => Request::DetachDisk { volume: name, force: true },
        "attach" => Request::Attach { target, unit: AttachVolume { volume: name, number, ana_group: None } },
        _ => Request::Detach { target, number: number.unwrap_or(0), force: true },
    }
}

#[test]
fn a_reload_undoes_the_commands_that_a_save_writes() {
    for_each_seed(8, |seed| {
        let mut configs = Configs::new(seed);
        // A target keeps the networks of a volume that a command removes, until the next reload.
        let mut text = configs.write_next();
        while text.contains("allow = ") {
            text = configs.write_next();
        }
        let daemon = configs.place.start().unwrap();
        let started = daemon.snapshot();
        let mut running = started.clone();
        for _ in 0..1 + configs.random.below(4) {
            let volumes: Vec<_> = daemon.control.exports.iter().map(|(_, own)| own.name.clone()).collect();
            if volumes.is_empty() {
                break;
            }
            let request = command(&mut configs.random, &volumes, &configs.place.directory());
            let answer = daemon.change(&request);
            configs.texts.push(format!("# {request}: {answer:?}"));
            let now = daemon.snapshot();
            if let Answer::Failed(_) = answer {
                assert_same("a failed command has changed something", &running, &now);
            }
            running = now;
        }
        let exported = daemon.exported();
        let saved = daemon.change(&Request::Save);
        configs.texts.push(format!("# save: {saved:?}"));
        if let Answer::Failed(_) = saved {
            assert_eq!(configs.place.text(), text, "a save that fails writes nothing");
            // Nothing is written to the volumes, so nothing prevents that they are removed.
            if reload(&daemon, &running).is_ok() {
                assert_same("a reload does not undo commands", &started, &daemon.snapshot());
            }
            daemon.stop();
            return;
        }
        assert_eq!(lines(&daemon.plan().unwrap()), [""; 0], "{exported}");
        daemon.stop();
        let again = configs.place.start().unwrap();
        assert_same("a start with the saved config differs", &running, &again.snapshot());
        configs.place.write(&text);
        if reload(&again, &running).is_ok() {
            assert_same("a reload does not undo what was saved", &started, &again.snapshot());
        }
        again.stop();
        configs.place.check_files();
    });
}

/// Number of changes with each seed.
const CHANGES: usize = 3;
/// The first seeds, all of which have clients.
const ALL_WITH_CLIENTS: u64 = 1000;
/// Of further ones, one of so many has clients.
const ONE_WITH_CLIENTS: u64 = 8;
/// Number of configs that are drawn until one is valid.
const MAX_DRAWS: usize = 30;
