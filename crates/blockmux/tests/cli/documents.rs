//! Examples of the pages for users do what a reader expects who copies them.
//!
//! They run as they are, in a root directory and a network namespace of their own that have what
//! the pages suppose: addresses, interfaces, images, secrets, keys and certificates.

use crate::examples::pages;
use crate::nbd_tls::Credentials;
use crate::program::{BLOCKMUX, has, text};
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Directories that the package and a reader have made.
const DIRECTORIES: [&str; 10] = [
    "etc/blockmux/conf.d",
    "etc/pki/blockmux",
    "var/lib/blockmux/aoe",
    "run/blockmux",
    "run/user/1000",
    "srv",
    "root",
    "opt",
    "tmp",
    "usr",
];

/// Prepares the network and the root directory `$1`, then runs `$2` there.
const ENTER: &str = r#"
    set -e
    ip link set lo up
    for address in 192.0.2.1 192.0.2.2 192.0.2.3; do ip addr add $address dev lo; done
    ip link add eth0 type veth peer name eth1
    ip link set eth0 up
    ip link set eth1 up
    ip link add eth2 type veth peer name eth3
    ip link set eth2 up
    for part in usr dev proc sys; do mount --rbind /$part "$1/$part"; done
    mount --bind "$3" "$1/opt/blockmux"
    cd "$1/root"
    TMPDIR=/tmp HOME=/root XDG_STATE_HOME= PATH=/opt:/usr/sbin:/usr/bin exec chroot "$1" /bin/sh -c "cd /etc/blockmux; $2"
"#;

/// A root directory for examples.
pub(crate) struct Place(TempDir);

impl Place {
    pub(crate) fn new() -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        for directory in DIRECTORIES {
            let path = place.path(directory);
            fs::DirBuilder::new().recursive(true).mode(0o700).create(path).unwrap();
        }
        for name in ["bin", "lib", "lib64", "sbin"] {
            symlink(format!("usr/{name}"), place.path(name)).unwrap();
        }
        for name in ["dev", "proc", "sys"] {
            fs::create_dir(place.path(name)).unwrap();
        }
        for name in ["etc/passwd", "etc/group"] {
            fs::copy(Path::new("/").join(name), place.path(name)).unwrap();
        }
        place.write("opt/blockmux", b"", 0o700);
        for name in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
            let content = fs::read(credentials().path(name)).unwrap();
            place.write(&format!("etc/pki/blockmux/{name}"), &content, 0o600);
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: &[u8], mode: u32) {
        fs::write(self.path(name), content).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Makes an image at a path of an example.
    pub(crate) fn image(&self, path: &str, size: u64) {
        fs::File::create(self.named(path)).unwrap().set_len(size).unwrap();
    }

    /// Makes a secret or a key file at a path of an example.
    fn secret(&self, path: &str, content: &str) {
        self.write(self.named(path).to_str().unwrap(), content.as_bytes(), 0o600);
    }

    /// Where a path of an example is. It is relative to the config file, and to where commands run.
    fn named(&self, path: &str) -> PathBuf {
        let there = Path::new("/etc/blockmux").join(path);
        self.path(there.strip_prefix("/").unwrap().to_str().unwrap())
    }

    /// Runs a shell's line there.
    fn run(&self, line: &str) -> Output {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "--net"]);
        command.args(["sh", "-c", ENTER, "sh"]).arg(self.0.path()).args([line, BLOCKMUX]);
        command.output().unwrap()
    }

    /// Makes the files that the values of a config file name.
    fn furnish(&self, table: &toml::Table) {
        for (key, value) in table {
            match value {
                toml::Value::Table(table) => self.furnish(table),
                toml::Value::Array(list) => {
                    list.iter().filter_map(toml::Value::as_table).for_each(|table| self.furnish(table));
                }
                toml::Value::String(value) => self.furnish_one(key, value),
                _ => {}
            }
        }
    }

    fn furnish_one(&self, key: &str, value: &str) {
        match (key, value.split_once(':')) {
            ("dhchap_secret_file", _) => {
                self.secret(value, "DHHC-1:00:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:");
            }
            ("dhchap_ctrl_secret_file", _) => {
                self.secret(value, "DHHC-1:01:xhpN8YQ0bpjH83p5yxlWLtSiXislYPoRsC6dIx1EcTfiGqn9:");
            }
            ("tls_key_file", _) => {
                self.secret(value, "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:");
            }
            _ if key.ends_with("_file") => {
                self.secret(value, &format!("secret-of-{}\n", value.replace('/', "-")))
            }
            ("spec", Some(("file", path))) if !path.contains("size=") => self.image(path, 16 << 20),
            _ => {}
        }
    }
}

/// An example with small disks, which are populated at once.
fn small(example: &str) -> String {
    example.replace("mem:1g", "mem:16m").replace("mem:4g", "mem:16m")
}

/// Certificates, made once.
fn credentials() -> &'static Credentials {
    static MADE: OnceLock<Credentials> = OnceLock::new();
    MADE.get_or_init(Credentials::new)
}

