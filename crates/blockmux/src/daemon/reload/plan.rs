//! Computes the difference between two configs and the steps that it requires of a running daemon,
//! without sockets and files.
//!
//! Configs are compared as TOML tables with absolute paths in which all volumes have names. Entries
//! of named lists are compared by name, lists of plain values as sets.

use super::json::json_of;
use crate::access::networks;
use crate::api::plan::{PlanReport, PlannedChange};
use crate::api::{ApiError, ErrorCode};
use crate::daemon::attachment::ATTACHMENTS;
use crate::daemon::role::{API_CERTIFICATES, API_TOKENS};
use crate::daemon::setup::VOLUMES;
use crate::output::masked;
use crate::protocol::address::{ListenerEntry, matches_listener, tcp_address};
use crate::protocol::frontend::TargetTables;
use crate::protocol::{self, Carrier, Frontends};
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_volume::ResizeError;
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use toml::{Table, Value};

/// The structure of configs: named lists, and keys that take effect only at the next start.
pub(in crate::daemon) struct Schema {
    /// Lists of targets.
    targets: Vec<&'static TargetTables>,
    /// Keys that take effect only at the next start, from the top level, joined by dots.
    fixed: Vec<&'static str>,
    /// Keys of the lists of listeners.
    listeners: Vec<String>,
}

/// The lists of objects that belong to no protocol: the key of each, and the key of the names.
const OWN_LISTS: [(&str, &str); 4] = [VOLUMES, ATTACHMENTS, API_TOKENS, API_CERTIFICATES];

/// One difference between two configs.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::daemon) struct ConfigChange {
    /// Keys from the top level; the name stands for an entry of a named list.
    pub(in crate::daemon) path: Vec<String>,
    pub(in crate::daemon) before: Option<Value>,
    pub(in crate::daemon) after: Option<Value>,
}

/// The steps of volumes, by name.
pub(in crate::daemon) type VolumeSteps = BTreeMap<String, VolumeStep>;

/// The step that a change of a volume requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) enum VolumeStep {
    /// Open it.
    Add,
    /// Stop exporting it.
    Remove,
    /// Open the new spec and export it under the same name.
    Replace,
    /// Resize it.
    Resize,
    /// Resize it over data of another volume, which is refused.
    Overlap,
    /// Resize it to fewer bytes, which a reload refuses.
    Shrink {
        /// Current size in bytes.
        now: u64,
        /// Smaller size in bytes.
        size: u64,
    },
    /// Remove or replace it although its data in RAM would be lost, which a reload refuses.
    Lose {
        /// Size of what is in RAM, in bytes.
        bytes: u64,
    },
    /// Open or export what the daemon still serves, which a reload refuses, with the reason and
    /// what to do.
    Twice(&'static str),
}

impl VolumeStep {
    /// Whether it would close the volume that is served.
    pub(super) fn closes(self) -> bool {
        matches!(self, VolumeStep::Remove | VolumeStep::Replace | VolumeStep::Twice(_))
    }

    /// Whether it gives the volume another size, perhaps one that is refused.
    pub(super) fn resizes(self) -> bool {
        matches!(self, VolumeStep::Resize | VolumeStep::Overlap)
    }

    /// Whether it opens a volume.
    pub(super) fn opens(self) -> bool {
        matches!(self, VolumeStep::Add | VolumeStep::Replace)
    }
}

impl Schema {
    /// The schema of configs for these frontends.
    pub(in crate::daemon) fn new(frontends: &Frontends) -> Schema {
        let own = ["cores", "poll", "congestion", "state", "control", "api", "group"].into_iter();
        let theirs = frontends.iter().flat_map(|(_, frontend)| frontend.fixed_keys());
        Schema {
            targets: frontends.target_tables().map(|(_, tables)| tables).collect(),
            fixed: own.chain(theirs.copied()).collect(),
            listeners: crate::protocol::PROTOCOLS.iter().map(|protocol| protocol.key()).collect(),
        }
    }

    /// Adds keys that take effect only at the next start.
    pub(in crate::daemon) fn with_fixed(mut self, keys: &[&'static str]) -> Schema {
        self.fixed.extend(keys);
        self
    }

    /// The structure of a list of targets.
    pub(super) fn target(&self, key: &str) -> Option<&'static TargetTables> {
        self.targets.iter().find(|tables| tables.key == key).copied()
    }

    /// The keys of all lists of objects.
    pub(super) fn lists(&self) -> impl Iterator<Item = &str> {
        let own = OWN_LISTS.iter().map(|(key, _)| *key);
        let named = own.chain(self.targets.iter().map(|own| own.key));
        named.chain(self.listeners.iter().map(String::as_str))
    }

