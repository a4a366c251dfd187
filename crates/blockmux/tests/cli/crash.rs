//! Changes and saves that stop at any of their system calls with an effect: the call fails, or the
//! daemon is killed instead of it. strace does that to the running daemon.

use crate::daemon::Daemon;
use crate::program::{BLOCKMUX, blockmux, ended, has, text};
use crate::raw_client::RawClient;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use tempfile::TempDir;

/// The config that runs: a volume that grows, and one that goes with its listener.
const BEFORE: &str = "nbd = ['unix:a.sock?volumes=a', 'unix:old.sock?volumes=old']\ncontrol = 'unix:control'\nstate = 'state'\n\
     [[volume]]\nname = 'a'\nspec = 'file:a.img?size=1m'\n\
     [[volume]]\nname = 'old'\nspec = 'file:old.img'\n";
/// The config that it is changed to, with a new file and new listeners.
const AFTER: &str = "nbd = ['unix:a.sock?volumes=a', 'unix:new.sock?volumes=new']\niscsi = ['127.0.0.1:0']\n\
     control = 'unix:control'\nstate = 'state'\n\
     [[volume]]\nname = 'a'\nspec = 'file:a.img?size=6m'\n\
     [[volume]]\nname = 'new'\nspec = 'file:new.img?size=2m'\n";

