//! The short commands of `ctl` as edits of the desired config, with their answers.
//!
//! `add`, `remove`, `limit`, `resize`, `attach`, `detach`, `attach-disk`, `detach-disk` and the
//! commands of protocols say in one word what several edits do. A command for a target that exists
//! by default first writes the default targets of its protocol into the config: a config that names
//! one target names all.

use super::edits::{ChangeProgress, Consent, Edits};
use super::json::{json_of, json_of_table};
use super::model::Model;
use super::objects::tag;
use super::plan::{describe_session, named_sessions};
use super::resize::{AskedResize, check_blocks};
use super::uses::{number, units_of, volume_of};
use super::{NewConfig, Reloader, RunningConfig, live_of};
use crate::access::networks;
use crate::api::ApiError;
use crate::api::bodies::{Added, AttachVolume, Attached, AttachedDevice, Attachment, LimitVolume, Resized};
use crate::api::edit::{ANY, ConfigEdit, EditOperation, EditOptions, ObjectPath};
use crate::api::limits::{self, LimitsBody};
use crate::api::plan::PlanReport;
use crate::api::request::{Answer, Request};
use crate::daemon::attachment::ATTACHMENTS;
use crate::daemon::config::{VolumeEntry, current_directory};
use crate::daemon::config_audit::Caller;
use crate::daemon::named_lock::WorkStep;
use crate::daemon::setup::{LARGEST, VOLUMES, generated_name};
use crate::protocol::frontend::{Change, NamedListener, TargetTables, VolumeNames};
use crate::protocol::{Frontends, Protocol};
use crate::spec_text::SpecText;
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_volume::{Beyond, Limits, Resize};
use serde_json::{Map, Value as Json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use toml::{Table, Value};

/// Executes a short command, which is one or more edits. After an error nothing has changed.
///
/// Commands wait for no reload and for no other command, because a path may hang; one that another
/// change has overtaken begins again.
///
/// # Errors
/// If the config has not what the command names, or the new one is refused as that of a reload.
pub(in crate::daemon) fn execute(
    reloader: &Arc<Reloader>,
    request: &Request,
    caller: &Caller,
    progress: &ChangeProgress<'_>,
) -> Result<Executed, ApiError> {
    let step = WorkStep::new(&request.to_string(), caller);
    let applied = reloader.apply(&NewConfig::Command(request.clone()), (&step, None), progress)?;
    let (answer, resized) = (applied.answer.clone(), applied.resized.clone());
    Ok(Executed { report: applied.finished()?, answer, resized })
}

/// What a short command has done.
pub(in crate::daemon) struct Executed {
    pub(in crate::daemon) report: PlanReport,
    pub(in crate::daemon) answer: Answer,
    /// The volumes that were resized, in the words of a plan.
    pub(in crate::daemon) resized: Vec<String>,
}

/// The edits that a short command stands for in a config, and its answer when they are made.
///
/// # Errors
/// If the config has not what the command names; the message says what to do.
pub(super) fn edits_of(
    reloader: &Reloader,
    config: &RunningConfig,
    request: &Request,
) -> Result<(Edits, Answer), ApiError> {
    let frontends = reloader.frontends.get();
    let mut command = ShortCommand { reloader, config, frontends, edits: Edits::default() };
    let answer = command.write(request)?;
    Ok((command.edits, answer))
}

/// A command that is written as edits.
struct ShortCommand<'a> {
    reloader: &'a Reloader,
    config: &'a RunningConfig,
    frontends: Arc<Frontends>,
    edits: Edits,
}