    /// The keys of the lists in each target of a list.
    pub(super) fn parts(&self, list: &str) -> impl Iterator<Item = &'static str> {
        let tables = self.target(list).into_iter();
        tables.flat_map(|own| {
            let named = own.peers.iter().chain(own.parts).map(|(key, _)| *key);
            own.units.iter().copied().chain(named).collect::<BTreeSet<_>>()
        })
    }

    /// The structures of all lists of targets.
    pub(super) fn targets(&self) -> impl Iterator<Item = &'static TargetTables> {
        self.targets.iter().copied()
    }

    /// The entries of a list of targets, by name.
    pub(super) fn entries<'a>(
        &self,
        table: &'a Table,
        tables: &'static TargetTables,
    ) -> impl Iterator<Item = (&'a str, &'a Table)> {
        let entries = table.get(tables.key).and_then(Value::as_array).into_iter().flatten();
        entries.filter_map(|entry| Some((entry.get(tables.name)?.as_str()?, entry.as_table()?)))
    }

    /// Whether the key has a list of listeners.
    pub(super) fn is_listeners(&self, key: &str) -> bool {
        self.listeners.iter().any(|own| own == key)
    }

    /// The key of the entries' names in the list at this path; `None` if they have no names.
    pub(in crate::daemon) fn name_key(&self, path: &[String]) -> Option<&'static str> {
        match path {
            [list] => {
                let own = OWN_LISTS.iter().find(|(key, _)| key == list).map(|(_, name)| *name);
                own.or_else(|| self.target(list).map(|tables| tables.name))
            }
            [list, _, part] => {
                let tables = self.target(list)?;
                let all = tables.peers.iter().chain(tables.parts);
                all.filter(|(key, name)| key == part && !name.is_empty()).map(|(_, name)| *name).next()
            }
            _ => None,
        }
    }

    /// Whether the value at this path is a LUN or a namespace of a table: the name of a volume, or
    /// a table with it.
    fn is_unit(&self, path: &[String]) -> bool {
        let [list, _, .., map, _] = path else { return false };
        self.target(list).is_some_and(|tables| tables.units.contains(&map.as_str()))
    }

    /// Whether the value at this path is the map of units of one peer. Without it the peer has all
    /// units of the target, with an empty one none.
    fn is_peer_map(&self, path: &[String]) -> bool {
        let [list, _, _, _, map] = path else { return false };
        self.target(list).is_some_and(|tables| tables.units.contains(&map.as_str()))
    }

    /// Whether the key has a list of plain values.
    pub(in crate::daemon) fn is_list(&self, key: &str) -> bool {
        let peers = self.targets.iter().flat_map(|tables| tables.peers);
        self.listeners.iter().any(|own| own == key)
            || ["portals", "listeners", "protocols"].contains(&key)
            || peers.into_iter().any(|(own, name)| *own == key && name.is_empty())
    }

    /// Whether a change takes effect only at the next start.
    pub(in crate::daemon) fn is_fixed(&self, change: &ConfigChange) -> bool {
        let keys = change.path.join(".");
        self.fixed
            .iter()
            .any(|fixed| keys == *fixed || keys.strip_prefix(fixed).is_some_and(|rest| rest.starts_with('.')))
    }
}

/// All differences between two configs, in the order of their keys.
pub(in crate::daemon) fn diff(schema: &Schema, before: &Table, after: &Table) -> Vec<ConfigChange> {
    let mut changes = Vec::new();
    diff_tables(schema, &mut Vec::new(), before, after, &mut changes);
    changes
}

fn diff_tables(
    schema: &Schema,
    path: &mut Vec<String>,
    before: &Table,
    after: &Table,
    found: &mut Vec<ConfigChange>,
) {
    let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for key in keys {
        path.push(key.clone());
        diff_values(schema, path, before.get(key), after.get(key), found);
        path.pop();
    }
}

fn diff_values(
    schema: &Schema,
    path: &mut Vec<String>,
    before: Option<&Value>,
    after: Option<&Value>,
    found: &mut Vec<ConfigChange>,
) {
    // A missing list of listeners is equal to an empty one.
    let empty_list = Value::Array(Vec::new());
    let is_listeners = path.len() == 1 && schema.listeners.contains(&path[0]);
    let [before, after] = [before, after].map(|value| value.or(is_listeners.then_some(&empty_list)));
    if before == after || is_networks(path) && is_same_set(before, after) {
        return;
    }
    let none = Vec::new();
    let list = |value: Option<&'_ Value>| value.is_none_or(Value::is_array);
    if let Some(name) = schema.name_key(path).filter(|_| list(before) && list(after)) {
        let [before, after] = [before, after].map(|value| value.and_then(Value::as_array).unwrap_or(&none));
        let (before, after) = (by_name(before, name), by_name(after, name));
        return diff_tables(schema, path, &before, &after, found);
    }
    let is_entry = schema.name_key(&path[..path.len() - 1]).is_some()
        || schema.is_unit(path)
        || schema.is_peer_map(path);
    let empty = Table::new();
    match (before, after) {
        (Some(Value::Table(before)), Some(Value::Table(after))) => {
            diff_tables(schema, path, before, after, found);
        }
        (None, Some(Value::Table(after))) if !is_entry => diff_tables(schema, path, &empty, after, found),
        (Some(Value::Table(before)), None) if !is_entry => diff_tables(schema, path, before, &empty, found),
        (Some(Value::Array(before)), Some(Value::Array(after)))
            if is_plain(before) && is_plain(after) && !is_networks(path) =>
        {
            // As TOML, so that a number is no text.
            let in_full = |list: &[Value]| list.iter().map(Value::to_string).collect::<HashSet<_>>();
            let mut each = |from: &[Value], to: &[Value], is_removal: bool| {
                let to = in_full(to);
                for value in from.iter().filter(|value| !to.contains(&value.to_string())) {
                    let path = path.iter().cloned().chain([text(value)]).collect();
                    let (gone, come) = (Some(value.clone()), None);
                    let (before, after) = if is_removal { (gone, come) } else { (come, gone) };
                    found.push(ConfigChange { path, before, after });
                }
            };
            each(before, after, true);
            each(after, before, false);
        }
        _ => found.push(ConfigChange { path: path.clone(), before: before.cloned(), after: after.cloned() }),
    }
}

