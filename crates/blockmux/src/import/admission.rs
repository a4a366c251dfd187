//! Damages each statement about access in the samples, and compares who is admitted.

use super::format;
use super::model::{Imported, ImportedAcl, ImportedChap, ImportedHost, KeyPlace, LunTable};
use super::source::SourceText;
use super::tests::samples;
use blockmux_proto::names::networks::{AllowedNetworks, Network};
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;

/// Whom a client may claim to be; each protocol uses some of it.
#[derive(Default)]
struct Clients {
    /// Names of initiators and hosts.
    names: BTreeSet<String>,
    addresses: BTreeSet<IpAddr>,
    /// CHAP names with their secrets.
    users: BTreeSet<(String, String)>,
    /// Keys of hosts.
    keys: BTreeSet<(String, String)>,
}

impl Clients {
    /// Clients that one of the configs names, and one that none does.
    fn of(configs: [&Imported; 2]) -> Clients {
        let mut clients = Clients::default();
        clients.names.insert("iqn.stranger".to_owned());
        clients.addresses.insert("203.0.113.9".parse().unwrap());
        clients.users.insert((String::new(), String::new()));
        clients.keys.insert((String::new(), String::new()));
        configs.into_iter().for_each(|config| clients.add(config));
        clients
    }

    fn add(&mut self, config: &Imported) {
        let iscsi = config.targets.iter().map(|target| (&target.allow, &target.acl));
        let srp = config.srp_targets.iter().map(|target| (&target.allow, &target.acl));
        for (allow, acl) in iscsi.chain(srp) {
            self.add_networks(allow.as_deref());
            self.names.extend(acl.iter().filter_map(|entry| entry.initiator.clone()));
            self.users.extend(acl.iter().filter_map(|entry| Some(user(entry.chap.as_ref()?))));
        }
        self.users.extend(config.discovery.iter().map(user));
        for subsystem in &config.subsystems {
            self.add_networks(subsystem.allow.as_deref());
            self.names.extend(subsystem.hosts.iter().flatten().map(|host| host.nqn.clone()));
            self.keys.extend(subsystem.hosts.iter().flatten().map(keys));
        }
        config.volumes.iter().for_each(|volume| self.add_networks(volume.allow.as_deref()));
    }

    fn add_networks(&mut self, networks: Option<&[String]>) {
        let address = |network: &String| -> IpAddr { network.split('/').next().unwrap().parse().unwrap() };
        self.addresses.extend(networks.unwrap_or_default().iter().map(address));
    }
}

fn user(chap: &ImportedChap) -> (String, String) {
    (chap.user.name.clone(), chap.user.secret.0.to_string())
}

fn keys(host: &ImportedHost) -> (String, String) {
    let text = |place: &Option<KeyPlace>| match place {
        Some(KeyPlace::Text(secret)) => secret.0.to_string(),
        Some(KeyPlace::File(path)) => path.clone(),
        None => String::new(),
    };
    (text(&host.dhchap_secret), text(&host.tls_key))
}

fn is_in(networks: Option<&[String]>, address: IpAddr) -> bool {
    let Some(networks) = networks else { return true };
    let networks: Vec<Network> = networks.iter().map(|network| network.parse().unwrap()).collect();
    AllowedNetworks::only(&networks).admits(Some(address))
}

/// Who reaches what, as `iscsi TARGET NAME ADDRESS USER SPEC write`.
fn admissions(config: &Imported, clients: &Clients) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let mut luns = |who: String, table: &LunTable| {
        for (_, mapped) in table.iter() {
            let volume = config.volumes.iter().find(|volume| volume.name == mapped.volume).unwrap();
            all.insert(format!("{who} {} read", volume.spec));
            if !mapped.is_read_only && !volume.read_only {
                all.insert(format!("{who} {} write", volume.spec));
            }
        }
    };
    for address in &clients.addresses {
        for name in &clients.names {
            for target in config.targets.iter().filter(|own| is_in(own.allow.as_deref(), *address)) {
                let Some(entry) = entry_of(&target.acl, name) else { continue };
                for user in clients.users.iter().filter(|user| is_accepted(entry.chap.as_ref(), user)) {
                    let table = entry.luns.as_ref().unwrap_or(&target.luns);
                    luns(format!("iscsi {} {name} {address} {user:?}", target.name), table);
                }
            }
            for target in config.srp_targets.iter().filter(|own| is_in(own.allow.as_deref(), *address)) {
                let Some(entry) = entry_of(&target.acl, name) else { continue };
                let table = entry.luns.as_ref().unwrap_or(&target.luns);
                luns(format!("srp {} {name} {address}", target.port_id), table);
            }
        }
    }
    let is_open = |user: &&(String, String)| is_accepted(config.discovery.as_ref(), user);
    all.extend(clients.users.iter().filter(is_open).map(|user| format!("discovery {user:?}")));
    for address in &clients.addresses {
        for subsystem in config.subsystems.iter().filter(|own| is_in(own.allow.as_deref(), *address)) {
            let namespaces = || subsystem.namespaces.iter().map(|namespace| &namespace.volume);
            for (name, (dhchap, tls)) in
                clients.names.iter().flat_map(|name| clients.keys.iter().map(move |keys| (name, keys)))
            {
                let is_admitted = match &subsystem.hosts {
                    None => true,
                    Some(hosts) => hosts.iter().filter(|host| host.nqn == *name).any(|host| {
                        let own = keys(host);
                        (own.0.is_empty() || own.0 == *dhchap) && (own.1.is_empty() || own.1 == *tls)
                    }),
                };
                let who = format!("nvme {} {name} {address} {dhchap} {tls}", subsystem.nqn);
                all.extend(namespaces().filter(|_| is_admitted).map(|volume| format!("{who} {volume}")));
            }
        }
        let exports = config.volumes.iter().filter(|volume| volume.is_nbd);
        for volume in exports.filter(|volume| is_in(volume.allow.as_deref(), *address)) {
            let access = if volume.read_only { "read" } else { "write" };
            all.insert(format!("nbd {} {address} read", volume.name));
            all.insert(format!("nbd {} {address} {access}", volume.name));
        }
    }
    all
}

