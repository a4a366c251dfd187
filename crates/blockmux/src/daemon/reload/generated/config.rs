//! Generates valid configs of everything that a test can serve cheaply: all kinds of volumes, and
//! the targets, listeners and limits of every protocol over TCP.
//!
//! Each part of a config is drawn from a number of its own, so that a config can differ from
//! another one in a few parts or in all. Paths are relative; addresses are on one IP address.

use blockmux_volume::random::SplitMix;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// The numbers from which a config is drawn: one for each of its parts.
#[derive(Clone)]
pub(crate) struct Genome([u64; PARTS]);

impl Genome {
    pub(crate) fn new(random: &mut SplitMix) -> Genome {
        Genome(std::array::from_fn(|_| random.next()))
    }

    /// A genome that differs in up to `changes` parts.
    pub(crate) fn changed(&self, random: &mut SplitMix, changes: u64) -> Genome {
        let mut other = self.clone();
        for _ in 0..changes {
            other.0[random.below(PARTS as u64) as usize] = random.next();
        }
        other
    }

    /// The config as text, with listeners on `ip`.
    pub(crate) fn text(&self, ip: &str) -> String {
        let part = |nth: usize| Dice(SplitMix::new(self.0[nth]));
        let mut listeners = Listeners::draw(&mut part(LISTENERS), ip);
        let mut volumes = draw_volumes(ip, |nth| part(VOLUMES + nth));
        let mut targets = Vec::new();
        for nth in 0..TARGETS_EACH {
            if !listeners.iscsi.is_empty() {
                targets.extend(iscsi_target(&mut part(ISCSI + nth), nth, &volumes, &listeners.iscsi));
            }
            if !listeners.nvme.is_empty() {
                targets.extend(nvme_subsystem(&mut part(NVME + nth), nth, &volumes, &listeners.nvme));
            }
            if !listeners.srp.is_empty() {
                targets.extend(srp_target(&mut part(SRP + nth), nth, &volumes));
            }
        }
        let (globals, restricts_nbd) = globals(&mut part(GLOBALS), &listeners, ip);
        grant(&mut part(GRANTS), &mut volumes, &mut listeners, &targets, restricts_nbd);
        let mut text = globals + &listeners.text();
        part(ORDER).shuffle(&mut volumes);
        volumes.iter().for_each(|volume| text += &volume.text());
        targets.iter().for_each(|target| text += &target.text);
        text
    }
}

/// Writes the files that configs name into their directory. Images have a mark at their beginning.
pub(crate) fn write_files(directory: &Path) {
    for (name, content) in SECRETS {
        fs::write(directory.join(name), format!("{content}\n")).unwrap();
        fs::set_permissions(directory.join(name), fs::Permissions::from_mode(0o600)).unwrap();
    }
    for name in FILES {
        fs::write(directory.join(name), mark(name)).unwrap();
    }
    // These can be served read-only, because no config makes them longer.
    for (name, len) in [(FIXED, 4 << 20), (SHARED, 24 << 20)] {
        fs::File::options().write(true).open(directory.join(name)).unwrap().set_len(len).unwrap();
    }
}

/// Checks that no image became shorter or lost its mark, and that no text of a save is left.
pub(crate) fn check_files(directory: &Path) {
    for name in FILES {
        let mark = mark(name);
        let mut content = vec![0; mark.len()];
        fs::File::open(directory.join(name)).unwrap().read_exact(&mut content).unwrap();
        assert!(content == mark, "{name} has lost data");
    }
    for entry in fs::read_dir(directory).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(!name.ends_with(".new"), "{name} was left behind");
    }
}

/// The first bytes of an image.
fn mark(name: &str) -> Vec<u8> {
    name.as_bytes().repeat(1 << 17)
}

/// The seeds to run: `count` of them, or those of the environment.
pub(crate) fn seeds(count: u64) -> Range<u64> {
    let Ok(text) = std::env::var("BLOCKMUX_CONFIG_SEEDS") else { return 0..count };
    let (from, to) = text.split_once("..").expect("BLOCKMUX_CONFIG_SEEDS is FROM..TO");
    from.parse().unwrap()..to.parse().unwrap()
}