/// The entries of a list by name. An entry without a name, as in an `acl`, applies to all
/// initiators.
fn by_name(list: &[Value], name: &str) -> Table {
    let named = list.iter().map(|entry| {
        let own = entry.get(name).map(text).unwrap_or_default();
        (own, entry.clone())
    });
    named.collect()
}

/// Whether a path ends in a list of networks. Such a list is compared as a whole, because its
/// networks can overlap.
fn is_networks(path: &[String]) -> bool {
    path.last().is_some_and(|key| key == NETWORKS)
}

fn is_same_set(before: Option<&Value>, after: Option<&Value>) -> bool {
    let lists = before.and_then(Value::as_array).zip(after.and_then(Value::as_array));
    lists.is_some_and(|(before, after)| {
        before.iter().all(|value| after.contains(value)) && after.iter().all(|value| before.contains(value))
    })
}

fn is_plain(list: &[Value]) -> bool {
    list.iter().all(|value| !matches!(value, Value::Array(_) | Value::Table(_)))
}

/// A value as part of a path: text without quotes.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

impl ConfigChange {
    /// The volume that has changed, and its changed key; the key is `None` if the volume was added
    /// or removed.
    pub(in crate::daemon) fn of_volume(&self) -> Option<(&str, Option<&str>)> {
        match &self.path[..] {
            [list, name, rest @ ..] if list == VOLUMES.0 => Some((name, rest.first().map(String::as_str))),
            _ => None,
        }
    }

    /// A one-line description for people.
    pub(in crate::daemon) fn describe(&self) -> String {
        let (sign, what) = match (&self.before, &self.after) {
            (None, _) => ('+', "added"),
            (_, None) => ('-', "removed"),
            _ => ('~', "changed"),
        };
        let path: Vec<_> = self.path.iter().map(|key| if key.is_empty() { "(all)" } else { key }).collect();
        let [place @ .., key] = &path[..] else { return String::new() };
        let short = |value: &Value| match value {
            Value::Table(table) if table.contains_key("spec") => table.get("spec").map(text),
            Value::Table(table) if table.contains_key("read_only") => Some(value.to_string()),
            Value::Table(_) => None,
            other => Some(other.to_string()),
        };
        let (before, after) = match (&self.before, &self.after) {
            // A volume became a table with `read_only`, or the reverse.
            (Some(before), Some(after)) => (Some(before.to_string()), Some(after.to_string())),
            (before, after) => (before.as_ref().and_then(short), after.as_ref().and_then(short)),
        };
        let values = match (before, after) {
            (Some(before), Some(after)) => format!(": {before} -> {after}"),
            (None, Some(after)) if after.trim_matches('"') != *key => format!(": {after}"),
            _ => String::new(),
        };
        let is_top = place.is_empty() || place.len() == 1;
        let words = if is_top { place.join(" ") } else { format!("{}:", join_place(place)) };
        let words = format!("{words} {key}");
        let what = if is_top || sign == '~' { "" } else { what };
        let space = if what.is_empty() { "" } else { " " };
        format!("{sign} {}{space}{what}{values}", words.trim())
    }
}

/// Joins the path of a key, as in `iscsi_target iqn.a: luns`.
fn join_place(place: &[&str]) -> String {
    match place {
        [list, name, rest @ ..] if !rest.is_empty() => format!("{list} {name}: {}", rest.join(" ")),
        _ => place.join(" "),
    }
}

/// The key of the networks from which clients may connect.
pub(super) const NETWORKS: &str = "allow";

/// The step of each changed volume. `is_resize` tells whether only the size of a volume's spec has
/// changed.
pub(in crate::daemon) fn volume_steps(
    changes: &[ConfigChange],
    is_resize: impl Fn(&str) -> bool,
) -> VolumeSteps {
    let mut steps = VolumeSteps::new();
    for change in changes {
        let Some((name, key)) = change.of_volume() else { continue };
        let step = match key {
            None if change.before.is_none() => VolumeStep::Add,
            None => VolumeStep::Remove,
            Some("spec") if is_resize(name) => VolumeStep::Resize,
            Some("spec") => VolumeStep::Replace,
            Some(_) => continue,
        };
        match steps.get_mut(name) {
            Some(own) if step == VolumeStep::Replace => *own = step,
            Some(_) => {}
            None => drop(steps.insert(name.to_owned(), step)),
        }
    }
    steps
}

/// Whether a change of a volume takes effect only at the next start, because the key applies when
/// the volume is opened and the volume stays open.
pub(in crate::daemon) fn waits_for_start(change: &ConfigChange, steps: &VolumeSteps) -> bool {
    match change.of_volume() {
        Some((name, Some("read_only" | "shared" | "uuid" | "scsi"))) => {
            let step = steps.get(name);
            !matches!(step, Some(VolumeStep::Replace | VolumeStep::Lose { .. } | VolumeStep::Twice(_)))
        }
        _ => false,
    }
}