/// The entry by which an initiator logs in. A target without entries is open.
fn entry_of(acl: &[ImportedAcl], name: &str) -> Option<ImportedAcl> {
    let own = acl.iter().find(|entry| entry.initiator.as_deref() == Some(name));
    let own = own.or_else(|| acl.iter().find(|entry| entry.initiator.is_none()));
    own.cloned().or_else(|| acl.is_empty().then(ImportedAcl::default))
}

/// An empty secret becomes a random one, which no client has.
fn is_accepted(chap: Option<&ImportedChap>, own: &(String, String)) -> bool {
    chap.is_none_or(|chap| user(chap) == *own && !own.1.is_empty())
}

fn import(text: &str) -> Option<Imported> {
    let source = SourceText::of_bytes(Path::new("file"), text.as_bytes()).ok()?;
    Some(format::import(&source).ok()?.1)
}

/// An error admits nobody.
fn assert_no_wider(sample: &str, text: &str, damaged: &str, what: &str) {
    let before = import(text).unwrap();
    let Some(after) = import(damaged) else { return };
    let clients = Clients::of([&before, &after]);
    let admitted = admissions(&before, &clients);
    let more: Vec<_> =
        admissions(&after, &clients).into_iter().filter(|one| !admitted.contains(one)).collect();
    assert!(more.is_empty(), "{sample}: {what} admits\n{}", more.join("\n"));
}

/// A statement about access without its value, without its last word, and with another keyword.
fn damages_of_line(line: &str, keyword: &str) -> Vec<String> {
    let (line, block) = match line.trim_end().strip_suffix('{') {
        Some(line) => (line.trim_end(), " {"),
        None => (line.trim_end(), ""),
    };
    let arguments = line.trim_start().strip_prefix(keyword).unwrap();
    let whole = arguments.trim();
    let last = match whole.strip_suffix('"') {
        // One word of SCST has both name and secret.
        Some(quoted) if quoted.matches('"').count() == 1 && quoted.starts_with('"') => {
            format!("{}\"", quoted.split(' ').next().unwrap())
        }
        Some(quoted) => quoted[..quoted.rfind('"').unwrap()].to_owned(),
        None => whole.rsplit_once(char::is_whitespace).map_or("", |(first, _)| first).to_owned(),
    };
    vec![
        format!("{keyword}{block}"),
        format!("{keyword} {last}{block}"),
        format!("{keyword} \"\"{block}"),
        format!("{keyword}3{arguments}{block}"),
    ]
}

#[test]
fn a_damaged_statement_admits_nobody_else() {
    for (name, keywords) in TEXT_SAMPLES {
        let text = std::fs::read_to_string(samples().join(name)).unwrap();
        for keyword in keywords {
            let is_own = |line: &str| line.split_whitespace().next() == Some(keyword);
            assert!(text.lines().any(is_own), "{name} has no {keyword}");
            for (number, line) in text.lines().enumerate().filter(|(_, line)| is_own(line)) {
                for damaged in damages_of_line(line, keyword) {
                    let mut lines: Vec<_> = text.lines().collect();
                    lines[number] = &damaged;
                    assert_no_wider(name, &text, &lines.join("\n"), &format!("{}: {damaged}", number + 1));
                }
            }
        }
    }
}

