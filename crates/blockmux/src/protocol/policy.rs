//! Decides which volumes are exported by which protocol: one access rule, for the start and for
//! changes by `ctl`.
//!
//! A target or a subsystem *restricts* a volume unless everybody can use it there without
//! authentication. A volume that is restricted in one place is exported without restriction in
//! another only if the config says so explicitly: `protocols` of the volume names the protocol or
//! the target, or a listener names the volume. See
//! docs/decisions/0032-a-restricted-volume-needs-an-explicit-export.md.
//!
//! Without configured targets, a protocol exports each volume by default: as an NBD export, an AoE
//! disk, or a separate target or subsystem for each volume. These are the *default exports*.

use super::address::{ListenerAddress, matches_listener};
use super::listeners::PolicyListeners;
pub(crate) use super::listeners::{AdvertisedAddress, PolicyListener};
use super::{Carrier, Protocol, by_name, with_frontend};
use crate::data::part::{DataPart, find_overlap};
use blockmux_engine::net::zone;
use blockmux_proto::names::networks::AllowedNetworks;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::iter;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};

/// The access control of a configured target or subsystem.
#[derive(Clone, Debug)]
pub(crate) struct TargetAccess {
    /// Key of the target's table in the config file.
    pub(crate) kind: &'static str,
    pub(crate) name: String,
    /// The key of the target's list of listeners, and the list; empty for all listeners.
    pub(crate) listeners: (&'static str, Vec<SocketAddr>),
    /// The target's volumes, and what everybody can do with each without authentication.
    pub(crate) volumes: Vec<(String, PublicAccess)>,
    /// Whether access to any volume of the target is restricted.
    pub(crate) is_restricted: bool,
    /// Whether every client must authenticate.
    pub(crate) authenticates_all: bool,
    /// The target's tables by listener.
    pub(crate) tables: Vec<ListenerTable>,
    /// The address to which the target redirects logins.
    pub(crate) moved_to: Option<String>,
}

/// A table of a target by listener, as ALUA or ANA states.
#[derive(Clone, Debug)]
pub(crate) struct ListenerTable {
    pub(crate) key: String,
    /// The listeners that it names.
    pub(crate) listeners: Vec<SocketAddr>,
    /// It must name every listener of the target.
    pub(crate) is_complete: bool,
}

/// What everybody can do with a volume without authentication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PublicAccess {
    Nothing,
    Read,
    Write,
}

impl PublicAccess {
    /// Everything or nothing.
    pub(crate) fn all_if(is_open: bool) -> PublicAccess {
        PublicAccess::Write.only_if(is_open)
    }

    /// What everybody can do who sees the volume as this LUN.
    pub(crate) fn of_lun(is_read_only: bool) -> PublicAccess {
        if is_read_only { PublicAccess::Read } else { PublicAccess::Write }
    }

    /// This access, or nothing.
    pub(crate) fn only_if(self, is_open: bool) -> PublicAccess {
        if is_open { self } else { PublicAccess::Nothing }
    }

    /// Whether some clients can do more than everybody.
    pub(crate) fn is_restricted(self) -> bool {
        self != PublicAccess::Write
    }
}

/// Access to a volume through a target, while the daemon runs.
pub(crate) struct LiveAccess {
    pub(crate) target: String,
    /// What everybody can do with the volume there without authentication.
    #[cfg_attr(not(test), expect(dead_code, reason = "the generated tests compare it"))]
    pub(crate) public: PublicAccess,
    /// Networks from which clients may log in to the target.
    #[cfg_attr(not(test), expect(dead_code, reason = "the generated tests compare them"))]
    pub(crate) networks: AllowedNetworks,
}

/// The access rule with the running configuration. Clones share the configuration.
#[derive(Clone, Debug, Default)]
pub(crate) struct Policy(Arc<RwLock<Arc<Shared>>>);

#[derive(Debug, Default)]
struct Shared {
    targets: Arc<TargetRules>,
    /// Protocols whose default exports require authentication.
    restricting: Vec<&'static str>,
    listeners: PolicyListeners,
    volumes: BTreeMap<String, VolumeRule>,
    /// Parts of the files and devices of each open volume.
    data: RwLock<BTreeMap<String, Vec<DataPart>>>,
}

/// The configured targets, and what the rule asks about them.
#[derive(Debug, Default)]
struct TargetRules {
    /// Each with the name of its protocol.
    all: Vec<(&'static str, TargetAccess)>,
    /// For each volume the targets that have it, as indexes, and its access there.
    of_volume: HashMap<String, Vec<(usize, PublicAccess)>>,
    names: HashSet<String>,
    protocols: BTreeSet<&'static str>,
    /// The index of the first target that restricts access.
    restricting: Option<usize>,
}

/// A volume's own access settings in the configuration.
#[derive(Clone, Debug, Default)]
struct VolumeRule {
    /// `protocols` of the volume; `None` without the key.
    protocols: Option<Vec<String>>,
    /// Networks from which clients may use it.
    networks: AllowedNetworks,
}

/// A target or a default export through which clients reach a volume.
struct VolumeAccess<'a> {
    protocol: &'static str,
    /// `None` for a default export.
    target: Option<&'a str>,
    /// Name of the target or the listener in messages.
    title: String,
    /// What everybody can do with the volume there without authentication.
    public: PublicAccess,
    /// Every listener of the target or export names the volume.
    is_named: bool,
}