/// What the report of a plan asks about the running daemon.
pub(in crate::daemon) struct Served<'a> {
    /// Whether sessions of this volume name this target.
    pub(in crate::daemon) is_target_of: &'a dyn Fn(&str, &str) -> bool,
    /// Whether the listener with this key and configured address listens at this address, which
    /// differs if the configured port is 0.
    pub(in crate::daemon) is_listener: &'a dyn Fn(&str, &str, &str) -> bool,
    /// Whether the listener with this address will no longer export a volume by default.
    pub(in crate::daemon) withdraws: &'a dyn Fn(&str, &str) -> bool,
    /// Why a listener, given its key and address, cannot be bound or changed while others run, and
    /// what to do.
    pub(in crate::daemon) conflict: &'a dyn Fn(&str, &str) -> Option<String>,
}

/// Describes all changes and the sessions that each of them affects.
pub(in crate::daemon) fn report(
    schema: &Schema,
    changes: &[ConfigChange],
    steps: &VolumeSteps,
    sessions: &[SessionInfo],
    served: &Served<'_>,
) -> PlanReport {
    let mut report = PlanReport::default();
    for change in changes {
        let of_volume = change.of_volume().filter(|(_, key)| key.is_none_or(|key| key == "spec"));
        let note = match of_volume.and_then(|(name, _)| steps.get(name).copied()) {
            Some(VolumeStep::Lose { bytes }) => {
                let name = of_volume.map_or("", |(name, _)| name);
                format!("; refused: {}", would_lose_ram(name, bytes))
            }
            Some(VolumeStep::Replace) => "; removed and added as another disk".to_owned(),
            Some(VolumeStep::Twice(why)) => format!("; refused: {why}"),
            Some(VolumeStep::Overlap) => "; refused: it would grow over data of another volume".to_owned(),
            Some(VolumeStep::Shrink { now, size }) => {
                format!("; refused: {}", ResizeError::WouldLose { now, size })
            }
            _ => match &change.path[..] {
                [list, text] if schema.listeners.contains(list) && change.after.is_some() => {
                    let conflict = (served.conflict)(list, ListenerEntry::address_of(text));
                    conflict.map_or_else(String::new, |why| format!("; refused: {why}"))
                }
                _ => String::new(),
            },
        };
        // The URL of a volume that is not open may be invalid.
        let line = masked(&(change.describe() + &note));
        let shown = |value: &Option<Value>| value.as_ref().map(|value| masked_json(json_of(value)));
        let planned = PlannedChange {
            change: line,
            path: change.path.clone(),
            before: shown(&change.before),
            after: shown(&change.after),
            affected: Vec::new(),
        };
        if schema.is_fixed(change) || waits_for_start(change, steps) {
            report.next_start.push(planned);
            continue;
        }
        let affected = affected_by(schema, change, changes, steps, sessions, served).collect();
        report.changes.push(PlannedChange { affected, ..planned });
    }
    report
}

/// The sessions that changes affect which do not wait for the next start.
pub(super) fn affected(
    schema: &Schema,
    changes: &[ConfigChange],
    steps: &VolumeSteps,
    sessions: &[SessionInfo],
    served: &Served<'_>,
) -> BTreeSet<String> {
    let now = changes.iter().filter(|change| !schema.is_fixed(change) && !waits_for_start(change, steps));
    now.flat_map(|change| affected_by(schema, change, changes, steps, sessions, served)).collect()
}

fn affected_by<'a>(
    schema: &'a Schema,
    change: &'a ConfigChange,
    changes: &'a [ConfigChange],
    steps: &'a VolumeSteps,
    sessions: &'a [SessionInfo],
    served: &'a Served<'_>,
) -> impl Iterator<Item = String> {
    let affected = sessions.iter().filter(|session| {
        affects(schema, change, steps, session, served) && !stays(schema, changes, change, session, served)
    });
    affected.map(describe_session)
}

/// A value without the passwords of URLs in it.
fn masked_json(value: Json) -> Json {
    match value {
        Json::String(text) => masked(&text).into(),
        Json::Array(items) => items.into_iter().map(masked_json).collect(),
        Json::Object(object) => object.into_iter().map(|(key, value)| (key, masked_json(value))).collect(),
        value => value,
    }
}

/// Why a volume with `bytes` in RAM is neither removed nor replaced, and what to do.
pub(in crate::daemon) fn would_lose_ram(name: &str, bytes: u64) -> String {
    format!(
        "its {bytes} bytes are in RAM and would be lost; copy them with 'blockmux copy', or to discard them, use \
         'blockmux ctl remove {name}', with --force while it is in use, and reload then"
    )
}

/// Refuses to take away what these sessions use without being forced to; `verb` is what is refused.
///
/// # Errors
/// If there are any; the message names them and says what to do.
pub(super) fn check_not_used(name: &str, verb: &str, users: &[String]) -> Result<(), ApiError> {
    if users.is_empty() {
        return Ok(());
    }
    let shown = named_sessions(users);
    let text = format!(
        "{name}: is in use by {shown}; disconnect them, or {verb} it with --force (API: ?force=true), \
         which makes their I/O fail"
    );
    Err(ApiError::new(ErrorCode::Conflict, text))
}

/// Sessions in a message, at most [`SHOWN_SESSIONS`] of them.
pub(in crate::daemon) fn named_sessions(sessions: &[String]) -> String {
    let more = sessions.len().saturating_sub(SHOWN_SESSIONS);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let shown: Vec<_> = sessions.iter().take(SHOWN_SESSIONS).map(String::as_str).collect();
    shown.join(", ") + &more
}