/// Whether the namespaces can be made; if not, prints that the test is skipped.
#[expect(clippy::print_stdout, reason = "a skipped test says why")]
pub(crate) fn can_run() -> bool {
    if !["unshare", "ip", "mount", "chroot"].into_iter().all(has) {
        return false;
    }
    let output = Place::new().run("blockmux --version");
    if !output.status.success() {
        println!("skipped: no namespaces: {}", text(&output.stderr));
    }
    output.status.success()
}

/// Lines that run commands one after another, and print those that fail, with their places and what
/// they said.
fn checked(commands: &[(String, String)]) -> String {
    let run = |(from, command): &(String, String)| {
        format!("({command}) > said 2>&1 || {{ echo '{from}:'; cat said; }}")
    };
    commands.iter().map(run).collect::<Vec<_>>().join("\n")
}

/// Runs commands one after another; returns those that fail, with their places and what they said.
fn failures(place: &Place, commands: &[(String, String)]) -> String {
    let ran = place.run(&checked(commands));
    format!("{}{}", text(&ran.stdout), text(&ran.stderr))
}

/// Runs commands as [`failures`] does, beside a daemon with the config `blockmux.toml`.
pub(crate) fn failures_with_daemon(place: &Place, commands: &[(String, String)]) -> String {
    let script = WITH_DAEMON.replace(" VOLUMES --control SOCKET", "");
    let ran = place.run(&script.replace("COMMANDS", &checked(commands)));
    // The daemon logs its sessions.
    let said = if ran.status.success() { String::new() } else { text(&ran.stderr) };
    format!("{}{said}", text(&ran.stdout))
}

#[test]
fn every_config_of_the_documents_is_valid_and_can_be_served() {
    if !can_run() {
        return;
    }
    let pages = pages();
    let blocks = pages.iter().flat_map(|page| page.blocks().into_iter().map(move |block| (page, block)));
    let place = Place::new();
    place.image("/srv/root", 16 << 20);
    let mut commands = Vec::new();
    for (page, block) in blocks.filter(|(_, block)| block.language == "toml") {
        let config = block.lines.join("\n");
        // A cluster; `make test-cluster` serves it.
        if config.contains("rbd:") {
            continue;
        }
        let mut table: toml::Table =
            config.parse().unwrap_or_else(|error| panic!("{}:{}: {error}", page.name, block.line));
        place.furnish(&table);
        let name = format!("{}.toml", commands.len());
        place.write(&format!("etc/blockmux/{name}"), config.as_bytes(), 0o644);
        // A disk of this machine needs a driver, and so does a block device; a file does not.
        let served = table.remove("attachment").map_or(config, |_| table.to_string());
        let served = small(&served).replace("block:/dev/vg0/", "file:/srv/");
        place.write(&format!("etc/blockmux/served-{name}"), served.as_bytes(), 0o644);
        let command = format!("blockmux check {name} && blockmux serve --config served-{name} --run true");
        commands.push((format!("{}:{}", page.name, block.line), command));
    }
    assert!(commands.len() > 15, "{commands:?}");
    assert_eq!(failures(&place, &commands), "");
}

/// Parts of command lines that cannot be served here, and why.
const ELSEWHERE: [(&str, &str); 9] = [
    ("nbd://server", "another machine"),
    ("nbds://", "another machine"),
    ("nbd+unix:///?", "another program"),
    ("block:/dev/", "a block device"),
    ("rdma=verbs", "an RDMA device"),
    ("rbd:", "a cluster; the tests of `make test-cluster` run the guide"),
    ("--takeover", "does not end"),
    ("...", "not complete"),
    ("--run", "runs programs that may not be installed"),
];

#[test]
fn every_serve_command_of_the_documents_starts() {
    if !can_run() {
        return;
    }
    let pages = pages();
    let lines = pages.iter().flat_map(|page| page.command_lines());
    // A sentence may name a command with `FILE`, or without arguments.
    let is_complete = |word: &String| !word.bytes().all(|byte| byte.is_ascii_uppercase());
    let lines = lines.filter(|line| {
        let has = |part: &str| line.words.iter().any(|word| word.contains(part));
        line.words[1] == "serve"
            && (line.is_example || line.words.len() > 2 && line.words.iter().all(is_complete))
            && !ELSEWHERE.iter().any(|(part, _)| has(part))
    });
    let place = Place::new();
    for (name, size) in [("disk.img", 32 << 30), ("root.img", 1 << 30), ("/srv/data.img", 1 << 30)] {
        place.image(name, size);
    }
    place.secret("api.token", "c1b9b5a5c0d1a4d2\n");
    place.secret("keys.psk", &fs::read_to_string(credentials().path("keys.psk")).unwrap());
    let packaged = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/blockmux.toml");
    place.write("etc/blockmux/blockmux.toml", &fs::read(packaged).unwrap(), 0o644);
    let commands = lines.map(|line| {
        let words: Vec<_> = line.words.iter().map(|word| format!("'{}'", small(word))).collect();
        (format!("{}: {}", line.place, line.words.join(" ")), format!("{} --run true", words.join(" ")))
    });
    let commands: Vec<_> = commands.collect();
    assert!(commands.len() > 20, "{commands:?}");
    assert_eq!(failures(&place, &commands), "");
}