impl From<Vec<(&'static str, TargetAccess)>> for TargetRules {
    fn from(all: Vec<(&'static str, TargetAccess)>) -> TargetRules {
        let mut rules = TargetRules::default();
        for (at, (protocol, target)) in all.iter().enumerate() {
            for (volume, public) in &target.volumes {
                rules.of_volume.entry(volume.clone()).or_default().push((at, *public));
            }
            rules.names.insert(target.name.clone());
            rules.protocols.insert(protocol);
            rules.restricting = rules.restricting.or(target.is_restricted.then_some(at));
        }
        TargetRules { all, ..rules }
    }
}

impl TargetRules {
    /// The targets that have a volume, each with its protocol and the access to the volume there.
    fn of(&self, volume: &str) -> impl Iterator<Item = (&'static str, &TargetAccess, PublicAccess)> {
        let own = self.of_volume.get(volume).into_iter().flatten();
        own.filter_map(|(at, public)| {
            let (protocol, target) = self.all.get(*at)?;
            Some((*protocol, target, *public))
        })
    }
}

impl TargetAccess {
    /// Whether the target is reached through this listener.
    fn is_at(&self, place: &ListenerAddress) -> bool {
        let (_, named) = &self.listeners;
        place
            .tcp()
            .is_some_and(|tcp| named.is_empty() || named.iter().any(|named| matches_listener(named, &tcp)))
    }

    /// What the target is called in messages.
    pub(crate) fn title(&self) -> String {
        format!("{} `{}`", self.kind, self.name)
    }
}

impl Policy {
    /// Creates the policy of configured targets and of volumes with their `protocols`, without
    /// listeners.
    ///
    /// # Errors
    /// If an entry of `protocols` is neither a protocol nor a configured target.
    pub(crate) fn new(
        targets: Vec<(&'static str, TargetAccess)>,
        volumes: impl Iterator<Item = (String, Option<Vec<String>>)>,
    ) -> Result<Policy, String> {
        let mut shared = Shared { targets: Arc::new(targets.into()), ..Shared::default() };
        for (name, protocols) in volumes {
            let protocols = shared.checked_words(&name, protocols)?;
            shared.volumes.insert(name, VolumeRule { protocols, networks: AllowedNetworks::default() });
        }
        Ok(Policy::of(shared))
    }

    fn of(shared: Shared) -> Policy {
        Policy(Arc::new(RwLock::new(Arc::new(shared))))
    }

    /// Sets the networks from which clients may use volumes, and the protocols whose default
    /// exports require authentication, as NBD with TLS does.
    pub(crate) fn with_access(
        self,
        networks: impl Iterator<Item = (String, AllowedNetworks)>,
        restricting: Vec<&'static str>,
    ) -> Policy {
        let before = self.current();
        let (targets, mut volumes) = (before.targets.clone(), before.volumes.clone());
        for (volume, networks) in networks {
            volumes.entry(volume).or_default().networks = networks;
        }
        Policy::of(Shared { targets, restricting, volumes, ..Shared::default() })
    }

    /// The policy of one volume at one listener, for a program that serves itself.
    pub(crate) fn of_one_volume(protocol: &'static Protocol, place: ListenerAddress, volume: &str) -> Policy {
        let listener = PolicyListener::at(protocol, place);
        let volumes = BTreeMap::from([(volume.to_owned(), VolumeRule::default())]);
        Policy::of(Shared { listeners: vec![listener].into(), volumes, ..Shared::default() })
    }

    /// Sets the listeners and checks the rule. With `may_change`, volumes can be added at run time,
    /// and a listener may name one that does not exist yet.
    ///
    /// # Errors
    /// If the configuration violates the rule; the message gives the line to write.
    pub(crate) fn at(self, listeners: Vec<PolicyListener>, may_change: bool) -> Result<Policy, String> {
        let before = self.current();
        let (targets, volumes) = (before.targets.clone(), before.volumes.clone());
        let restricting = before.restricting.clone();
        let listeners = listeners.into();
        let shared = Shared { targets, restricting, listeners, volumes, ..Shared::default() };
        shared.check_listeners(may_change)?;
        for (volume, rule) in &shared.volumes {
            shared.check_volume(volume, rule)?;
        }
        Ok(Policy::of(shared))
    }

    /// Replaces the configuration, for all clones of this policy.
    pub(crate) fn replace(&self, with: &Policy) {
        let with = with.current();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = with;
    }

    fn current(&self) -> Arc<Shared> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether a listener of the protocol without a list of volumes would export anything.
    pub(crate) fn has_use_for(&self, protocol: &Protocol) -> bool {
        let (shared, name) = (self.current(), protocol.served_as());
        shared.has_targets(name) || shared.volumes.values().any(|rule| shared.is_default(name, rule))
    }

    /// Whether a listener exports a volume by default. A protocol with configured targets has no
    /// default exports.
    pub(crate) fn serves(&self, protocol: &Protocol, place: &ListenerAddress, volume: &str) -> bool {
        self.current().serves(protocol, place, volume)
    }

    /// Whether the listener with this address exports a volume by default.
    pub(crate) fn serves_at(&self, address: &str, volume: &str) -> bool {
        let shared = self.current();
        shared.listeners.at_address(address).any(|own| shared.serves_from(own, volume))
    }

    /// Why the listener of the protocol at this place does not export a volume by default; `None`
    /// if it does.
    pub(crate) fn why_not(
        &self,
        protocol: &Protocol,
        place: &ListenerAddress,
        volume: &str,
    ) -> Option<String> {
        let shared = self.current();
        shared.why_not(shared.listeners.at_place(protocol.served_as(), place)?, volume)
    }

    /// The listeners that do not export a volume by default, each with the reason.
    pub(crate) fn not_served(&self, volume: &str) -> Vec<String> {
        let shared = self.current();
        let why = |own: &PolicyListener| Some(format!("{}: {}", own.title(), shared.why_not(own, volume)?));
        shared.listeners.all().iter().filter_map(why).collect()
    }

    /// Whether a volume is exported by the protocol by default, or can be part of a target.
    pub(crate) fn may_serve(&self, protocol: &Protocol, volume: &str) -> bool {
        let shared = self.current();
        let name = protocol.served_as();
        match shared.has_targets(name) {
            true => shared.listeners.of(name).next().is_some(),
            false => shared.default_exports(volume).into_iter().any(|own| own.is_of(name)),
        }
    }

    /// Whether the protocol exports a volume without a configured target.
    pub(crate) fn exports_by_default(&self, protocol: &Protocol, volume: &str) -> bool {
        let (shared, name) = (self.current(), protocol.served_as());
        !shared.has_targets(name) && shared.default_exports(volume).into_iter().any(|own| own.is_of(name))
    }

    /// The networks from which clients may use a volume.
    pub(crate) fn networks_of(&self, volume: &str) -> AllowedNetworks {
        self.current().rule_of(volume).map(|own| own.networks.clone()).unwrap_or_default()
    }

    /// Whether a listener at this place accepts a client's address. A place without a listener
    /// refuses nobody.
    pub(crate) fn admits(&self, place: &str, client: Option<IpAddr>) -> bool {
        let shared = self.current();
        shared.listeners.at_address(place).next().is_none_or(|own| own.networks.admits(client))
    }

    /// Whether the protocol's URLs of a volume are announced for a listener.
    pub(crate) fn leads_to(&self, protocol: &Protocol, place: &ListenerAddress, volume: &str) -> bool {
        self.current().leads_to(protocol, place, volume)
    }

    /// Whether a volume can be used over the protocol without authentication.
    pub(crate) fn is_open(&self, protocol: &Protocol) -> bool {
        let (shared, name) = (self.current(), protocol.served_as());
        let has_open_exports = !shared.has_targets(name) && !shared.restricts(name);
        let mut own = shared.targets.all.iter().filter(|(own, _)| *own == name);
        has_open_exports || own.any(|(_, target)| !target.authenticates_all)
    }

    /// Whether a listener of the protocol has a list of volumes.
    pub(crate) fn has_lists(&self, protocol: &Protocol) -> bool {
        let shared = self.current();
        shared.listeners.of(protocol.served_as()).any(|listener| listener.volumes.is_some())
    }

    /// Sets the parts of files and devices that an open volume consists of.
    pub(crate) fn set_data(&self, volume: &str, data: Vec<DataPart>) {
        let shared = self.current();
        shared.data.write().unwrap_or_else(PoisonError::into_inner).insert(volume.to_owned(), data);
    }

    /// The parts of files and devices that an open volume consists of.
    pub(crate) fn data_of(&self, volume: &str) -> Vec<DataPart> {
        let shared = self.current();
        let all = shared.data.read().unwrap_or_else(PoisonError::into_inner);
        all.get(volume).cloned().unwrap_or_default()
    }

    /// Checks that no two volumes share a part of a file or device if either is restricted.
    ///
    /// # Errors
    /// If two do; the message names both and says what to do.
    pub(crate) fn check_same_data(&self) -> Result<(), String> {
        let shared = self.current();
        let all = shared.data.read().unwrap_or_else(PoisonError::into_inner);
        let restricted: HashSet<&str> =
            all.keys().map(String::as_str).filter(|name| shared.is_restricted(name)).collect();
        if restricted.is_empty() {
            return Ok(());
        }
        let is_meant = |[one, other]: [&str; 2]| restricted.contains(one) || restricted.contains(other);
        let parts = all.iter().map(|(name, parts)| (name.as_str(), &parts[..]));
        let Some([volume, other]) = find_overlap(parts, is_meant) else { return Ok(()) };
        let (restricted, open) = if restricted.contains(volume) { (volume, other) } else { (other, volume) };
        Err(format!(
            "volume `{volume}`: uses the same file or device as `{other}`; a target restricts access to `{restricted}`, \
             and `{open}` would bypass that; export one volume in all places, with its `protocols` or 'blockmux ctl \
             attach', or a copy of the data"
        ))
    }

    /// The listeners of a protocol and of those that are served with it.
    pub(crate) fn places_of(&self, protocol: &Protocol) -> Vec<ListenerAddress> {
        let shared = self.current();
        shared.listeners.of(protocol.served_as()).map(|listener| listener.place.clone()).collect()
    }

    /// The targets that redirect logins, and their new addresses.
    pub(crate) fn moved(&self) -> Vec<(String, String)> {
        let shared = self.current();
        let all = shared.targets.all.iter();
        all.filter_map(|(_, target)| Some((target.name.clone(), target.moved_to.clone()?))).collect()
    }

    /// The listeners that export nothing, each with the reason and what to do.
    pub(crate) fn idle_listeners(&self) -> Vec<String> {
        let shared = self.current();
        let mut idle = IdleListeners::of(&shared);
        shared.listeners.all().iter().filter_map(|listener| idle.why(listener)).collect()
    }

    /// The listeners of all protocols.
    pub(crate) fn listeners(&self) -> Vec<PolicyListener> {
        self.current().listeners.all().to_vec()
    }

    /// The address that clients are told instead of that of the listener at `own`, if there is one.
    pub(crate) fn advertised_for(&self, own: SocketAddr) -> Option<SocketAddr> {
        self.current().listeners.advertised_for(own)
    }
}

impl Shared {
    fn serves(&self, protocol: &Protocol, place: &ListenerAddress, volume: &str) -> bool {
        let name = protocol.served_as();
        if self.has_targets(name) {
            return false;
        }
        let listener = self.listeners.at_place(name, place);
        listener.is_some_and(|listener| self.serves_from(listener, volume))
    }

    /// Whether one of these listeners exports a volume by default.
    fn serves_from(&self, listener: &PolicyListener, volume: &str) -> bool {
        let name = listener.protocol.served_as();
        !self.has_targets(name)
            && match &listener.volumes {
                Some(_) => listener.names(volume),
                None => self.rule_of(volume).is_some_and(|rule| self.is_default(name, rule)),
            }
    }

    fn leads_to(&self, protocol: &Protocol, place: &ListenerAddress, volume: &str) -> bool {
        self.has_targets(protocol.served_as()) || self.serves(protocol, place, volume)
    }

    /// The `protocols` of a volume, with the names of protocols as they are everywhere else.
    ///
    /// # Errors
    /// If a word is neither a protocol nor a configured target.
    fn checked_words(
        &self,
        volume: &str,
        protocols: Option<Vec<String>>,
    ) -> Result<Option<Vec<String>>, String> {
        let word = |word: String| {
            let dashed = word.replace('_', "-");
            if protocol_names().any(|name| name == dashed) {
                return Ok(dashed);
            }
            if self.targets.names.contains(&word) {
                return Ok(word);
            }
            let known: Vec<_> = protocol_names().map(key).collect();
            Err(format!(
                "volume `{volume}`: protocols: `{word}` is neither a protocol nor a configured target; use some of {}",
                known.join(", ")
            ))
        };
        protocols.map(|names| names.into_iter().map(word).collect()).transpose()
    }

    /// Whether a volume with this rule is exported at a listener without a list of volumes.
    fn is_default(&self, protocol: &str, rule: &VolumeRule) -> bool {
        match &rule.protocols {
            Some(protocols) => protocols.iter().any(|word| word == protocol),
            None => {
                self.restricting().is_none()
                    && self.restricting.iter().all(|own| *own == protocol)
                    && (rule.networks.is_everyone() || checks_networks(protocol))
            }
        }
    }

    /// Whether the protocol's default exports require authentication.
    fn restricts(&self, protocol: &str) -> bool {
        self.restricting.contains(&protocol)
    }

    /// A target that restricts access. If there is one, volumes without `protocols` have no default
    /// exports.
    fn restricting(&self) -> Option<&TargetAccess> {
        self.targets.all.get(self.targets.restricting?).map(|(_, target)| target)
    }

    fn has_targets(&self, protocol: &str) -> bool {
        self.targets.protocols.contains(protocol)
    }

    /// The rule of a volume; `None` if the config has none with this name, as while it is removed.
    fn rule_of(&self, volume: &str) -> Option<&VolumeRule> {
        self.volumes.get(volume)
    }

    /// Whether clients of some networks only may use a volume.
    fn has_networks(&self, volume: &str) -> bool {
        self.rule_of(volume).is_some_and(|rule| !rule.networks.is_everyone())
    }

    /// The listeners that export a volume by default; one without a list of volumes stands for all
    /// of its protocol.
    fn default_exports(&self, volume: &str) -> Vec<&PolicyListener> {
        let all = self.listeners.unlisted(false).chain(self.listeners.naming(volume));
        self.listeners.in_order(all.filter(|own| self.serves_from(own, volume)))
    }

    /// The default exports of a volume that the rule is about: also those at configured listeners
    /// without a list, which are meant to export every volume without `protocols`.
    fn checked_exports(&self, volume: &str, protocols: Option<&[String]>) -> Vec<VolumeAccess<'_>> {
        let named = self.listeners.naming(volume);
        let wanted = self.listeners.unlisted(true).filter(|_| protocols.is_none());
        let meant = self.default_exports(volume).into_iter().chain(named).chain(wanted);
        let meant = meant.filter(|listener| !self.has_targets(listener.protocol.served_as()));
        let has_networks = self.has_networks(volume);
        let accesses = self.listeners.in_order(meant).into_iter().map(|listener| VolumeAccess {
            protocol: listener.protocol.served_as(),
            target: None,
            title: listener.title(),
            public: PublicAccess::all_if(
                !(self.restricts(listener.protocol.served_as())
                    || has_networks && checks_networks(listener.protocol.served_as())),
            ),
            is_named: listener.names(volume),
        });
        accesses.collect()
    }

    /// Checks that all volumes in lists of listeners exist, and that every target has a listener.
    fn check_listeners(&self, may_change: bool) -> Result<(), String> {
        let Shared { targets, listeners, volumes, .. } = self;
        for (protocol, target) in &targets.all {
            let (title, option) = (target.title(), key(protocol));
            if listeners.of(protocol).next().is_none() {
                return Err(format!(
                    "{title}: has no {option} listener; add {option} = [\":PORT\"], or remove the {}",
                    target.kind
                ));
            }
            let (list, named) = &target.listeners;
            let tables = target.tables.iter();
            // Thousands of targets name none of thousands of listeners.
            let is_about_all = named.is_empty() && target.tables.is_empty();
            let own: Vec<_> = listeners.of(protocol).filter(|_| !is_about_all).collect();
            let leading: Vec<_> = own.iter().copied().filter(|own| target.is_at(&own.place)).collect();
            let named_by_tables =
                tables.clone().map(|table| (table.key.as_str(), &table.listeners, &leading));
            for (key, named, there) in iter::once((*list, named, &own)).chain(named_by_tables) {
                let is_there = |named: &SocketAddr| {
                    there.iter().filter_map(|own| own.place.tcp()).any(|tcp| matches_listener(named, &tcp))
                };
                if let Some(unknown) = named.iter().find(|named| !is_there(named)) {
                    let there: Vec<_> = there.iter().map(|listener| listener.place.to_string()).collect();
                    let there = there.join(", ");
                    return Err(format!(
                        "{title}: {key}: {} is not a listener; use one of {there}",
                        zone::address_text(unknown)
                    ));
                }
            }
            for table in tables.filter(|table| table.is_complete) {
                let has = |tcp: &SocketAddr| table.listeners.iter().any(|named| matches_listener(named, tcp));
                let all = leading.iter().filter_map(|own| own.place.tcp());
                if let Some(missing) = all.into_iter().find(|tcp| !has(tcp)) {
                    let (key, missing) = (&table.key, zone::address_text(&missing));
                    return Err(format!("{title}: {key}: has no entry for the listener {missing}; add one"));
                }
            }
            for listener in listeners.listed_of(protocol).filter(|own| target.is_at(&own.place)) {
                if let Some((volume, _)) = target.volumes.iter().find(|(volume, _)| !listener.names(volume)) {
                    return Err(format!(
                        "{}: its list of volumes lacks `{volume}`, which {title} has; add `{volume}` to the list, or \
                         change `{list}` of the {}",
                        listener.title(),
                        target.kind
                    ));
                }
            }
        }
        // Otherwise a volume may be added while the daemon runs.
        let mut idle = IdleListeners::of(self);
        for listener in listeners.all().iter().filter(|_| !may_change) {
            let title = listener.title();
            let missing = listener.volumes.iter().flatten().find(|name| !volumes.contains_key(*name));
            if let Some(missing) = missing {
                return Err(format!(
                    "{title}: no volume has the name `{missing}`; add it, or correct ?volumes="
                ));
            }
            idle.why(listener).map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    /// Why a listener does not export a volume by default; `None` if it does, or if its protocol
    /// has configured targets.
    fn why_not(&self, listener: &PolicyListener, volume: &str) -> Option<String> {
        let name = listener.protocol.served_as();
        if self.has_targets(name) || self.serves_from(listener, volume) {
            return None;
        }
        let Some(rule) = self.rule_of(volume) else {
            return Some("the config has no such volume".to_owned());
        };
        if listener.volumes.is_some() {
            return Some("the listener's list (?volumes=) lacks it".to_owned());
        }
        let option = listener.protocol.key();
        if rule.protocols.is_some() {
            return Some(format!("its `protocols` lack \"{option}\""));
        }
        if let Some(target) = self.restricting() {
            return Some(format!("{} restricts access", target.title()));
        }
        Some(match self.restricting.iter().find(|own| **own != name) {
            Some(own) => format!("{} requires authentication", key(own)),
            None => format!("{} cannot check its `allow` list", listener.protocol.title),
        })
    }

    /// The reasons why a listener exports none of these volumes, to follow "exports no volume".
    fn why_none<'a>(&self, listener: &PolicyListener, volumes: impl Iterator<Item = &'a str>) -> String {
        let why = volumes.filter_map(|volume| Some((volume, self.why_not(listener, volume)?)));
        let why: Vec<_> = why.collect();
        match why.split_first() {
            None => String::new(),
            Some(((_, first), rest)) if rest.iter().all(|(_, other)| other == first) => {
                format!(", because {}", first.replace("lacks it", "lacks them").replace("its `", "their `"))
            }
            _ => {
                let shown = why.iter().take(SHOWN_REASONS).map(|(volume, why)| format!("`{volume}`: {why}"));
                let more = if why.len() > SHOWN_REASONS { ", ..." } else { "" };
                format!(" ({}{more})", shown.collect::<Vec<_>>().join(", "))
            }
        }
    }

    fn is_restricted(&self, volume: &str) -> bool {
        self.targets.of(volume).any(|(_, _, public)| public.is_restricted())
            || self.has_networks(volume)
            || !self.restricting.is_empty()
                && self
                    .default_exports(volume)
                    .into_iter()
                    .any(|own| self.restricts(own.protocol.served_as()))
    }

    /// Checks the rule for a volume at the start.
    fn check_volume(&self, volume: &str, rule: &VolumeRule) -> Result<(), String> {
        let (Shared { targets, listeners, .. }, protocols) = (self, rule.protocols.as_deref());
        let mut accesses = Vec::new();
        for (protocol, target, public) in targets.of(volume) {
            let here = listeners.of(protocol).filter(|own| target.is_at(&own.place));
            accesses.push(VolumeAccess {
                protocol,
                target: Some(&target.name),
                title: target.title(),
                public: public.only_if(rule.networks.is_everyone()),
                is_named: all_name(here, volume),
            });
        }
        accesses.extend(self.checked_exports(volume, protocols));
        check_accesses(volume, protocols, &accesses)
    }
}

/// Finds listeners that export nothing. What it has found about all volumes is kept, for the next
/// listener.
struct IdleListeners<'a> {
    shared: &'a Shared,
    /// Whether a listener without a list of volumes exports any, by its protocol.
    exports_any: HashMap<&'static str, bool>,
    /// Whether a restricted volume has no `protocols`, so that listeners would open it.
    has_opened: OnceCell<bool>,
}

impl<'a> IdleListeners<'a> {
    fn of(shared: &'a Shared) -> IdleListeners<'a> {
        IdleListeners { shared, exports_any: HashMap::new(), has_opened: OnceCell::new() }
    }

    /// Why a listener exports nothing, and what to do; `None` if it exports anything, or a volume
    /// of its list is missing.
    fn why(&mut self, listener: &PolicyListener) -> Option<String> {
        let (shared, name) = (self.shared, listener.protocol.served_as());
        let volumes = &shared.volumes;
        let mut listed = listener.volumes.iter().flatten();
        if shared.has_targets(name) || listed.clone().any(|volume| !volumes.contains_key(volume)) {
            return None;
        }
        let exports_any = match &listener.volumes {
            Some(_) => listed.any(|volume| shared.serves_from(listener, volume)),
            None => *self
                .exports_any
                .entry(name)
                .or_insert_with(|| volumes.values().any(|rule| shared.is_default(name, rule))),
        };
        // If this listener would open a restricted volume, `check_volume` has a better message.
        let would_open = || {
            *self.has_opened.get_or_init(|| {
                let mut all = volumes.iter().filter(|(_, rule)| rule.protocols.is_none());
                all.any(|(volume, _)| shared.is_restricted(volume))
            })
        };
        if exports_any || !shared.restricts(name) && would_open() {
            return None;
        }
        let (title, option) = (listener.title(), listener.protocol.key());
        let why = shared.why_none(listener, volumes.keys().map(String::as_str));
        Some(format!(
            "{title}: exports no volume{why}; remove it, or write protocols = [\"{option}\"] in the [[volume]] to \
             export there"
        ))
    }
}

/// Maximum number of volumes in a message.
const SHOWN_REASONS: usize = 4;

/// Whether a protocol checks the networks of its clients. AoE does not, because its clients have no
/// IP addresses.
fn checks_networks(protocol: &str) -> bool {
    by_name(protocol).is_none_or(|protocol| protocol.carrier == Carrier::Stream)
}

/// Whether `listeners` is not empty and each of them names the volume.
fn all_name<'a>(listeners: impl Iterator<Item = &'a PolicyListener>, volume: &str) -> bool {
    let mut listeners = listeners.peekable();
    listeners.peek().is_some() && listeners.all(|listener| listener.names(volume))
}

/// The access rule. `protocols` are the volume's `protocols`.
fn check_accesses(
    volume: &str,
    protocols: Option<&[String]>,
    accesses: &[VolumeAccess<'_>],
) -> Result<(), String> {
    let names = |word: &str| protocols.iter().flat_map(|protocols| protocols.iter()).any(|own| own == word);
    let names_target = |access: &VolumeAccess<'_>| access.target.is_some_and(names);
    for access in accesses {
        if protocols.is_some() && !names(access.protocol) && !names_target(access) {
            let (title, option) = (&access.title, key(access.protocol));
            return Err(format!(
                "volume `{volume}`: {title} has it, but the volume's protocols do not name {option}; add \"{option}\" \
                 to them, or remove the volume there"
            ));
        }
    }
    for open in accesses.iter().filter(|access| access.public != PublicAccess::Nothing) {
        // What everybody can read restricts the places where everybody can write, but not itself.
        let restricts = |access: &&VolumeAccess<'_>| {
            access.public.is_restricted() && !std::ptr::eq::<VolumeAccess<'_>>(*access, open)
        };
        let restricting: Vec<_> = accesses.iter().filter(restricts).collect();
        let Some(first) = restricting.first() else { continue };
        let is_another = restricting.iter().all(|access| access.protocol != open.protocol);
        if names_target(open) || is_another && (names(open.protocol) || open.is_named) {
            continue;
        }
        let mut kept: BTreeSet<String> = restricting.iter().map(|access| key(access.protocol)).collect();
        kept.extend(protocols.iter().flat_map(|protocols| protocols.iter()).map(|word| key(word)));
        let mut both = kept.clone();
        both.insert(match open.target {
            Some(target) if !is_another => target.to_owned(),
            _ => key(open.protocol),
        });
        let advice = match open.target {
            None => format!("to export it with restrictions only, write {}", line(&kept)),
            Some(_) => "to export it with restrictions only, remove it there".to_owned(),
        };
        return Err(format!(
            "volume `{volume}`: {} restricts access to it ({}), but {} ({}) would export it to everybody; {advice}; \
             to export it to everybody there, write {} in its [[volume]]",
            first.title,
            key(first.protocol),
            open.title,
            key(open.protocol),
            line(&both)
        ));
    }
    Ok(())
}

/// The key `protocols` as a line of a config file.
fn line(protocols: &BTreeSet<String>) -> String {
    let protocols: Vec<_> = protocols.iter().map(|word| format!("\"{word}\"")).collect();
    format!("protocols = [{}]", protocols.join(", "))
}

/// A protocol's name in config files; names of targets are returned unchanged.
fn key(name: &str) -> String {
    by_name(name).map_or_else(|| name.to_owned(), Protocol::key)
}

/// The protocols that `protocols` may name.
fn protocol_names() -> impl Iterator<Item = &'static str> {
    with_frontend().map(|protocol| protocol.name)
}