/// Maximum number of sessions in a message.
const SHOWN_SESSIONS: usize = 8;

/// A session in a message: protocol, initiator, address and target.
pub(in crate::daemon) fn describe_session(session: &SessionInfo) -> String {
    let SessionInfo { login, peer, .. } = session;
    match login.initiator.as_str() {
        "" => format!("{} client {peer} of {}", login.protocol, login.target),
        initiator => format!("{} {initiator} at {peer}, of {}", login.protocol, login.target),
    }
}

/// Whether a change removes something that a session uses.
fn affects(
    schema: &Schema,
    change: &ConfigChange,
    steps: &VolumeSteps,
    session: &SessionInfo,
    served: &Served<'_>,
) -> bool {
    let login = &session.login;
    let is_loss = match change.path.last().map(String::as_str) {
        Some("read_only") => change.after == Some(Value::Boolean(true)),
        _ => change.before.is_some(),
    };
    let is_kept_out =
        is_networks(&change.path) && !networks::admits(change.after.as_ref(), session.peer_ip());
    if let Some((name, key)) = change.of_volume() {
        let is_gone = key.is_none() && change.after.is_none();
        let is_replaced = |step| matches!(step, VolumeStep::Replace | VolumeStep::Twice(_));
        let loses =
            |step| is_replaced(step) || matches!(step, VolumeStep::Shrink { .. } | VolumeStep::Lose { .. });
        let loses_data = steps.get(name).is_some_and(|step| loses(*step));
        let is_withdrawn =
            withdraws_from(change, login.protocol) && (served.withdraws)(name, &session.listener);
        let is_its = || login.target == name || (served.is_target_of)(name, &login.target);
        let is_lost = is_loss && (is_gone || key == Some("spec") && loses_data);
        return (is_lost || is_withdrawn || is_kept_out) && is_its();
    }
    let [list, name, rest @ ..] = &change.path[..] else { return false };
    if schema.listeners.contains(list) {
        return is_loss && (served.is_listener)(list, ListenerEntry::address_of(name), &session.listener);
    }
    let Some(tables) = schema.target(list).filter(|_| login.target == *name) else { return false };
    let Some((part, rest)) = rest.split_first() else { return is_loss && change.after.is_none() };
    if tables.units.contains(&part.as_str()) {
        return is_loss;
    }
    if tables.peers.iter().any(|(key, _)| key == part) {
        // Adding or removing a whole list changes who has access to the target.
        return match rest.split_first() {
            Some((peer, _)) => {
                let may_lose = is_loss || schema.is_peer_map(&change.path);
                may_lose && (login.initiator == *peer || peer.is_empty())
            }
            None => true,
        };
    }
    if let Some((_, port)) = tables.port_name.filter(|(key, _)| key == part) {
        let named = rest.first().and_then(|at| tcp_address(at, port).ok());
        let listener = session.listener.parse().ok();
        return named.zip(listener).is_none_or(|(named, own)| matches_listener(&named, &own));
    }
    part == "redirect" && change.after.is_some() || is_kept_out
}

/// Whether a change of a volume's `protocols` may withdraw the volume from this protocol.
fn withdraws_from(change: &ConfigChange, protocol: &str) -> bool {
    match &change.path[2..] {
        [key, word] if key == "protocols" => {
            let protocol = protocol::by_name(protocol);
            protocol.is_some_and(|protocol| protocol.served_as() == word.replace('_', "-"))
        }
        [key] => key == "protocols",
        _ => false,
    }
}