impl ShortCommand<'_> {
    fn write(&mut self, request: &Request) -> Result<Answer, ApiError> {
        match request {
            Request::Add(asked) => {
                let entry: VolumeEntry = asked.volume.as_written().parse().map_err(ApiError::invalid)?;
                let entry = VolumeEntry {
                    read_only: asked.read_only,
                    description: asked.description.clone(),
                    protocols: asked.protocols.clone(),
                    networks: networks::parse(asked.allow.as_deref()).map_err(ApiError::invalid)?,
                    limits: read_limits(asked.limits.as_ref())?.unwrap_or_default(),
                    client_limits: read_limits(asked.client_limits.as_ref())?.unwrap_or_default(),
                    ..entry
                };
                self.add(&asked.volume, &entry)
            }
            Request::Remove { name, force } => {
                self.check_volume(name)?;
                self.edits.force = *force;
                self.edits.consent = Consent::Asked { name: name.clone(), verb: "remove" };
                self.push(ObjectPath(vec![VOLUMES.0.to_owned(), name.clone()]), EditOperation::Remove);
                Ok(Answer::Done)
            }
            Request::Limit { name, limits: LimitVolume { limits, client_limits } } => {
                self.check_volume(name)?;
                let value = |limits: Limits| limits::table(&limits).as_ref().map_or(Json::Null, json_of);
                let (limits, client_limits) = (limits.as_ref(), client_limits.as_ref());
                let given =
                    [("limits", read_limits(limits)?), ("client_limits", read_limits(client_limits)?)];
                let given =
                    given.into_iter().filter_map(|(key, limits)| Some((key.to_owned(), value(limits?))));
                let given: Map<String, Json> = given.collect();
                let path = ObjectPath(vec![VOLUMES.0.to_owned(), name.clone()]);
                // Those that are given replace all of before.
                let none = given.keys().map(|key| (key.clone(), Json::Null)).collect();
                self.push(path.clone(), EditOperation::Set(none));
                self.push(path, EditOperation::Set(given));
                Ok(Answer::Done)
            }
            Request::Attach { target, unit } => {
                self.check_volume(&unit.volume)?;
                let target = self.target(target)?;
                self.attach(unit, &target)
            }
            Request::Detach { target, number, force } => {
                let target = self.target(target)?;
                let name = format!("{} {number}", target.name);
                let unit = target.units().into_iter().find(|unit| unit.number == *number);
                let TargetUnit { list, volume, .. } = unit.ok_or_else(|| {
                    let text = format!("{}: has no unit {number}; 'ctl export' lists its units", target.name);
                    ApiError::not_found(text)
                })?;
                self.edits.detached = volume.map(str::to_owned).into_iter().collect();
                self.edits.force = *force;
                self.edits.consent = Consent::Asked { name, verb: "detach" };
                self.push(target.path(list, number), EditOperation::Remove);
                Ok(Answer::Done)
            }
            Request::Resize { name, size, shrink } => self.resize(name, *size, *shrink),
            Request::AttachDisk(asked) => self.attach_disk(&asked.clone().below(&current_directory())),
            Request::DetachDisk { volume, force } => self.detach_disk(volume, *force),
            Request::Change(change) => self.change(change),
            _ => Err(ApiError::failed("internal error: a request is no edit")),
        }
    }

    fn push(&mut self, path: ObjectPath, operation: EditOperation) {
        self.push_if(path, operation, EditOptions::default());
    }

    /// Adds an object, which must not exist when the edit is made.
    fn push_new(&mut self, path: ObjectPath, object: Map<String, Json>) {
        let options = EditOptions { if_none_match: Some(ANY.to_owned()), ..EditOptions::default() };
        self.push_if(path, EditOperation::Put(object), options);
    }

    fn push_if(&mut self, path: ObjectPath, operation: EditOperation, options: EditOptions) {
        self.edits.objects.push(ConfigEdit { path, operation, options });
    }

    /// Checks that the config has a volume with this name.
    fn check_volume(&self, name: &str) -> Result<(), ApiError> {
        if self.config.desired.volume(name).is_some() {
            return Ok(());
        }
        Err(no_volume(name, self.config.desired.volumes().iter().map(|own| own.name.as_str())))
    }

    fn add(&mut self, written: &SpecText, entry: &VolumeEntry) -> Result<Answer, ApiError> {
        let is_free = |name: &str| self.config.desired.volume(name).is_none();
        let free = || (0..).map(generated_name).find(|name| is_free(name));
        let name = entry.name.clone().or_else(free).unwrap_or_default();
        if !is_free(&name) {
            return Err(format!("a volume with the name `{name}` exists already; choose another name").into());
        }
        let Json::Object(mut object) = json_of_table(&entry.table(&name)) else { return Ok(Answer::Done) };
        // The table has no passwords.
        let spec = written.as_written();
        let spec = entry.name.as_ref().map_or(spec, |name| &spec[name.len() + 1..]);
        object.insert("spec".to_owned(), spec.into());
        self.edits.unnamed = entry.name.is_none().then(|| name.clone());
        self.push_new(ObjectPath(vec![VOLUMES.0.to_owned(), name.clone()]), object);
        Ok(Answer::Added(Added { name, urls: Vec::new(), protocols_without_listener: Vec::new() }))
    }

    fn resize(&mut self, name: &str, size: Option<u64>, shrink: bool) -> Result<Answer, ApiError> {
        self.check_volume(name)?;
        let size = size.ok_or_else(|| ApiError::failed("internal error: a resize without its size"))?;
        if size > LARGEST {
            let text = format!("{name}: clients support at most 2^63 - 1 bytes; choose a smaller size");
            return Err(ApiError::invalid(text));
        }
        if let Some(volume_state) = self.reloader.state_of(name) {
            check_blocks(name, size, &**volume_state.volume())?;
        }
        let spec = self.config.desired.volume(name).map(|own| &own.entry.spec);
        // Without `size` in the spec the file itself has the size.
        let spec = spec.filter(|spec| spec.size().is_some()).and_then(|spec| spec.with_size(size));
        if let Some(spec) = &spec {
            let path = ObjectPath(vec![VOLUMES.0.to_owned(), name.to_owned()]);
            self.push(path, EditOperation::Set(object([("spec", spec.to_string().into())])));
        }
        let beyond = if shrink { Beyond::Discard } else { Beyond::Refuse };
        let to = Resize::Bytes { size, beyond };
        self.edits.resize = Some(AskedResize { volume: name.to_owned(), to, spec });
        Ok(Answer::Resized(Resized { size }))
    }

    fn attach_disk(&mut self, asked: &Attachment) -> Result<Answer, ApiError> {
        let volume = &asked.volume;
        self.check_volume(volume)?;
        // For the same attachment the step itself checks, which knows what this command has
        // attached.
        if self.has_attachment(volume) && !self.config.desired.attachments().contains(asked) {
            self.reloader.disks.check_free(volume)?;
        }
        if let Json::Object(entry) = json_of_table(&asked.table()) {
            self.push(attachment_path(volume), EditOperation::Put(entry));
        }
        Ok(Answer::DiskAttached(AttachedDevice { device: String::new() }))
    }

    fn detach_disk(&mut self, volume: &str, force: bool) -> Result<Answer, ApiError> {
        self.check_volume(volume)?;
        if !self.has_attachment(volume) {
            return Err(ApiError::not_found(format!("{volume}: is not attached as a disk")));
        }
        self.edits.force = force;
        self.push(attachment_path(volume), EditOperation::Remove);
        Ok(Answer::Done)
    }

    fn has_attachment(&self, volume: &str) -> bool {
        self.config.desired.attachments().iter().any(|own| own.volume == volume)
    }

    fn attach(&mut self, unit: &AttachVolume, target: &Target) -> Result<Answer, ApiError> {
        let (name, volume) = (&target.name, &*unit.volume);
        let (units, peers) = (target.units(), target.peers());
        let is_used = |number: u32| units.iter().any(|unit| unit.number == number);
        // A free number that a peer's list names is not used: the volume would be visible to that
        // peer, for which another volume was intended.
        let is_named = |number: u32| peers.iter().flatten().any(|listed| listed.contains(&number));
        let free = || (target.tables.first_unit..).find(|number| !is_used(*number) && !is_named(*number));
        let number = unit.number.or_else(free).unwrap_or_default();
        if is_used(number) {
            let text = format!("{name}: there is a unit {number} already; use another number");
            return Err(text.into());
        }
        if peers.iter().all(|listed| listed.as_ref().is_some_and(|listed| !listed.contains(&number))) {
            let text = format!(
                "{name}: nobody would see unit {number}, because each of those with access has a list of units; use \
                 one of those, or add {number} to a list"
            );
            return Err(text.into());
        }
        self.check_networks(volume, name)?;
        if let Some(group) = unit.ana_group {
            let path = target.path("ana_group", group);
            let mut members = target.members_of(group)?;
            members.push(number.into());
            self.push(path, EditOperation::Set(object([("namespaces", members.into())])));
        }
        let list = target.tables.units.first().copied().unwrap_or_default();
        self.push_new(target.path(list, number), object([("volume", volume.into())]));
        Ok(Answer::Attached(Attached { number }))
    }

    /// Checks that a target has no sessions from networks that the volume does not allow: the
    /// target would no longer allow them either.
    fn check_networks(&self, volume: &str, target: &str) -> Result<(), ApiError> {
        let Some(named) = self.config.desired.volume(volume) else { return Ok(()) };
        let sessions = self.reloader.connection_limits.limit.sessions().list();
        let is_kept_out = |session: &&SessionInfo| {
            session.login.target == target && !named.entry.networks.admits(session.peer_ip())
        };
        let kept_out: Vec<String> = sessions.iter().filter(is_kept_out).map(describe_session).collect();
        match kept_out.is_empty() {
            true => Ok(()),
            false => Err(format!(
                "volume `{volume}`: its `allow` list keeps out {}; disconnect them from {target} first",
                named_sessions(&kept_out)
            )
            .into()),
        }
    }

    /// A command of a protocol.
    fn change(&mut self, Change { protocol, target, what }: &Change) -> Result<Answer, ApiError> {
        let mut target = self.target(target)?;
        let own = target.protocol;
        if own.name != protocol {
            let text =
                format!("{}: belongs to {}, which does not support this command", target.name, own.title);
            return Err(ApiError::invalid(text));
        }
        let listeners = self.listeners(own);
        let frontends = self.frontends.clone();
        let frontend = frontends.of(own).ok_or_else(|| ApiError::failed("internal error: no frontend"))?;
        let before = tag(&json_of_table(&target.entry));
        let said = frontend.write_command(what, &mut target.entry, &listeners);
        let said = said.map_err(|error| ApiError::from(format!("{}: {error}", target.name)))?;
        if let Json::Object(entry) = json_of_table(&target.entry) {
            let path = ObjectPath(vec![target.tables.key.to_owned(), target.name]);
            let options = EditOptions { if_match: Some(before), ..EditOptions::default() };
            self.push_if(path, EditOperation::Put(entry), options);
        }
        Ok(said.map_or(Answer::Done, Answer::Message))
    }

    /// The TCP listeners of a protocol.
    fn listeners(&self, protocol: &Protocol) -> Vec<NamedListener> {
        let own = self.config.listeners.iter().filter(|(_, own)| own.is_of(protocol.name));
        let named = own.filter_map(|(written, own)| {
            Some(NamedListener { written: written.tcp()?, address: own.place.tcp()? })
        });
        named.collect()
    }

    /// The target with this name, which the edits write into the config if it has it by default.
    fn target(&mut self, name: &str) -> Result<Target, ApiError> {
        let frontends = self.frontends.clone();
        let mut known = BTreeSet::new();
        for (protocol, tables) in frontends.target_tables() {
            let configured = self.config.desired.table.get(tables.key).and_then(Value::as_array);
            let configured = configured.filter(|list| !list.is_empty());
            let own = match configured {
                None => own_entries(self.reloader, &frontends, protocol),
                Some(_) => Vec::new(),
            };
            let entries = || configured.into_iter().flatten().filter_map(Value::as_table).chain(&own);
            let name_of = |entry: &Table| entry.get(tables.name).and_then(Value::as_str).map(str::to_owned);
            let found = entries().find(|entry| name_of(entry).as_deref() == Some(name)).cloned();
            let Some(entry) = found else {
                known.extend(entries().filter_map(name_of));
                continue;
            };
            if configured.is_none() {
                self.write_targets(protocol, tables, own)?;
            }
            return Ok(Target { protocol, tables, name: name.to_owned(), entry });
        }
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        Err(ApiError::not_found(match known.is_empty() {
            true => format!("no target or subsystem `{name}`; no volume has one"),
            false => format!("no target or subsystem `{name}`; choose one of {}", shown(&known)),
        }))
    }

    /// Writes the default targets of a protocol into the config.
    fn write_targets(
        &mut self,
        protocol: &Protocol,
        tables: &TargetTables,
        entries: Vec<Table>,
    ) -> Result<(), ApiError> {
        if self.reloader.policy.has_lists(protocol) {
            let text = format!(
                "the listeners of {} have `?volumes=` lists, so its targets are no objects; name the targets with 'ctl add {}' \
                 instead",
                protocol.title, tables.key
            );
            return Err(text.into());
        }
        self.edits.default_targets.push((tables.key, entries));
        Ok(())
    }
}