/// What the pages suppose of a daemon that they control.
const CONTROLLED: &str = r#"
nbd = ["unix:nbd.sock"]
iscsi = ["192.0.2.1"]
nvme_tcp = ["192.0.2.1"]
state = "/var/lib/blockmux"

[[volume]]
name = "other"
spec = "mem:16m"
protocols = ["nbd", "iscsi", "nvme_tcp"]

[[iscsi_target]]
TargetName = "iqn.2026-11.com.example:storage"
luns = { 0 = "other" }
access_states = {}

[[nvme_subsystem]]
nqn = "nqn.2026-11.com.example:disks"
namespaces = { 1 = "other" }
hosts = ["nqn.2026-11.com.example:first"]

[[nvme_subsystem.ana_group]]
ANAGRPID = 1
namespaces = [1]
states = {}
"#;

/// Names that a reader replaces.
const NAMES: [(&str, &str); 3] = [
    ("HOSTNQN", "nqn.2026-11.com.example:host"),
    ("NQN", "nqn.2026-11.com.example:disks"),
    ("IQN", "iqn.2026-11.com.example:storage"),
];

/// Starts a daemon, runs commands, and stops it.
const WITH_DAEMON: &str = "mkfifo ready; blockmux serve --quiet --config blockmux.toml VOLUMES --control SOCKET > ready & \
     daemon=$!; read ready < ready || exit 1; status=0; COMMANDS; kill $daemon; wait $daemon || status=1; exit $status";

#[test]
fn every_ctl_command_of_the_documents_is_accepted_by_a_daemon() {
    if !can_run() {
        return;
    }
    let mut sessions: Vec<(String, String, Vec<Vec<String>>)> = Vec::new();
    for page in pages() {
        for line in page.command_lines().into_iter().filter(|line| line.is_example && line.words[1] == "ctl")
        {
            // A disk of this machine needs a driver.
            if line.words.iter().any(|word| word.ends_with("tach-disk")) {
                continue;
            }
            let [_, _, socket, ..] = &line.words[..] else { continue };
            let Some(path) = socket.strip_prefix("unix:") else { continue };
            match sessions.last_mut() {
                Some((place, before, lines)) if follows(place, &line.place) && before == path => {
                    lines.push(line.words.clone());
                    *place = line.place;
                }
                _ => sessions.push((line.place.clone(), path.to_owned(), vec![line.words.clone()])),
            }
        }
    }
    let mut failures = Vec::new();
    for (end, socket, lines) in &sessions {
        let ran = control(socket, lines);
        if !ran.status.success() {
            failures.push(format!("{end}: {}{}", text(&ran.stdout), text(&ran.stderr)));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(sessions.len() > 4, "{sessions:?}");
}

/// Whether the second place is the line behind the first.
fn follows(first: &str, second: &str) -> bool {
    let parts = |place: &str| {
        let (page, line) = place.rsplit_once(':').unwrap();
        (page.to_owned(), line.parse::<usize>().unwrap())
    };
    let ((page, line), (next_page, next)) = (parts(first), parts(second));
    page == next_page && next == line + 1
}

/// Runs `ctl` commands with a daemon that has the volumes which they do not add.
fn control(socket: &str, lines: &[Vec<String>]) -> Output {
    let place = Place::new();
    place.write("etc/blockmux/blockmux.toml", CONTROLLED.as_bytes(), 0o644);
    let part = "[[volume]]\nname = 'part'\nspec = 'mem:1m'\n";
    place.write("etc/blockmux/part.toml", part.as_bytes(), 0o644);
    for name in ["root.img", "data.img"] {
        place.image(&format!("/srv/{name}"), 16 << 20);
    }
    let adds =
        |name: &str| lines.iter().any(|words| words.iter().any(|word| word.starts_with(&format!("{name}="))));
    let volumes = ["root=file:/srv/root.img", "disk0=mem:16m"].into_iter();
    let volumes: Vec<_> = volumes.filter(|spec| !adds(spec.split('=').next().unwrap())).collect();
    let filled = |word: &String| {
        let name = NAMES.iter().find(|(name, _)| name == word);
        format!("'{}'", name.map_or(word.as_str(), |(_, value)| value))
    };
    let commands = lines.iter().map(|words| {
        let typed = words.iter().map(filled).collect::<Vec<_>>().join(" ");
        format!("{typed} > said 2>&1 || {{ status=1; echo {} >&2; cat said >&2; }}", words[3..].join(" "))
    });
    let commands = commands.collect::<Vec<_>>().join("; ");
    let script = WITH_DAEMON.replace("VOLUMES", &volumes.join(" "));
    place.run(&script.replace("SOCKET", &format!("unix:{socket}")).replace("COMMANDS", &commands))
}