/// Whether a removed listener is added again with other parameters that still admit the session:
/// its networks, its volumes, and the fabric of the session's connection.
fn stays(
    schema: &Schema,
    changes: &[ConfigChange],
    change: &ConfigChange,
    session: &SessionInfo,
    served: &Served<'_>,
) -> bool {
    let [list, _] = &change.path[..] else { return false };
    if !schema.listeners.contains(list) {
        return false;
    }
    changes.iter().any(|other| match &other.path[..] {
        [own, text] if own == list && other.after.is_some() => {
            let entry = ListenerEntry::read(Carrier::Stream, text);
            (served.is_listener)(list, ListenerEntry::address_of(text), &session.listener)
                && entry.is_ok_and(|entry| {
                    entry.keeps(&session.login.target, session.peer_ip()) && entry.has_fabric(session.fabric)
                })
        }
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::driver::audit_event::Login;
    use blockmux_proto::volume_state::VolumeTraffic;
    use std::time::SystemTime;

    fn changes(before: &str, after: &str) -> Vec<ConfigChange> {
        let [before, after] = [before, after].map(|text| text.parse::<Table>().unwrap());
        diff(&schema(), &before, &after)
    }

    fn schema() -> Schema {
        Schema::new(&Frontends::default())
    }

    fn lines(before: &str, after: &str) -> Vec<String> {
        changes(before, after).iter().map(ConfigChange::describe).collect()
    }

    #[test]
    fn a_config_in_another_order_has_no_changes() {
        let before = "nbd = [':1', ':2']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n[[volume]]\nname = 'b'\nspec = 'mem:2m'";
        let after = "nbd = [':2', ':1']\n[[volume]]\nspec = 'mem:2m'\nname = 'b'\n[[volume]]\nname = 'a'\nspec = 'mem:1m'";
        assert_eq!(changes(before, after), []);
    }

    #[test]
    fn each_addition_removal_and_change_is_a_line() {
        let before = "cores = 1\nnbd = ['127.0.0.1:1', '127.0.0.1:2']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n\
                      [[volume]]\nname = 'b'\nspec = 'mem:2m'\ndescription = 'x'\n\
                      [[iscsi_target]]\nTargetName = 'iqn.a'\nluns = { 0 = 'a', 1 = 'b' }\n\
                      [[iscsi_target.acl]]\nInitiatorName = 'iqn.i'\nluns = [0]\n[[iscsi_target.acl]]\nCHAP_N = 'u'";
        let after = "cores = 2\nnbd = ['127.0.0.1:1', '127.0.0.1:3']\n[[volume]]\nname = 'c'\nspec = 'mem:1m'\n\
                     [[volume]]\nname = 'b'\nspec = 'mem:2m'\ndescription = 'y'\n\
                     [[iscsi_target]]\nTargetName = 'iqn.a'\nluns = { 0 = 'c', 2 = 'b' }\n\
                     [[iscsi_target.acl]]\nInitiatorName = 'iqn.i'\nluns = [0, 2]\n[[nvme_subsystem]]\nnqn = 'nqn.a'";
        assert_eq!(
            lines(before, after),
            [
                "~ cores: 1 -> 2",
                "- iscsi_target iqn.a: acl: (all) removed",
                "+ iscsi_target iqn.a: acl iqn.i luns: 2 added",
                "~ iscsi_target iqn.a: luns: 0: \"a\" -> \"c\"",
                "- iscsi_target iqn.a: luns: 1 removed",
                "+ iscsi_target iqn.a: luns: 2 added: \"b\"",
                "- nbd 127.0.0.1:2",
                "+ nbd 127.0.0.1:3",
                "+ nvme_subsystem nqn.a",
                "- volume a",
                "~ volume b: description: \"x\" -> \"y\"",
                "+ volume c: mem:1m",
            ]
        );
    }

    #[test]
    fn each_changed_lun_of_a_map_is_a_line() {
        let config = |luns: &str| {
            format!(
                "[[iscsi_target]]\nTargetName = 'iqn.a'\nTargetPortalGroupTag = 1\n\
                 [[iscsi_target.acl]]\nInitiatorName = 'iqn.i'\nluns = {luns}"
            )
        };
        let before = config("{ 0 = 'a', 1 = 'b', 2 = { volume = 'c', read_only = true } }");
        let after = config("{ 0 = { volume = 'a', read_only = true }, 2 = { volume = 'c' }, 3 = 'b' }")
            .replace("Tag = 1", "Tag = { ':1' = 1 }");
        assert_eq!(
            lines(&before, &after),
            [
                "~ iscsi_target iqn.a: TargetPortalGroupTag: 1 -> { \":1\" = 1 }",
                "~ iscsi_target iqn.a: acl iqn.i luns: 0: \"a\" -> { read_only = true, volume = \"a\" }",
                "- iscsi_target iqn.a: acl iqn.i luns: 1 removed",
                "- iscsi_target iqn.a: acl iqn.i luns 2: read_only removed",
                "+ iscsi_target iqn.a: acl iqn.i luns: 3 added: \"b\"",
            ]
        );
        // A LUN is added or removed as a whole, as `ctl save` writes it.
        let [one, both] = ["{ 0 = 'a' }", "{ 0 = 'a', 1 = { volume = 'b', read_only = true } }"].map(config);
        let expected = "acl iqn.i luns: 1 added: { read_only = true, volume = \"b\" }";
        assert_eq!(lines(&one, &both), [format!("+ iscsi_target iqn.a: {expected}")]);
        assert_eq!(lines(&both, &one), ["- iscsi_target iqn.a: acl iqn.i luns: 1 removed"]);
        let some = config("[0]");
        let expected = "~ iscsi_target iqn.a: acl iqn.i: luns: [0] -> { 0 = \"a\" }";
        assert_eq!(lines(&some, &config("{ 0 = 'a' }")), [expected]);
    }

    #[test]
    fn each_added_or_removed_listener_is_a_line() {
        assert_eq!(lines("", "nbd = [':1', ':2']"), ["+ nbd :1", "+ nbd :2"]);
        assert_eq!(lines("nbd = [':1']", "iscsi = [':2']"), ["+ iscsi :2", "- nbd :1"]);
        assert!(lines("nbd = []", "").is_empty());
    }

    #[test]
    fn a_volume_is_resized_if_only_its_size_changes_and_replaced_otherwise() {
        let volume = |rest: &str| format!("[[volume]]\nname = 'a'\n{rest}");
        let steps = |before: &str, after: &str, is_resize| {
            volume_steps(&changes(&volume(before), &volume(after)), |_| is_resize)
        };
        let one = |step| VolumeSteps::from([("a".to_owned(), step)]);
        assert_eq!(steps("spec = 'mem:1m'", "spec = 'mem:2m'", true), one(VolumeStep::Resize));
        let both = "spec = 'mem:2m'\ndescription = 'x'";
        assert_eq!(steps("spec = 'mem:1m'", both, true), one(VolumeStep::Resize));
        assert_eq!(steps("spec = 'mem:1m'", "spec = 'null:2m'", false), one(VolumeStep::Replace));
        assert_eq!(steps("spec = 'mem:1m'", "spec = 'mem:1m'\nread_only = true", false), VolumeSteps::new());
        let all = changes("", &volume("spec = 'mem:1m'"));
        assert_eq!(volume_steps(&all, |_| false), one(VolumeStep::Add));
        let all = changes(&volume("spec = 'mem:1m'"), "");
        assert_eq!(volume_steps(&all, |_| false), one(VolumeStep::Remove));
    }

    /// A daemon in which nothing is known about the volumes.
    const NOTHING: Served<'static> = Served {
        is_target_of: &|_, _| false,
        is_listener: &|_, address, place| address == place,
        withdraws: &|_, _| false,
        conflict: &|_, _| None,
    };

    fn session(protocol: &'static str, initiator: &str, target: &str, listener: &str) -> SessionInfo {
        SessionInfo {
            login: Login {
                protocol,
                initiator: initiator.to_owned(),
                target: target.to_owned(),
                is_authenticated: false,
            },
            peer: "192.0.2.9:5".to_owned(),
            listener: listener.to_owned(),
            fabric: None,
            since: SystemTime::UNIX_EPOCH,
            traffic: VolumeTraffic::default(),
        }
    }

    #[test]
    fn a_change_names_exactly_the_sessions_that_it_affects() {
        let sessions = [
            session("nbd", "", "a", "127.0.0.1:1"),
            session("iscsi", "iqn.i", "iqn.a", "127.0.0.1:3260"),
            session("iscsi", "iqn.j", "iqn.a", "127.0.0.2:3260"),
            session("iscsi", "iqn.i", "iqn.b", "127.0.0.1:3260"),
        ];
        let affected = |before: &str, after: &str| {
            let all = changes(before, after);
            let steps = volume_steps(&all, |_| false);
            let is_target_of = |volume: &str, target: &str| volume == "a" && target == "iqn.b";
            let served = Served { is_target_of: &is_target_of, withdraws: &|_, _| true, ..NOTHING };
            let report = report(&schema(), &all, &steps, &sessions, &served);
            assert_eq!(report.changes.len(), 1, "{report:?}");
            let is_named = |peer: &&String| peer.contains(" of ");
            let who = report.changes[0].affected.iter().filter(is_named).cloned();
            who.map(|who| who.replace(" at 192.0.2.9:5,", "").replace(" 192.0.2.9:5", "")).collect::<Vec<_>>()
        };
        let volume = "[[volume]]\nname = 'a'\nspec = 'mem:1m'\n";
        assert_eq!(affected(volume, ""), ["nbd client of a", "iscsi iqn.i of iqn.b"]);
        assert!(affected("", volume).is_empty());
        assert!(affected(volume, &format!("{volume}description = 'x'")).is_empty());
        let over = |list: &str| format!("{volume}protocols = [{list}]");
        let all = "'nbd', 'iscsi', 'aoe'";
        assert_eq!(affected(&over(all), &over("'iscsi', 'aoe'")), ["nbd client of a"]);
        assert_eq!(affected(&over(all), &over("'nbd', 'aoe'")), ["iscsi iqn.i of iqn.b"]);
        assert!(affected(&over(all), &over("'nbd', 'iscsi'")).is_empty());
        // What the default is depends on the targets.
        let each = ["nbd client of a", "iscsi iqn.i of iqn.b"];
        assert_eq!(affected(volume, &over("'aoe'")), each);
        assert_eq!(affected(&over(all), volume), each);
        let target = |rest: &str| format!("[[iscsi_target]]\nTargetName = 'iqn.a'\n{rest}");
        let both = ["iscsi iqn.i of iqn.a", "iscsi iqn.j of iqn.a"];
        assert_eq!(affected(&target(""), ""), both);
        assert_eq!(affected(&target("luns = { 0 = 'a', 1 = 'b' }"), &target("luns = { 0 = 'a' }")), both);
        assert!(affected(&target("luns = { 0 = 'a' }"), &target("luns = { 0 = 'a', 1 = 'b' }")).is_empty());
        let acl =
            "[[iscsi_target.acl]]\nInitiatorName = 'iqn.i'\n[[iscsi_target.acl]]\nInitiatorName = 'iqn.j'\n";
        let fewer = target("[[iscsi_target.acl]]\nInitiatorName = 'iqn.j'");
        assert_eq!(affected(&target(acl), &fewer), ["iscsi iqn.i of iqn.a"]);
        assert_eq!(affected("nbd = ['127.0.0.1:1', ':2']", "nbd = [':2']"), ["nbd client of a"]);
        let tags = |tags: &str| target(&format!("TargetPortalGroupTag = {tags}"));
        assert_eq!(affected(&tags("1"), &tags("2")), both);
        let [one, other] = [1, 2].map(|tag| tags(&format!("{{ '127.0.0.1' = 1, '127.0.0.2' = {tag} }}")));
        assert_eq!(affected(&one, &other), ["iscsi iqn.j of iqn.a"]);
        let own = |lun: &str| {
            let entries = acl.replacen("\n", &format!("\nluns = {{ 5 = {lun} }}\n"), 2);
            target(&entries.replacen(&format!("luns = {{ 5 = {lun} }}\n"), "", 1))
        };
        let protected = "{ volume = 'a', read_only = true }";
        assert_eq!(affected(&own("'a'"), &own(protected)), ["iscsi iqn.i of iqn.a"]);
        let writable = "{ volume = 'a', read_only = false }";
        assert_eq!(affected(&own(writable), &own(protected)), ["iscsi iqn.i of iqn.a"]);
        assert!(affected(&own(protected), &own(writable)).is_empty());
    }

    #[test]
    fn changed_networks_affect_sessions_that_they_keep_out_and_no_others() {
        let at = |ip: &str, session: SessionInfo| SessionInfo { peer: format!("{ip}:5"), ..session };
        let sessions = [
            at("192.0.2.9", session("nbd", "", "a", "127.0.0.1:1")),
            at("198.51.100.9", session("nbd", "", "b", "127.0.0.1:1")),
            at("192.0.2.9", session("iscsi", "iqn.i", "iqn.a", "127.0.0.1:3260")),
            at("198.51.100.9", session("iscsi", "iqn.j", "iqn.a", "127.0.0.1:3260")),
        ];
        let affected = |before: &str, after: &str| {
            let all = changes(before, after);
            let served = Served { is_target_of: &|_, target| target == "iqn.a", ..NOTHING };
            let report = report(&schema(), &all, &VolumeSteps::new(), &sessions, &served);
            let all = report.changes.iter().flat_map(|change| change.affected.clone());
            let short = |who: String| who.split(['.', ' ']).next_back().unwrap_or_default().to_owned();
            all.map(short).collect::<Vec<_>>()
        };
        let listener = |rest: &str| format!("nbd = ['127.0.0.1:1{rest}']");
        assert_eq!(affected(&listener(""), &listener("?allow=198.51.100.0/24")), ["a"]);
        assert_eq!(affected(&listener("?allow=::1"), &listener("?volumes=a")), ["b"]);
        assert!(affected(&listener("?allow=10.0.0.0/8"), &listener("")).is_empty());
        let target = |rest: &str| format!("[[iscsi_target]]\nTargetName = 'iqn.a'\n{rest}");
        assert_eq!(affected(&target(""), &target("allow = ['192.0.2.0/24']")), ["a"]);
        assert_eq!(affected(&target("allow = ['::/0']"), &target("allow = []")), ["a", "a"]);
        assert!(affected(&target("allow = ['::/0']"), &target("")).is_empty());
        let volume = |rest: &str| format!("[[volume]]\nname = 'a'\nspec = 'mem:1m'\n{rest}");
        assert_eq!(affected(&volume(""), &volume("allow = ['198.51.100.9']")), ["a", "a"]);
        let both = "allow = ['192.0.2.9', '198.51.100.9']";
        assert!(affected(&volume(""), &volume(both)).is_empty());
        assert!(changes(&volume(both), &volume("allow = ['198.51.100.9', '192.0.2.9']")).is_empty());
    }

    #[test]
    fn a_removed_fabric_affects_sessions_over_it_and_no_others() {
        let over = |fabric, target| SessionInfo { fabric, ..session("iscsi", "i", target, "192.0.2.1:1") };
        let sessions = [over(None, "tcp"), over(Some("roce"), "roce")];
        let affected = |before: &str, after: &str| {
            let [before, after] = [before, after].map(|rest| format!("iscsi = ['192.0.2.1:1{rest}']"));
            let all = changes(&before, &after);
            let report = report(&schema(), &all, &VolumeSteps::new(), &sessions, &NOTHING);
            let named = report.changes.iter().flat_map(|change| change.affected.clone());
            named.map(|who| who.rsplit(' ').next().unwrap_or_default().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(affected("?rdma=roce", ""), ["roce"]);
        assert_eq!(affected("?rdma=roce", "?rdma=verbs"), ["roce"]);
        assert_eq!(affected("?rdma=roce", "?rdma=roce&allow=192.0.2.0/24"), [""; 0]);
        assert_eq!(affected("", "?rdma=roce"), [""; 0]);
    }

    #[test]
    fn fixed_keys_take_effect_at_the_next_start() {
        let next = |before: &str, after: &str| {
            let all = changes(before, after);
            let steps = volume_steps(&all, |_| false);
            report(&schema(), &all, &steps, &[], &NOTHING)
                .next_start
                .into_iter()
                .map(|later| later.change)
                .collect::<Vec<_>>()
        };
        assert_eq!(next("cores = 1", "cores = 2"), ["~ cores: 1 -> 2"]);
        let line = "+ nvme_discovery unique_subnqn: true";
        assert_eq!(next("", "[nvme_discovery]\nunique_subnqn = true"), [line]);
        let before = "[nvme_discovery]\nunique_subnqn = false";
        let after = "[nvme_discovery]\nunique_subnqn = true";
        assert_eq!(next(before, after), ["~ nvme_discovery unique_subnqn: false -> true"]);
        assert!(next("max_connections = 1", "max_connections = 2").is_empty());
        let volume = "[[volume]]\nname = 'a'\nspec = 'mem:1m'\n";
        let read_only = format!("{volume}read_only = true");
        assert_eq!(next(volume, &read_only), ["+ volume a: read_only added: true"]);
        assert!(
            next(volume, &read_only.replace("mem:1m", "mem:2m")).is_empty(),
            "the volume is opened again"
        );
    }
}