/// System calls with an effect, as a regular expression, and the files of the place that they are
/// meant on; none for all files.
type Calls = (&'static str, &'static [&'static str]);

const RELOAD_CALLS: &[Calls] = &[
    ("/^open", &["b.toml", "new.img", "state"]),
    ("/^flock$", &[]),
    ("/^fallocate$", &[]),
    ("/^ftruncate", &[]),
    ("/^f(data)?sync$", &[]),
    ("/^bind$", &[]),
    ("/^listen$", &[]),
    ("/^unlink", &[]),
];
/// Those of a change that does not read the config file.
const CHANGE_CALLS: &[Calls] = &[
    ("/^open", &["new.img", "state"]),
    ("/^(flock|fallocate|ftruncate(64)?|f(data)?sync)$", &[]),
    ("/^(bind|listen|unlink(at)?)$", &[]),
];
/// The main file of a config of several files.
const MAIN: &str = "include = 'conf.d'\nnbd = ['unix:a.sock?volumes=a', 'unix:old.sock?volumes=old']\ncontrol = 'unix:control'\n\
     state = 'state'\n[[volume]]\nname = 'a'\nspec = 'file:a.img?size=1m'\n";
/// The file that it includes.
const INCLUDED: &str = "[[volume]]\nname = 'old'\nspec = 'file:old.img'\n";
const SAVE_ALL_CALLS: &[Calls] = &[
    ("/^open", &["", "conf.d", "b.toml", "conf.d/old.toml"]),
    ("/^(fchmod|f(data)?sync)$", &[]),
    ("/^linkat$", &[]),
    ("/^(rename.*|unlink(at)?)$", &[]),
];
const PUT_BACK_CALLS: &[Calls] =
    &[("/^(fchmod|f(data)?sync)$", &[]), ("/^linkat$", &[]), ("/^unlink(at)?$", &[])];
const SAVE_CALLS: &[Calls] = &[
    ("/^open", &["", "b.toml"]),
    ("/^fchmod$", &[]),
    ("/^f(data)?sync$", &[]),
    ("/^linkat$", &[]),
    ("/^rename", &[]),
];

/// A directory with the config file, and the daemon that serves it.
struct Served {
    daemon: Daemon,
    files: TempDir,
    failing: Option<&'static str>,
}

impl Served {
    fn start() -> Served {
        Served::start_with(BEFORE, None)
    }

    /// Serves a config file, and one that it includes.
    fn start_with(config: &str, included: Option<&str>) -> Served {
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("a.img"), vec![7; 4 << 20]).unwrap();
        fs::write(files.path().join("old.img"), vec![8; 1 << 20]).unwrap();
        fs::write(files.path().join("b.toml"), config).unwrap();
        if let Some(included) = included {
            fs::create_dir(files.path().join("conf.d")).unwrap();
            fs::write(files.path().join("conf.d/old.toml"), included).unwrap();
        }
        let daemon = start_in(files.path());
        let mut client = RawClient::connect(&files.path().join("a.sock"));
        assert_eq!(client.write(0, 512, &[9; 512]), 0);
        Served { daemon, files, failing: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    fn config(&self) -> String {
        fs::read_to_string(self.path("b.toml")).unwrap()
    }

    /// Runs a command, in which `DIR` stands for the directory.
    fn ctl(&self, args: &[&str]) -> Output {
        let directory = self.files.path().display().to_string();
        let args = args.iter().map(|word| word.replace("DIR", &directory));
        let ctl = ["ctl".to_owned(), format!("unix:{}", self.path("control").display())];
        blockmux(ctl.into_iter().chain(args))
    }

    fn said(&self, args: &[&str]) -> String {
        let output = self.ctl(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// The running config, and the sizes of what is served.
    fn running(&self) -> (String, Vec<(String, u64)>) {
        let status: serde_json::Value = serde_json::from_str(&self.said(&["status", "--json"])).unwrap();
        let volumes = status["volumes"].as_array().unwrap().iter();
        let sizes = volumes
            .map(|volume| (volume["name"].as_str().unwrap().to_owned(), volume["size"].as_u64().unwrap()));
        (self.said(&["export"]), sizes.collect())
    }

    /// Makes the `nth` of these system calls fail or end the daemon; `None` if the system does not
    /// permit that.
    fn inject(&self, (call, names): Calls, how: &str, nth: usize) -> Option<Tracer> {
        let mut strace = Command::new("strace");
        let failing = self.failing.map(|failing| failing.rsplit_once(':').unwrap());
        let traced = failing.map_or_else(|| call.to_owned(), |(other, _)| format!("{call},{other}"));
        strace.args(["-f", "-o"]).arg(self.path("strace.log")).args(["-e", &format!("trace={traced}")]);
        strace.arg(format!("--inject={call}:{how}:when={nth}"));
        strace.args(failing.map(|(other, nth)| format!("--inject={other}:error=EIO:when={nth}")));
        for name in names {
            let path = if name.is_empty() { self.files.path().to_owned() } else { self.path(name) };
            strace.arg("-P").arg(path);
        }
        let pid = self.daemon.pid().as_raw_nonzero().to_string();
        let mut strace = strace.args(["-p", &pid]).stderr(Stdio::piped()).spawn().unwrap();
        let (mut line, mut stderr) = (String::new(), BufReader::new(strace.stderr.take().unwrap()));
        while !line.contains("attached") {
            line.clear();
            if stderr.read_line(&mut line).unwrap() == 0 || line.contains("not permitted") {
                let _ = (strace.kill(), strace.wait());
                return None;
            }
        }
        Some(Tracer { strace, _stderr: stderr, log: self.path("strace.log") })
    }

    /// Checks that no file is shorter than it was and that no data is lost.
    fn check_data(&self) {
        let content = fs::read(self.path("a.img")).unwrap();
        assert!(content.len() >= 4 << 20, "a.img has {} bytes", content.len());
        assert_eq!((&content[..512], &content[512..1024]), (&[7; 512][..], &[9; 512][..]));
        assert!(content[1024..4 << 20].iter().all(|byte| *byte == 7));
        assert!(fs::read(self.path("old.img")).unwrap() == [8; 1 << 20]);
    }

    /// Checks that a daemon starts with a config after all that has happened, and that it leaves
    /// only the files that belong to the configs.
    fn check_start(&self, config: &str) {
        fs::write(self.path("b.toml"), config).unwrap();
        self.check_start_as_it_is();
        assert_eq!(self.config(), config);
    }

    /// Checks that a daemon starts, and that it leaves only the files that belong to the configs.
    fn check_start_as_it_is(&self) {
        let mut daemon = start_in(self.files.path());
        assert_eq!(RawClient::connect(&self.path("a.sock")).read(512, 512), [9; 512]);
        daemon.signal(Signal::TERM);
        assert!(daemon.wait().success());
        self.check_data();
        let known = ["a.img", "old.img", "new.img", "b.toml", "conf.d", "part.toml", "state", "strace.log"];
        // A socket of a killed daemon stays if the config does not name it any more.
        let sockets = ["old.sock", "new.sock"];
        for entry in fs::read_dir(self.files.path()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(known.contains(&&*name) || sockets.contains(&&*name), "{name} was left behind");
        }
    }
}

fn start_in(directory: &Path) -> Daemon {
    let mut command = Command::new(BLOCKMUX);
    command.args(["serve", "--json", "--config"]).arg(directory.join("b.toml"));
    Daemon::spawn_in(tempfile::tempdir().unwrap(), command.stdout(Stdio::piped()).stderr(Stdio::piped()))
}

/// A strace of a daemon.
struct Tracer {
    strace: Child,
    /// It writes a line for each new thread, and would end without a reader.
    _stderr: BufReader<ChildStderr>,
    log: PathBuf,
}

impl Tracer {
    /// Leaves the daemon, which may have been killed; returns whether the system call was reached.
    fn end(mut self, is_killed: bool) -> bool {
        let signal = if is_killed { Signal::KILL } else { Signal::TERM };
        let _ = kill_process(Pid::from_child(&self.strace), signal);
        ended(&mut self.strace);
        is_killed || fs::read_to_string(&self.log).unwrap().contains("(INJECTED)")
    }
}

/// Stops `work` at each of its calls, and passes each place where it was stopped to `check`,
/// together with the number of the call and the output of the work.
fn at_each(
    calls: &[Calls],
    how: &str,
    start: impl Fn() -> Served,
    work: &[&str],
    mut check: impl FnMut(Served, usize, &Output) -> Option<Served>,
) {
    if !has("strace") {
        return;
    }
    let mut number = 0;
    for call in calls {
        let (mut served, mut nth) = (None, 0);
        loop {
            nth += 1;
            assert!(nth < MAX_CALLS, "{call:?} has no end");
            let own = served.take().unwrap_or_else(&start);
            let Some(tracer) = own.inject(*call, how, nth) else { return skipped() };
            let output = own.ctl(work);
            let kills = how.contains("KILL");
            // A failure that the daemon reports is that of another call.
            let is_answered = output.status.success() || text(&output.stderr).contains("cannot be written");
            let is_killed = kills && !is_answered;
            if !tracer.end(is_killed) || kills && !is_killed {
                let has_failed = own.failing.is_some() && is_answered;
                assert!(output.status.success() || has_failed, "{call:?} {nth}: {}", text(&output.stderr));
                break;
            }
            served = check(own, number, &output);
            number += 1;
        }
        assert!(nth > 1, "{call:?} was not called");
    }
}

#[expect(clippy::print_stdout, reason = "a skipped test says why")]
fn skipped() {
    println!("skipped: this system does not permit strace to attach to a process");
}

#[test]
fn a_reload_that_is_killed_at_any_call_loses_nothing_and_either_config_starts() {
    at_each(
        RELOAD_CALLS,
        "signal=KILL",
        || Served::start().with(Served::write_after),
        &["reload"],
        |mut served, number, _| {
            assert!(!served.daemon.wait().success());
            served.check_data();
            served.check_start(if number.is_multiple_of(2) { BEFORE } else { AFTER });
            None
        },
    );
}

#[test]
fn a_reload_that_fails_at_any_call_changes_nothing() {
    at_each(
        RELOAD_CALLS,
        "error=EIO",
        || Served::start().with(Served::write_after),
        &["reload"],
        |served, _, output| {
            served.check_data();
            let (exported, sizes) = served.running();
            let names: Vec<_> = sizes.iter().map(|(name, size)| (name.as_str(), size >> 20)).collect();
            if output.status.success() {
                // What failed is reported and harmless, such as the removal of a socket.
                assert!(exported.contains("new.sock") && names == [("a", 6), ("new", 2)], "{exported}");
                return None;
            }
            assert!(exported.contains("old.sock") && names == [("a", 1), ("old", 1)], "{exported} {names:?}");
            assert_eq!(RawClient::connect(&served.path("old.sock")).read(0, 512), [8; 512]);
            assert!(!served.path("new.sock").exists());
            Some(served)
        },
    );
}

#[test]
fn a_save_that_is_killed_at_any_call_leaves_the_old_config_file_or_the_new_one() {
    at_each(
        SAVE_CALLS,
        "signal=KILL",
        || Served::start().with(Served::add),
        &["save"],
        |mut served, _, _| {
            assert!(!served.daemon.wait().success());
            let config = served.config();
            assert!(config == BEFORE || config.contains("name = \"more\""), "{config}");
            served.check_start(&config);
            None
        },
    );
}

#[test]
fn a_save_that_fails_at_any_call_changes_no_file() {
    at_each(
        SAVE_CALLS,
        "error=EIO",
        || Served::start().with(Served::add),
        &["save"],
        |served, _, output| {
            if output.status.success() {
                assert!(served.config().contains("name = \"more\""));
                return None;
            }
            assert_eq!(served.config(), BEFORE, "{}", text(&output.stderr));
            assert!(!served.path(".b.toml.new").exists());
            assert!(served.said(&["diff"]).contains("- volume more"), "it is still to be saved");
            Some(served)
        },
    );
}

#[test]
fn an_apply_that_is_killed_at_any_call_loses_nothing_and_changes_no_config() {
    each_change(CHANGE_CALLS, &["apply", "--prune", "DIR/part.toml"], |served| {
        fs::write(served.path("part.toml"), AFTER).unwrap();
    });
}

#[test]
fn an_edit_that_is_killed_at_any_call_loses_nothing_and_changes_no_config() {
    // It has no listener.
    let calls = &CHANGE_CALLS[..2];
    each_change(calls, &["add", "volume", "new", "spec=file:DIR/new.img?size=2m"], |_| {});
}

/// Kills the daemon at each call of a change of the running config.
fn each_change(calls: &[Calls], work: &[&str], prepare: impl Fn(&Served)) {
    at_each(
        calls,
        "signal=KILL",
        || Served::start().with(&prepare),
        work,
        |mut served, _, _| {
            assert!(!served.daemon.wait().success());
            served.check_data();
            assert_eq!(served.config(), BEFORE, "a change is not saved");
            served.check_start(BEFORE);
            None
        },
    );
}

#[test]
fn a_save_of_several_files_that_is_killed_at_any_call_leaves_all_old_ones_or_all_new_ones() {
    let mut seen = [false; 2];
    at_each(
        SAVE_ALL_CALLS,
        "signal=KILL",
        || Served::start_with(MAIN, Some(INCLUDED)).with(Served::change_both),
        &["save"],
        |mut served, _, _| {
            assert!(!served.daemon.wait().success());
            seen[usize::from(served.check_all_old_or_new())] = true;
            None
        },
    );
    assert!(seen == [true; 2] || seen == [false; 2], "it was killed before and after the decision");
}

#[test]
fn a_save_of_several_files_that_fails_and_is_then_killed_leaves_all_old_ones_or_all_new_ones() {
    // The second file cannot be replaced; then its replacement cannot be flushed.
    for (failing, calls) in [("/^rename:3", PUT_BACK_CALLS), ("/^f(data)?sync$:8", &[("/^rename", &[][..])])]
    {
        let mut seen = [0; 2];
        at_each(
            calls,
            "signal=KILL",
            || Served::start_with(MAIN, Some(INCLUDED)).with(Served::change_both).failing(failing),
            &["save"],
            |mut served, _, _| {
                assert!(!served.daemon.wait().success());
                seen[usize::from(served.check_all_old_or_new())] += 1;
                None
            },
        );
        // A list decides for the new ones for a moment only.
        assert!(seen[0] > 2 || seen == [0; 2], "{failing}: {seen:?}");
    }
}

#[test]
fn a_save_of_several_files_that_fails_at_any_call_changes_none() {
    at_each(
        SAVE_ALL_CALLS,
        "error=EIO",
        || Served::start_with(MAIN, Some(INCLUDED)).with(Served::change_both),
        &["save"],
        |served, _, output| {
            let [main, included] = served.both();
            if output.status.success() {
                assert!(main.contains("name = \"more\"") && included.contains("iops = 900"));
                return None;
            }
            assert!(main == MAIN && included == INCLUDED, "{main}{included}{}", text(&output.stderr));
            assert!(served.said(&["diff"]).contains("- volume more"), "it is still to be saved");
            Some(served)
        },
    );
}

impl Served {
    /// This daemon after some work.
    fn with(self, work: impl Fn(&Served)) -> Served {
        work(&self);
        self
    }

    /// Makes changes that neither of two config files has.
    fn change_both(&self) {
        self.said(&["add", "more=null:1m"]);
        self.said(&["limit", "old", "iops=900"]);
    }

    /// Lets another call fail, as strace has it: the calls, a colon, and the number of the call.
    fn failing(self, failing: &'static str) -> Served {
        Served { failing: Some(failing), ..self }
    }

    /// Checks that a start finds both files of before the save, or both new ones, and returns
    /// whether these are the new ones.
    fn check_all_old_or_new(&self) -> bool {
        // A start completes what was decided.
        let checked = text(&blockmux(["check", &self.path("b.toml").display().to_string()]).stderr);
        let is_decided = self.path(".b.toml.commit").exists();
        assert_eq!(
            checked.contains("b.toml: a save was interrupted; a start first completes it"),
            is_decided
        );
        self.check_start_as_it_is();
        let [main, included] = self.both();
        let is_new = main.contains("name = \"more\"");
        assert_eq!(included.contains("iops = 900"), is_new, "{main}{included}");
        assert!(is_new || main == MAIN && included == INCLUDED, "{main}{included}");
        let names = fs::read_dir(self.path("conf.d")).unwrap().count();
        assert_eq!(names, 1, "no text of the save is left");
        is_new
    }

    /// The texts of both config files.
    fn both(&self) -> [String; 2] {
        ["b.toml", "conf.d/old.toml"].map(|name| fs::read_to_string(self.path(name)).unwrap())
    }

    fn write_after(&self) {
        fs::write(self.path("b.toml"), AFTER).unwrap();
    }

    /// Makes a change that the config file does not have.
    fn add(&self) {
        self.said(&["add", "more=null:1m"]);
    }
}

/// More than any of the calls.
const MAX_CALLS: usize = 60;