/// The default targets of a protocol that are served, as a config has them.
fn own_entries(reloader: &Reloader, frontends: &Frontends, protocol: &Protocol) -> Vec<Table> {
    let served = reloader.live_protocols.get();
    let (Some(frontend), Some(live)) = (frontends.of(protocol), live_of(&served, protocol)) else {
        return Vec::new();
    };
    // In the order of the volumes' numbers, as the exports are.
    let all = live.targets_by_volume().into_keys().filter_map(|id| {
        let (named, export) = (VolumeNames::of(&reloader.exports, id)?, reloader.exports.get(id)?);
        frontend.own_entry(&named, &export.description)
    });
    all.collect()
}

/// The default targets that a new config has no longer, or has without their volume: a config that
/// names one target names all.
pub(super) fn lost_defaults(
    reloader: &Reloader,
    config: &RunningConfig,
    desired: &Model,
) -> BTreeSet<String> {
    let (frontends, mut lost) = (reloader.frontends.get(), BTreeSet::new());
    for (protocol, tables) in frontends.target_tables() {
        let [before, after] = [&config.running, desired].map(|model| model.table.get(tables.key));
        let [before, after] = [before, after].map(|list| list.and_then(Value::as_array));
        let Some(after) = after.filter(|list| !list.is_empty() && before.is_none_or(Vec::is_empty)) else {
            continue;
        };
        let named: BTreeMap<&str, &Value> =
            after.iter().filter_map(|entry| Some((entry.get(tables.name)?.as_str()?, entry))).collect();
        for own in own_entries(reloader, &frontends, protocol) {
            let Some(name) = own.get(tables.name).and_then(Value::as_str) else { continue };
            let keeps = |units: &&str| {
                let entry = named.get(name).and_then(|entry| entry.get(*units));
                let mut own = own.get(*units).and_then(Value::as_table).into_iter().flatten();
                own.all(|(number, unit)| entry.and_then(|units| units.get(number)) == Some(unit))
            };
            if !tables.units.iter().all(keeps) {
                lost.insert(name.to_owned());
            }
        }
    }
    lost
}