#[cfg(test)]
mod tests {
    use super::super::{AOE, ISCSI, NBD, NVME_TCP};
    use super::*;
    use blockmux_engine::net::socket::Address;

    fn target(
        protocol: &'static str,
        name: &str,
        volume: &str,
        is_open: bool,
    ) -> (&'static str, TargetAccess) {
        let target = TargetAccess {
            kind: "iscsi_target",
            name: name.to_owned(),
            listeners: ("portals", Vec::new()),
            volumes: vec![(volume.to_owned(), PublicAccess::all_if(is_open))],
            is_restricted: !is_open,
            authenticates_all: !is_open,
            tables: Vec::new(),
            moved_to: None,
        };
        (protocol, target)
    }

    fn listener(protocol: &'static Protocol, volumes: Option<&[&str]>, is_asked: bool) -> PolicyListener {
        let volumes = volumes.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
        let networks = AllowedNetworks::default();
        PolicyListener { volumes, networks, is_asked, ..PolicyListener::at(protocol, place(protocol)) }
    }

    fn place(protocol: &Protocol) -> ListenerAddress {
        ListenerAddress::Socket(Address::Tcp(SocketAddr::from(([127, 0, 0, 1], protocol.port))))
    }

    /// Volumes `a` and `b` with their `protocols`.
    fn policy(
        targets: Vec<(&'static str, TargetAccess)>,
        protocols: [Option<&[&str]>; 2],
        listeners: Vec<PolicyListener>,
    ) -> Result<Policy, String> {
        let owned = |protocols: &[&str]| protocols.iter().map(|word| (*word).to_owned()).collect();
        let volumes = ["a", "b"].into_iter().zip(protocols);
        let volumes = volumes.map(|(name, protocols)| (name.to_owned(), protocols.map(owned)));
        Policy::new(targets, volumes)?.at(listeners, false)
    }

    fn guarded() -> Vec<(&'static str, TargetAccess)> {
        vec![target("iscsi", "iqn.a", "a", false)]
    }

    #[test]
    fn without_restrictions_every_listener_exports_everything() {
        let both = vec![listener(&NBD, None, true), listener(&NVME_TCP, Some(&["b"]), true)];
        let policy = policy(Vec::new(), [None, None], both).unwrap();
        let serves = |protocol, volume| policy.serves(protocol, &place(protocol), volume);
        assert!(serves(&NBD, "a") && serves(&NBD, "b"));
        assert!(!serves(&NVME_TCP, "a") && serves(&NVME_TCP, "b"));
        assert!(!serves(&ISCSI, "a"), "without a listener");
        assert!(policy.has_lists(&NVME_TCP) && !policy.has_lists(&NBD));
    }

    #[test]
    fn a_listener_that_exports_nothing_is_refused_with_the_reasons_unless_volumes_can_be_added() {
        let refused = |targets, protocols: [Option<&[&str]>; 2], listeners: Vec<PolicyListener>| {
            let owned = |protocols: &[&str]| protocols.iter().map(|word| (*word).to_owned()).collect();
            let volumes = ["a", "b"].into_iter().zip(protocols);
            let volumes = volumes.map(|(name, protocols)| (name.to_owned(), protocols.map(owned)));
            let policy = Policy::new(targets, volumes).unwrap();
            let said = policy.clone().at(listeners.clone(), true).unwrap().idle_listeners().concat();
            if !said.is_empty() {
                assert_eq!(policy.at(listeners, false).err(), Some(said.clone()));
            }
            said
        };
        let nbd = |volumes| vec![listener(&ISCSI, None, true), listener(&NBD, volumes, true)];
        let only: Option<&[&str]> = Some(&["iscsi"]);
        let said = refused(Vec::new(), [only, only], nbd(None));
        assert!(
            said.contains("exports no volume, because their `protocols` lack \"nbd\"; remove it, or"),
            "{said}"
        );
        let said = refused(guarded(), [only, None], nbd(None));
        let why = "exports no volume (`a`: its `protocols` lack \"nbd\", `b`: iscsi_target `iqn.a` restricts access); ";
        assert!(said.contains(why), "{said}");
        // A listener may wait for a volume that it names.
        assert_eq!(refused(Vec::new(), [only, only], nbd(Some(&["later"]))), "");
        let policy = policy(guarded(), [only, Some(&["nbd"])], nbd(None)).unwrap();
        let why = |volume| policy.why_not(&NBD, &place(&NBD), volume);
        assert_eq!((why("a"), why("b")), (Some("its `protocols` lack \"nbd\"".to_owned()), None));
        assert_eq!(policy.not_served("a"), ["nbd at 127.0.0.1:10809: its `protocols` lack \"nbd\""]);
        assert!(policy.not_served("b").is_empty());
    }

    #[test]
    fn a_restricted_volume_is_exported_elsewhere_only_explicitly() {
        let listeners = |nbd| vec![listener(&ISCSI, None, true), nbd];
        let asked = || listeners(listener(&NBD, None, true));
        let said = policy(guarded(), [None, None], asked()).unwrap_err();
        assert!(said.starts_with("volume `a`: iscsi_target `iqn.a` restricts"), "{said}");
        assert!(said.contains("protocols = [\"iscsi\"]") && said.contains("[\"iscsi\", \"nbd\"]"), "{said}");
        // Explicitly, or the other volume only.
        for (protocols, served) in [
            ([Some(&["iscsi", "nbd"][..]), None], [true, false]),
            ([Some(&["iscsi"][..]), Some(&["nbd"][..])], [false, true]),
        ] {
            let policy = policy(guarded(), protocols, asked()).unwrap();
            assert_eq!(["a", "b"].map(|volume| policy.serves(&NBD, &place(&NBD), volume)), served);
        }
        let named = listeners(listener(&NBD, Some(&["a"]), true));
        assert!(policy(guarded(), [None, None], named).unwrap().serves(&NBD, &place(&NBD), "a"));
        // A default listener is no reason to refuse the configuration.
        let usual =
            policy(guarded(), [None, Some(&["nbd"])], listeners(listener(&NBD, None, false))).unwrap();
        assert!(!usual.serves(&NBD, &place(&NBD), "a") && usual.serves(&NBD, &place(&NBD), "b"));
        assert!(usual.has_use_for(&NBD) && usual.has_use_for(&ISCSI) && !usual.has_use_for(&NVME_TCP));
    }

    #[test]
    fn an_open_target_of_the_same_protocol_needs_its_own_name() {
        let targets = || vec![guarded().remove(0), target("iscsi", "iqn.open", "a", true)];
        let here = || vec![listener(&ISCSI, None, true)];
        for protocols in [None, Some(&["iscsi"][..])] {
            let said = policy(targets(), [protocols, None], here()).unwrap_err();
            assert!(said.contains("[\"iqn.open\", \"iscsi\"]"), "{said}");
        }
        assert!(policy(targets(), [Some(&["iscsi", "iqn.open"]), None], here()).is_ok());
        let named = vec![listener(&ISCSI, Some(&["a"]), true)];
        assert!(policy(targets(), [None, None], named).is_err(), "the listener leads to both");
    }

    #[test]
    fn protocols_limit_exports_and_must_be_known() {
        let here = || vec![listener(&ISCSI, None, true)];
        let said = policy(guarded(), [Some(&["nbd"]), None], here()).unwrap_err();
        assert!(said.contains("the volume's protocols do not name iscsi"), "{said}");
        let said = policy(guarded(), [Some(&["iser"]), None], here()).unwrap_err();
        assert!(said.contains("`iser` is neither a protocol"), "{said}");
        let said = policy(guarded(), [None, None], vec![listener(&NBD, Some(&["c"]), true)]).unwrap_err();
        assert!(said.contains("has no iscsi listener"), "{said}");
        let partial = vec![listener(&ISCSI, Some(&["b"]), true)];
        let said = policy(guarded(), [None, None], partial).unwrap_err();
        assert!(said.contains("its list of volumes lacks `a`"), "{said}");
    }

    #[test]
    fn default_exports_with_authentication_restrict_their_volumes() {
        let by_tls = |targets, protocols: [Option<&[&str]>; 2], listeners| {
            let owned = |protocols: &[&str]| protocols.iter().map(|word| (*word).to_owned()).collect();
            let volumes = ["a", "b"].into_iter().zip(protocols);
            let volumes = volumes.map(|(name, protocols)| (name.to_owned(), protocols.map(owned)));
            Policy::new(targets, volumes)?.with_access(iter::empty(), vec!["nbd"]).at(listeners, false)
        };
        let nbd = || listener(&NBD, None, true);
        let alone = by_tls(Vec::new(), [None, None], vec![nbd()]).unwrap();
        assert!(alone.serves(&NBD, &place(&NBD), "a") && !alone.is_open(&NBD));
        assert!(alone.has_use_for(&NBD) && !alone.has_use_for(&ISCSI), "nothing else is exported by default");
        let both = || vec![nbd(), listener(&NVME_TCP, None, true)];
        let said = by_tls(Vec::new(), [None, None], both()).unwrap_err();
        assert!(
            said.contains("nbd at 127.0.0.1:10809 restricts") && said.contains("[\"nbd\", \"nvme_tcp\"]"),
            "{said}"
        );
        let protocols: [Option<&[&str]>; 2] = [Some(&["nbd"]), Some(&["nbd", "nvme-tcp"])];
        let policy = by_tls(Vec::new(), protocols, both()).unwrap();
        assert_eq!(
            ["a", "b"].map(|volume| policy.serves(&NVME_TCP, &place(&NVME_TCP), volume)),
            [false, true]
        );
        // Clients that NBD authenticates are not those of a target.
        let here = || vec![nbd(), listener(&ISCSI, None, true)];
        let said = by_tls(guarded(), [None, None], here()).unwrap_err();
        assert!(said.contains("exports no volume") && said.contains("protocols = [\"nbd\"]"), "{said}");
        let protocols: [Option<&[&str]>; 2] = [Some(&["nbd", "iscsi"]), None];
        let policy = by_tls(guarded(), protocols, here()).unwrap();
        assert_eq!(["a", "b"].map(|volume| policy.serves(&NBD, &place(&NBD), volume)), [true, false]);
    }

    #[test]
    fn the_networks_of_a_volume_restrict_it_in_every_protocol_but_aoe() {
        let networks = || AllowedNetworks::only(&["192.0.2.0/24".parse().unwrap()]);
        let with = |targets, protocols: [Option<&[&str]>; 2], listeners| {
            let owned = |protocols: &[&str]| protocols.iter().map(|word| (*word).to_owned()).collect();
            let volumes = ["a", "b"].into_iter().zip(protocols);
            let volumes = volumes.map(|(name, protocols)| (name.to_owned(), protocols.map(owned)));
            let allowed = std::iter::once(("a".to_owned(), networks()));
            Policy::new(targets, volumes)?.with_access(allowed, Vec::new()).at(listeners, false)
        };
        let (nbd, aoe) = (
            || listener(&NBD, None, true),
            || PolicyListener {
                place: ListenerAddress::Interface("eth0".to_owned()),
                ..listener(&AOE, None, true)
            },
        );
        let alone = with(Vec::new(), [None, None], vec![nbd()]).unwrap();
        assert!(alone.serves(&NBD, &place(&NBD), "a") && alone.networks_of("a") == networks());
        assert!(alone.networks_of("b").is_everyone());
        let said = with(Vec::new(), [None, None], vec![nbd(), aoe()]).unwrap_err();
        assert!(said.contains("volume `a`: nbd at ") && said.contains("[\"aoe\", \"nbd\"]"), "{said}");
        let both: [Option<&[&str]>; 2] = [Some(&["aoe", "nbd"]), None];
        assert!(with(Vec::new(), both, vec![nbd(), aoe()]).unwrap().serves(&AOE, &aoe().place, "a"));
    }

    #[test]
    fn the_networks_of_a_listener_apply_only_to_its_clients() {
        let mut own = listener(&NBD, None, true);
        own.networks = AllowedNetworks::only(&["::1".parse().unwrap()]);
        let policy = policy(Vec::new(), [None, None], vec![own, listener(&ISCSI, None, true)]).unwrap();
        let admits = |place: &str| policy.admits(place, Some([127, 0, 0, 1].into()));
        assert!(!admits("127.0.0.1:10809") && admits("127.0.0.1:3260") && admits("127.0.0.1:1"));
        assert!(policy.admits("127.0.0.1:10809", None));
    }

    #[test]
    fn a_volume_that_everybody_may_read_is_exported_elsewhere_for_writing_only_explicitly() {
        let readable = |name: &str| {
            let mut readable = target("iscsi", name, "a", true);
            readable.1.volumes[0].1 = PublicAccess::Read;
            readable
        };
        let both = || vec![listener(&ISCSI, None, true), listener(&NBD, None, true)];
        let said = policy(vec![readable("iqn.a")], [None, None], both()).unwrap_err();
        assert!(said.contains("iscsi_target `iqn.a` restricts access to it (iscsi), but nbd at "), "{said}");
        assert!(policy(vec![readable("iqn.a")], [Some(&["iscsi", "nbd"]), None], both()).is_ok());
        let here = || vec![listener(&ISCSI, None, true)];
        assert!(policy(vec![readable("iqn.a")], [None, None], here()).is_ok(), "it is alone");
        // What another target protects from everybody is not readable by accident.
        let targets = || vec![guarded().remove(0), readable("iqn.b")];
        let said = policy(targets(), [None, None], here()).unwrap_err();
        assert!(said.contains("iscsi_target `iqn.a` restricts access to it"), "{said}");
        assert!(policy(targets(), [Some(&["iscsi", "iqn.b"]), None], here()).is_ok());
    }

    #[test]
    fn a_table_that_must_be_complete_has_every_listener_of_its_target() {
        let with = |is_complete, listeners: &[SocketAddr]| {
            let mut own = target("iscsi", "iqn.a", "a", true);
            let (key, listeners) = ("TargetPortalGroupTag".to_owned(), listeners.to_vec());
            own.1.tables.push(ListenerTable { key, listeners, is_complete });
            policy(vec![own], [None, None], vec![listener(&ISCSI, None, true)]).err()
        };
        assert_eq!(with(false, &[]), None);
        assert_eq!(with(true, &[place(&ISCSI).tcp().unwrap()]), None);
        let expected = "iscsi_target `iqn.a`: TargetPortalGroupTag: has no entry for the listener 127.0.0.1:3260; add one";
        assert_eq!(with(true, &[]), Some(expected.to_owned()));
    }
}