/// An IP address of this test alone.
pub(crate) fn own_ip() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (process, nth) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed) % 250);
    format!("127.{}.{}.{}", 64 + (process >> 8) % 128, process % 256, 1 + nth)
}

/// The initiators, hosts and SRP ports that targets name.
pub(crate) const INITIATORS: [&str; 2] = ["iqn.2026-11.test:i0", "iqn.2026-11.test:i1"];
pub(crate) const HOSTS: [&str; 2] = ["nqn.2026-11.test:h0", "nqn.2026-11.test:h1"];
pub(crate) const GUIDS: [&str; 2] = ["00000000000000a0", "00000000000000a1"];
/// The files that configs name, each with a content that is valid.
const SECRETS: [(&str, &str); 5] = [
    ("chap.secret", "twelve bytes"),
    ("chap2.secret", "other twelve bytes"),
    ("host.secret", "DHHC-1:00:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:"),
    ("tls.key", "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:"),
    ("nbd.psk", "alice:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"),
];
/// The CHAP name that goes with `chap.secret`.
pub(crate) const CHAP_NAME: &str = "u";
/// The image files of volumes; the last one is for slices.
const FILES: [&str; 5] = ["f0.img", "f1.img", "f2.img", FIXED, SHARED];
const FIXED: &str = "f3.img";
const SHARED: &str = "shared.img";

const MAX_VOLUMES: usize = 5;
const TARGETS_EACH: usize = 2;
const GLOBALS: usize = 0;
const LISTENERS: usize = 1;
const GRANTS: usize = 2;
const ORDER: usize = 3;
const VOLUMES: usize = 4;
const ISCSI: usize = VOLUMES + MAX_VOLUMES;
const NVME: usize = ISCSI + TARGETS_EACH;
const SRP: usize = NVME + TARGETS_EACH;
const PARTS: usize = SRP + TARGETS_EACH;

/// Draws choices.
struct Dice(SplitMix);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound as u64) as usize
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.0.below(times) == 0
    }

    fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// Each of the values with a probability of one in two, and at least one.
    fn some<T: Copy>(&mut self, all: &[T]) -> Vec<T> {
        let mut some: Vec<T> = all.iter().copied().filter(|_| self.one_in(2)).collect();
        if some.is_empty() {
            some.push(self.pick(all));
        }
        some
    }

    fn shuffle<T>(&mut self, all: &mut [T]) {
        for nth in (1..all.len()).rev() {
            all.swap(nth, self.below(nth + 1));
        }
    }
}

/// A list of texts as TOML.
fn list<T: AsRef<str>>(all: impl IntoIterator<Item = T>) -> String {
    let quoted: Vec<_> = all.into_iter().map(|text| format!("'{}'", text.as_ref())).collect();
    format!("[{}]", quoted.join(", "))
}

/// Networks with and without 127.0.0.0/8.
fn networks(dice: &mut Dice) -> String {
    list(dice.pick(&[&["127.0.0.0/8", "10.0.0.0/8"][..], &["127.0.0.0/8"], &["10.0.0.0/8", "::1"], &[]]))
}

/// The addresses of each protocol's listeners.
struct Listeners {
    nbd: Vec<String>,
    iscsi: Vec<String>,
    iser: Vec<String>,
    nvme: Vec<String>,
    srp: Vec<String>,
    /// Parameters of the listeners of each protocol: its word, and `?volumes=` or `?allow=`.
    parameters: Vec<(&'static str, String)>,
}

impl Listeners {
    fn draw(dice: &mut Dice, ip: &str) -> Listeners {
        let mut some = |ports: &[u16]| {
            let all: Vec<u16> = ports.iter().copied().filter(|_| !dice.one_in(3)).collect();
            all.into_iter().map(|port| format!("{ip}:{port}")).collect::<Vec<_>>()
        };
        let (mut nbd, iscsi, iser) = (some(&[10809]), some(&[3260, 3261]), some(&[3262]));
        let (nvme, srp) = (some(&[4420, 4421]), some(&[5555]));
        if nbd.is_empty() || dice.one_in(2) {
            nbd.push("unix:n.sock".to_owned());
        }
        let iser = if dice.one_in(3) { iser } else { Vec::new() };
        Listeners { nbd, iscsi, iser, nvme, srp, parameters: Vec::new() }
    }