/// A target of the config.
struct Target {
    protocol: &'static Protocol,
    tables: &'static TargetTables,
    name: String,
    entry: Table,
}

/// A unit of a target.
struct TargetUnit<'a> {
    /// LUN or NSID.
    number: u32,
    /// The key of the map that has it.
    list: &'static str,
    volume: Option<&'a str>,
}

impl Target {
    /// The path of an object in one of its lists.
    fn path(&self, list: &str, name: impl ToString) -> ObjectPath {
        let words = [self.tables.key, &self.name, list].map(str::to_owned);
        ObjectPath(words.into_iter().chain([name.to_string()]).collect())
    }

    fn units(&self) -> Vec<TargetUnit<'_>> {
        let of_list = |list: &'static str| {
            let units = self.entry.get(list).map(units_of).unwrap_or_default();
            units.into_iter().map(move |(number, unit)| TargetUnit { number, list, volume: volume_of(unit) })
        };
        self.tables.units.iter().flat_map(|list| of_list(list)).collect()
    }

    /// For each of those with access that has no units of its own: the numbers that it sees, `None`
    /// for all.
    fn peers(&self) -> Vec<Option<BTreeSet<u32>>> {
        let lists = self.tables.peers.iter().filter_map(|(key, _)| self.entry.get(*key)?.as_array());
        let all: Vec<&Value> = lists.flatten().collect();
        if all.is_empty() {
            return vec![None];
        }
        let seen = |peer: &Value| match self.tables.units.iter().find_map(|units| peer.get(*units)) {
            None => Some(None),
            Some(Value::Array(numbers)) => Some(Some(numbers.iter().filter_map(number).collect())),
            Some(_) => None,
        };
        all.into_iter().filter_map(seen).collect()
    }

    /// The members of an ANA group.
    fn members_of(&self, group: u32) -> Result<Vec<Json>, ApiError> {
        let groups = self.entry.get("ana_group").and_then(Value::as_array).into_iter().flatten();
        let is_it = |entry: &&Value| entry.get("ANAGRPID").and_then(number) == Some(group);
        let found = groups.clone().find(is_it).and_then(|entry| entry.get("namespaces")?.as_array());
        let missing = || ApiError::from(format!("{}: has no ana_group {group}; add it first", self.name));
        Ok(found.ok_or_else(missing)?.iter().map(json_of).collect())
    }
}

/// The limits of a request's body, if it has some.
fn read_limits(written: Option<&LimitsBody>) -> Result<Option<Limits>, ApiError> {
    written.map(LimitsBody::limits).transpose().map_err(ApiError::invalid)
}

fn attachment_path(volume: &str) -> ObjectPath {
    ObjectPath([ATTACHMENTS.0, volume].map(str::to_owned).to_vec())
}

fn object<const N: usize>(keys: [(&str, Json); N]) -> Map<String, Json> {
    keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// That none of these volumes has this name.
pub(in crate::daemon) fn no_volume<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> ApiError {
    let names: Vec<&str> = names.collect();
    ApiError::not_found(match names.is_empty() {
        true => format!("no volume has the name `{name}`; no volume is exported"),
        false => format!("no volume has the name `{name}`; choose one of {}", shown(&names)),
    })
}

/// Names in a message, at most [`SHOWN`] of them.
fn shown(names: &[&str]) -> String {
    let more = if names.len() > SHOWN { ", ..." } else { "" };
    names.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ") + more
}

/// Maximum number of names in a message.
const SHOWN: usize = 8;