#[test]
fn a_damaged_value_of_ucl_admits_nobody_else() {
    let text = std::fs::read_to_string(samples().join("ctl.ucl")).unwrap();
    let chap = "chap = [ { user = joe, secret = \"hunter-of-joe\" } ]";
    let networks = "initiator-portal = [ 192.0.2.0/24, \"[2001:db8::]/32\" ]";
    for (whole, damaged) in [
        (chap, "chap = []"),
        (chap, "chap = {}"),
        (chap, "chap = \"\""),
        (chap, "chap = [ { user = joe } ]"),
        (chap, "chap = [ { secret = \"hunter-of-joe\" } ]"),
        (chap, "chap3 = [ { user = joe, secret = \"hunter-of-joe\" } ]"),
        (networks, "initiator-portal = []"),
        (networks, "initiator-portal = \"\""),
        (networks, "initiator-portal3 = 192.0.2.0/24"),
        ("auth-type = chap", "auth-type = \"\""),
        ("auth-type = chap", "auth-type3 = chap"),
        ("auth-group = hosts", "auth-group = \"\""),
        ("auth-group = hosts", "auth-group = []"),
        ("auth-group = hosts", "auth-group3 = hosts"),
    ] {
        assert!(text.contains(whole), "{whole}");
        for rest in [text.clone(), text.replace("auth-type = chap", "")] {
            assert_no_wider("ctl.ucl", &rest, &rest.replace(whole, damaged), damaged);
        }
    }
}

/// Puts `change` in place of each member with this key, one after the other.
fn damages_of_json(value: &Value, key: &str, change: &dyn Fn(&Value) -> (String, Value)) -> Vec<Value> {
    let mut all = Vec::new();
    match value {
        Value::Object(members) => {
            for (own, member) in members {
                let mut put = |key: String, member: Value| {
                    let mut damaged = members.clone();
                    damaged.shift_remove(own);
                    damaged.insert(key, member);
                    all.push(Value::Object(damaged));
                };
                if own == key {
                    let (key, member) = change(member);
                    put(key, member);
                }
                damages_of_json(member, key, change).into_iter().for_each(|below| put(own.clone(), below));
            }
        }
        Value::Array(items) => {
            for (at, item) in items.iter().enumerate() {
                all.extend(damages_of_json(item, key, change).into_iter().map(|below| {
                    let mut damaged = items.clone();
                    damaged[at] = below;
                    Value::Array(damaged)
                }));
            }
        }
        _ => {}
    }
    all
}

#[test]
fn a_damaged_member_admits_nobody_else() {
    for (name, keys) in JSON_SAMPLES {
        let text = std::fs::read_to_string(samples().join(name)).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        for key in keys {
            let mut changes: Vec<(&str, Value)> =
                vec![(key, Value::Null), (key, serde_json::json!({"x": 1}))];
            // The kernel's files have an empty key for a host without authentication.
            if *key != "dhchap_key" {
                changes.push((key, "".into()));
            }
            let mut damaged: Vec<(String, Value)> = Vec::new();
            for (key, put) in changes {
                let all = damages_of_json(&value, key, &|_| (key.to_owned(), put.clone()));
                damaged.extend(all.into_iter().map(|one| (format!("{key} {put}"), one)));
            }
            let renamed = damages_of_json(&value, key, &|member| (format!("{key}3"), member.clone()));
            assert!(!renamed.is_empty(), "{name} has no {key}");
            damaged.extend(renamed.into_iter().map(|one| (format!("{key}3"), one)));
            for (what, damaged) in damaged {
                assert_no_wider(name, &text, &damaged.to_string(), &what);
            }
        }
    }
}

/// Samples of statements, with those that decide who may do what.
const TEXT_SAMPLES: [(&str, &[&str]); 4] = [
    (
        "tgt.conf",
        &[
            "incomingdiscoveryuser",
            "initiator-address",
            "initiator-name",
            "incominguser",
            "outgoinguser",
            "readonly",
        ],
    ),
    (
        "scst.conf",
        &["IncomingUser", "IncomingUser1", "OutgoingUser", "INITIATOR", "GROUP", "enabled", "read_only"],
    ),
    ("ctl.conf", &["auth-group", "auth-type", "chap", "chap-mutual", "initiator-name", "initiator-portal"]),
    ("nbd-server.conf", &["authfile", "readonly", "copyonwrite"]),
];
/// Samples in JSON, with the members that decide who may do what.
const JSON_SAMPLES: [(&str, &[&str]); 3] = [
    (
        "lio.json",
        &[
            "discovery_enable_auth",
            "discovery_userid",
            "discovery_password",
            "readonly",
            "authentication",
            "generate_node_acls",
            "demo_mode_write_protect",
            "enable",
            "node_acls",
            "node_wwn",
            "chap_userid",
            "chap_password",
            "chap_mutual_userid",
            "chap_mutual_password",
            "mapped_luns",
            "tpg_lun",
            "write_protect",
        ],
    ),
    ("nvmet.json", &["allow_any_host", "allowed_hosts", "hosts", "nqn", "dhchap_key", "enable"]),
    (
        "spdk.json",
        &[
            "allow_any_host",
            "host",
            "initiators",
            "netmasks",
            "ig_tag",
            "tag",
            "secrets",
            "user",
            "secret",
            "require_chap",
            "disable_chap",
            "chap_group",
            "pg_ig_maps",
            "readonly",
            "method",
        ],
    ),
];