    fn of(&self, word: &str) -> &[String] {
        match word {
            "nbd" => &self.nbd,
            "iscsi" => &self.iscsi,
            "nvme_tcp" => &self.nvme,
            _ => &self.srp,
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (key, all) in [
            ("nbd", &self.nbd),
            ("iscsi", &self.iscsi),
            ("iser", &self.iser),
            ("nvme_tcp", &self.nvme),
            ("srp", &self.srp),
        ] {
            let with = |address: &String| {
                let own = self.parameters.iter().find(|(own, parameters)| {
                    *own == key && !(address.starts_with("unix:") && parameters.contains("allow="))
                });
                format!("{address}{}", own.map_or("", |(_, parameters)| parameters))
            };
            if !all.is_empty() {
                let _ = writeln!(text, "{key} = {}", list(all.iter().map(with)));
            }
        }
        // The keys of the top level come before all tables.
        text
    }
}

/// One volume, before it is known which protocols may export it.
struct Volume {
    /// `None` for a generated name.
    name: Option<String>,
    /// What targets call it.
    called: String,
    spec: String,
    lines: String,
    has_networks: bool,
    protocols: Option<BTreeSet<String>>,
}

impl Volume {
    fn text(&self) -> String {
        let name = self.name.iter().map(|name| format!("name = '{name}'\n")).collect::<String>();
        let protocols = self.protocols.iter().map(|words| format!("protocols = {}\n", list(words)));
        let (spec, lines) = (&self.spec, &self.lines);
        format!("[[volume]]\n{name}spec = '{spec}'\n{}{lines}", protocols.collect::<String>())
    }
}

fn draw_volumes(ip: &str, part: impl Fn(usize) -> Dice) -> Vec<Volume> {
    let (mut volumes, mut files, mut uuids) = (Vec::new(), Vec::new(), BTreeSet::new());
    let mut units = BTreeSet::new();
    for nth in 0..MAX_VOLUMES {
        let mut dice = part(nth);
        if nth > 0 && dice.one_in(3) {
            continue;
        }
        let spec = spec(&mut dice, nth, &mut files);
        let mut lines = String::new();
        // Only one volume has no name, so its generated name does not depend on the order. Without
        // a UUID its targets would have a random one in their names.
        let name = (nth != 2 || dice.one_in(2)).then(|| format!("v{nth}"));
        if name.is_none() || dice.one_in(3) {
            let wanted = nth + usize::from(dice.one_in(3));
            let uuid = if uuids.insert(wanted) { wanted } else { MAX_VOLUMES + nth };
            uuids.insert(uuid);
            // Two daemons of a machine may not have the same UUID, and each has its own IP address.
            let machine: String =
                ip.split('.').map(|byte| format!("{:02x}", byte.parse().unwrap_or(0_u8))).collect();
            let _ = writeln!(lines, "uuid = '6f9a4c2e-1d3b-4f5a-8c7d-00{machine}{uuid:02x}'");
        }
        if dice.one_in(3) {
            let wanted = nth + usize::from(dice.one_in(3));
            let unit = if units.insert(wanted) { wanted } else { MAX_VOLUMES + nth };
            units.insert(unit);
            let own =
                dice.pick(&["naa = '6001405000000000000000000000NN'", "serial = 'NN', revision = '4.0'"]);
            let _ = writeln!(lines, "scsi = {{ {} }}", own.replace("NN", &format!("00{unit:02x}")));
        }
        let grows = ["f0", "f1", "f2"].iter().any(|file| spec.contains(file));
        for key in ["shared", "read_only"] {
            if dice.one_in(6) && !(key == "read_only" && grows) {
                let _ = writeln!(lines, "{key} = true");
            }
        }
        if dice.one_in(3) {
            let _ = writeln!(lines, "description = '{}'", dice.pick(&["one", "two"]));
        }
        let has_networks = dice.one_in(8);
        if has_networks {
            let _ = writeln!(lines, "allow = {}", networks(&mut dice));
        }
        for key in ["limits", "client_limits"] {
            if dice.one_in(4) {
                let limit = dice.pick(&["iops = 500", "read_bandwidth = '10m', burst = '2s'", "iops = 700"]);
                let _ = writeln!(lines, "{key} = {{ {limit} }}");
            }
        }
        let called = name.clone().unwrap_or_else(|| "disk0".to_owned());
        volumes.push(Volume { name, called, spec, lines, has_networks, protocols: None });
    }
    volumes
}

/// The spec of a volume. `files` are those that other volumes have taken.
fn spec(dice: &mut Dice, nth: usize, files: &mut Vec<usize>) -> String {
    let size = dice.pick(&["1m", "2m", "4m"]);
    let mut file = |dice: &mut Dice| {
        let first = dice.below(FILES.len() - 1);
        let mut all = (first..first + FILES.len() - 1).map(|file| file % (FILES.len() - 1));
        let free = all.find(|file| !files.contains(file));
        files.extend(free);
        free.map(|file| format!("file:{}", FILES[file]))
    };
    let memory = format!("mem:{size}{}", dice.pick(&["", "", "?populate=off", "?block_size=4k"]));
    let plain = match dice.below(8) {
        0 | 1 => memory,
        2 => format!("null:{size}"),
        3 | 4 => match file(dice) {
            Some(file) => format!("{file}?size={size}{}", dice.pick(&["", "", "&direct=off"])),
            None => memory,
        },
        // Slices share a file.
        5 => format!("slice:{}m,{size}:file:shared.img?size=24m", nth * 4),
        6 => match (file(dice), file(dice)) {
            (Some(one), Some(two)) => format!("stripe:64k:{one}?size={size},{two}?size={size}"),
            _ => format!("stripe:64k:mem:{size},mem:{size}"),
        },
        _ => format!("stripe:{}:mem:1m,null:1m", dice.pick(&["64k", "128k"])),
    };
    let decorator = match dice.below(10) {
        0 => "delay:1us:",
        1 => "rate:iops=100000:",
        2 => "log:v.log:",
        3 => "fault:op=write,every=1000:",
        _ => "",
    };
    format!("{decorator}{plain}")
}

/// A target or a subsystem.
struct Target {
    /// The word for its protocol.
    protocol: &'static str,
    name: String,
    text: String,
    volumes: BTreeSet<String>,
    is_restricted: bool,
}

/// A map of LUNs of some volumes; returns their names, and whether some are write-protected.
fn luns(dice: &mut Dice, volumes: &[Volume]) -> (String, BTreeSet<String>, bool) {
    let names: Vec<&str> = volumes.iter().map(|volume| volume.called.as_str()).collect();
    let (chosen, mut is_protected) = (dice.some(&names), false);
    let mut next = 0;
    let units = chosen.iter().take(3).map(|name| {
        let lun = next + dice.below(2);
        next = lun + 1;
        match dice.one_in(8) {
            true => {
                is_protected = true;
                format!("{lun} = {{ volume = '{name}', read_only = true }}")
            }
            false => format!("{lun} = '{name}'"),
        }
    });
    let map = format!("{{ {} }}", units.collect::<Vec<_>>().join(", "));
    (map, chosen.iter().take(3).map(|name| (*name).to_owned()).collect(), is_protected)
}

/// States of some listeners.
fn by_listener(dice: &mut Dice, all: &[String], values: &[&str]) -> String {
    let own: Vec<&String> = all.iter().filter(|_| dice.one_in(2)).collect();
    let own: Vec<_> = own.iter().map(|at| format!("'{at}' = {}", dice.pick(values))).collect();
    format!("{{ {} }}", own.join(", "))
}

fn iscsi_target(dice: &mut Dice, nth: usize, volumes: &[Volume], listeners: &[String]) -> Option<Target> {
    if dice.one_in(2) {
        return None;
    }
    let name = format!("iqn.2026-11.test:t{nth}");
    let mut text = format!("[[iscsi_target]]\nTargetName = '{name}'\n");
    let (map, mut own, mut is_restricted) = luns(dice, volumes);
    let _ = writeln!(text, "luns = {map}");
    if dice.one_in(3) {
        let _ = writeln!(text, "TargetAlias = '{}'", dice.pick(&["one", "two"]));
    }
    let mut at = listeners.to_vec();
    if dice.one_in(3) {
        at = dice.some(&listeners.iter().collect::<Vec<_>>()).into_iter().cloned().collect();
        let _ = writeln!(text, "portals = {}", list(&at));
    }
    let has_states = dice.one_in(3);
    if has_states {
        let states = ["'active/optimized'", "'active/non-optimized'", "'standby'"];
        let _ = writeln!(text, "access_states = {}", by_listener(dice, &at, &states));
    }
    match dice.below(6) {
        0 if !has_states => {
            let _ = writeln!(text, "TargetPortalGroupTag = {}", 5 + dice.below(3));
        }
        1 => {
            let tags = at.iter().enumerate().map(|(nth, at)| format!("'{at}' = {}", nth + 7));
            let tags = tags.collect::<Vec<_>>().join(", ");
            let _ = writeln!(text, "TargetPortalGroupTag = {{ {tags} }}");
        }
        _ => {}
    }
    let keys: [(&str, &[&str]); 7] = [
        ("removable", &["true", "false"]),
        ("HeaderDigest", &["'None'", "'None,CRC32C'"]),
        ("InitialR2T", &["true", "false"]),
        ("MaxConnections", &["1", "4"]),
        ("FirstBurstLength", &["8192", "65536"]),
        ("ErrorRecoveryLevel", &["0", "2"]),
        ("DefaultTime2Retain", &["0", "20"]),
    ];
    for (key, values) in keys {
        if dice.one_in(6) {
            let _ = writeln!(text, "{key} = {}", dice.pick(values));
        }
    }
    if dice.one_in(8) {
        let _ = writeln!(text, "allow = {}", networks(dice));
        is_restricted = true;
    }
    if dice.one_in(3) {
        is_restricted = true;
        for initiator in dice.some(&[Some(INITIATORS[0]), Some(INITIATORS[1]), None]) {
            text += "[[iscsi_target.acl]]\n";
            initiator.iter().for_each(|name| {
                let _ = writeln!(text, "InitiatorName = '{name}'");
            });
            match dice.below(4) {
                0 => {
                    let (map, more, _) = luns(dice, volumes);
                    own.extend(more);
                    let _ = writeln!(text, "luns = {map}");
                }
                1 => text += "luns = []\n",
                _ => {}
            }
            if dice.one_in(2) {
                let file = dice.pick(&["chap.secret", "chap.secret", "chap2.secret"]);
                let _ = writeln!(text, "CHAP_N = '{CHAP_NAME}'\nsecret_file = '{file}'");
            }
        }
    }
    Some(Target { protocol: "iscsi", name, text, volumes: own, is_restricted })
}

fn srp_target(dice: &mut Dice, nth: usize, volumes: &[Volume]) -> Option<Target> {
    if dice.one_in(2) {
        return None;
    }
    let name = format!("0x1111111111111111222222222222220{}", nth + 1);
    let (map, mut own, mut is_restricted) = luns(dice, volumes);
    let mut text = format!("[[srp_target]]\nport_id = '{name}'\nluns = {map}\n");
    if dice.one_in(3) {
        let state = dice.pick(&["active/optimized", "active/non-optimized", "standby"]);
        let _ = writeln!(text, "access_state = '{state}'");
    }
    if dice.one_in(8) {
        let _ = writeln!(text, "allow = {}", networks(dice));
        is_restricted = true;
    }
    if dice.one_in(3) {
        is_restricted = true;
        for guid in dice.some(&GUIDS) {
            let _ = writeln!(text, "[[srp_target.acl]]\ninitiator_port = '0x{guid}'");
            if dice.one_in(3) {
                let (map, more, _) = luns(dice, volumes);
                own.extend(more);
                let _ = writeln!(text, "luns = {map}");
            }
        }
    }
    Some(Target { protocol: "srp", name, text, volumes: own, is_restricted })
}

fn nvme_subsystem(dice: &mut Dice, nth: usize, volumes: &[Volume], listeners: &[String]) -> Option<Target> {
    if dice.one_in(2) {
        return None;
    }
    let nqn = format!("nqn.2026-11.test:s{nth}");
    let mut text = format!("[[nvme_subsystem]]\nnqn = '{nqn}'\n");
    let names: Vec<&str> = volumes.iter().map(|volume| volume.called.as_str()).collect();
    let own = dice.some(&names);
    let mut nsids: Vec<usize> = (1..=6).collect();
    dice.shuffle(&mut nsids);
    nsids.truncate(own.len());
    let (mut short, mut long) = (Vec::new(), String::new());
    for (name, nsid) in own.iter().zip(&nsids) {
        match dice.one_in(4) {
            true => {
                let id = format!("{:02x}{nsid:02x}", 0x10 + nth);
                let _ = writeln!(
                    long,
                    "[[nvme_subsystem.namespace]]\nnsid = {nsid}\nvolume = '{name}'\n\
                     uuid = '6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b{id}'\neui64 = '00a098112233{id}'"
                );
            }
            false => short.push(format!("{nsid} = '{name}'")),
        }
    }
    let _ = writeln!(text, "namespaces = {{ {} }}", short.join(", "));
    for (key, values) in [("serial_number", ["4711", "4712"]), ("model_number", ["Disk", "Other"])] {
        if dice.one_in(4) {
            let _ = writeln!(text, "{key} = '{}{nth}'", dice.pick(&values));
        }
    }
    let mut at = listeners.to_vec();
    if dice.one_in(3) {
        at = dice.some(&listeners.iter().collect::<Vec<_>>()).into_iter().cloned().collect();
        let _ = writeln!(text, "listeners = {}", list(&at));
    }
    let mut is_restricted = dice.one_in(8);
    if is_restricted {
        let _ = writeln!(text, "allow = {}", networks(dice));
    }
    if dice.one_in(3) {
        is_restricted = true;
        let mut tables = String::new();
        let (listed, with_table): (Vec<_>, Vec<_>) =
            dice.some(&HOSTS).into_iter().partition(|_| dice.one_in(2));
        let _ = writeln!(text, "hosts = {}", list(listed));
        for host in with_table {
            let _ = writeln!(tables, "[[nvme_subsystem.host]]\nhostnqn = '{host}'");
            if dice.one_in(2) {
                let _ = writeln!(tables, "namespaces = {:?}", dice.some(&[1, 2, 3, 4, 5, 6]));
            }
            match dice.below(3) {
                0 => tables += "dhchap_secret_file = 'host.secret'\ndhchap_dhgroup = 'null'\n",
                1 => tables += "tls_key_file = 'tls.key'\n",
                _ => {}
            }
        }
        long += &tables;
    }
    if dice.one_in(3) {
        let mut free = dice.some(&nsids);
        for id in dice.some(&[1, 2, 9]) {
            let members: Vec<usize> = free.pop().into_iter().collect();
            let states = ["'optimized'", "'non-optimized'", "'inaccessible'"];
            let states = by_listener(dice, &at, &states);
            let _ = writeln!(
                long,
                "[[nvme_subsystem.ana_group]]\nANAGRPID = {id}\nnamespaces = {members:?}\nstates = {states}"
            );
        }
    }
    let volumes = own.into_iter().map(str::to_owned).collect();
    Some(Target { protocol: "nvme_tcp", name: nqn, text: text + &long, volumes, is_restricted })
}

/// The keys of the top level, and whether NBD requires authentication.
fn globals(dice: &mut Dice, listeners: &Listeners, ip: &str) -> (String, bool) {
    let mut text = "state = 'state'\n".to_owned();
    // Nobody listens there, as clients that follow it find out at once.
    let referral = format!("{{ referral = [{{ traddr = '{ip}' }}] }}");
    let keys: [(&str, &[&str]); 9] = [
        ("max_connections", &["50", "60"]),
        ("login_timeout", &["10", "20"]),
        ("idle_timeout", &["3600", "7200"]),
        ("cores", &["1", "2"]),
        ("poll", &["'never'", "'adaptive'"]),
        ("nvme_tcp_ktls", &["true", "false"]),
        ("nvme_in_capsule_data_size", &["4096", "16384"]),
        ("nvme_discovery", &["{ unique_subnqn = true }", "{ unique_subnqn = false }"]),
        ("nvme_discovery", &[&referral, "{ referral = [] }"]),
    ];
    for (key, values) in keys {
        if dice.one_in(8) && !text.contains(&format!("{key} =")) {
            let _ = writeln!(text, "{key} = {}", dice.pick(values));
        }
    }
    if dice.one_in(8) && !listeners.iscsi.is_empty() {
        let _ = writeln!(text, "iscsi_discovery = {{ CHAP_N = '{CHAP_NAME}', secret_file = 'chap.secret' }}");
    }
    let restricts_nbd = dice.one_in(10);
    if restricts_nbd || dice.one_in(10) {
        let _ = writeln!(text, "nbd_tls_psk = 'nbd.psk'");
    }
    if !restricts_nbd && text.contains("nbd_tls_psk") {
        text += "nbd_tls = 'on'\n";
    }
    (text, restricts_nbd)
}

/// Names the protocols of each volume, where something restricts access, so that the config is
/// valid; and gives listeners of default exports lists of volumes or networks.
fn grant(
    dice: &mut Dice,
    volumes: &mut [Volume],
    listeners: &mut Listeners,
    targets: &[Target],
    restricts_nbd: bool,
) {
    let is_restricted = restricts_nbd
        || targets.iter().any(|target| target.is_restricted)
        || volumes.iter().any(|volume| volume.has_networks);
    const WORDS: [&str; 4] = ["nbd", "iscsi", "nvme_tcp", "srp"];
    if is_restricted || dice.one_in(3) {
        for volume in volumes.iter_mut() {
            let mut words: BTreeSet<String> = dice.some(&WORDS).into_iter().map(str::to_owned).collect();
            for target in targets.iter().filter(|target| target.volumes.contains(&volume.called)) {
                words.insert(target.protocol.to_owned());
                words.insert(target.name.clone());
            }
            volume.protocols = Some(words);
        }
    }
    for word in WORDS {
        if listeners.of(word).is_empty() || targets.iter().any(|target| target.protocol == word) {
            continue;
        }
        let exports = |volume: &Volume| volume.protocols.as_ref().is_none_or(|words| words.contains(word));
        if !volumes.iter().any(exports) {
            let volume = &mut volumes[dice.below(volumes.len())];
            volume.protocols.iter_mut().for_each(|words| words.extend([word.to_owned()]));
        }
        let exported: Vec<&str> =
            volumes.iter().filter(|volume| exports(volume)).map(|volume| volume.called.as_str()).collect();
        match dice.below(8) {
            0 => {
                let some = dice.some(&exported).join(",");
                listeners.parameters.push((word, format!("?volumes={some}")));
            }
            1 => listeners.parameters.push((word, "?allow=127.0.0.0/8,::1".to_owned())),
            _ => {}
        }
    }
}
